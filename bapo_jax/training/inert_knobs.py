"""Finds the knobs of a config that have no effect, and what would give them one.

1. SWITCHES lists knobs with the condition under which they have an effect. The knobs of
   a rule have an effect only while its slot names this rule.
2. `inert` applies the conditions to a config.
3. `refuse` raises an error for such a knob on the command line. In a config file it
   may wait for another rule, so the first screen and the report only list it.
"""

import math
import operator
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bapo_jax import knobs
from bapo_jax.data.knobs import MADE
from bapo_jax.knobs import Section
from bapo_jax.own_code import is_place
from bapo_jax.training.config import Config

SLOTS = ('batch', 'advantage', 'clip', 'mask', 'loss', 'buffer.thresholds')
UNPOOLED = ('aime', 'gsm8k', 'countdown', 'exact')  # verifiers without processes


class Switch(NamedTuple):
  """A condition on other knobs under which some knobs have an effect."""

  knobs: str  # names of knobs and of sections, separated by spaces
  active: Callable[[Config], bool]
  decided_by: str  # the knob to blame
  remedy: str


def _needs_value(names: str, knob: str, value: Any) -> Switch:
  """Returns a switch for knobs that have an effect only with one value of a knob."""
  get = operator.attrgetter(knob)
  return Switch(names, lambda c: get(c) == value, knob, f'set {knob}={value!r}')


def _needs_more(names: str, knob: str, remedy: str = 'to 1 or more') -> Switch:
  """Returns a switch for knobs that have an effect only if another is above 0."""
  get = operator.attrgetter(knob)
  return Switch(names, lambda c: get(c) > 0, knob, f'set {knob} {remedy}')


def _of_embedded(names: str, why: str) -> Switch:
  """Returns a switch for knobs of the embedded policy, which has no model.path."""
  return Switch(
    names, lambda c: not c.model.path, 'model.path', f'remove it, because {why}'
  )


class Inert(NamedTuple):
  """The reason why a knob has no effect."""

  because: str  # a knob with its value
  remedy: str


def rule_names(slot: Section) -> list[str]:
  """Returns the names of the built-in rules of a slot."""
  annotation = type(slot).model_fields['rule'].annotation
  parts = (annotation, *typing.get_args(annotation))
  names = (typing.get_args(x) for x in parts if typing.get_origin(x) is Literal)
  return list(next(names))


def _of_rules() -> Iterator[Switch]:
  """Yields a switch for the section of each built-in rule."""
  for slot in SLOTS:
    for rule in rule_names(operator.attrgetter(slot)(Config())):
      yield _needs_value(f'{slot}.{rule}', f'{slot}.rule', rule)


def _needs_batch_rule(
  names: str, needs: str, active: Callable[[Config], bool] | None = None
) -> Switch:
  """Returns a switch for knobs that need a batch rule that declares `needs`.

  `active` is their condition; by default, that the rule of the config declares it.
  """
  batch, get = Config().batch, operator.attrgetter(f'batch.active.{needs}')
  rules = [repr(x) for x in rule_names(batch) if getattr(getattr(batch, x), needs)]
  return Switch(
    names, active or get, 'batch.rule', f'set batch.rule={" or ".join(rules)}'
  )


def _sources(c: Config) -> set[str]:
  return {c.problems.source, c.problems.test_source}


def _generates(c: Config) -> bool:
  """Returns whether problems are generated, for the run or for its warm start."""
  return not c.model.path or not _sources(c).isdisjoint(MADE)


def _synthetic(c: Config) -> bool:
  """Returns whether problems are synthetic, for the run or for its warm start."""
  warm_start = not c.model.path and c.problems.source not in ('countdown', 'drawn')
  return warm_start or 'synthetic' in _sources(c)


def _verifiers(c: Config, without: Container[str]) -> bool:
  """Returns whether a verifier is used that is not in `without`.

  Rows of a file may name any verifier.
  """
  rules = c.rewards.rule.split(',')
  return not _sources(c) <= set(MADE) or any(rule not in without for rule in rules)


def _own_reward(c: Config) -> bool:
  return any(is_place(rule) for rule in c.rewards.rule.split(','))


def _own_batch(c: Config) -> bool:
  """Returns whether the batch rule is an own function, which may use anything."""
  return is_place(c.batch.rule)


