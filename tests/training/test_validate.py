"""What does not fit together is said in one sentence; what a config offers does fit."""

import pytest

from bapo_jax.algorithms import clip, loss, replay_buffer
from bapo_jax.training import validate
from configs import aime, base

KNOBS = [  # knob, value, what the sentence must say
  (
    'clip.rule',
    'balnced',
    r"no rule named 'balnced'; choose one of \['balanced', 'fixed'",
  ),
  ('loss.rule', 'ppo', r"loss\.rule: no rule named 'ppo'; choose one of \['cispo'"),
  ('loss.aggregate', 'mean', r"loss\.aggregate='mean': choose one of"),
  ('loss.kl', -0.1, r'loss\.kl=-0\.1: must be 0 or more'),
  ('loss.clipped.limit', -1.0, r'loss\.clipped\.limit=-1\.0'),
  (
    'learner.bounds_scope',
    'row',
    r"learner\.search='row': choose one of \('minibatch', 's",
  ),
  ('clip.balanced.low_step', 0.5, r'clip\.balanced\.low_step=0\.5: .*\(0, 0\.3\]'),
  ('clip.balanced.sources', ('stale',), r"clip\.balanced\.sources=\('stale',\)"),
  ('rewards.rule', 'amie', r"rewards\.rule: no rule named 'amie'; choose one of"),
  ('rewards.workers', 0, r'rewards\.workers=0 is too small; give at least 1'),
  ('rewards.deadline', 0.0, r'rewards\.deadline=0\.0 seconds must be above 0'),
  ('rewards.memory_mb', 64, r'rewards\.memory_mb=64 is too small; give at least 512'),
  ('rewards.shaping.truncated', 'cut', r"truncated='cut': choose one of \('judged'"),
  ('rewards.shaping.overlong_cache', 41, r'overlong_cache=41 tokens: .*new=40'),
  ('evaluate.k', (1, 4), r'evaluate\.k=\(1, 4\): pass@4 needs at least 4 responses'),
  ('checkpoint.best', -1, r'checkpoint\.best=-1 is too small; give at least 0'),
  ('learner.grad_accum_steps', 0, r'learner\.slices=0 is too small; give at least 1'),
  (
    'prompts.overlong',
    'cut',
    r"prompts\.overlong='cut': choose one of \('drop', 'refu",
  ),
  (
    'problems.changed',
    'yes',
    r"problems\.changed='yes': choose one of \('refuse', 'ac",
  ),
  ('problems.source', 'countdown', r"test_source='synthetic' beside .*='countdown'"),
  ('problems.source', '/x/a.jsonl', r"test_source='synthetic' beside .*='/x/a.jsonl'"),
  (
    'problems.test_source',
    '/x/a.jsonl',
    r'not found: .*test_source=/x/a\.jsonl\. Down',
  ),
  ('problems.test_source', 'tfds:', r'problems\.test_source=tfds:: write hub:owner'),
  (
    'buffer.reevaluate',
    999,
    r'buffer\.reevaluated=999 is more than buffer\.capacity=256',
  ),
  ('buffer.capacity', 0, r'buffer\.capacity=0 is too small; give at least 1'),
  ('buffer.max_reuse', 0, r'buffer\.max_reuse=0 is too small; give at least 1'),
  (
    'buffer.thresholds.rule',
    'free',
    r"buffer\.band\.rule: no rule named 'free'; choose one",
  ),
  (
    'buffer.thresholds.fixed.hard',
    1.2,
    r'hard runs from 1\.2 to 1\.2; shares lie in \[0, 1\]',
  ),
  (
    'buffer.thresholds.fixed.hard',
    1.0,
    r'hard=1 files solved problems as hard; give less',
  ),
  (
    'buffer.thresholds.fixed.good',
    (0.7, 0.2),
    r'good begins at 0\.7 and ends at 0\.2; turn',
  ),
  ('batch.max_extra_rounds', -1, r'batch\.refills=-1 is too small; give at least 0'),
  ('batch.weights.reused', -0.5, r'batch\.weights\.reused=-0\.5: must be 0 or more'),
  ('batch.weights.fresh', float('inf'), r'batch\.weights\.fresh=inf: .* finite'),
  ('batch.weights.fresh', float('nan'), r'batch\.weights\.fresh=nan: .* finite'),
  (
    'learner.max_consecutive_skips',
    0,
    r'learner\.give_up=0 is too small; give at least 1',
  ),
]
TOGETHER = [  # knobs that are wrong beside each other, what the sentence must say
  (
    {'buffer.thresholds.rule': 'threshold_free', 'sampler.group_size': 7},
    r"rule='threshold_free' keeps .* half right, and sampler\.group=7 is odd",
  ),
  (
    {'buffer.thresholds.rule': 'moving', 'buffer.thresholds.moving.low': (0.1, 0.9)},
    r'good begins at 0\.9 and ends at 0\.875; turn them',
  ),
  (
    {'buffer.thresholds.rule': 'moving', 'buffer.thresholds.moving.high': (0.5, -0.1)},
    r'high runs from 0\.5 to -0\.1; shares lie in \[0, 1\]',
  ),
  (
    {'batch.rule': 'replay', 'batch.replay.replay_ratio': 0},
    r'replay\.older=0: replay what',
  ),
  (
    {'batch.rule': 'replay', 'batch.replay.replay_ratio': 2, 'buffer.capacity': 127},
    r'capacity=127 holds fewer .*=64 x batch\.replay\.older=2 = 128; give that much',
  ),
  (
    {'batch.rule': 'replay', 'learner.minibatches': 48},
    r'count=64 and 64 replayed groups do not divide into learner\.minibatches=48',
  ),
]


