"""Knobs: a bad value is refused in one sentence, and every rule binds its section."""

import inspect
import math
import re
import subprocess
import sys
import typing

import pydantic
import pytest

from bapo_jax import knobs
from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.algorithms.batch_knobs import BatchConfig, ThresholdsConfig
from bapo_jax.algorithms.knobs import AdvantageConfig, ClipConfig, LossConfig
from bapo_jax.knobs import Section, knob
from bapo_jax.training.config import Config, parse
from bapo_jax.training.rules import bind, bind_rule

INF, NAN = math.inf, math.nan


def nested(dotted: dict) -> dict:
  """{'clip.rule': x} as {'clip': {'rule': x}}."""
  values = {}
  for path, value in dotted.items():
    *sections, name = path.split('.')
    section = values
    for key in sections:
      section = section.setdefault(key, {})
    section[name] = value
  return values


def refusal(**dotted) -> str:
  with pytest.raises(ValueError) as error:
    parse(nested(dotted))
  assert not isinstance(error.value, pydantic.ValidationError)
  assert '\n' not in str(error.value)
  return str(error.value)


# --- the sentences of the algorithms' knobs, one by one ------------------------------

SHARE, LOWS = 'a number from 0 to 1', 'each above 0 and at most 1'
HIGHS, COUNT = 'each from 1 to 1e+09', 'an integer from 1 to 2147483647'
RISING, SHARES = 'a tuple of 2 numbers that do not fall', 'each from 0 to 1'
BALANCED, RECIPE, FIXED = 'clip.balanced', 'clip.recipe', 'clip.fixed'
BUFFER, THRESHOLDS, WEIGHTS = 'buffer', 'buffer.thresholds', 'batch.weights'
CLIPS = "one of 'unclipped', 'fixed', 'balanced', 'recipe'"
LOSSES = "one of 'clipped', 'decoupled', 'sequence', 'cispo', 'tis'"
BATCHES = "one of 'fresh_only', 'learnable_only', 'replay', 'adapted'"
SOURCES = "a tuple of values, each one of 'fresh', 'reevaluated', 'reused'"
GIVE = [  # section, knob, value, what to give
  ('clip', 'rule', 'balnced', CLIPS),
  (BALANCED, 'target', 1.5, SHARE),
  (BALANCED, 'target', -0.1, SHARE),
  (BALANCED, 'target', NAN, SHARE),
  (BALANCED, 'low', (0.9, 0.6), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.0, 0.6), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (-0.1, 0.6), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, 1.1), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, NAN), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6,), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, 0.7, 0.8), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, '0.9'), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', (0.6, True), f'{RISING}, {LOWS}'),
  (BALANCED, 'low', [0.6, 0.9], f'{RISING}, {LOWS}'),
  (BALANCED, 'low', 0.6, f'{RISING}, {LOWS}'),
  (BALANCED, 'high', (3.0, 1.2), f'{RISING}, {HIGHS}'),
  (BALANCED, 'high', (0.9, 1.2), f'{RISING}, {HIGHS}'),
  (BALANCED, 'high', (1.2, INF), f'{RISING}, {HIGHS}'),
  (BALANCED, 'high_step', -0.05, 'a number of at least 0'),
  (BALANCED, 'contribution', 'loss', "one of 'gradient', 'surrogate'"),
  (BALANCED, 'weight', 'mu', "one of 'one', 'behaviour'"),
  (BALANCED, 'order', 'up', "one of 'upper', 'lower'"),
  (BALANCED, 'resolution', 'fine', "one of 'step', 'continuous'"),
  (BALANCED, 'tolerance', 0.0, 'a number from 1e-06 to 0.1'),
  (BALANCED, 'sources', ('old',), SOURCES),
  (BALANCED, 'sources', 'fresh', SOURCES),
  (BALANCED, 'reused_high', 1.0, 'a number above 1 or inf'),
  (BALANCED, 'dual', 0.5, 'a number above 1 or inf'),
  (RECIPE, 'positive_to_negative', -1.0, 'a number from 0 to 1e+09'),
  (RECIPE, 'high', (2.0, 1.2), f'{RISING}, {HIGHS}'),
  (FIXED, 'low', -0.1, SHARE),
  (FIXED, 'high', 0.9, 'a number of at least 1 or inf'),
  (FIXED, 'high', -INF, 'a number of at least 1 or inf'),
  (FIXED, 'dual', 1.0, 'a number above 1 or inf'),
  ('loss', 'rule', 'ppo', LOSSES),
  ('loss', 'aggregate', 'mean', "one of 'token', 'sequence', 'constant'"),
  ('loss', 'kl', -0.1, 'a number of at least 0'),
  ('loss', 'kl', INF, 'a number of at least 0'),
  ('loss', 'kl', True, 'a number of at least 0'),
  ('loss.clipped', 'limit', 0.0, 'a number above 0 or inf'),
  ('loss.clipped', 'limit', -1.0, 'a number above 0 or inf'),
  ('loss.decoupled', 'cap', -1.0, 'a number above 0 or inf'),
  ('loss.tis', 'cap', 0.0, 'a number above 0 or inf'),
  ('advantage.group_relative', 'eps', -1e-6, SHARE),
  (BUFFER, 'capacity', 0, 'an integer from 1 to 1048576'),
  (BUFFER, 'max_off_policy_steps', 0, COUNT),
  (BUFFER, 'max_reuse', 0, COUNT),
  (BUFFER, 'max_reuse', 2**31, COUNT),
  (BUFFER, 'max_reuse', 3.0, COUNT),
  (BUFFER, 'max_reuse', True, COUNT),
  (BUFFER, 'max_reuse', None, COUNT),
  (BUFFER, 'reevaluate', -1, 'an integer from 0 to 2147483647'),
  (BUFFER, 'reeval_interval', 0, COUNT),
  (THRESHOLDS, 'rule', 'free', "one of 'fixed', 'moving', 'threshold_free',"),
  (f'{THRESHOLDS}.fixed', 'hard', 1.2, 'a number of at least 0 and below 1'),
  (f'{THRESHOLDS}.fixed', 'hard', 1.0, 'a number of at least 0 and below 1'),
  (f'{THRESHOLDS}.fixed', 'reusable', (0.7, 0.2), f'{RISING}, {SHARES}'),
  (f'{THRESHOLDS}.moving', 'high', (0.5, -0.1), f'a tuple of 2 numbers, {SHARES}'),
  ('batch', 'rule', 'old', BATCHES),
  ('batch', 'max_extra_rounds', -1, 'an integer from 0 to 1024'),
  (WEIGHTS, 'reused', -0.5, 'a number of at least 0'),
  (WEIGHTS, 'fresh', INF, 'a number of at least 0'),
  (WEIGHTS, 'fresh', NAN, 'a number of at least 0'),
  ('batch.replay', 'replay_ratio', 0, 'an integer from 1 to 1024'),
]
STEP = 'must be in (0, {}], the width of the range {}; 0 for a range of one point'
TOGETHER = [  # knobs that do not fit each other, the sentence
  (
    {'clip.balanced.low_step': 0.0},
    'clip.balanced.low_step=0.0: ' + STEP.format(0.3, (0.6, 0.9)),
  ),
  (
    {'clip.balanced.low_step': 0.4},
    'clip.balanced.low_step=0.4: ' + STEP.format(0.3, (0.6, 0.9)),
  ),
  (
    {'clip.balanced.low': (0.6, 0.6)},
    'clip.balanced.low_step=0.02: ' + STEP.format(0, (0.6, 0.6)),
  ),
  (
    {'clip.balanced.high_step': 2.0},
    'clip.balanced.high_step=2.0: ' + STEP.format(1.8, (1.2, 3.0)),
  ),
  (
    {'clip.balanced.low_step': 1e-9},
    'clip.balanced.low_step=1e-09: more than a million steps in (0.6, 0.9)',
  ),
  (
    {'clip.recipe.low_step': 0.5},
    'clip.recipe.low_step=0.5: ' + STEP.format(0.15, (0.8, 0.95)),
  ),
  (
    {'clip.balanced.sources': ()},
    'clip.balanced.sources=(): name at least one of fresh, reevaluated, reused',
  ),
  (
    {'buffer.reevaluate': 3, 'buffer.capacity': 2},
    'buffer.reevaluate=3 is more than buffer.capacity=2',
  ),
  (
    {'buffer.thresholds.moving.low': (0.1, 0.9)},
    'buffer.thresholds.moving.low=(0.1, 0.9) and high=(0.625, 0.875): c2=0.9 is above',
  ),
  (
    {'buffer.thresholds.rule': 'threshold_free', 'sampler.group_size': 7},
    "buffer.thresholds.rule='threshold_free' keeps groups that are half right, and ",
  ),
  (
    {'batch.rule': 'replay', 'batch.replay.replay_ratio': 2, 'buffer.capacity': 127},
    'buffer.capacity=127 holds fewer groups than a batch replays, prompts.count=64 x '
    'batch.replay.replay_ratio=2 = 128; give that much',
  ),
  (
    {'batch.rule': 'replay', 'learner.minibatches': 48},
    'prompts.count=64 and 64 replayed groups do not divide into learner.minibatches=48',
  ),
]


