"""The supervised stage: gives the embedded default a policy worth improving.

1. worked solutions, some clean and some with slips and repeats, become token rows;
2. `fit` trains on clean ones until the policy can reason, then briefly on noisy ones,
   so that it is right sometimes and knows how to go wrong.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bapo_jax import sharding
from bapo_jax.data import tokenizer
from bapo_jax.models import logprobs, transformer
from bapo_jax.runtime.progress import progress_bar
from bapo_jax.training import learner


def rows(
  text, problems, solve: Callable, length: int, seed, slip: float, repeat: float
):
  """(tokens_NT, weight_NT): prompts with worked solutions, cut at `length` tokens.

  The answer weighs four times a token of the work: it is one token in twenty, and a
  policy that cannot end is worth nothing.

  Args:
    solve: (problem, rng, slip, repeat) -> its worked solution.
  """
  rng = np.random.default_rng(seed)
  solved = [solve(p, rng, slip, repeat) + '<eos>' for p in problems]
  asked = [text.template.replace('{problem}', p.text) for p in problems]
  prompts, answers = tokenizer.encode(text, asked), tokenizer.encode(text, solved)
  (box,) = tokenizer.encode(text, ['\\boxed{'])
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
  jax.jit, static_argnames=('tx', 'spec'), donate_argnames=('params', 'opt')
)
def imitate(params, opt, tokens_BT, weight_BT, *, tx, spec):
  """One supervised step; returns (params, opt, nats a weighted token)."""

  def objective(params):
    logp_BT, _ = logprobs.sequence_logprobs(params, tokens_BT, spec, 1.0)
    return -(logp_BT * weight_BT).sum() / jnp.maximum(weight_BT.sum(), 1)

  value, grads = jax.value_and_grad(objective)(params)
  updates, opt = tx.update(grads, opt, params)
  return optax.apply_updates(params, updates), opt, value


def fit(
  text,
  spec: transformer.ModelSpec,
  device_mesh,
  length: int,
  problems: list,
  solve: Callable,
  *,
  seed: int,
  clean: int,
  noisy: int,
  batch: int,
  lr: float,
  slip: float,
  repeat: float,
) -> dict:
  """Parameters after `clean` + `noisy` supervised steps of `batch` solutions each.

  Args:
    problems, solve: what `problems.sources.worked` gives.
  """
  tx = learner.optimizer(lr=lr, warmup=20, b2=0.98, weight_decay=0.01)
  params = transformer.init(spec, jax.random.key(seed))
  params = jax.device_put(params, sharding.shardings(params, device_mesh))
  opt = tx.init(params)
  rng = np.random.default_rng(seed)
  value = 0.0
  with progress_bar(clean + noisy, 'warm start', 'step') as progress:
    for name, steps, chances in (
      ('clean', clean, (0.0, 0.0)),
      ('noisy', noisy, (slip, repeat)),
    ):
      # A step sees new solutions; several thousand at a time keep the tokenizer quick.
      for start in range(0, steps, 50):
        count = min(50, steps - start)
        picked = [problems[i] for i in rng.integers(len(problems), size=count * batch)]
        drawn = rows(text, picked, solve, length, (seed, start, len(name)), *chances)
        for tokens_BT, weight_BT in zip(
          *(x.reshape(count, batch, -1) for x in drawn), strict=True
        ):
          tokens_BT, weight_BT = jax.device_put(
            (tokens_BT, weight_BT), sharding.over_rows(device_mesh)
          )
          params, opt, value = imitate(
            params, opt, tokens_BT, weight_BT, tx=tx, spec=spec
          )
          value = float(value)
          progress.update()
          tokens = (progress.format_dict['rate'] or 0) * tokens_BT.size
          progress.set_postfix_str(
            f'{tokens:.0f} tokens/s, {value:.3f} nats', refresh=False
          )
  return params