def config(**knobs):
  made = base.get_config()
  with made.unlocked():
    made.update_from_flattened_dict(knobs)
  return made


@pytest.mark.parametrize(('knob', 'value', 'message'), KNOBS)
def test_errors_name_the_knob_and_its_value(knob, value, message):
  with pytest.raises(ValueError, match=message):
    validate.check(config(**{knob: value}))


@pytest.mark.parametrize(('knobs', 'message'), TOGETHER)
def test_errors_name_knobs_that_do_not_fit_together(knobs, message):
  with pytest.raises(ValueError, match=message):
    validate.check(config(**knobs))


def test_a_weight_of_no_source_is_refused():
  made = base.get_config()
  with made.unlocked():
    made.batch.weights.stale = 1.0
  with pytest.raises(
    ValueError, match=r"weights\.stale: the sources are \('fresh', 'r"
  ):
    validate.check(made)


def test_every_band_fits_the_embedded_default():
  for rule in replay_buffer.THRESHOLD_RULES:
    validate.check(config(**{'buffer.thresholds.rule': rule, 'batch.rule': 'adapted'}))


def test_a_knob_that_is_no_knob_of_its_rule_is_refused():
  made = base.get_config()
  with made.unlocked():
    made.clip.fixed.target = 0.4  # of a rule that is not even chosen
  with pytest.raises(
    ValueError, match=r'clip\.fixed\.target: no such knob; fixed knows'
  ):
    validate.check(made)


@pytest.mark.parametrize('variant', ['tiny', 'recipe'])
def test_variants_that_need_no_download_are_sound(variant):
  rules = validate.check(aime.get_config(variant))
  assert rules.keys() == {'batch', 'band', 'advantage', 'clip', 'loss'}


@pytest.mark.parametrize('loss_rule', loss.RULES)
@pytest.mark.parametrize('clip_rule', clip.RULES)
def test_every_pair_of_rules_fits_or_is_refused(clip_rule, loss_rule):
  made = config(**{'clip.rule': clip_rule, 'loss.rule': loss_rule})
  if loss_rule == 'tis' and clip_rule != 'unclipped':
    with pytest.raises(ValueError, match=f"clip.rule='{clip_rule}'.*'unclipped'"):
      validate.check(made)
  else:
    validate.check(made)
