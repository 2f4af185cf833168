"""The presets hold the settings that the papers give, every one of them.

The tables are typed from the papers and the public script, not from configs/aime.py.
"""

import math
from typing import Any

import pytest
from runs import plain

from bapo_jax.knobs import fields
from bapo_jax.tools.plan import programs
from bapo_jax.training.config import Config, parse
from configs import aime, geometry

# arXiv:2510.18927: target, ranges, steps, lr, temperature, response length; its public
# script: 256 prompts, minibatches of 64, n = 16, 2 epochs, no KL, weight decay 0.1, and
# warm-up over a tenth of the steps: 40 of our 400, each of 4 x 2 updates. Its dual clip
# is not the paper's.
BALANCED = {
  'batch.rule': 'fresh_only',
  'advantage.rule': 'group_relative',
  'clip.rule': 'balanced',
  'clip.target': 0.4,
  'clip.low': (0.6, 0.9),
  'clip.high': (1.2, 3.0),
  'clip.high_step': 0.05,
  'clip.low_step': 0.02,
  'clip.contribution': 'gradient',
  'clip.order': 'upper',
  'clip.resolution': 'step',
  'optimizer.lr': 2e-6,
  'optimizer.weight_decay': 0.1,
  'sampler.temperature': 0.6,
  'sampler.max_new_tokens': 8192,
  'sampler.group_size': 16,
  'prompts.count': 256,
  'learner.minibatches': 256 // 64,
  'learner.epochs': 2,
  'loss.kl': 0.0,
  'clip.dual': math.inf,
  'optimizer.warmup': 40 * 8,
}
# arXiv:2602.20722: G = 8, v = m = 5, 256 prompts, minibatches of 64, c1 = c2 = 1/8,
# c3 = 5/8, at most 128 problems re-evaluated, 256 hard ones, ages 1 to 3, lr 1e-6, clip
# 0.2, KL(pi || alpha) with a coefficient of .001 to .01: .001 for math.
BATCH = {
  'batch.rule': 'adapted',
  'advantage.rule': 'group_relative',
  'sampler.group_size': 8,
  'rollout.weight_sync_interval': 5,
  'buffer.reeval_interval': 5,
  'prompts.count': 256,
  'learner.minibatches': 256 // 64,
  'buffer.thresholds.rule': 'fixed',
  'buffer.thresholds.hard': 0.125,
  'buffer.thresholds.reusable': (0.125, 0.625),
  'buffer.reevaluate': 128,
  'buffer.hard_order': 'fifo',
  'buffer.max_off_policy_steps': 3,
  'buffer.capacity': 256,
  'optimizer.lr': 1e-6,
  'clip.rule': 'fixed',
  'clip.low': 0.8,
  'clip.high': 1.2,
  'loss.kl': 0.001,
  'loss.kl_direction': 'policy_behavior',
  'loss.entropy': 0.001,
}
# The same on Geometry3K, with prompts of 1,024 and responses of 4,096 tokens.
GEOMETRY = BATCH | {
  'prompts.max_prompt_tokens': 1024,
  'sampler.max_new_tokens': 4096,
  'sampler.temperature': 1.0,
  'buffer.reevaluate': 256,
  'loss.kl': 0.01,
}
# What the papers leave open and a large model needs: ours.
OURS = """
  title steps mesh.data mesh.fsdp mesh.tensor model.path model.compute
  tokenizer.path tokenizer.template problems.source problems.test_source rewards.rule
  prompts.max_prompt_tokens sampler.max_new_tokens sampler.max_num_seqs
  sampler.prefill_batch_size sampler.tokens_per_dispatch sampler.cache_segments
  sampler.done_check_lag learner.grad_accum_steps optimizer.warmup optimizer.b2
  evaluate.every evaluate.group_size evaluate.sampling.temperature
"""
PRESETS = [  # config file, variant, settings of its paper, model
  (aime, 'balanced_paper', BALANCED, 'DeepSeek-R1-Distill-Qwen-7B'),
  (aime, 'batch_paper', BATCH, 'DeepSeek-R1-Distill-Qwen-1.5B'),
  (aime, '7b', BALANCED, 'DeepSeek-R1-Distill-Qwen-7B'),
  (aime, '32b', BALANCED, 'DeepSeek-R1-Distill-Qwen-32B'),
  (geometry, '3b', GEOMETRY, 'Qwen2.5-VL-3B-Instruct'),
  (geometry, '7b', GEOMETRY, 'Qwen2.5-VL-7B-Instruct'),
]


def values(config: Config) -> dict[str, Any]:
  """Returns knob -> value."""
  return {name: value for name, _, value in fields(config)}


@pytest.mark.parametrize(('file', 'variant', 'paper', 'model'), PRESETS)
def test_a_preset_has_the_settings_of_its_paper_and_others_are_ours(
  file, variant, paper, model
):
  config = parse(file.get_config(variant).to_dict())
  found, default = (values(x) for x in (config, parse(plain())))
  assert {knob: found[knob] for knob in paper} == paper
  changed = {knob for knob, value in found.items() if value != default.get(knob)}
  assert changed <= paper.keys() | set(OURS.split())
  assert found['model.path'] == f'models/{model}'
  assert config.updates_per_step == 4 * config.learner.epochs
  if file is geometry:  # a plan counts a picture beside the text
    assert found['prompts.max_prompt_tokens'] > programs.TEXT
    assert not found['model.train_tower']
