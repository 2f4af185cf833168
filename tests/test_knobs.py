"""Knobs: a bad value is refused in one sentence, and every rule binds its section."""

import math
import re
import typing

import pytest
from refusals import refusal

from bapo_jax import knobs
from bapo_jax.algorithms import clip, loss
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import PARTS, Config, overrides, parse

INF, NAN = math.inf, math.nan


EVERY = {path: (field, value) for path, field, value in knobs.fields(Config())}


def bad_values(field, default):
  """Values that the type or the limits of a knob exclude."""
  limits = knobs.limits(field)
  if isinstance(default, bool):
    return [0, 'yes', None]
  if isinstance(default, tuple):
    return [default[0] if default else 0, list(default), None]
  if isinstance(default, str | None):
    return [1, None, True]
  number = type(default)
  bad = [None, '1', True, NAN, -INF]
  if 'ge' in limits:
    bad += [number(limits['ge'] - 1)]
  if limits.get('le', INF) < INF:
    bad += [limits['le'] + 1]
  bad += [number(limits[end]) for end in ('gt', 'lt') if end in limits]
  if number is int:
    return [*bad, float(default), 2**31]
  return bad if limits.get('le') == INF else [*bad, INF]


@pytest.mark.parametrize('path', EVERY)
def test_every_knob_refuses_what_it_excludes(path):
  field, default = EVERY[path]
  for value in bad_values(field, default):
    if value is None and knobs.is_auto(field):
      assert path in parse(config_lib.merged({}, {path: None})).undecided
      continue
    expected = f'{path}={knobs.shown(value)}: give {knobs.expected(field)}'
    meaning = (field.description or '').rstrip('.')
    said = refusal(**{path: value})
    if example := re.search(r', such as ([\d.,]+)$', said):
      said = said[: example.start()]
      # The command line accepts the example.
      assert overrides([f'--config.{path}={example[1]}']) == {path: default}
    assert said in (expected, f'{expected} ({meaning})')
  if isinstance(default, tuple):  # elements and length
    for value in ((*default, None), ({},) * max(1, len(default))):
      assert refusal(**{path: value}).startswith(
        f'{path}={knobs.shown(value)}: give a tuple'
      )


def test_ranges_in_words():
  words = {
    'sampler.group_size': 'an integer from 2 to 4096',
    'rollout.max_tokens_per_step': 'a number of at least 1 or inf',
    'rewards.right_from': 'a number',
    'evaluate.k': 'a tuple of integers, each above 0',
    'clip.low': 'a tuple of 2 numbers that do not fall, each above 0 and at most 1',
  }
  assert {path: knobs.expected(EVERY[path][0]) for path in words} == words


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
