"""Balanced Policy Optimization in one file: reads in ten minutes, runs in three.

  .venv/bin/python examples/minimal.py

A policy of 0.1 M parameters learns to solve ax + c = b (mod m) by trial. It first
imitates worked solutions (700 steps on clean ones, 100 on ones with slips), after which
it solves a third of the problems. Then it learns from its own responses:

1. `sample` draws 8 responses to each of 64 problems;
2. `verify` compares the answer in \\boxed{} with the solution: reward 1 or 0;
3. `advantages` compares each response with the others to its problem;
4. `update` takes 8 steps of AdamW on the clipped surrogate of PPO. Its bounds are
   searched at each step, until tokens with a positive advantage have 42 % of the
   gradient (arXiv:2510.18927, Algorithm 1).

This is the loop of bapo_jax.main on one device, without replay, checkpoints, packing
or records. Axes: P problems, G responses to each, B responses, T tokens. A row has the
prompt, then the response, then zeros; column t of an array is about the token in
column t.
"""

import functools
import os
import sys
import time
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax import sharding
from bapo_jax.algorithms.clip import Balanced
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made import synthetic
from bapo_jax.data.tokenizer import Tokenizer, characters, encode
from bapo_jax.models import decoder, logprobs
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rewards.verifiers import verify as check
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.training import sft
from bapo_jax.training.knobs import SftConfig
from bapo_jax.types import Batch, Prompts, Tree

STEPS = 40
PROBLEMS = 64  # P, per step
GROUP = 8  # G
MINIBATCHES = 8  # updates per step
HELD_OUT = 512  # problems that are never trained on
PROMPT, RESPONSE = 17, 40  # most tokens of a problem and of a response
# (start, end) of each bound. The search raises the upper bound in steps of .05 to its
# end, then the lower bound in steps of .02, and takes the first pair that gives tokens
# with A > 0 the target share of the gradient; if none does, it takes both ends
# (bapo_jax/algorithms/bound_search.py).
CLIP = Balanced(target=0.42, low=(0.6, 0.9), high=(1.2, 3.0))
OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.0)
)


class Policy(NamedTuple):
  """The fixed pieces of a run."""

  spec: ModelSpec
  tokenizer: Tokenizer
  engine: RolloutEngine


def make_policy() -> Policy:
  """Returns a small Qwen2-like model with a token per character, and its sampler."""
  backend = characters()
  eos = backend.convert_tokens_to_ids('<eos>')
  tokenizer = Tokenizer(backend, (eos,), '{problem}\n')
  spec = ModelSpec(
    vocab=-(-len(backend) // 8) * 8,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=16,
    ffn=192,
  )
  engine = RolloutEngine(
    spec,
    max_prompt_tokens=PROMPT,
    max_new_tokens=RESPONSE,
    group_size=GROUP,
    temperature=1.0,
    eos=(eos,),
    max_num_seqs=PROBLEMS * GROUP,
    prefill_batch_size=PROBLEMS * GROUP,
    tokens_per_dispatch=8,
  )
  return Policy(spec, tokenizer, engine)


def warm_start(policy: Policy, problems: list, knobs: ProblemsConfig) -> dict:
  """Returns weights that imitate worked solutions; see SftConfig."""
  imitated, solve = synthetic.to_imitate(knobs, tuple(problems))
  mesh = sharding.make(1, 1, 1, jax.devices()[:1])
  length = PROMPT + RESPONSE
  return sft.fit(
    policy.tokenizer, policy.spec, mesh, length, imitated, solve, SftConfig(), seed=0
  )


def sample(policy: Policy, params: dict, problems: list, key: Array) -> dict:
  """Returns G responses to each problem: tokens, log-probabilities, mask, texts.

  The log-probabilities are those of the sampling policy, mu.
  """
  template = policy.tokenizer.template
  texts = [template.format(problem=p.text) for p in problems]
  prompts = encode(policy.tokenizer, texts)
  tokens_PT = np.zeros((len(prompts), PROMPT), np.int32)
  for row, prompt in zip(tokens_PT, prompts, strict=True):
    row[: len(prompt)] = prompt
  length_P = np.array([len(prompt) for prompt in prompts], np.int32)
  rollouts = PartialRollouts(policy.engine, places=len(problems))
  # The noise of a token depends on the key, the uid of its response and its column.
  uid_B = np.arange(len(problems) * GROUP, dtype=np.uint32)
  rollouts.submit(Prompts(np.arange(len(prompts)), tokens_PT, length_P), uid_B)
  rollouts.decode(decoder.actor(params, policy.spec), key)
  rows = rollouts.read(np.arange(len(problems)), seats=len(problems))
  tokens_BT, logp_BT, mask_BT = (
    np.asarray(x).reshape(len(uid_B), -1)
    for x in (rows.tokens_BT, rows.logp_BT, rows.response_mask_BT)
  )
  pairs = zip(tokens_BT, mask_BT, strict=True)
  responses = [row[mask].tolist() for row, mask in pairs]
  texts = policy.tokenizer.decode(responses)
  return {'tokens': tokens_BT, 'logp': logp_BT, 'mask': mask_BT, 'texts': texts}


def verify(problems: list, texts: list[str]) -> np.ndarray:
  """Returns the reward [P, G] of each response: 1 if its boxed answer is right.

  The rule `aime` reads integers from 0 to 999 in \\boxed{}.
  """
  answers = np.repeat([p.row.answer for p in problems], GROUP)
  right = [check('aime', *pair).earned for pair in zip(answers, texts, strict=True)]
  return np.reshape(right, (-1, GROUP)).astype(np.float32)


def advantages(reward_PG: np.ndarray) -> np.ndarray:
  """Returns (r - mean) / std within each group, [B]: GRPO (arXiv:2402.03300)."""
  centred_PG = reward_PG - reward_PG.mean(1, keepdims=True)
  return (centred_PG / np.sqrt((centred_PG**2).mean(1, keepdims=True) + 1e-6)).ravel()


def objective(params: dict, batch: Batch, spec: ModelSpec) -> tuple[Array, tuple]:
  """Returns (loss, (low, high)) of a minibatch: PPO's surrogate with searched bounds.

  A token's log-probability has the weight A pi / mu in the gradient, and the weight 0
  once the ratio pi / mu has left the bounds in the direction of A.
  """
  logp_BT = logprobs.sequence_stats(
    params, batch.tokens_BT, spec, temperature=1.0
  ).logp_BT
  mask_BT = batch.loss_mask_BT
  ratio_BT = jnp.exp(jnp.where(mask_BT, logp_BT - batch.behavior_logp_BT, 0))
  adv_B1 = batch.adv_B[:, None]

  # A clip rule asks for the weight of each token under given bounds. The search asks
  # once, without bounds, and sums the weights that each pair of bounds would keep,
  # inside the loss mask; here the weights are those of PPO for any bounds.
  def weigh(bounds):
    return jax.lax.stop_gradient(ratio_BT * adv_B1)

  bounds = CLIP(jax.lax.stop_gradient(ratio_BT), batch, weigh)
  clipped_BT = jnp.clip(ratio_BT, bounds.low, bounds.high)
  gain_BT = jnp.minimum(ratio_BT * adv_B1, clipped_BT * adv_B1)
  loss = -jnp.where(mask_BT, gain_BT, 0).sum() / jnp.maximum(mask_BT.sum(), 1)
  return loss, (bounds.low, bounds.high)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames=('params', 'opt'))
