"""Knobs: a bad value is refused in one sentence, and every rule binds its section."""

import inspect
import math
import re
import subprocess
import sys
import typing

import pytest
from refusals import refusal

from bapo_jax import knobs
from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.algorithms.knobs import (
  AdvantageConfig,
  BatchConfig,
  ClipConfig,
  LossConfig,
  ThresholdsConfig,
)
from bapo_jax.knobs import Section, knob
from bapo_jax.training.config import Config, parse
from bapo_jax.training.rules import bind

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
  ('path', 'sentence'),
  [
    # Of a rule that is not in force, too; and of the source of a weight.
    ('clip.fixed.target', 'the nearest in its section are high, dual, low'),
    ('clip.unclipped.low', 'its section has no knobs'),
    (
      'batch.weights.reuse',
      'the nearest in its section are reused, fresh, reevaluated',
    ),
    ('clop', 'the nearest in its section are clip, '),
  ],
)
def test_an_unknown_name_is_refused_with_the_nearest_ones(path, sentence):
  assert refusal(**{path: 0.4}).startswith(f'{path} is not a knob; {sentence}')


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
  if isinstance(default, tuple):  # elements and length
    for value in ((*default, None), ({},) * max(1, len(default))):
      assert refusal(**{path: value}).startswith(
        f'{path}={knobs.shown(value)}: give a tuple'
      )


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


@pytest.mark.parametrize(
  ('values', 'name', 'sentence'),
  [
    ({'inner': {'pair': (2.0, 1.0)}}, 'a.b', 'a.b.inner.pair=(2.0, 1.0): give a tuple'),
    (
      {'cuont': 1},
      'a.b',
      'a.b.cuont is not a knob; the nearest in its section are count, ',
    ),
    ({'free': INF}, '', 'free=inf: give a number'),
    ({'inner': 1}, '', 'inner=1: give a section with pair'),
  ],
)
def test_validate_names_the_section_it_is_given(values, name, sentence):
  with pytest.raises(ValueError, match=f'^{re.escape(sentence)}'):
    knobs.validate(Outer, values, name)
  made = knobs.validate(Outer, {'inner': {'pair': (1.0, 1.0)}}, name)
  assert made.inner.pair == (1.0, 1.0) and made.count == 1


def test_a_value_is_shown_on_one_line():
  assert knobs.shown('a\nb') == r"'a\nb'" and knobs.shown(0.1) == '0.1'
  assert knobs.shown('x' * 99) == "'" + 'x' * 56 + '...'
  assert knobs.shown(10**5000) == '<int>'


def test_the_command_line_reads_a_config_without_jax():
  code = (
    'import sys; from bapo_jax import main; from docs.reference import write_config; '
    "print({'jax', 'numpy', 'flax'} & {*sys.modules})"
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
  names, _ = typing.get_args(section.model_fields['rule'].annotation)
  assert typing.get_args(names) == tuple(rules)
  assert set(rules) <= set(section.model_fields)


@pytest.mark.parametrize(
  ('slot', 'name'), [(slot, name) for slot in SLOTS for name in SLOTS[slot][0]]
)
def test_a_rule_takes_its_section_last_unless_it_has_no_knobs(slot, name):
  rules, slot_section = SLOTS[slot]
  *_, last = inspect.signature(rules[name]).parameters.values()
  section = getattr(slot_section(), name)
  has_knobs = bool(type(section).model_fields)
  # The numbers of the public recipe are no knobs.
  assert (last.name == 'k') == (has_knobs or name == 'recipe')
  if has_knobs:
    assert last.annotation is type(section) and last.default == section


def test_a_config_binds_the_rules_that_it_names():
  bound = bind(parse({'clip': {'rule': 'fixed', 'fixed': {'low': 0.5}}}))
  assert bound.clip.func is clip.fixed and bound.clip.keywords['k'].low == 0.5
  assert bound.batch.__wrapped__ is batch_rules.fresh_only
