"""Looks up the rules that a config names."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.algorithms import advantage, batch_rules, clip, loss, masks, replay_buffer
from bapo_jax.algorithms.knobs import active
from bapo_jax.own_code import Slot, described, file_of, is_place, load
from bapo_jax.training.config import Config, code
from bapo_jax.types import Batch, Bounds, Rules, empty_groups


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
    mask=bind_rule(masks.RULES, config.mask),
    loss=bind_rule(loss.RULES, config.loss),
    thresholds=bind_rule(replay_buffer.THRESHOLD_RULES, config.buffer.thresholds),
  )


def check(config: Config) -> None:
  """Traces every own rule once on small shapes, without computing anything.

  Raises:
    ValueError: a rule raises an error, or does not return what its slot demands.
  """
  if not code(config):  # the arrays below would compile a program each
    return
  B, T, G, seats = 4, 8, config.sampler.group_size, config.batch.active.seats(2)
  bound, P = bind(config), 2
  f32, i32, flags = (jnp.zeros((B, T), kind) for kind in (jnp.float32, jnp.int32, bool))
  batch = Batch(i32, flags, f32, f32, f32[:, 0], i32[:, 0], flags)
  none = clip.unclipped(f32, batch, lambda _: f32)
  groups = empty_groups(P, G, T)
  reward_PG = jnp.zeros((P, G))
  flag_PG = reward_PG > 0
  called: list[Array] = []

  def find(ratio_BT: Array) -> Bounds:
    called.append(ratio_BT)
    return none

  def filled() -> Any:
    buffer = replay_buffer.init(P, G, T, bound.thresholds)
    return bound.batch(groups, groups, buffer, 0, jax.random.key(0), seats=seats)

  shaping = config.rewards.shaping

  def shaped() -> Any:
    rule = bind_rule({'standard': lambda *_, k: None}, shaping)
    return rule(reward_PG, jnp.zeros((P, G), jnp.int32), flag_PG, flag_PG)

  chosen = empty_groups(seats, G, T), jnp.zeros(seats, jnp.int32)
  trials: list[tuple[str, Slot, Callable[[], Any], Any]] = [
    ('loss', config.loss, lambda: bound.loss(f32, batch, find), (f32, none)),
    ('clip', config.clip, lambda: bound.clip(f32, batch, lambda _: f32), none),
    ('mask', config.mask, lambda: bound.mask(f32, batch), flags),
    ('advantage', config.advantage, lambda: bound.advantage(reward_PG), reward_PG),
    ('batch', config.batch, filled, chosen),
    ('rewards.shaping', shaping, shaped, (reward_PG, flag_PG)),
  ]
  for name, slot, call, wanted in trials:
    place = getattr(slot, 'rule')  # noqa: B009 (every slot has one)
    if not is_place(place):
      continue
    try:
      found = jax.eval_shape(call)
    except Exception as error:  # a user's function may raise anything
      raise ValueError(
        f'{name}.rule={place} raises {described(error, file_of(place))}'
      ) from error
    if misfit := _misfit(found, wanted):
      raise ValueError(f'{name}.rule={place} returns {misfit}')
    if name == 'loss' and not called:
      raise ValueError(
        f'loss.rule={place} never calls `find`, so no clip rule has an effect; return '
        '(gain_BT, find(ratio_BT)), and declare bounds="ignored" if it ignores bounds'
      )


def _misfit(found: Any, wanted: Any) -> str:
  """Describes how a result differs from the wanted type and shape; '' if it fits."""
  if isinstance(wanted, Array):
    shape = getattr(found, 'shape', None)
    return '' if shape == wanted.shape else f'{_said(found)} for {_said(wanted)}'
  if isinstance(wanted, Bounds):
    fits = isinstance(found, Bounds)
    return '' if fits else f'{_said(found)} for Bounds (see clip.unclipped)'
  if not isinstance(found, type(wanted)) or len(found) != len(wanted):
    return f'{_said(found)} for {_said(wanted)}'
  return next(filter(None, map(_misfit, found, wanted)), '')


def _said(value: Any) -> str:
  """Describes a result in a few words."""
  if (shape := getattr(value, 'shape', None)) is not None:
    return f'an array of shape {tuple(shape)}'
  if type(value) is tuple:
    return f'({", ".join(map(_said, value))})'
  return type(value).__name__
