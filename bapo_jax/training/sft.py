"""Runs the supervised warm start of the embedded policy.

1. worked solutions, some clean and some with slips and repeats, become token rows;
2. `fit` trains on clean ones until the policy can reason, then briefly on noisy ones,
   so that it is sometimes right and sometimes wrong.
"""

import functools
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
from bapo_jax.data.made.problem import Problem, Solver
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner import accumulation, optimizer, pictured
from bapo_jax.learner.pictured import Variables
from bapo_jax.models import logprobs, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import exchange
from bapo_jax.runtime.progress import progress_bar
from bapo_jax.types import Pictures, Tree

MICRO_BATCHES = 4  # of a step, if all its rows were of full length
CHUNK = 50  # steps whose solutions are tokenised at once: it keeps the tokenizer quick


def rows(
  tokenizer: Tokenizer,
  prompts: Sequence[list[int]],
  problems: Sequence[Problem],
  solve: Solver,
  length: int,
  seed: int | tuple[int, ...],
  slip: float,
  repeat: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens_NT, weight_NT) of prompts with worked solutions, cut at `length`.

  The answer has four times the weight of a token of the work: it is one token in
  twenty, and a policy that never ends a response earns no reward.

  Args:
    prompts: token ids of the prompt of each problem.
    solve: (problem, rng, slip, repeat) -> its worked solution.
  """
  rng = np.random.default_rng(seed)
  solutions = [solve(p, rng, slip, repeat) + '<eos>' for p in problems]
  answers = tokenizer_lib.encode(tokenizer, solutions)
  (box,) = tokenizer_lib.encode(tokenizer, ['\\boxed{'])
  tokens_NT = np.zeros((len(problems), length), np.int32)
  weight_NT = np.zeros((len(problems), length), np.float32)
  for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
    row = (prompt + answer)[:length]
    tokens_NT[i, : len(row)] = row
    weight_NT[i, len(prompt) : len(row)] = 1
    if box[0] in row[len(prompt) :]:
      weight_NT[i, row.index(box[0], len(prompt)) : len(row)] = 4
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

  Args:
    pictures: of the rows' prompts, whose tower is trained too; None: texts.
  """
  trained, seen, of_params = pictured.variables(params, pictures, spec, schedule)
  packed = pictured.pack(tokens_BT, weight_BT > 0, MICRO_BATCHES, spec, seen)
  total = jnp.maximum(weight_BT.sum(), 1)

  def objective(trained: Variables, n: Array) -> tuple[Array, None]:
    stats = logprobs.packed_stats(
      trained.params,
      packed.cells(n),
      spec,
      1.0,
      patch_XD=trained.patches(seen),
      schedule=schedule,
    )
    return -(packed.unpack(stats.logp_BT, n) * weight_BT).sum() / total, None

  value, grads, _ = accumulation.summed(
    objective, trained, packed.used, None, lambda n, so_far, found: None
  )
  updates, opt = tx.update(of_params(grads), opt, params)
  return optax.apply_updates(params, updates), opt, value


def pictured_problems(
  tokenizer: Tokenizer, problems: Sequence[Problem], spec: ModelSpec
) -> tuple[list[list[int]], Gallery | None]:
  """Returns the token ids of each prompt, and the pictures; None: there are none."""
  shown = [problem.row for problem in problems]
  encoded = prompts_lib.encode(tokenizer, shown, spec.vision)
  tokens, grids = [x.tokens for x in encoded], [x.grids for x in encoded]
  if spec.vision is None or not any(grids):
    return tokens, None
  return tokens, Gallery(shown, spec.vision, capacity(grids, spec.vision))


def fit(
  tokenizer: Tokenizer,
  spec: ModelSpec,
  mesh: Mesh,
  length: int,
  problems: Sequence[Problem],
  solve: Solver,
  *,
  schedule: Schedule = Schedule(),
  seed: int,
  clean: int,
  noisy: int,
  batch: int,
  lr: float,
  slip: float,
  repeat: float,
) -> Tree:
  """Returns the parameters after `clean` + `noisy` steps of `batch` solutions each."""
  tx = optimizer.adamw(lr=lr, warmup=20, b2=0.98, weight_decay=0.01)
  params = transformer.init(spec, jax.random.key(seed))
  params = exchange.placed(params, sharding.shardings(params, mesh))
  opt = tx.init(params)
  rng = np.random.default_rng(seed)
  encoded, gallery = pictured_problems(tokenizer, problems, spec)
  step = None

  def batches() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens_BT, weight_BT, index_B) of every step, always new solutions."""
    for name, steps, chances in (
      ('clean', clean, (0.0, 0.0)),
      ('noisy', noisy, (slip, repeat)),
    ):
      for start in range(0, steps, CHUNK):
        count = min(CHUNK, steps - start)
        index = rng.integers(len(problems), size=count * batch)
        drawn, prompts = [problems[i] for i in index], [encoded[i] for i in index]
        purpose = (seed, start, len(name))
        made = rows(tokenizer, prompts, drawn, solve, length, purpose, *chances)
        tokens, weights = (x.reshape(count, batch, -1) for x in made)
        yield from zip(tokens, weights, index.reshape(count, batch), strict=True)

  with progress_bar(clean + noisy, 'warm start', 'step') as progress:
    for *rows_BT, index_B in batches():
      tokens_BT, weight_BT = exchange.placed(rows_BT, sharding.over_rows(mesh))
      shown = gallery and pictured.placed(gallery.of(index_B), mesh)
      args = params, opt, tokens_BT, weight_BT, shown
      # Once: results of a program lie otherwise than what it was first given, and
      # `imitate` would be compiled for them again.
      step = step or imitate.lower(*args, tx=tx, spec=spec, schedule=schedule).compile()
      params, opt, value = step(*args)
      nats = float(value)
      progress.update()
      rate = (progress.format_dict['rate'] or 0) * tokens_BT.size
      progress.set_postfix_str(f'{rate:.0f} tokens/s, {nats:.3f} nats', refresh=False)
  return params