def update(params: dict, opt: Tree, batch: Batch, spec: ModelSpec) -> tuple:
  """Takes one optimiser step; returns (params, opt, (low, high))."""
  grads, bounds = jax.grad(objective, has_aux=True)(params, batch, spec)
  updates, opt = OPTIMIZER.update(grads, opt, params)
  return optax.apply_updates(params, updates), opt, bounds


def batch_of(sampled: dict, adv_B: np.ndarray, rows: np.ndarray) -> Batch:
  """Returns the minibatch of these rows."""
  tokens_BT, logp_BT, mask_BT = (
    jnp.asarray(sampled[name][rows]) for name in ('tokens', 'logp', 'mask')
  )
  return Batch(
    tokens_BT=tokens_BT,
    loss_mask_BT=mask_BT,
    behavior_logp_BT=logp_BT,
    prox_BT=logp_BT,  # this and the last two fields are for other rules
    adv_B=jnp.asarray(adv_B[rows], jnp.float32),
    source_B=jnp.zeros(len(rows), jnp.int32),  # 0: fresh
    on_policy_BT=mask_BT,
  )


def accuracy(policy: Policy, params: dict, problems: list) -> float:
  """Returns the share of right responses to held-out problems."""
  right = []
  # Every evaluation has the same noise, so that two of them differ by the weights.
  for start in range(0, len(problems), PROBLEMS):
    part = problems[start : start + PROBLEMS]
    texts = sample(policy, params, part, jax.random.key(10**6 + start))['texts']
    right.append(verify(part, texts).mean())
  return float(np.mean(right))


def main(steps: int = STEPS) -> list[float]:
  """Trains the policy and prints its curve; returns the held-out accuracies."""
  knobs = ProblemsConfig()
  generated = synthetic.generate(knobs)
  problems, held_out = list(generated[:-HELD_OUT]), list(generated[-HELD_OUT:])
  policy = make_policy()
  params = warm_start(policy, problems, knobs)
  opt = OPTIMIZER.init(params)
  rng = np.random.default_rng(0)
  curve = [accuracy(policy, params, held_out)]
  began = time.monotonic()
  print(f'before: held-out accuracy {curve[0]:.3f}')
  for step in range(1, steps + 1):
    chosen = [problems[i] for i in rng.choice(len(problems), PROBLEMS, replace=False)]
    sampled = sample(policy, params, chosen, jax.random.key(step))
    reward_PG = verify(chosen, sampled['texts'])
    adv_B = advantages(reward_PG)
    searched = []
    for rows in np.split(rng.permutation(len(adv_B)), MINIBATCHES):
      batch = batch_of(sampled, adv_B, rows)
      params, opt, bounds = update(params, opt, batch, policy.spec)
      searched.append(bounds)
    low, high = np.mean(searched, 0)  # over the updates of the step
    bar = '#' * round(60 * reward_PG.mean())
    print(f'{step:3} {reward_PG.mean():.3f} [{low:.2f}, {high:.2f}] {bar}', flush=True)
    if step % 10 == 0 or step == steps:
      curve.append(accuracy(policy, params, held_out))
      seconds = time.monotonic() - began
      print(f'after {step} steps, {seconds:.0f} s: held-out accuracy {curve[-1]:.3f}')
  return curve


if __name__ == '__main__':
  main()
