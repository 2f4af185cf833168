"""The presets hold the settings that the papers give, every one of them.

The tables are typed from the papers and the public script, not from configs/aime.py.
"""

import pytest
from runs import plain

from bapo_jax.knobs import fields
from bapo_jax.tools.plan import programs
from bapo_jax.training import rules
from bapo_jax.training.config import Config, parse
from configs import aime, geometry

# arXiv:2510.18927: target, ranges, steps, lr, temperature, response length; its public
# script: 256 prompts, minibatches of 64, n = 16, 2 epochs, no KL, weight decay 0.1.
BALANCED = {
  'batch.rule': 'fresh_only',
  'advantage.rule': 'group_relative',
  'clip.rule': 'balanced',
  'clip.balanced.target': 0.4,
  'clip.balanced.low': (0.6, 0.9),
  'clip.balanced.high': (1.2, 3.0),
  'clip.balanced.high_step': 0.05,
  'clip.balanced.low_step': 0.02,
  'clip.balanced.contribution': 'gradient',
  'clip.balanced.order': 'upper',
  'clip.balanced.resolution': 'step',
  'optimizer.lr': 2e-6,
  'optimizer.weight_decay': 0.1,
  'sampler.temperature': 0.6,
  'sampler.max_new_tokens': 8192,
  'sampler.group_size': 16,
  'prompts.count': 256,
  'learner.minibatches': 256 // 64,
  'learner.epochs': 2,
  'loss.kl': 0.0,
}
# arXiv:2602.20722: G = 8, v = m = 5, 256 prompts, minibatches of 64, c1 = c2 = 1/8,
# c3 = 5/8, at most 128 problems re-evaluated, ages 1 to 3, lr 1e-6, clip 0.2, KL(pi ||
# alpha) with a coefficient of .001 to .01.
BATCH = {
  'batch.rule': 'adapted',
  'advantage.rule': 'group_relative',
  'sampler.group_size': 8,
  'rollout.weight_sync_interval': 5,
  'buffer.reeval_interval': 5,
  'prompts.count': 256,
  'learner.minibatches': 256 // 64,
  'buffer.thresholds.rule': 'fixed',
  'buffer.thresholds.fixed.hard': 0.125,
  'buffer.thresholds.fixed.reusable': (0.125, 0.625),
  'buffer.reevaluate': 128,
  'buffer.hard_order': 'fifo',
  'buffer.max_off_policy_steps': 3,
  'optimizer.lr': 1e-6,
  'clip.rule': 'fixed',
  'clip.fixed.low': 0.8,
  'clip.fixed.high': 1.2,
  'loss.kl': 0.001,
  'loss.kl_direction': 'policy_behavior',
}
PRESETS = {'balanced_paper': BALANCED, 'batch_paper': BATCH}
# What the papers leave open and a large model needs: ours.
OURS = {
  'title',
  'steps',
  'mesh.data',
  'mesh.fsdp',
  'model.path',
  'model.compute',
  'logprobs.chunk',
  'tokenizer.path',
  'tokenizer.template',
  'problems.source',
  'problems.test_source',
  'prompts.max_prompt_tokens',
  'sampler.max_new_tokens',
  'sampler.max_num_seqs',
  'sampler.prefill_batch_size',
  'sampler.tokens_per_dispatch',
  'sampler.cache_segments',
  'sampler.done_check_lag',
  'learner.grad_accum_steps',
  'optimizer.warmup',
  'optimizer.b2',
  'evaluate.every',
  'evaluate.group_size',
  'evaluate.sampling.temperature',
}


def values(config: Config) -> dict:
  """Knob -> value."""
  return {name: value for name, _, value in fields(config)}


def preset(name: str) -> dict:
  """Knob -> value of a preset, validated."""
  return values(parse(aime.get_config(name).to_dict()))


@pytest.mark.parametrize('name', PRESETS)
def test_a_preset_has_every_setting_of_its_paper(name):
  found = preset(name)
  for knob, value in PRESETS[name].items():
    assert found[knob] == value, knob


@pytest.mark.parametrize('name', PRESETS)
def test_whatever_a_preset_changes_is_the_papers_or_named_as_ours(name):
  default = values(parse(plain()))
  changed = {knob for knob, value in preset(name).items() if value != default[knob]}
  assert changed <= PRESETS[name].keys() | OURS


def test_the_runs_of_one_model_have_the_settings_of_balanced_po():
  for name, model in (('7b', '7B'), ('32b', '32B')):
    found = preset(name)
    assert found['model.path'] == f'models/DeepSeek-R1-Distill-Qwen-{model}'
    for knob, value in BALANCED.items():
      assert found[knob] == value, knob


@pytest.mark.parametrize('name', ['3b', '7b'])
def test_the_runs_on_pictures_have_the_settings_of_batch_adaptation(name):
  found = values(parse(geometry.get_config(name).to_dict()))
  assert found['model.path'] == f'models/Qwen2.5-VL-{name.upper()}-Instruct'
  for knob, value in BATCH.items():
    assert found[knob] == value, knob
  default = values(parse(plain()))
  changed = {knob for knob, value in found.items() if value != default[knob]}
  assert changed <= BATCH.keys() | OURS | {'rewards.rule', 'mesh.tensor'}
  # A picture of 1024 tokens, and text.
  assert found['prompts.max_prompt_tokens'] == 1024 + programs.TEXT
  assert not found['model.train_tower']


@pytest.mark.parametrize('name', PRESETS)
def test_the_rules_of_a_preset_can_be_bound(name):
  config = parse(aime.get_config(name).to_dict())
  assert callable(rules.bind(config).batch)
  assert config.updates_per_step == 4 * config.learner.epochs
