"""The benchmarks of a step: what they start, and what they count."""

import functools
import heapq
import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from making import QWEN2 as SPEC

from bapo_jax import main
from bapo_jax.models.vision import spec as vision_spec
from bapo_jax.tools.plan import roofline
from benchmarks.models import tower
from benchmarks.rollout import shared_prompts
from benchmarks.training import (
  changed_weights,
  learner,
  our_step,
  rates,
  rl_step,
  trl_step,
)


@pytest.mark.parametrize('name', rl_step.CASES)
def test_both_sides_have_the_same_settings(name):
  args = rl_step.parse(['--steps=2', '--model=m', '--data=d.jsonl'])
  ours, overrides = our_step.parse(rl_step.our_command(name, args)[3:])
  config = main.read_config('configs/aime.py', overrides)
  peer = trl_step.parse(rl_step.trl_command(name, args)[3:])
  settings = trl_step.settings(peer)
  rows = config.prompts.count * config.sampler.group_size
  # Two steps and the one that is not counted.
  assert config.steps * config.updates_per_step == settings['max_steps']
  assert config.steps == 2 + our_step.SKIPPED == 2 + trl_step.SKIPPED
  assert config.updates_per_step == settings['steps_per_generation']
  assert rows == settings['per_device_train_batch_size'] * config.updates_per_step
  assert config.sampler.group_size == settings['num_generations']
  assert config.sampler.max_new_tokens == settings['max_completion_length']
  assert config.sampler.temperature == settings['temperature']
  assert config.optimizer.lr == settings['learning_rate']
  assert config.optimizer.max_norm == settings['max_grad_norm']
  bounds = config.clip
  assert (1 - bounds.low, bounds.high - 1) == pytest.approx([settings['epsilon']] * 2)
  assert (config.clip.rule, config.loss.kl) == ('fixed', settings['beta'])
  assert config.tokenizer.template.startswith('chat:') == peer.chat
  assert ours.workdir in peer.problems
  assert peer.model == ('m' if name != 'embedded' else f'{ours.workdir}/model')


def test_rewards_of_the_peer_are_our_verdicts():
  chat = [{'role': 'assistant', 'content': '39 + 14 = 53.'}]
  texts = [chat, '39 + 14 = 52.', r'\boxed{53}']
  assert trl_step.reward(texts, ['53'] * 3, ['gsm8k', 'gsm8k', 'aime']) == [1, 0, 1]


@pytest.mark.parametrize('case', learner.CASES)
def test_rows_are_as_long_as_the_case_says(case):
  batch = learner.example(32, 256, case)
  mask_BT = np.asarray(batch.loss_mask_BT)
  length_B = mask_BT.shape[1] - mask_BT[:, ::-1].argmax(1)
  assert mask_BT.any(1).all() and length_B.max() == 256
  assert 256 / length_B.mean() == pytest.approx(learner.factor(case), rel=0.02)
  adv_PG = np.asarray(batch.adv_B).reshape(-1, learner.GROUP)
  assert (adv_PG.sum(1) == 0).all()
  taught = (adv_PG != 0).any(1).mean()
  assert taught == (0.25 if case.endswith('-quarter') else 1)


def test_useful_flops_by_hand():
  batch = learner.example(32, 256, '1:2-quarter')
  seen = rates.teaching(batch)
  mask_BT = np.asarray(batch.loss_mask_BT)
  assert seen.trained == mask_BT.sum()
  assert seen.response_R.tolist() == mask_BT[: learner.GROUP].sum(1).tolist()
  # One row: 3 tokens of a prompt and 2 of a response, which alone meet the head.
  one = rates.Teaching(2, np.array([2]), np.array([5]))
  once = roofline.forward(SPEC, 2.5)
  body = 5 * (once.layers + once.attention)
  assert rates.useful_flops(SPEC, [one]) == 3 * (body + 2 * once.head)
  # Two updates add up.
  assert rates.useful_flops(SPEC, [one, one]) == 6 * (body + 2 * once.head)


@pytest.mark.parametrize('name', tower.TOWERS)
def test_flops_of_a_tower_are_those_of_its_products(name):
  v = tower.spec_of(name).vision
  # Pictures of 16 x 8 patches: two windows of 64.
  sizes = {p: math.prod(s) for p, (s, _) in vision_spec.describe(v).items()}
  kernels = {p: n for p, n in sizes.items() if not p.endswith(('bias', 'norm'))}
  kernels['patch'] //= v.frames  # both frames are one picture
  for path in ('merger_in', 'merger_out'):
    kernels[path] //= v.merge**2
  # Scores and their products with values: two numbers of each channel of a key.
  full = len(v.full_layers)
  attention = 2 * v.width * (full * 128 + (v.layers - full) * 64)
  alone = {'data': 1, 'fsdp': 1, 'tensor': 1}
  found = roofline.tower(tower.spec_of(name), alone, 3, 128)
  assert found.flops == 3 * 2 * 128 * (sum(kernels.values()) + attention)
  assert found.bytes == 4 * sum(sizes.values())


