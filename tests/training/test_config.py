"""What does not fit together is one sentence; what a config offers does fit.

Values of a single knob of a rule slot or of the replay buffer: tests/test_knobs.py.
"""

import json

import jax
import pytest
from runs import plain, tiny

from bapo_jax.algorithms import clip, loss, replay_buffer
from bapo_jax.training import config as config_lib
from bapo_jax.training import resolve, rules
from bapo_jax.training.config import parse
from configs import aime

KNOBS = [  # knob, value, what the sentence must say
  ('rewards.rule', 'amie', r"rewards\.rule='amie': give one of 'aime', 'math'"),
  ('rewards.workers', 0, r'rewards\.workers=0: give an integer from 1 to 256'),
  ('rewards.deadline', 0.0, r'rewards\.deadline=0\.0: give a number above 0'),
  ('rewards.memory_mb', 64, r'rewards\.memory_mb=64: give an integer from 512'),
  (
    'rewards.shaping.truncated',
    'cut',
    r"truncated='cut': give one of .*'wrong', 'masked'",
  ),
  ('rewards.shaping.overlong_cache', 41, r'overlong_cache=41: .*max_new_tokens=40'),
  ('evaluate.k', (1, 4), r'evaluate\.k=\(1, 4\): pass@4 needs at least 4 responses'),
  ('checkpoint.best', -1, r'checkpoint\.best=-1: give an integer from 0'),
  (
    'learner.grad_accum_steps',
    0,
    r'learner\.grad_accum_steps=0: give an integer from 1',
  ),
  ('learner.bounds_scope', 'row', r"learner\.bounds_scope='row': .* 'micro_batch'"),
  (
    'learner.max_consecutive_skips',
    0,
    r'max_consecutive_skips=0: give an integer from',
  ),
  ('prompts.overlong', 'cut', r"prompts\.overlong='cut': give one of 'drop', 'refuse'"),
  ('problems.changed', 'yes', r"problems\.changed='yes': give one of 'refuse', 'acc"),
  ('problems.source', 'countdown', r"test_source='synthetic' beside .*='countdown'"),
  ('problems.source', '/x/a.jsonl', r"test_source='synthetic' beside .*='/x/a.jsonl'"),
  ('mesh.data', 0, r'mesh\.data=0: give 1 or more devices, or -1 for the rest'),
  ('mesh.fsdp', -1, r'mesh\.data=-1, fsdp=-1, tensor=1: only one of them may be -1'),
  ('model.heads', 3, r'model\.heads=3: give a multiple of kv_heads=2'),
  (
    'model.remat',
    'some',
    r"model\.remat='some': give one of 'auto', 'full', 'dots', 'none'",
  ),
  ('model.dtype', 'float16', r"model\.dtype='float16': give one of 'float32', 'bf"),
  ('model.compute', 'int8', r"model\.compute='int8': give one of 'float32', 'bf"),
  ('model.attention', 'flash', r"model\.attention='flash': give one of 'auto', 'pl"),
  ('lora.rank', -1, r'lora\.rank=-1: give an integer from 0'),
  (
    'lora.targets',
    'q_proj',
    r"lora\.targets='q_proj' matches none .* are layers/q, la",
  ),
  ('lora.targets', 'layers/(q', r"lora\.targets='layers/\(q': no regular expression"),
  ('checkpoint.final', 'all', r"checkpoint\.final='all': give one of 'run', 'weights'"),
  ('sampler.group_size', 1, r'sampler\.group_size=1: give an integer from 2'),
  ('sampler.temperature', 0.0, r'sampler\.temperature=0\.0: give a number above 0'),
  ('sampler.done_check_lag', -1, r'sampler\.done_check_lag=-1: give an integer from 0'),
  ('rollout.cache', 'drop', r"rollout\.cache='drop': give one of 'refresh', 'keep'"),
  ('rollout.max_tokens_per_step', 6.0, r'=6 leaves .*max_off_policy_steps=0 forbids'),
  ('sampler.max_new_tokens', 40_000, r'tokens exceed .* 32768 positions; lower one'),
]
# Knobs that are wrong beside each other, and what the sentence must say.
TOGETHER = [
  (
    {'rollout.max_tokens_per_step': 0.5, 'rollout.max_off_policy_steps': 1},
    r'max_tokens_per_step=0\.5: give a number .* 1,? or inf',
  ),
  (
    {'buffer.thresholds.rule': 'threshold_free', 'sampler.group_size': 7},
    r"rule='threshold_free' keeps .* half right, and sampler\.group_size=7 is odd",
  ),
  (
    {'batch.rule': 'replay', 'batch.replay.replay_ratio': 2, 'buffer.capacity': 127},
    r'capacity=127 holds .*=64 x batch\.replay\.replay_ratio=2 = 128; give that much',
  ),
  (
    {'batch.rule': 'replay', 'learner.minibatches': 48},
    r'count=64 and 64 replayed groups do not divide into learner\.minibatches=48',
  ),
  (
    {'prompts.count': 10, 'learner.minibatches': 4},
    r'prompts\.count=10 groups do not divide into learner\.minibatches=4',
  ),
]