@pytest.mark.parametrize(('section', 'name', 'value', 'give'), GIVE)
def test_a_refusal_names_the_knob_its_value_and_its_range(section, name, value, give):
  found = refusal(**{f'{section}.{name}': value})
  assert found.startswith(f'{section}.{name}={value!r}: give {give}')


@pytest.mark.parametrize(('values', 'sentence'), TOGETHER)
def test_a_refusal_names_the_knobs_that_do_not_fit(values, sentence):
  assert refusal(**values).startswith(sentence)


def test_an_unknown_name_is_refused_with_the_known_ones():
  # Of a rule that is not in force, too; and of the source of a weight.
  assert refusal(**{'clip.fixed.target': 0.4}) == (
    'no knob clip.fixed.target; clip.fixed is a section with low, high, dual'
  )
  assert refusal(**{'clip.unclipped.low': 0.4}) == (
    'no knob clip.unclipped.low; clip.unclipped is a section with no knobs'
  )
  assert refusal(**{'batch.weights.stale': 1.0}) == (
    'no knob batch.weights.stale; batch.weights is a section with fresh, reevaluated, '
    'reused'
  )
  assert refusal(clop=1).startswith('no knob clop; the config is a section with title,')
  assert refusal(**{'batch.replay': 1}) == (
    'batch.replay=1: give a section with replay_ratio'
  )


