"""Makes optimisers: one class per rule, with what all rules share.

1. a rule returns an optax transformation for a learning rate: `AdamW`, `Muon`, or a
   user's function;
2. `rate` is the schedule, and `make` puts the limit on the gradient's norm before the
   rule, and float32 master weights around both (`mastered`).
"""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bapo_jax.knobs import Auto, knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.sharding import path_name
from bapo_jax.types import Tree


def matrices(params: Tree) -> Tree:
  """Marks the parameters that decay: all but the scales of norms and the biases.

  Layers are stacked, so a norm of [L, D] is no matrix: paths decide, not ranks. This is
  the convention of Hugging Face's trainer: embedding, head, routers and adapters decay.
  """
  return jax.tree.map_with_path(
    lambda path, _: not path_name(path).endswith(('norm', 'bias')), params
  )


class OptimizerRule(Part):
  """An optimiser, and what all optimisers share: the rate and the gradient's limit."""

  arguments = ('learning_rate',)
  returns = ()
  traced = False

  lr: Auto[float] = knob(3e-4, 'Learning rate.', above=0, most=10)
  warmup: int = knob(4, 'Updates of linear warm-up.', least=0)
  schedule: Literal['constant', 'linear', 'cosine'] = knob(
    'constant',
    'The rate after the warm-up: constant, or falling to `floor` times lr at the last '
    'update of the run. Skipped updates do not count; a resumed run with other `steps` '
    'continues on the curve of these steps.',
  )
  floor: float = knob(
    0.0,
    'Last rate of a schedule, as a share of lr.',
    least=0,
    most=1,
    needs='scheduled',
  )
  max_norm: float = knob(
    1.0, 'Largest global gradient norm; inf: not clipped.', above=0, infinite=True
  )

  def __call__(
    self, learning_rate: optax.ScalarOrSchedule
  ) -> optax.GradientTransformation:
    """Returns the transformation from clipped gradients to updates."""
    raise NotImplementedError

  def refuses(self, config) -> Iterator[str]:
    """Refuses a schedule for a run whose number of updates is not known."""
    if self.schedule != 'constant' and config.responses < math.inf:
      yield (
        f'optimizer.schedule={self.schedule} needs the number of updates of the run, '
        f'but responses={config.responses:g} may end it earlier; set steps and '
        "responses=inf, or schedule='constant'"
      )

  def fault(self, result, example) -> str:
    """Says what is wrong with a transformation, tried on parameters of a tiny model."""
    if not isinstance(result, optax.GradientTransformation):
      return (
        f'returns {type(result).__name__}; return an optax.GradientTransformation, '
        'such as optax.sgd(learning_rate)'
      )
    params = {'embed': jnp.ones((4, 2)), 'layers': {'q': jnp.ones((1, 2, 2, 1))}}
    updates, _ = result.update(params, result.init(params), params)
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
      return 'changes the shapes of the gradients; return updates of the same shapes'
    if not all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates)):
      return 'returns updates that are not finite for gradients of ones'
    # 0 is right for a warm-up from 0, or a transformation that sums gradients first.
    if sum(x.sum() for x in jax.tree.leaves(updates)) > 0:
      return (
        'moves along the gradient, not against it; return updates to be added to the '
        'parameters, as optax.scale_by_learning_rate makes them'
      )
    return ''


class AdamW(OptimizerRule):
  """AdamW (arXiv:1711.05101)."""

  rule: Literal['adamw'] = 'adamw'
  b1: float = knob(0.9, 'Decay of the first moment.', least=0, below=1)
  b2: float = knob(0.95, 'Decay of the second moment.', least=0, below=1)
  weight_decay: float = knob(
    0.0, 'Decoupled weight decay, times the rate.', least=0, most=10
  )
  decays: Literal['matrices', 'all'] = knob(
    'matrices',
    "What decays: matrices, embeddings included, as in Hugging Face's trainer; or all "
    'parameters, norms and biases too.',
    needs='optimizer.weight_decay',
  )

  def __call__(
    self, learning_rate: optax.ScalarOrSchedule
  ) -> optax.GradientTransformation:
    """Returns AdamW."""
    return optax.adamw(
      learning_rate,
      b1=self.b1,
      b2=self.b2,
      weight_decay=self.weight_decay,
      mask=matrices if self.decays == 'matrices' else None,
    )


