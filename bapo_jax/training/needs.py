"""Finds the knobs of a config that have no effect, and explains what would change that.

1. A knob or a section declares `needs` next to its default: a comparison such as
   'lora.rank > 0', a declaration of a rule such as 'batch.uses_buffer', or a name of
   FACTS;
2. `inert` returns the knobs of a config whose needs are not met;
3. `refuse` raises an error for such a knob on the command line. In a config file the
   knob may be set for a later override, so the first screen and report only list it.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bapo_jax import custom_code
from bapo_jax.knobs import Section, fields_of, needed, shown
from bapo_jax.parts import parts
from bapo_jax.training.schema import Config

COMPARISON = re.compile(r'([\w.]+) (==|!=|<|>) (.+)')
COMPARE = {'==': operator.eq, '!=': operator.ne, '<': operator.lt, '>': operator.gt}
SIGNS = {'==': '=', '!=': ' to another value than ', '<': ' below ', '>': ' above '}


class Need(NamedTuple):
  """A condition without which a knob has no effect."""

  met: Callable[[Config], bool]
  knob: str  # the knob that decides it
  remedy: str


class Inert(NamedTuple):
  """The reason why a knob has no effect."""

  because: str  # a knob with its value
  remedy: str


FACTS = {
  'embedded': Need(
    lambda c: not c.model.path,
    'model.path',
    'remove it: the section sft describes the embedded policy',
  ),
  'routed': Need(
    lambda c: bool(c.model.path) or c.sft.experts > 0,
    'sft.experts',
    'set it to 2 or more, or model.path to a model with experts',
  ),
  'warm_start': Need(
    lambda c: c.sft.clean + c.sft.noisy > 0,
    'sft.clean',
    'set sft.clean or sft.noisy to 1 or more',
  ),
  'custom_reward': Need(
    lambda c: bool(custom_code.paths_in(c.rewards.rule)),
    'rewards.rule',
    'set rewards.rule to path/to/file.py:function',
  ),
  'custom_calls': Need(
    lambda c: bool(c.called),
    'rewards.rule',
    'set rewards.rule or rollout.environment to path/to/file.py:function',
  ),
  # 0 requires that all responses finish.
  'unfinished': Need(
    lambda c: (
      c.rollout.max_tokens_per_step < math.inf or not c.rollout.max_off_policy_steps
    ),
    'rollout.max_tokens_per_step',
    'set rollout.max_tokens_per_step below sampler.max_new_tokens',
  ),
  # A custom batch rule may use anything.
  'hard_problems': Need(
    lambda c: c.batch.reevaluates or c.batch.custom,
    'batch.rule',
    "set batch.rule='adapted'",
  ),
  'mixes_sources': Need(
    lambda c: len(c.sources) > 1,
    'batch.rule',
    "set batch.rule='replay' or 'adapted'",
  ),
  'cuts_tokens': Need(
    lambda c: c.loss.bounds != 'limit' or c.loss.custom,
    'loss.rule',
    "set loss.rule='clipped'",
  ),
  'searches': Need(
    lambda c: c.clip.rule not in ('fixed', 'unclipped'),
    'clip.rule',
    "set clip.rule='balanced' or 'recipe'",
  ),
}


def parse(need: str) -> Need:
  """Returns the condition that a knob declares."""
  if need in FACTS:
    return FACTS[need]
  if match := COMPARISON.fullmatch(need):
    knob, sign, text = match.groups()
    value = math.inf if text == 'inf' else ast.literal_eval(text)
    get = operator.attrgetter(knob)
    return Need(
      lambda c: COMPARE[sign](get(c), value), knob, f'set {knob}{SIGNS[sign]}{text}'
    )
  part, _, declared = need.rpartition('.')
  rules = parts(Config)[part].names
  names = ' or '.join(repr(x) for x in rules if getattr(rules[x], declared))
  return Need(operator.attrgetter(need), f'{part}.rule', f'set {part}.rule={names}')


def _declared(
  section: Section, name: str = '', of_section: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...]]]:
  """Yields (dotted name, needs) of every knob, with the needs of its sections."""
  for path, field, value in fields_of(section, name):
    needs = (*of_section, *needed(field))
    if isinstance(value, Section):
      yield from _declared(value, path, needs)
    else:
      yield path, needs


def inert(config: Config, undecided: Container[str] = ()) -> dict[str, Inert]:
  """Returns the knobs that have no effect, each with the reason.

  A knob in `undecided` has no value yet, so no other knob is inert because of it.
  """
  inert_knobs: dict[str, Inert] = {}
  for name, needs in _declared(config):
    for need in map(parse, needs):
      if need.knob not in undecided and not need.met(config):
        value = operator.attrgetter(need.knob)(config)
        inert_knobs[name] = Inert(f'{need.knob}={shown(value)}', need.remedy)
        break  # the first is reported
  return inert_knobs


def refuse(given: Mapping[str, Any], configs: Sequence[Config]) -> None:
  """Raises a ValueError if a given knob has an effect in none of these configs.

  Args:
    given: dotted knob -> value, as on the command line.
    configs: at least one config that contains these values.
  """
  inert_everywhere = [inert(config, config.undecided) for config in configs]
  for name, value in given.items():
    if all(name in inert_knobs for inert_knobs in inert_everywhere):
      because, remedy = inert_everywhere[0][name]
      raise ValueError(f'{name}={shown(value)} has no effect while {because}; {remedy}')