def test_bounds_that_are_held_or_unlimited_are_accepted():
  held = {'low': (0.7, 0.7), 'low_step': 0.0}
  parse({'clip': {'balanced': held, 'recipe': held}})
  # The continuous search needs no steps.
  continuous = {'resolution': 'continuous', 'low_step': 0.0, 'high_step': 99.0}
  parse({'clip': {'balanced': continuous}})
  parse({'clip': {'fixed': {'low': 0.0, 'high': INF, 'dual': INF}}})
  assert parse({'loss': {'kl': 1}}).loss.kl == 1  # an integer is a number


def test_every_threshold_rule_fits_the_embedded_default():
  for rule in replay_buffer.THRESHOLD_RULES:
    parse({'buffer': {'thresholds': {'rule': rule}}, 'batch': {'rule': 'adapted'}})


@pytest.mark.parametrize('loss_rule', loss.RULES)
@pytest.mark.parametrize('clip_rule', clip.RULES)
def test_every_pair_of_rules_fits_or_is_refused(clip_rule, loss_rule):
  values = {'clip.rule': clip_rule, 'loss.rule': loss_rule}
  if loss_rule == 'tis' and clip_rule != 'unclipped':
    found = refusal(**values)
    assert found.startswith(f"clip.rule='{clip_rule}'") and "'unclipped'" in found
  else:
    parse(nested(values))


