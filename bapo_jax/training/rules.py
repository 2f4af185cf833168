"""Binds the rules of a config: the one place where names of rules are looked up."""

import functools
from collections.abc import Callable, Mapping

import jax

from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.knobs import Section
from bapo_jax.training.config import Config
from bapo_jax.types import Rules


def bind_rule(rules: Mapping[str, Callable], section: Section) -> Callable:
  """The rule that `section.rule` names, with the knobs under its name bound.

  Raises:
    ValueError: no such rule.
  """
  name = getattr(section, 'rule')  # noqa: B009 (sections of slots have it, others not)
  if name not in rules:
    raise ValueError(f'no rule named {name!r}; choose one of {sorted(rules)}')
  return functools.partial(rules[name], **getattr(section, name).model_dump())


def bind(config: Config) -> Rules:
  """The rules of a config."""
  return Rules(
    batch=jax.jit(bind_rule(batch_rules.RULES, config.batch), static_argnames='seats'),
    advantage=bind_rule(advantage.RULES, config.advantage),
    clip=bind_rule(clip.RULES, config.clip),
    loss=bind_rule(loss.RULES, config.loss),
    thresholds=bind_rule(replay_buffer.THRESHOLD_RULES, config.buffer.thresholds),
  )
