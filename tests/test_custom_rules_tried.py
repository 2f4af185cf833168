"""Custom functions of every slot, right and wrong, tried before a run starts.

A wrong function gives one sentence that names the function; a right one gives none.
"""

import contextlib

import numpy as np
import pytest
from runs import tiny

from bapo_jax import custom_code
from bapo_jax.data import sources
from bapo_jax.data.prompts import Problems
from bapo_jax.data.row import Row
from bapo_jax.rewards.knobs import Environment, Verification
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.run import experiment
from bapo_jax.training import refusals
from bapo_jax.training.build import Material

HEAD = """
import math
import bapo_jax, jax, jax.numpy as jnp, numpy as np
from bapo_jax.algorithms import clip, loss
from bapo_jax.types import Bounds, PassRateThresholds

"""
LOSS = 'def f(logp_BT, batch, find):\n  r = loss.ratio(logp_BT, batch)\n  b = find(r)\n'
CLIP = (
  'def f(ratio_BT, batch, weigh):\n  none = clip.constant(0.0, math.inf, math.inf)\n'
)
MASK = 'def f(logp_BT, batch):\n'
ADVANTAGE = 'def f(reward_PG):\n'
BATCH = 'def f(fresh, reevaluated, buffer, now, key, seats):\n'
BANDS = 'def f(rate, G):\n'
SHAPING = 'def f(earned_PG, length_PG, truncated_PG, formatted_PG):\n'
PROMPTS = 'def f(history, key, count):\n'
MASKS = '@bapo_jax.declare(gives="mask")\n'
BY_GROUP = '@bapo_jax.declare(reads="groups")\ndef f(groups):\n'