# --- every knob of every section -----------------------------------------------------

EVERY = {path: (field, value) for path, field, value in knobs.fields(Config())}


def bad_values(field, default):
  """Values that the type or the limits of a knob exclude."""
  limits = field.json_schema_extra
  if isinstance(default, bool):
    return [0, 'yes', None]
  if isinstance(default, tuple):
    return [default[0] if default else 0, list(default), None]
  if isinstance(default, str):
    return [1, None, True]
  number = type(default)
  bad = [None, '1', True, NAN, -INF]
  if 'least' in limits:
    bad += [number(limits['least'] - 1)]
  if 'most' in limits:
    bad += [number(limits['most'] + 1)]
  bad += [number(limits[end]) for end in ('above', 'below') if end in limits]
  if number is int:
    return [*bad, float(default), 2**31, -(2**31) - 1]
  return bad if limits['infinite'] else [*bad, INF]


@pytest.mark.parametrize('path', EVERY)
def test_every_knob_refuses_what_it_excludes(path):
  field, default = EVERY[path]
  for value in bad_values(field, default):
    expected = f'{path}={knobs.shown(value)}: give {knobs.expected(field)}'
    assert refusal(**{path: value}) == expected
  if isinstance(default, tuple) and path != 'cells':  # elements and length
    for value in ((*default, None), ({},) * len(default)):
      assert refusal(**{path: value}).startswith(
        f'{path}={knobs.shown(value)}: give a tuple'
      )


NUMBER = r'-?\d+(\.\d+)?(e[+-]\d+)?'
RANGE = rf'(from {NUMBER} to {NUMBER}|(above|at least|below|at most) {NUMBER})'
RANGE += rf'( and (below|at most) {NUMBER})?( or inf)?'
WORDS = "('[a-z0-9_]+'(, )?)+"
EXPECTED = re.compile(
  rf'an? (integer|number)( of)? {RANGE}|a string|True or False|one of {WORDS}'
  rf'|a tuple of (\d )?(integers|numbers|strings)( that do not fall)?(, each {RANGE})?'
  rf'|a tuple of values(, each one of {WORDS})?|a tuple of tuples, each a tuple of .*'
)


@pytest.mark.parametrize('path', EVERY)
def test_every_knob_has_its_range_and_its_sentence(path):
  field, _ = EVERY[path]
  assert EXPECTED.fullmatch(knobs.expected(field)), knobs.expected(field)
  sentence = field.description
  assert sentence.endswith('.') and len(sentence) >= 10 and '  ' not in sentence


def test_describe_gives_a_line_per_knob():
  lines = {path: rest for path, *rest in knobs.describe(Config())}
  assert list(lines) == list(EVERY)
  assert lines['clip.fixed.low'] == [
    '0.8',
    'a number from 0 to 1',
    'Lower bound of the ratio, 1 - epsilon.',
  ]


class Inner(Section):
  pair: tuple[float, float] = knob((1.0, 2.0), 'A pair.', above=0, below=9, rising=True)


class Outer(Section):
  rows: tuple[tuple[str, str], ...] = knob((), 'Rows.')
  count: int = knob(1, 'A count.', above=0)
  big: float = knob(1.0, 'A number.', least=1, infinite=True)
  free: float = knob(1.0, 'Any finite number.')
  words: tuple[str, ...] = knob(('a',), 'Words.')
  inner: Inner = knob(Inner, 'The inner section.')


def test_ranges_in_words():
  found = {path: knobs.expected(field) for path, field, _ in knobs.fields(Outer())}
  assert found == {
    'rows': 'a tuple of tuples, each a tuple of 2 strings',
    'count': 'an integer above 0 and at most 2147483647',
    'big': 'a number of at least 1 or inf',
    'free': 'a number',
    'words': 'a tuple of strings',
    'inner.pair': ('a tuple of 2 numbers that do not fall, each above 0 and below 9'),
  }