@pytest.mark.parametrize(('knob', 'value', 'message'), KNOBS)
def test_errors_name_the_knob_and_its_value(knob, value, message):
  with pytest.raises(ValueError, match=message):
    parse(plain(**{knob: value}))


@pytest.mark.parametrize(('knobs', 'message'), TOGETHER)
def test_errors_name_knobs_that_do_not_fit_together(knobs, message):
  with pytest.raises(ValueError, match=message):
    parse(plain(**knobs))


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('/x/a.jsonl', r'not found: .*test_source=/x/a\.jsonl\. Download'),
    ('tfds:', r'problems\.test_source=tfds:: write hub:owner'),
  ],
)
def test_errors_name_the_source_that_is_not_to_be_had(source, message):
  config = parse(plain(**{'problems.test_source': source}))
  with pytest.raises(ValueError, match=message):
    resolve.check_available(config)


@pytest.mark.parametrize(
  'path', ['clip.fixed.target', 'batch.weights.stale', 'clip.speed', 'speed']
)
def test_an_unknown_knob_is_refused(path):
  # Also a knob of a rule that is not even chosen.
  values = plain()
  *sections, name = path.split('.')
  section = values
  for key in sections:
    section = section[key]
  section[name] = 0.4
  with pytest.raises(ValueError, match=rf'no knob {path}(;|$)'):
    parse(values)


def test_rows_divide_over_the_mesh():
  # 12 prompts x 4 responses / 4 minibatches = 12 rows over 8 shards.
  knobs = {'prompts.count': 12, 'learner.minibatches': 4, 'sampler.group_size': 4}
  config = parse(plain(**knobs, **{'mesh.data': 4, 'mesh.fsdp': 2}))
  with pytest.raises(
    ValueError, match='12 responses, which do not divide over 8 device shards'
  ):
    resolve.make_mesh(config)
  config_lib.check_shards(config, 4)
  for name in ('max_num_seqs', 'prefill_batch_size'):
    with pytest.raises(
      ValueError, match=rf'sampler\.{name}=12 rows .* 8 device shards'
    ):
      resolve.make_mesh(parse(plain(**{f'sampler.{name}': 12})))
  sound = parse(plain(**{'learner.grad_accum_steps': 2}))
  assert resolve.make_mesh(sound).size == len(jax.devices()) == 8


def test_a_kernel_that_the_platform_lacks_is_refused():
  with pytest.raises(ValueError, match='splash'):
    resolve.make_mesh(parse(plain(**{'model.attention': 'splash'})))


def test_every_threshold_rule_fits_the_embedded_default():
  for rule in replay_buffer.THRESHOLD_RULES:
    knobs = {'buffer.thresholds.rule': rule, 'batch.rule': 'adapted'}
    thresholds = rules.bind(parse(plain(**knobs))).thresholds
    for rate in (0.0, 1.0):
      assert thresholds(rate, 8).hard_max < 8  # solved problems are never hard


@pytest.mark.parametrize('variant', ['tiny', 'recipe'])
def test_variants_that_need_no_download_are_sound(variant):
  config = parse(aime.get_config(variant).to_dict())
  bound = rules.bind(config)
  assert callable(bound.batch) and callable(bound.clip)
  resolve.check_available(config)


@pytest.mark.parametrize('loss_rule', loss.RULES)
@pytest.mark.parametrize('clip_rule', clip.RULES)
def test_every_pair_of_rules_fits_or_is_refused(clip_rule, loss_rule):
  values = plain(**{'clip.rule': clip_rule, 'loss.rule': loss_rule})
  searched = clip_rule in ('balanced', 'recipe')
  if (
    (loss_rule == 'tis' and clip_rule != 'unclipped')
    or (loss_rule == 'cispo' and searched)
    or (loss_rule not in ('tis', 'clipped') and clip_rule == 'recipe')
  ):
    with pytest.raises(ValueError, match=f"clip.rule='{clip_rule}'.*; choose"):
      parse(values)
  else:
    parse(values)


@pytest.mark.parametrize('config', [parse({}), tiny()], ids=['default', 'tiny'])
def test_a_config_comes_back_from_its_plain_values_and_from_json(config):
  assert parse(config_lib.plain(config)) == config
  assert (
    config_lib.from_json(json.loads(json.dumps(config_lib.plain(config)))) == config
  )


def test_a_config_cannot_be_changed():
  with pytest.raises(ValueError, match='frozen'):
    tiny().steps = 5


def test_the_fingerprint_changes_with_any_value():
  first = config_lib.fingerprint(plain())
  assert first == config_lib.fingerprint(plain())
  assert first != config_lib.fingerprint(plain(**{'clip.balanced.target': 0.43}))
