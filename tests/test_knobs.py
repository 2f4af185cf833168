"""Knobs: a bad value is refused in one sentence, and every rule binds its section."""

import math
import re
import typing

import jax.numpy as jnp
import pytest
from refusals import refusal

from bapo_jax import knobs
from bapo_jax.algorithms import clip, loss
from bapo_jax.knobs import Section, knob
from bapo_jax.training.config import PARTS, Config, parse

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
  ('path', 'sentence'),
  [
    ('clip.targt', "rule='balanced' has target, low, high, low_step"),
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


# --- every rule is a section ---------------------------------------------------------


@pytest.mark.parametrize('part', PARTS)
def test_the_choices_of_a_part_are_its_rules(part):
  rules = PARTS[part]
  field = {name: field for name, field, _ in knobs.fields(Config())}[f'{part}.rule']
  names, _ = typing.get_args(field.annotation)
  assert typing.get_args(names) == tuple(rules.names)
  for name, rule in rules.at_defaults().items():
    assert rule.rule == name and rule == parse_part(part, {'rule': name})
    assert hash(rule) == hash(parse_part(part, {'rule': name}))  # static under jit
    assert type(rule).__call__ is not rules.base.__call__ and type(rule).__doc__


def parse_part(part, values):
  """The rule of these values."""
  return PARTS[part].validate(values)


def test_other_values_may_name_another_rule():
  config = parse({'loss': {'kl': 0.1}, 'clip': {'target': 0.3}})
  changed = config.with_values(
    clip={'rule': 'unclipped'}, loss={'rule': 'tis', 'cap': 3.0}
  )
  assert changed.clip == clip.Unclipped()
  assert changed.loss == loss.Tis(kl=0.1, cap=3.0)
  assert config.with_values(clip={'rule': 'balanced'}).clip.target == 0.3


def test_a_config_has_the_rule_that_it_names():
  config = parse({'clip': {'rule': 'fixed', 'low': 0.5}})
  assert config.clip == clip.Fixed(low=0.5)
  bounds = config.clip(jnp.ones((1, 1)), None, None)
  assert float(bounds.low) == 0.5


@pytest.mark.parametrize(
  ('values', 'sentence'),
  [
    (
      {'rule': 'fixed', 'target': 0.4},
      "clip.target is not a knob; rule='fixed' h",
    ),
    ({'rule': 'fixed', 'low': 2.0}, 'clip.low=2.0: give a number from 0 to 1'),
    ({'rule': 'best'}, "clip.rule='best': give one of 'balanced', "),
    ({'rule': 3}, 'clip.rule=3: give one of'),
    (3, 'clip.rule=3 is not a section'),
  ],
)
def test_a_part_is_refused_in_one_sentence(values, sentence):
  with pytest.raises(ValueError, match=f'^{re.escape(sentence)}'):
    parse({'clip': values})