def _searches(c: Config) -> bool:
  """Returns whether the bounds may depend on the tokens of the batch."""
  return c.clip.rule not in ('fixed', 'unclipped')


HARD = (
  'buffer.reeval_interval buffer.hard_order buffer.thresholds.fixed.hard '
  'buffer.thresholds.moving.hard'
)
SHAPING = 'format_bonus overlong_penalty overlong_cache truncated'
SIZES = 'width layers heads kv_heads head_width ffn tower'

# If several conditions fail, the first is reported.
SWITCHES = (
  _of_embedded(
    ' '.join(f'model.{name}' for name in SIZES.split()),
    'the files of the model give its sizes',
  ),
  _needs_more('model.tower.width model.tower.ffn', 'model.tower.layers'),
  Switch(
    'model.sequence_sharding',
    lambda c: c.mesh.tensor != 1,
    'mesh.tensor',
    'set mesh.tensor to 2 or more',
  ),
  _needs_more('lora.alpha lora.targets', 'lora.rank'),
  Switch(
    'problems.family problems.level problems.pair',
    _synthetic,
    'problems.source',
    "set problems.source and problems.test_source to 'synthetic'",
  ),
  _needs_value('problems.pair', 'problems.family', 'pair'),
  _of_embedded(
    'problems.pair.stops', 'only the warm start of the embedded policy uses it'
  ),
  Switch(
    'problems.seed problems.train problems.test',
    _generates,
    'problems.source',
    'remove it, because all rows of the source are used',
  ),
  *(
    Switch(
      f'problems.{name}',
      lambda c, name=name: name in _sources(c),
      'problems.source',
      f'set problems.source and problems.test_source to {name!r}',
    )
    for name in ('countdown', 'drawn')
  ),
  Switch(
    'problems.duplicates',
    lambda c: not _sources(c) <= set(MADE),
    'problems.source',
    'remove it, because generated problems do not repeat',
  ),
  Switch(
    'problems.overlap',
    lambda c: len(_sources(c)) > 1 or c.problems.source not in MADE,
    'problems.source',
    'remove it, because generated problems do not overlap',
  ),
  Switch(
    'rewards.right_from rewards.timeout rewards.parallel',
    _own_reward,
    'rewards.rule',
    'set rewards.rule to path/to/file.py:function',
  ),
  Switch(
    'rewards.strict',
    lambda c: _verifiers(c, ('aime', 'countdown', 'exact')),
    'rewards.rule',
    "set rewards.rule='math' or 'gsm8k'",
  ),
  Switch(
    'rewards.workers rewards.deadline rewards.batch_deadline',
    lambda c: _verifiers(c, UNPOOLED),
    'rewards.rule',
    "set rewards.rule='math' or path/to/file.py:function",
  ),
  Switch(
    ' '.join(f'rewards.shaping.{name}' for name in SHAPING.split()),
    lambda c: not is_place(c.rewards.shaping.rule),
    'rewards.shaping.rule',
    "set rewards.shaping.rule='standard'",
  ),
  Switch(
    'rewards.shaping.overlong_cache',
    lambda c: c.rewards.shaping.overlong_penalty > 0,
    'rewards.shaping.overlong_penalty',
    'set rewards.shaping.overlong_penalty=1.0',
  ),
  Switch(
    'rollout.cache',
    lambda c: c.rollout.max_off_policy_steps > 0,
    'rollout.max_off_policy_steps',
    'set rollout.max_off_policy_steps=1 or more and rollout.max_tokens_per_step',
  ),
  Switch(
    'rollout.cache rollout.max_off_policy_steps',
    # 0 requires that all responses finish.
    lambda c: (
      c.rollout.max_tokens_per_step < math.inf or not c.rollout.max_off_policy_steps
    ),
    'rollout.max_tokens_per_step',
    'set rollout.max_tokens_per_step below sampler.max_new_tokens',
  ),
  _needs_batch_rule('buffer', 'uses_buffer'),
  *_of_rules(),
  _needs_batch_rule(
    f'buffer.reevaluate {HARD}',
    'reevaluates',
    lambda c: c.batch.active.reevaluates or _own_batch(c),
  ),
  Switch(
    HARD,
    lambda c: c.buffer.reevaluate > 0 or _own_batch(c),
    'buffer.reevaluate',
    'set buffer.reevaluate to 1 or more',
  ),
  _needs_batch_rule('batch.max_extra_rounds', 'asks_again'),
  _needs_batch_rule('batch.weights.reevaluated', 'reevaluates'),
  Switch(
    'batch.weights.reevaluated',
    lambda c: 'reevaluated' in c.sources,
    'buffer.reevaluate',
    'set buffer.reevaluate to 1 or more',
  ),
  _needs_batch_rule(
    'batch.weights.reused clip.balanced.reused_high',
    'uses_buffer',
    lambda c: 'reused' in c.sources,
  ),
  _needs_batch_rule(
    'clip.balanced.sources', 'uses_buffer', lambda c: len(c.sources) > 1
  ),
  _needs_value(
    'clip.balanced.low_step clip.balanced.high_step',
    'clip.balanced.resolution',
    'step',
  ),
  Switch(
    'clip.fixed.dual',
    lambda c: c.loss.active.bounds != 'limit' or is_place(c.loss.rule),
    'loss.rule',
    "set loss.rule='clipped'",
  ),
  _needs_more('loss.kl_direction', 'loss.kl', 'above 0'),
  Switch(
    'loss.decoupled.beyond_cap',
    lambda c: c.loss.decoupled.cap < math.inf,
    'loss.decoupled.cap',
    'set loss.decoupled.cap=2.0',
  ),
  Switch(
    'learner.bounds_scope',
    _searches,
    'clip.rule',
    "set clip.rule='balanced' or 'recipe'",
  ),
  Switch(
    'learner.bounds_scope learner.bounds_pass',
    lambda c: c.learner.grad_accum_steps > 1,
    'learner.grad_accum_steps',
    'set learner.grad_accum_steps to 2 or more',
  ),
  _needs_value('learner.bounds_pass', 'learner.bounds_scope', 'minibatch'),
  _of_embedded('sft', 'only the embedded policy has a warm start'),
  Switch(
    'sft.batch sft.lr',
    lambda c: c.sft.clean + c.sft.noisy > 0,
    'sft.clean',
    'set sft.clean or sft.noisy to 1 or more',
  ),
  _needs_more('sft.slip sft.repeat', 'sft.noisy'),
  _needs_more(
    'evaluate.sampling.top_k evaluate.sampling.top_p',
    'evaluate.sampling.temperature',
    'above 0',
  ),
)


