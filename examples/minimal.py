"""Balanced Policy Optimization in one file: reads in ten minutes, runs in three.

  .venv/bin/python examples/minimal.py

A policy of 0.1 M parameters learns to solve ax + c = b (mod m), such as
'13x+10=29 mod 8', by trial. It first imitates worked solutions, which end in
\\boxed{7}, and then solves a third of the problems. Then it learns from its own
responses. Each of 40 steps

1. draws 8 responses to each of 64 problems (`sample`);
2. compares the last \\boxed{} with the answer: reward 1 or 0 (`verify`);
3. compares each response with the others to its problem (`advantages`);
4. updates the weights on each of 8 minibatches (`update`) on the clipped surrogate of
   PPO, whose bounds are searched at every update (arXiv:2510.18927, Algorithm 1).

This is the loop of bapo_jax.main on one device in float32, without replay, checkpoints,
packing or records. The accuracy on held-out problems rises from .36 to .80. Axes: P
problems, G responses to each, B responses in rows b = p G + g (512 of a step or 64 of a
minibatch), T tokens. A row has the prompt, then the response with its <eos>, then
zeros; column t of an array is about the token in column t. A response that is still
unfinished after 40 tokens ends there, without an <eos> and mostly without a box.
"""

import functools
import os
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax.algorithms.clip import Balanced
from bapo_jax.data import sources
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.tokenizer import (
  EMBEDDED,
  Tokenizer,
  decode_responses,
  encode,
  load,
)
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
HELD_OUT = 512  # problems that are never trained on; a multiple of PROBLEMS
PROMPT, RESPONSE = 17, 40  # most tokens of a problem and of a response
# (start, end) of each bound of r = pi / mu; mu is the policy that sampled the token. A
# token is kept if A > 0 and r < high, or A < 0 and r > low, and weighs |A| r in the
# gradient. The positive share is the sum over kept tokens with A > 0, divided by that
# over all kept tokens. The search raises `high` in steps of .05; at its end, it raises
# `low` in steps of .02. It stops when the share is at the target, or both at their end.
CLIP = Balanced(target=0.42, low=(0.6, 0.9), high=(1.2, 3.0))
OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.0)
)


class Policy(NamedTuple):
  spec: ModelSpec
  tokenizer: Tokenizer
  engine: RolloutEngine


def make_policy() -> Policy:
  """Returns a small Qwen2-like model with a token per character, and its sampler."""
  # Digits, signs and letters of these problems; other characters raise an error.
  tokenizer = load(EMBEDDED, '{problem}\n')
  spec = ModelSpec(
    vocab=-(-len(tokenizer.backend) // 8)
    * 8,  # rounded up, so that it divides over devices
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
    eos=tokenizer.eos,
    max_num_seqs=PROBLEMS * GROUP,
    prefill_batch_size=PROBLEMS * GROUP,
    tokens_per_dispatch=8,  # tokens per call of the compiled program
  )
  return Policy(spec, tokenizer, engine)


def warm_start(policy: Policy, imitated: list) -> dict:
  """Returns weights that imitate worked solutions: 700 steps right, 100 wrong ones.

  row.solution(rng, slip, repeat) writes one, to the prompt of row.problem. Without
  solutions, start from models.transformer.init(policy.spec, jax.random.key(0)).
  """
  length = PROMPT + RESPONSE
  return sft.fit(policy.tokenizer, policy.spec, length, imitated, SftConfig())


def sample(policy: Policy, params: dict, problems: list, key: Array) -> dict:
  """Returns G responses to each problem: tokens, log-probabilities, mask, texts.

  The log-probabilities are those of the sampling policy, mu.
  """
  template = policy.tokenizer.template
  texts = [template.format(problem=row.problem) for row in problems]
  prompts = encode(policy.tokenizer, texts)
  tokens_PT = np.zeros((len(prompts), PROMPT), np.int32)
  for row, prompt in zip(tokens_PT, prompts, strict=True):
    row[: len(prompt)] = prompt
  length_P = np.array([len(prompt) for prompt in prompts], np.int32)
  rollouts = PartialRollouts(policy.engine, places=len(problems))  # one per prompt
  # The noise of a token depends on the key, the uid of its response and its column.
  uid_B = np.arange(len(problems) * GROUP, dtype=np.uint32)
  every_P = np.arange(len(prompts))
  rollouts.submit(Prompts(every_P, tokens_PT, length_P), uid_B)
  # Copies the weights to the sampler's layout, and decodes until all responses end.
  rollouts.decode(decoder.actor(params, policy.spec), key)
  rows = rollouts.read(every_P, seats=len(prompts))  # [P, G, T], mask with <eos>
  tokens_BT, logp_BT, mask_BT = (
    np.asarray(x).reshape(len(uid_B), -1)
    for x in (rows.tokens_BT, rows.logp_BT, rows.response_mask_BT)
  )
  texts = decode_responses(policy.tokenizer, tokens_BT, mask_BT)  # without <eos>
  return {'tokens': tokens_BT, 'logp': logp_BT, 'mask': mask_BT, 'texts': texts}


def verify(problems: list, texts: list[str]) -> np.ndarray:
  """Returns the reward [P, G] of each response: 1 if its boxed answer is right.

  The rule `aime` reads integers from 0 to 999 in \\boxed{}.
  """
  answers = np.repeat([row.answer for row in problems], GROUP)
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
  adv_BT = batch.adv_BT

  # Returns d gain / d logp of each token without a cut; change it with the surrogate.
  # Only weights that no bound changes can be searched, so the argument is not used.
  def weigh(_):
    return jax.lax.stop_gradient(ratio_BT * adv_BT)

  bounds = CLIP(jax.lax.stop_gradient(ratio_BT), batch, weigh)
  clipped_BT = jnp.clip(ratio_BT, bounds.low, bounds.high)
  gain_BT = jnp.minimum(ratio_BT * adv_BT, clipped_BT * adv_BT)
  loss = -jnp.where(mask_BT, gain_BT, 0).sum() / jnp.maximum(mask_BT.sum(), 1)
  return loss, (bounds.low, bounds.high)


@functools.partial(jax.jit, static_argnames='spec')
def update(params: dict, opt: Tree, batch: Batch, spec: ModelSpec) -> tuple:
  """Returns (params, opt, (low, high)) after one minibatch."""
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
    prox_BT=logp_BT,  # not read here, like source_B and on_policy_BT
    adv_BT=jnp.broadcast_to(jnp.float32(adv_B[rows])[:, None], mask_BT.shape),
    source_B=jnp.zeros(len(rows), jnp.int32),
    on_policy_BT=mask_BT,
  )


def accuracy(policy: Policy, params: dict, problems: list) -> float:
  """Returns the share of right responses; every call samples with the same noise."""
  right = []
  for start in range(0, len(problems), PROBLEMS):
    part = problems[start : start + PROBLEMS]
    texts = sample(policy, params, part, jax.random.key(10**6 + start))['texts']
    right.append(verify(part, texts).mean())
  return float(np.mean(right))


def main(steps: int = STEPS) -> list[float]:
  """Trains the policy and prints its curve; returns the held-out accuracies."""
  knobs = ProblemsConfig()  # 2,048 problems and HELD_OUT others
  data = sources.read(knobs)
  problems, held_out = data.training, data.held_out
  policy = make_policy()
  params = warm_start(policy, sources.imitated(knobs, data))
  opt = OPTIMIZER.init(params)
  rng = np.random.default_rng(0)
  curve = [accuracy(policy, params, held_out)]
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
      print(f'after {step} steps: held-out accuracy {curve[-1]:.3f}')
  return curve


if __name__ == '__main__':
  main()
