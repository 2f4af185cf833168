"""Looks up the rules that a config names."""

import functools
from collections.abc import Callable, Mapping

import jax

from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.knobs import Section
from bapo_jax.training.config import Config
from bapo_jax.types import Rules


def bind_rule(rules: Mapping[str, Callable], slot: Section) -> Callable:
  """Returns the rule that the section `slot` names, with its knobs bound as `k`."""
  name = getattr(slot, 'rule')  # noqa: B009 (only the sections of slots have it)
  rule, section = rules[name], getattr(slot, name)
  return functools.partial(rule, k=section) if type(section).model_fields else rule


def bind(config: Config) -> Rules:
  """Returns the batch, advantage, clip, loss and thresholds rules, with knobs bound."""
  return Rules(
    batch=jax.jit(bind_rule(batch_rules.RULES, config.batch), static_argnames='seats'),
    advantage=bind_rule(advantage.RULES, config.advantage),
    clip=bind_rule(clip.RULES, config.clip),
    loss=bind_rule(loss.RULES, config.loss),
    thresholds=bind_rule(replay_buffer.THRESHOLD_RULES, config.buffer.thresholds),
  )