def inert(config: Config, undecided: Container[str] = ()) -> dict[str, Inert]:
  """Returns the knobs that have no effect, each with the reason.

  A knob in `undecided` has no value yet, so no other knob is inert because of it.
  """
  found: dict[str, Inert] = {}
  names = [name for name, _, _ in knobs.fields(config)]
  for switch in SWITCHES:
    if switch.decided_by in undecided or switch.active(config):
      continue
    value = operator.attrgetter(switch.decided_by)(config)
    reason = Inert(f'{switch.decided_by}={knobs.shown(value)}', switch.remedy)
    for wanted in switch.knobs.split():
      for name in names:
        if name == wanted or name.startswith(f'{wanted}.'):
          found.setdefault(name, reason)
  return found


def refuse(given: Mapping[str, Any], configs: Sequence[Config]) -> None:
  """Raises a ValueError if a given knob has an effect in none of these configs.

  Args:
    given: dotted knob -> value, as on the command line.
    configs: at least one config that contains these values.
  """
  inert_everywhere = [inert(config, config.derived) for config in configs]
  for name, value in given.items():
    if all(name in found for found in inert_everywhere):
      because, remedy = inert_everywhere[0][name]
      raise ValueError(
        f'{name}={knobs.shown(value)} has no effect while {because}; '
        f'{remedy}{_instead(configs[0], name)}'
      )


def _instead(config: Config, name: str) -> str:
  """Names the knob of the active rule that is called like a knob of another rule."""
  for slot in SLOTS:
    section = operator.attrgetter(slot)(config)
    rule, _, key = name.removeprefix(f'{slot}.').partition('.')
    twin = getattr(getattr(section, section.rule, None), key, None)
    if name.startswith(f'{slot}.{rule}.') and rule != section.rule and twin is not None:
      return f', or instead {slot}.{section.rule}.{key} (now {knobs.shown(twin)})'
  return ''