class Muon(OptimizerRule):
  """Muon: the momentum of each matrix of the layers is orthogonalised.

  Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks", with
  the scale of arXiv:2502.16982 (section 2.2), so that updates are as large as those of
  AdamW and a rate of AdamW fits. Embeddings, head, norms, biases and a vision tower
  take AdamW with the same rate. A projection to or from heads is one matrix.
  """

  rule: Literal['muon'] = 'muon'
  momentum: float = knob(0.95, 'Decay of the momentum.', least=0, below=1)
  b1: float = knob(0.9, 'Decay of the first moment of AdamW.', least=0, below=1)
  b2: float = knob(0.95, 'Decay of the second moment of AdamW.', least=0, below=1)
  weight_decay: float = knob(
    0.0, 'Decoupled weight decay of the matrices, times the rate.', least=0, most=10
  )

  def refuses(self, config) -> Iterator[str]:
    """Refuses adapters, whose factors are no matrices of the layers."""
    yield from super().refuses(config)
    if config.lora.rank:
      yield (
        f'optimizer.rule=muon orthogonalises whole matrices, but lora.rank='
        f"{config.lora.rank} trains their factors; set optimizer.rule='adamw'"
      )

  def __call__(
    self, learning_rate: optax.ScalarOrSchedule
  ) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, and AdamW for the others."""
    return optax.contrib.muon(
      learning_rate,
      beta=self.momentum,
      weight_decay=self.weight_decay,
      adam_b1=self.b1,
      adam_b2=self.b2,
      adam_weight_decay=self.weight_decay,
      muon_weight_dimension_numbers=_orthogonalised,
      consistent_rms=0.2,
    )


# Axes of a matrix of the layers: those that it sums over, and those that it returns.
_MATRICES = (
  (r'^layers/(q|k|v)$', (1,), (2, 3)),
  (r'^layers/o$', (1, 2), (3,)),
  (r'^layers/(gate|up|down|router)$', (1,), (2,)),
  (r'^layers/expert_(gate|up|down)$', (2,), (3,)),
)


def _orthogonalised(params: Tree) -> Tree:
  """Returns the axes of each matrix that Muon orthogonalises; None for the others."""

  def axes(path, _):
    name = path_name(path)
    numbers = (x[1:] for x in _MATRICES if re.search(x[0], name))
    return next((optax.contrib.MuonDimensionNumbers(*x) for x in numbers), None)

  return jax.tree.map_with_path(axes, params)


Optimizer = Annotated[OptimizerRule, OneOf('Optimiser.', AdamW, Muon)]


def rate(k: OptimizerRule, updates: int) -> optax.ScalarOrSchedule:
  """Returns the rate of each of the updates of a run; a number if it never changes."""
  assert k.lr is not None
  if k.schedule == 'constant' and not k.warmup:
    return k.lr
  rising = optax.linear_schedule(k.lr / (k.warmup + 1), k.lr, k.warmup)
  if k.schedule == 'constant':
    return rising
  if k.schedule == 'linear':
    after = optax.linear_schedule(k.lr, k.floor * k.lr, updates - k.warmup)
  else:
    after = optax.cosine_decay_schedule(k.lr, max(updates - k.warmup, 1), k.floor)
  return optax.join_schedules([rising, after], [k.warmup])


def make(
  k: OptimizerRule, updates: int = 0, master: bool = False
) -> optax.GradientTransformation:
  """Returns an optimiser that first clips the gradient by its global norm.

  Args:
    updates: optimiser updates of the run, for a schedule.
    master: keeps float32 master weights beside narrower parameters; see `mastered`.
  """
  # Clipped first: one spike of the gradient would stay in the moments for long.
  tx = optax.chain(optax.clip_by_global_norm(k.max_norm), k(rate(k, updates)))
  return mastered(tx) if master else tx


class Mastered(NamedTuple):
  """The state of the optimiser that `mastered` returns."""

  master: Any  # the weights in float32
  inner: Any  # state of the wrapped optimiser


def mastered(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns an optimiser that applies `tx` to float32 copies of the parameters.

  The parameters are the rounded copies. Without copies, a step of 1e-6 would not change
  most bfloat16 weights: their spacing is larger (Micikevicius et al., 2018).
  """

  def wide(tree):
    return optax.tree.cast(tree, jnp.float32)

  def init(params) -> Mastered:
    return Mastered(wide(params), tx.init(wide(params)))

  def update(grads, state, params) -> tuple[Tree, Mastered]:
    updates, inner = tx.update(wide(grads), state.inner, state.master)
    master = optax.apply_updates(state.master, updates)
    rounded = optax.tree.cast_like(master, params)
    return optax.tree.sub(wide(rounded), wide(params)), Mastered(master, inner)

  return optax.GradientTransformation(init, update)  # pyrefly: ignore
