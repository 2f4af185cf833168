"""Finds the knobs of a config that have no effect, and explains what would change that.

1. A knob or a section declares `needs` next to its default: the name of another knob
   that must not be 0 or empty, such as 'lora.rank'; a declaration of a rule, such as
   'batch.uses_buffer'; or a name of FACTS;
2. `inert` returns the knobs of a config whose needs are not met;
3. `refuse` raises an error for such a knob on the command line. In a config file the
   knob may be set for a later override, so the first screen and report only list it.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bapo_jax import custom_code
from bapo_jax.knobs import Section, fields_of, needed, shown
from bapo_jax.training.schema import PARTS, Config


class Need(NamedTuple):
  """A condition without which a knob has no effect."""

  met: Callable[[Any], Any]  # of a config
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
    lambda c: c.model.path or c.sft.experts,
    'sft.experts',
    'set it to 2 or more, or model.path to a model with experts',
  ),
  'warm_start': Need(
    lambda c: c.sft.clean + c.sft.noisy,
    'sft.clean',
    'set sft.clean or sft.noisy to 1 or more',
  ),
  'custom_reward': Need(
    lambda c: custom_code.paths_in(c.rewards.rule),
    'rewards.rule',
    'set rewards.rule to path/to/file.py:function',
  ),
  'custom_calls': Need(
    lambda c: c.called,
    'rewards.rule',
    'set rewards.rule or rollout.environment to path/to/file.py:function',
  ),
  'sampled': Need(
    lambda c: not c.rollout.records,
    'rollout.records',
    'remove it: the rewards are those of the record',
  ),
  'unsampled': Need(
    lambda c: c.rollout.given or c.rollout.environment,
    'rollout.given',
    'set rollout.given above 0, or rollout.environment',
  ),
  # 0 requires that all responses finish.
  'unfinished': Need(
    lambda c: (
      c.rollout.max_tokens_per_step < math.inf or not c.rollout.max_off_policy_steps
    ),
    'rollout.max_tokens_per_step',
    'set rollout.max_tokens_per_step below sampler.max_new_tokens',
  ),
  'cuts_tokens': Need(
    lambda c: c.loss.bounds != 'limit' or c.loss.custom,
    'loss.rule',
    "set loss.rule='clipped'",
  ),
  'searched_in_steps': Need(
    lambda c: c.clip.resolution == 'step',
    'clip.resolution',
    "set clip.resolution='step'",
  ),
  'scheduled': Need(
    lambda c: c.optimizer.schedule != 'constant',
    'optimizer.schedule',
    "set optimizer.schedule='linear' or 'cosine'",
  ),
  'capped': Need(lambda c: c.loss.cap < math.inf, 'loss.cap', 'set loss.cap below inf'),
  'accumulates': Need(
    lambda c: c.learner.grad_accum_steps > 1,
    'learner.grad_accum_steps',
    'set learner.grad_accum_steps above 1',
  ),
  'bounds_of_all': Need(
    lambda c: c.learner.bounds_scope == 'minibatch',
    'learner.bounds_scope',
    "set learner.bounds_scope='minibatch'",
  ),
  'tensor': Need(
    lambda c: c.mesh.tensor != 1,
    'mesh.tensor',
    'set mesh.tensor to another value than 1',
  ),
}


def unmet(config: Config, need: str) -> Inert | None:
  """Returns why a condition is not met; None if it is met, or not decided yet."""
  is_on = operator.attrgetter(need)
  part, _, name = need.rpartition('.')
  if need in FACTS:
    condition = FACTS[need]
  elif part in PARTS and hasattr(PARTS[part].base, name):
    rules = PARTS[part].names
    names = ' or '.join(repr(x) for x in rules if getattr(rules[x], name))
    condition = Need(is_on, f'{part}.rule', f'set {part}.rule={names}')
  else:
    limit = {str: '', bool: '=True'}.get(type(is_on(config)), ' above 0')
    condition = Need(is_on, need, f'set {need}{limit}')
  value = operator.attrgetter(condition.knob)(config)
  if value is None or condition.met(config):
    return None
  return Inert(f'{condition.knob}={shown(value)}', condition.remedy)


def inert(config: Config) -> dict[str, Inert]:
  """Returns the knobs that have no effect, each with the first reason.

  A knob that is None has no value yet, so no other knob is inert because of it.
  """
  return dict(_inert(config, config))


def _inert(
  config: Config, section: Section, path: str = '', because: Inert | None = None
) -> Iterator[tuple[str, Inert]]:
  """Yields (dotted name, reason) of the inert knobs of a section.

  `because` is the reason why the whole section has no effect, if it has none.
  """
  for name, field, value in fields_of(section, path):
    reasons = [because, *(unmet(config, need) for need in needed(field))]
    reason = next(filter(None, reasons), None)
    if isinstance(value, Section):
      yield from _inert(config, value, name, reason)
    elif reason:
      yield name, reason


def refuse(given: Mapping[str, Any], configs: Sequence[Config]) -> None:
  """Raises a ValueError if a given knob has an effect in none of these configs.

  Args:
    given: dotted knob -> value, as on the command line.
    configs: at least one config that contains these values.
  """
  inert_everywhere = [inert(config) for config in configs]
  for name, value in given.items():
    if all(name in inert_knobs for inert_knobs in inert_everywhere):
      because, remedy = inert_everywhere[0][name]
      raise ValueError(f'{name}={shown(value)} has no effect while {because}; {remedy}')
