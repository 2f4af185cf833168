"""Looks up the rules that a config names."""

import functools
from collections.abc import Callable, Mapping

import jax

from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.algorithms.knobs import active
from bapo_jax.own_code import Slot, is_place, load
from bapo_jax.training.config import Config
from bapo_jax.types import Rules


def bind_rule(rules: Mapping[str, Callable], slot: Slot) -> Callable:
  """Returns the rule of a slot, by name or by place, with its knobs bound.

  A built-in rule takes its section as `k`, an own rule its knobs by name.
  """
  name, section = getattr(slot, 'rule'), active(slot)  # noqa: B009 (all slots have it)
  if is_place(name):
    return functools.partial(load(name), **section.model_dump())
  has_knobs = bool(type(section).model_fields)
  return functools.partial(rules[name], k=section) if has_knobs else rules[name]


def bind(config: Config) -> Rules:
  """Returns the rule of every slot, bound to its knobs."""
  return Rules(
    batch=jax.jit(bind_rule(batch_rules.RULES, config.batch), static_argnames='seats'),
    advantage=bind_rule(advantage.RULES, config.advantage),
    clip=bind_rule(clip.RULES, config.clip),
    loss=bind_rule(loss.RULES, config.loss),
    thresholds=bind_rule(replay_buffer.THRESHOLD_RULES, config.buffer.thresholds),
  )