# Slot, text, and a part of the sentence.
WRONG = [
  ('loss', LOSS + '  return r * batch.adv_BT', r'returns float32\[8, 7\], not \(float'),
  (
    'loss',
    LOSS + '  return r * batch.adv_BT, find(r[0])',
    r'ratio_BT must have axes BT',
  ),
  ('loss', LOSS + '  return jnp.sqrt(r - 1) * batch.adv_BT, b', 'nan'),
  (
    'loss',
    LOSS + '  far = r - 1\n  return jnp.where(far > 9, jnp.sqrt(-1 - far**2), r) '
    '* batch.adv_BT * (b.high - r), b',
    'gradient of 0 or nan',
  ),
  (
    'loss',
    LOSS + '  return r * batch.adv_BT, clip.constant(0.8, 1.2, 9.0)',
    'of `find`',
  ),
  ('loss', LOSS + '  return r * batch.adv_BT, b', 'does not use the bounds'),
  (
    'loss',
    LOSS + '  c = jnp.clip(r, b.low, b.high)\n'
    '  return -jnp.minimum(r * batch.adv_BT, c * batch.adv_BT), b',
    'return the gain, which is maximised',
  ),
  (
    'loss',
    LOSS + '  raise SystemExit(3)',
    r'raises SystemExit: 3 \(own\.py, line 10\)',
  ),
  ('clip', CLIP + '  return 0.8, 1.2', r'\(float32\[\], float32\[\]\), not Bounds'),
  (
    'clip',
    CLIP + '  return clip.constant(1.3, 0.8, math.inf)',
    'low=1.3 above high=0.8',
  ),
  ('clip', CLIP + '  return none._replace(high=ratio_BT.sum(1))', r'shape \(8,\)'),
  ('clip', CLIP + '  return none._replace(keep_BT=ratio_BT)', r'not bool\[8, 7\]'),
  ('clip', MASKS + CLIP + '  return none', "gives='mask', but returns nothing"),
  (
    'clip',
    MASKS + CLIP + '  return none._replace(keep_BT=ratio_BT < 2, low=0.5)',
    "gives='mask', but returns bounds",
  ),
  (
    'clip',
    '@bapo_jax.declare(gives="nothing")\n' + CLIP + '  return clip.constant(0, 2, 9)',
    "gives='nothing', but returns bounds",
  ),
  ('mask', MASK + '  return jnp.exp(logp_BT)', r'returns float32\[8, 7\], not bool\[8'),
  ('mask', MASK + '  if logp_BT.sum() > 0:\n    return 1', 'TracerBoolConversionError'),
  (
    'advantage',
    ADVANTAGE + '  return (reward_PG - reward_PG.mean(1, keepdims=True)) / '
    'reward_PG.std(1, keepdims=True)',
    'returns nan .* equal rewards',
  ),
  (
    'advantage',
    ADVANTAGE + '  return reward_PG[..., None]',
    r'float32\[2, 4, 1\], not',
  ),
  ('advantage', BY_GROUP + '  return groups.reward_PG', r'not float32\[2, 4, 7\]'),
  ('advantage', 'f = int', 'cannot be called with'),
  ('batch', BATCH + '  return fresh, jnp.full(seats, 7)', r'source_P=\[7 7\]; give'),
  (
    'batch',
    BATCH
    + '  return fresh._replace(teaches_PG=fresh.reward_PG), jnp.zeros(seats, int)',
    r'returns float32\[2, 4\], not bool',
  ),
  (
    'batch',
    '@bapo_jax.declare(uses_buffer=True)\n' + BATCH + '  from bapo_jax import types\n'
    '  both = types.concat(fresh, buffer.reusable)\n'
    '  source = jnp.repeat(jnp.array([0, 2]), seats, total_repeat_length=2 * seats)\n'
    '  order = jnp.arange(2) * 3\n'
    '  return types.take(both, order), source[order]',
    r'source_P=\[. .\]; give -1 for empty groups',
  ),
  ('prompts', PROMPTS + '  return range(count - 1)', r'int64\[7\]; return .*=8 int'),
  (
    'prompts',  # too few problems are in its window, but not at the start
    PROMPTS + '  return np.flatnonzero(history.tries_N == 0)[:count]',
    r'returns int64\[6\]; return',
  ),
  ('prompts', PROMPTS + '  yield from range(count)', 'generator; return an array of 8'),
  (
    'prompts',
    PROMPTS + '  return np.arange(count) / 2',
    r'float64\[8\]; return .*=8 int',
  ),
  ('prompts', PROMPTS + '  return np.arange(count) + 5', 'the id 12; .* from 0 to 11'),
  ('prompts', PROMPTS + '  return np.arange(count) - 1', 'returns the id -1; return'),
  (
    'prompts',
    PROMPTS + '  return [0] + list(range(count - 1))',
    'the id 0 twice; retu',
  ),
  (
    'prompts',
    PROMPTS + '  history.tries_N[0] = 1\n  return np.arange(count)',
    r'read-only \(own\.py, line 8\)',
  ),
  (
    'buffer.thresholds',
    BANDS + '  return PassRateThresholds(0.1, 0.1, 0.6)',
    r'returns float32\[\], not int32\[\]',
  ),
  (
    'buffer.thresholds',
    BANDS + '  return PassRateThresholds(3, 2, 1)',
    r'returns \[3, 2, 1\]; the last must be the largest',
  ),
  ('rewards.shaping', SHAPING + '  return earned_PG, 0.5', r'float32\[\], not bool'),
]
RIGHT = [
  (
    'loss',
    'def f(logp_BT, batch, find):\n'
    '  far_B = (logp_BT - batch.behavior_logp_BT).mean(1, keepdims=True)\n'
    '  r = jnp.exp(far_B + 0 * logp_BT)\n  b = find(r)\n'
    '  inside = jnp.where(batch.adv_BT > 0, r < b.high, r > b.low)\n'
    '  return jnp.where(inside, r * batch.adv_BT, 0), b',
  ),
  (
    'loss',
    '@bapo_jax.declare(bounds="ignored")\n'
    + LOSS
    + '  return jax.nn.sigmoid(r) * batch.adv_BT, b',
  ),
  (
    'loss',
    LOSS + '  c = jnp.clip(r, b.low, b.high)\n'
    '  return jnp.minimum(r * batch.adv_BT, c * batch.adv_BT), b',
  ),
  (
    'clip',
    CLIP + '  return Bounds(0.7, 1.4, math.inf, 4.0, 0.7, 1.4, 0, *3 * [False])',
  ),
  (
    'clip',
    CLIP + '  return clip.constant(0.8, 1.3, 3.0)._replace(low=0.9 - 0 * ratio_BT)',
  ),
  (
    'clip',
    CLIP + '  share = (weigh(none) > 0).mean(1, keepdims=True)\n'
    '  return clip.constant(0.8, 1.3, math.inf)._replace(high=1.2 + share)',
  ),
  ('mask', MASK + '  return (batch.adv_BT >= 0) | (logp_BT > -3)'),
  ('advantage', ADVANTAGE + '  return jnp.where(reward_PG > 0.5, 1.0, -1.0)'),
  ('batch', BATCH.replace('seats', 'n') + '  return fresh, jnp.arange(n) - 1'),
  (
    'batch',
    '@bapo_jax.declare(uses_buffer=True)\n' + BATCH + '  from bapo_jax import types\n'
    '  both = types.concat(fresh, buffer.reusable)\n'
    '  source = jnp.repeat(jnp.array([0, 2]), seats, total_repeat_length=2 * seats)\n'
    '  source = jnp.where(both.completed_step_P < 0, -1, source)\n'
    '  order = jax.random.permutation(key, 2 * seats)[:seats]\n'
    '  return types.take(both, order), source[order]',
  ),
  (
    'prompts',
    PROMPTS
    + '  seed, number = key\n  noise = jax.random.fold_in(jax.random.key(seed), '
    'number)\n  order = jax.random.permutation(noise, len(history.tries_N))\n'
    '  late = jnp.asarray(history.last_step_N)[order]\n'
    '  return order[jnp.argsort(late, stable=True)[:count]]',
  ),
  ('prompts', PROMPTS + '  return range(count)'),
  ('buffer.thresholds', BANDS + '  return PassRateThresholds(1, 1, 0)'),
  (
    'buffer.thresholds',
    BANDS + '  most = jnp.floor(rate * G).astype(jnp.int32)\n'
    '  return PassRateThresholds(jnp.int32(0), most * 0, most)',
  ),
  ('rewards.shaping', SHAPING + '  return np.maximum(earned_PG, 0.1), ~truncated_PG'),
]


