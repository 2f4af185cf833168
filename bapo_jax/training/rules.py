"""Looks up the rules that a config names."""

import functools
from collections.abc import Callable, Mapping

import jax

from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.knobs import Section
from bapo_jax.training.config import Config
from bapo_jax.types import Rules


def bind_rule(rules: Mapping[str, Callable], slot: Section) -> Callable:
  """Returns the rule that `slot.rule` names, bound to its section of knobs.

  A rule with knobs takes its section as the last argument, `k`; a rule without knobs
  is returned as it is.

  Raises:
    ValueError: if there is no such rule.
  """
  name = getattr(slot, 'rule')  # noqa: B009 (only the sections of slots have it)
  if name not in rules:
    raise ValueError(f'no rule named {name!r}; choose one of {sorted(rules)}')
  section = getattr(slot, name)
  if not type(section).model_fields:
    return rules[name]
  return functools.partial(rules[name], k=section)


def bind(config: Config) -> Rules:
  """Returns the rule of every slot, bound to its knobs."""
  return Rules(
    batch=jax.jit(bind_rule(batch_rules.RULES, config.batch), static_argnames='seats'),
    advantage=bind_rule(advantage.RULES, config.advantage),
    clip=bind_rule(clip.RULES, config.clip),
    loss=bind_rule(loss.RULES, config.loss),
    thresholds=bind_rule(replay_buffer.THRESHOLD_RULES, config.buffer.thresholds),
  )
