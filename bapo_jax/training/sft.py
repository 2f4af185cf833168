"""Runs the supervised warm start of the embedded policy.

The policy is trained on clean worked solutions until it can reason, then briefly on
solutions with slips and repeats, so that it is sometimes right and sometimes wrong.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.gallery import Gallery, capacity
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner import accumulation, optimizer, pictured
from bapo_jax.learner.pictured import Variables
from bapo_jax.models import logprobs, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import exchange
from bapo_jax.runtime.progress import progress_bar
from bapo_jax.training.knobs import SftConfig
from bapo_jax.types import Pictures, Tree

MICRO_BATCHES = 4  # most per step, reached if all rows have full length
CHUNK = 50  # steps whose solutions are tokenized at once, which is faster


def rows(
  tokenizer: Tokenizer,
  prompts: Sequence[list[int]],
  imitated: Sequence[Row],
  length: int,
  seed: int | tuple[int, ...],
  slip: float,
  repeat: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens_NT, weight_NT) of prompts with worked solutions, cut at `length`.

  A token of the answer has four times the weight of a token of the work: answers are a
  twentieth of the tokens, and a policy that never ends a response earns no reward.
  Messages of an environment have no weight. `prompts` are lists of token ids, a list
  per row of `imitated`.
  """
  rng = np.random.default_rng(seed)
  parts = (row.solution(rng, slip, repeat) for row in imitated)
  parts = ([text] if isinstance(text, str) else text for text in parts)
  turns = [[x if i % 2 else f'{x}<eos>' for i, x in enumerate(each)] for each in parts]
  ids = iter(tokenizer_lib.encode(tokenizer, list(itertools.chain(*turns))))
  ((box,),) = tokenizer_lib.encode(tokenizer, ['\\boxed{'])
  tokens_NT = np.zeros((len(imitated), length), np.int32)
  weight_NT = np.zeros((len(imitated), length), np.float32)
  for i, (prompt, each) in enumerate(zip(prompts, turns, strict=True)):
    row = list(prompt)
    weights = [0] * len(prompt)
    for number, part in zip(range(len(each)), ids, strict=False):
      work = part.index(box) if box in part else len(part)
      row += part
      of_turn = [1] * work + [4] * (len(part) - work)
      weights += [0] * len(part) if number % 2 else of_turn
    tokens_NT[i, : len(row)] = row[:length]
    weight_NT[i, : len(row)] = weights[:length]
  return tokens_NT, weight_NT


@functools.partial(
  jax.jit, static_argnames=('tx', 'spec', 'schedule'), donate_argnames=('params', 'opt')
)
def imitate(
  params: Tree,
  opt: Tree,
  tokens_BT: Array,
  weight_BT: Array,
  pictures: Pictures | None = None,
  *,
  tx: optax.GradientTransformation,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
) -> tuple[Tree, Tree, Array]:
  """Runs one supervised step; returns (params, opt, nats per weighted token).

  A vision tower is trained too if `pictures` are given.
  """
  trained, seen, of_params = pictured.variables(params, pictures, spec, schedule)
  packed = pictured.pack(tokens_BT, weight_BT > 0, MICRO_BATCHES, spec, seen)
  total = jnp.maximum(weight_BT.sum(), 1)

  def objective(trained: Variables, n: Array) -> tuple[Array, None]:
    cells = packed.cells(n)
    patch_XD = trained.patches(seen)
    stats = logprobs.packed_stats(
      trained.params, cells, spec, 1.0, patch_XD=patch_XD, schedule=schedule
    )
    return -(packed.unpack(stats.logp_BT, n) * weight_BT).sum() / total, None

  value, grads, _ = accumulation.summed(
    objective, trained, packed.used, None, lambda n, so_far, found: None
  )
  updates, opt = tx.update(of_params(grads), opt, params)
  state = optax.apply_updates(params, updates), opt
  return *sharding.constrain_params(state), value


def fit(
  tokenizer: Tokenizer,
  spec: ModelSpec,
  mesh: Mesh,
  length: int,
  imitated: Sequence[Row],
  k: SftConfig,
  seed: int,
  schedule: Schedule = Schedule(),
) -> Tree:
  """Returns the parameters after k.clean + k.noisy steps of k.batch solutions each.

  `imitated` are rows with solutions.
  """
  # Norms and biases decay here too: recorded runs start from such weights.
  tx = optimizer.adamw(lr=k.lr, warmup=20, b2=0.98, weight_decay=0.01, decay_all=True)
  params = transformer.init(spec, jax.random.key(seed))
  params = exchange.placed(params, sharding.shardings(params, mesh))
  layout = sharding.shardings(jax.eval_shape(tx.init, params), mesh)
  opt = jax.jit(tx.init, out_shardings=layout)(params)
  rng = np.random.default_rng(seed)
  encoded = prompts_lib.encode(tokenizer, imitated, spec.vision)
  grids = [x.grids for x in encoded]
  gallery = None
  step = None
  if spec.vision is not None and any(grids):
    gallery = Gallery(imitated, spec.vision, capacity(grids, spec.vision))

  def batches() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens_BT, weight_BT, problem index_B) per step, with new solutions."""
    for name, steps, *chances in (
      ('clean', k.clean, 0, 0),
      ('noisy', k.noisy, k.slip, k.repeat),
    ):
      for start in range(0, steps, CHUNK):
        count = min(CHUNK, steps - start)
        index = rng.integers(len(imitated), size=count * k.batch)
        prompts = [encoded[i].tokens for i in index]
        drawn = [imitated[i] for i in index]
        purpose = (seed, start, len(name))
        numbers = rows(tokenizer, prompts, drawn, length, purpose, *chances)
        tokens, weights = (x.reshape(count, k.batch, -1) for x in numbers)
        yield from zip(tokens, weights, index.reshape(count, k.batch), strict=True)

  with progress_bar(k.clean + k.noisy, 'warm start', 'step') as progress:
    for *rows_BT, index_B in batches():
      tokens_BT, weight_BT = exchange.placed(rows_BT, sharding.over_rows(mesh))
      pictures = gallery and pictured.placed(gallery.of(index_B), mesh)
      args = params, opt, tokens_BT, weight_BT, pictures
      # Compiled once, explicitly: the results have another layout than the first
      # arguments, so a call of `imitate` would compile again at the second step.
      step = step or imitate.lower(*args, tx=tx, spec=spec, schedule=schedule).compile()
      params, opt, value = step(*args)
      nats = float(value)
      progress.update()
      progress.set_postfix_str(f'{nats:.3f} nats', refresh=False)
  return params