def sentences(tmp_path, slot, text):
  """Returns what is said at a start with this function in a slot."""
  path = tmp_path / 'own.py'
  path.write_text(HEAD + text)
  knobs = {f'{slot}.rule': f'{path}:f'}
  if slot == 'buffer.thresholds':
    knobs |= {'batch.rule': 'adapted'}
  if slot == 'loss':
    knobs['clip.rule'] = 'unclipped' if 'ignored' in text else 'fixed'
  try:
    config = tiny(**knobs)
    return [*refusals.of_custom_rules(config), *refusals.of_prompts(config, 12)]
  except ValueError as error:
    return [str(error)]


@pytest.mark.parametrize(('slot', 'text', 'message'), WRONG)
def test_a_wrong_rule_gives_one_sentence(tmp_path, slot, text, message):
  (sentence,) = sentences(tmp_path, slot, text)
  assert sentence.startswith(f'{slot}.rule={tmp_path}/own.py:f '), sentence
  with pytest.raises(ValueError, match=message):
    raise ValueError(sentence)
  assert '\n' not in sentence


@pytest.mark.parametrize(('slot', 'text'), RIGHT)
def test_a_right_rule_gives_no_sentence(tmp_path, slot, text):
  assert sentences(tmp_path, slot, text) == []


def silent(sample):
  """Leaves every response undecided."""
  return None


def message(turn):
  return f'turn {turn.number} of {turn.messages[-1]["content"]}'


def end(turn):
  return None


async def judge(sample):
  return {'right': 1.0, 'brief': -0.1}


def field(sample):
  return sample.row['solution'] == sample.response


def count(turn):
  return turn.number


@pytest.mark.parametrize(
  ('slot', 'function', 'message'),
  [
    ('rewards', judge, ''),
    ('rewards', silent, ''),
    ('environment', message, ''),
    ('environment', end, ''),
    ('rewards', field, "raises KeyError: 'solution'"),
    ('environment', count, 'returned 1, neither a message nor None'),
  ],
)
def test_rewards_and_environments_are_called_once(slot, function, message):
  knob = {'rewards': 'rewards.rule', 'environment': 'rollout.environment'}[slot]
  path = custom_code.register(function)
  rule = Verification(rule=path if slot == 'rewards' else 'exact')
  environment = Environment(rule=path) if slot == 'environment' else None
  numbers = np.zeros(1, np.int32)
  problems = Problems(numbers, numbers[None], numbers, [Row('1+1=', '2')])
  with contextlib.closing(Verifier(rule, environment)) as verifier:
    if not message:
      experiment.try_custom(verifier, Material(problems, problems))
      return
    with pytest.raises(ValueError, match=rf'^{knob}={path} fails on .*{message}'):
      experiment.try_custom(verifier, Material(problems, problems))


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('def f(split): return [{"problem": "1+1=", "answer": "2"}]', ''),
    ('def f(split): return None', 'raises TypeError'),
    ('def f(split): return []', 'returns no rows'),
    ('def f(split): return [{"x": 1}]', 'row 1: fields .* match no layout'),
    ('def f(split): raise SystemExit(4)', r'raises SystemExit: 4 \(own\.py, line 7\)'),
    ('def f(): return []', r'cannot be called with \(split\)'),
  ],
)
def test_rows_are_read_before_a_run(tmp_path, text, message):
  path = tmp_path / 'own.py'
  path.write_text(HEAD + text)
  knobs = {f'problems.{name}': f'{path}:f' for name in ('source', 'test_source')}
  if not message:
    assert len(sources.read(tiny(**knobs).problems).training) == 1
    return
  with pytest.raises(ValueError, match=rf'{path}:f.*{message}') as refused:
    sources.read(tiny(**knobs).problems)
  assert '\n' not in str(refused.value)