def test_validate_names_the_section_it_is_given():
  made = knobs.validate(Outer, {'inner': {'pair': (1.0, 1.0)}}, 'a.b')
  assert made.inner.pair == (1.0, 1.0) and made.count == 1
  with pytest.raises(
    ValueError, match=r'^a\.b\.inner\.pair=\(2\.0, 1\.0\): give a tup'
  ):
    knobs.validate(Outer, {'inner': {'pair': (2.0, 1.0)}}, 'a.b')
  with pytest.raises(
    ValueError, match=r'^no knob a\.b\.cuont; a\.b is a section with rows, count'
  ):
    knobs.validate(Outer, {'cuont': 1}, 'a.b')
  with pytest.raises(ValueError, match=r'^free=inf: give a number$'):
    knobs.validate(Outer, {'free': INF})


def test_a_value_is_shown_on_one_line():
  assert knobs.shown('a\nb') == r"'a\nb'" and knobs.shown(0.1) == '0.1'
  assert knobs.shown('x' * 99) == "'" + 'x' * 56 + '...'
  assert knobs.shown(10**5000) == '<int>'


def test_a_section_cannot_change():
  with pytest.raises(pydantic.ValidationError, match='frozen'):
    Outer().count = 2


def test_the_config_is_read_without_jax_and_numpy():
  code = (
    'import sys, bapo_jax.training.config; print({"jax", "numpy"} & {*sys.modules})'
  )
  run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert run.stdout.strip() == 'set()', run.stdout + run.stderr


# --- every rule binds its section ----------------------------------------------------

SLOTS = {
  'batch': (batch_rules.RULES, BatchConfig),
  'advantage': (advantage.RULES, AdvantageConfig),
  'clip': (clip.RULES, ClipConfig),
  'loss': (loss.RULES, LossConfig),
  'thresholds': (replay_buffer.THRESHOLD_RULES, ThresholdsConfig),
}


@pytest.mark.parametrize('slot', SLOTS)
def test_the_choices_of_a_slot_are_its_rules(slot):
  rules, section = SLOTS[slot]
  assert typing.get_args(section.model_fields['rule'].annotation) == tuple(rules)
  assert set(rules) <= set(section.model_fields)


@pytest.mark.parametrize(
  ('slot', 'name'), [(slot, name) for slot in SLOTS for name in SLOTS[slot][0]]
)
def test_the_parameters_of_a_rule_are_the_knobs_of_its_section(slot, name):
  rules, section = SLOTS[slot]
  parameters = inspect.signature(rules[name]).parameters.values()
  found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
  assert found == getattr(section(), name).model_dump()  # the defaults as well


def scaled(x, *, scale):
  return x * scale


def shifted(x, *, by, twice):
  return x + by * (1 + twice)


class Scaled(Section):
  scale: float = knob(3.0, 'Factor.')


class Shifted(Section):
  by: float = knob(5.0, 'Difference.')
  twice: bool = knob(True, 'Added twice.')


class Slot(Section):
  rule: str = knob('scaled', 'The rule.')
  scaled: Scaled = knob(Scaled, 'A factor.')
  shifted: Shifted = knob(Shifted, 'A difference.')


def test_bind_rule_binds_the_knobs_of_the_rule_in_force():
  rules = {'scaled': scaled, 'shifted': shifted}
  assert bind_rule(rules, Slot())(2.0) == 6
  assert bind_rule(rules, Slot(rule='shifted'))(2.0) == 12
  assert bind_rule(rules, Slot(scaled=Scaled(scale=4.0)))(2.0) == 8
  with pytest.raises(ValueError, match=r"no rule named 'bold'; choose .*'shifted'\]"):
    bind_rule(rules, Slot(rule='bold'))


def test_a_config_binds_the_rules_that_it_names():
  bound = bind(parse({'clip': {'rule': 'fixed', 'fixed': {'low': 0.5}}}))
  assert bound.clip.func is clip.fixed and bound.clip.keywords['low'] == 0.5
  assert bound.batch.func is batch_rules.fresh_only and not bound.batch.keywords