def test_problems_are_written_in_the_order_of_the_run(tmp_path):
  from bapo_jax.data import prompts
  from bapo_jax.data.row import Row
  from bapo_jax.training import build, resolve

  config = main.read_config('configs/aime.py', ['--config.steps=2'])
  problems = build.read(config, resolve.open_model(config)).problems

  t = types.SimpleNamespace(config=config, problems=problems)
  our_step.write_problems(t, tmp_path / 'problems.jsonl')
  rows = [json.loads(x) for x in (tmp_path / 'problems.jsonl').read_text().splitlines()]
  second = prompts.next_prompts(problems, 1, config.seed, config.prompts.count)
  reader = resolve.open_model(config).tokenizer
  again = [Row(row['problem'], '') for row in rows[64:]]
  tokens_PT = prompts.tabulate(reader, again, 17, drop=False).tokens_NT
  assert (tokens_PT == second.tokens_PT).all()


@pytest.mark.parametrize('kind', ['equal', 'geometric'])
def test_prompts_per_slot_are_those_of_simulated_slots(kind):
  mean, group, slots, n = 64, 4, 32, 100_000
  rollout = shared_prompts.Rollout.of(mean, group, kind)
  length_N = np.full(n, mean)
  if kind == 'geometric':
    length_N = np.random.default_rng(0).geometric(1 / mean, n)
    length_N = length_N.clip(max=shared_prompts.ROOM * mean)
  # A free slot takes the next response, as in the sampler.
  free, kept, begun = [0] * slots, 0, 0
  for i, length in enumerate(length_N):
    start = heapq.heappop(free)
    heapq.heappush(free, end := start + int(length))
    if i % group == 0:  # the first response of a group
      begun, last = start, end
    last = max(last, end)
    if i % group == group - 1:
      kept += last - begun
  counted = rollout.prompts(group, slots)
  tokens = length_N.sum()
  assert counted - 1 / slots <= kept / tokens <= 1.01 * counted
  # Relative standard errors of 100,000 lengths are at most 0.36 %.
  live = (length_N * (length_N + 1) / 2).sum() / tokens
  assert rollout.live == pytest.approx(live, rel=0.015)
  assert rollout.tokens == pytest.approx(tokens / n, rel=0.015)


def test_a_shared_prompt_is_read_once_per_group():
  # An H100, 1024 prompt tokens, 16 responses of equal lengths 1024, 32 slots: 56 KiB
  # per column; half the response and half a block of 128 are live.
  rollout = shared_prompts.Rollout.of(1024, 16, 'equal')
  step = functools.partial(shared_prompts.step, 'h100', rollout, 1024, 1024, 32)
  today, shared = step(1.0), step(1 / 16)
  column = 2 * 28 * 4 * 128 * 2 / 2**30
  assert today.cache == pytest.approx(32 * 2048 * column)
  assert shared.cache == pytest.approx((32 * 1024 + 2 * 1024) * column)
  assert today.read - shared.read == pytest.approx(30 * 1024 * column)
  weights = today.read - 32 * (1024 + 512.5 + 63.5) * column
  assert weights == pytest.approx(2 * 7.07e9 / 2**30, rel=0.01)  # without embedding
  assert shared.rate / today.rate == pytest.approx(today.read / shared.read)


def test_changed_casts_by_hand():
  # Above 1 bfloat16 steps by 1/128: 1.003 rounds to 1, 1.005 to the next number.
  params = {'a': jnp.array([1.0, 1.0, 2.0]), 'b': jnp.array([[0.5]])}
  steps = [
    {'a': jnp.array([1.003, 1.0, 2.0]), 'b': jnp.array([[0.5]])},  # none of four
    {'a': jnp.array([1.005, 1.0, 2.0]), 'b': jnp.array([[0.51]])},  # two
    {'a': jnp.array([1.0, 1.0, 2.0]), 'b': jnp.array([[0.5]])},  # is not compared
    {'a': jnp.array([1.005, 1.0, 2.0]), 'b': jnp.array([[0.5]])},  # one went back
  ]
  steps += [*steps[:3], *steps[1:2] * 2]  # the ninth is compared to the eighth
  windows = []
  step = changed_weights.watch(lambda params: (params, None), params, windows)
  for made in steps:
    assert step(made) == (made, None)
  assert windows == [
    {'before': 0, 'after 1': 0, 'after 2': 0.5, 'after 4': 0.25, 'after 8': 0.5},
    {'before': 8, 'after 1': 0},
  ]


def test_a_sparse_sync_by_hand():
  # Of 800 weights, 1600 bytes, 8 changed: 8 x 6, 8 x 4, and 100 bytes of mask + 8 x 2.
  sizes = changed_weights.sizes(0.01)
  assert sizes == pytest.approx({'index': 0.03, 'offset': 0.02, 'mask': 116 / 1600})
  for name, share in changed_weights.break_even().items():
    assert changed_weights.sizes(share)[name] == pytest.approx(1)
