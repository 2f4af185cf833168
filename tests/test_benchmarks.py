"""The benchmarks of a step: what they start, and what they count."""

import numpy as np
import pytest
from making import QWEN2 as SPEC

from bapo_jax import main
from benchmarks import roofline
from benchmarks.training import (
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


def test_rewards_of_the_peer_are_our_verdicts():
  chat = [{'role': 'assistant', 'content': '39 + 14 = 53.'}]
  texts = [chat, '39 + 14 = 52.', r'\boxed{53}']
  assert trl_step.reward(texts, ['53'] * 3, ['gsm8k', 'gsm8k', 'aime']) == [1, 0, 1]


def test_useful_flops_by_hand():
  batch = learner.example(32, 256, '1:2-quarter')
  seen = rates.teaching(batch)
  mask_BT = np.asarray(batch.loss_mask_BT)
  assert seen.trained == mask_BT.sum()
  assert seen.response_R.tolist() == mask_BT[: learner.GROUP].sum(1).tolist()
  # One row: 3 tokens of a prompt and 2 of a response, which alone meet the head.
  one = rates.Teaching(2, np.array([2]), np.array([5]))
  once = roofline.forward(SPEC, 2 * 2.5)
  body = 5 * (once.layers + once.attention)
  assert rates.useful_flops(SPEC, [one]) == 3 * (body + 2 * once.head)
  # Two updates add up.
  assert rates.useful_flops(SPEC, [one, one]) == 6 * (body + 2 * once.head)
