"""Evaluates a loss or clip rule on a grid, for a page that has no Python.

1. `table` finds out which of the two a function is, chooses the values of its knobs
   that the page offers (`_axes`), and evaluates every combination of them;
2. for a loss rule, and for a clip rule that gives a mask or bounds by token, an entry
   has the gains and weights of single tokens and the weights of the recorded tokens;
3. for a clip rule that gives two bounds, an entry has the bounds.
"""

import base64
import contextlib
import functools
import inspect
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import custom_code
from bapo_jax.algorithms import loss
from bapo_jax.algorithms.clip import ClipRule
from bapo_jax.algorithms.loss import LossRule
from bapo_jax.parts import Custom, Part
from bapo_jax.types import Batch, Bounds, ClipFunction
from lab import rule_curves

# The grid of single tokens: 16 ratios per octave, and ten probabilities.
RATIOS = np.exp2(np.arange(-48, 49) / 16).astype(np.float32)
PROBABILITIES = np.linspace(0.05, 0.95, 10).astype(np.float32)
BOUNDS = {'clip.fixed.low': [0.6, 0.8, 0.9], 'clip.fixed.high': [1.2, 1.28, 2.0]}
STALE = np.linspace(0, 4, 9).tolist()  # factors of the recorded log-ratios
COUNTS = (17, 9, 5, 3)  # values of each knob, as many as fit
LARGEST_TABLE = 200_000  # numbers; 1.1 MB of the page
MOST_COMBINATIONS = 17  # of the knobs of a clip rule: each compiles a program
# What the page reads of bounds, in this order.
OF_BOUNDS = ('low', 'high', 'dual', 'start_low', 'start_high', 'search_steps')

BASES: dict[str, type[Part]] = {'loss': LossRule, 'clip': ClipRule}
CLIPPED = loss.Clipped()

Tokens = tuple[Array, Batch]  # logp_BT and the batch
Axes = dict[str, list[float]]  # knob -> values
Entries = tuple[Axes, Axes, dict[str, Any]]  # axes of the rule, other axes, entries
Make = Callable[..., Any]  # knobs -> rule


def table(rule: str, batch: pathlib.Path) -> dict[str, Any]:
  """Evaluates a rule on a grid and on the recorded batch.

  The axes of the table are the knobs of the rule whose default is a float, and the clip
  bounds of a loss rule that uses them, or the staleness of the batch for a clip rule.
  If the table would be too large, the last knobs have no axis and keep their defaults.

  Args:
    rule: path/to/file.py:function of a user, or a rule of ours, such as loss.gmpo.

  Returns:
    A dict for the page. Its entries are numbered like the combinations of the values of
    `axes`, the last axis fastest; `beside` has the knobs for which they are valid.

  Raises:
    ValueError: there is no such rule, or the function cannot be used.
  """
  recorded = rule_curves.recorded(batch)
  part, _, name = rule.partition('.')
  if custom_code.is_path(rule):
    part = 'clip' if _gives_bounds(custom_code.load(rule), recorded) else 'loss'
    name = rule
  if part not in BASES:
    raise ValueError(
      f'{rule}: give path/to/file.py:function, loss.<rule> or clip.<rule>'
    )
  kind = BASES[part].rules.type_of(name)
  make = functools.partial(kind, rule=name)
  defaults = _floats(kind)
  evaluate = _of_clip if part == 'clip' else _of_loss
  own, others, entries = evaluate(make, defaults, recorded)
  axes = {f'{part}.own.{knob}': values for knob, values in own.items()} | others
  return entries | {
    'slot': part,
    'title': name,
    'about': about(kind),
    'axes': [{'name': knob, 'values': values} for knob, values in axes.items()],
    'defaults': {f'{part}.own.{knob}': x for knob, x in defaults.items()},
    'ratios': RATIOS.tolist(),
  }


def _gives_bounds(rule: Callable, recorded: Tokens) -> bool:
  """Returns whether a function is a clip rule; else it is a loss rule."""
  try:
    bounds = jax.eval_shape(functools.partial(_bounds, rule), *recorded)
  except Exception:  # a loss rule may do anything with the arguments of a clip rule
    return False
  return isinstance(bounds, Bounds)


def _of_loss(make: Make, defaults: dict[str, float], recorded: Tokens) -> Entries:
  """Returns the axes and entries of a loss rule, for some constant clip bounds."""
  uses_bounds, uses_probability = _uses(make, defaults, recorded)
  others = BOUNDS if uses_bounds else {}
  probabilities = PROBABILITIES if uses_probability else PROBABILITIES[:1]
  grid = _grid(probabilities)

  def trial(rule: Any, logp_BT: Array, batch: Batch) -> Array:
    return loss.weights(rule, logp_BT, batch, rule_curves.constant())

  largest = LARGEST_TABLE // _size(grid, recorded)
  own = _axes(make, defaults, trial, recorded, others, largest)
  tables = []
  for values in itertools.product(*own.values(), *others.values()):
    rule = make(**dict(zip(own, values, strict=False)))
    bounds = rule_curves.constant(*values[len(own) :])
    gain_N, weight_N = rule_curves.curve(rule, *grid, bounds)
    tables.append((gain_N, weight_N, loss.weights(rule, *recorded, bounds)))
  beside = {'clip.rule': 'fixed' if uses_bounds else 'unclipped', 'mask.rule': 'none'}
  return own, others, {'beside': beside} | _packed(tables, probabilities, recorded)


def _of_clip(make: Make, defaults: dict[str, float], recorded: Tokens) -> Entries:
  """Returns the axes and entries of a clip rule beside the loss rule `clipped`.

  Two bounds apply to single tokens as they are. A mask, or bounds by row or token, may
  depend on the token, so each token of the grid is added to the batch in turn.
  """
  bounds = _bounds(make(), *recorded)
  by_token = bounds.keep_BT is not None or any(jnp.ndim(x) for x in bounds[:6])
  by_token = by_token or bool(jnp.isfinite(bounds.cap))  # depends on a row's source
  grid = _grid(PROBABILITIES)
  size = _size(grid, recorded) if by_token else len(OF_BOUNDS)
  largest = min(LARGEST_TABLE // size, MOST_COMBINATIONS * len(STALE))
  others = {'stale': STALE}
  own = _axes(make, defaults, _bounds, recorded, others, largest)
  compute = _weighed if by_token else _scalars
  tables: list[Any] = []
  for values in itertools.product(*own.values()):
    rule = make(**dict(zip(own, values, strict=True)))
    at = jax.jit(functools.partial(compute, rule))
    tables += [jax.device_get(at(recorded, grid, factor)) for factor in STALE]
  beside = {'loss.rule': 'clipped', 'loss.aggregate': 'token', 'mask.rule': 'none'}
  if by_token:
    entries = _packed(tables, PROBABILITIES, recorded)
  else:
    entries = {'bounds': packed(tables)}
  return own, others, {'beside': beside} | entries


def _size(grid: Tokens, recorded: Tokens) -> int:
  """Returns how many numbers a table has for one combination of knobs."""
  return len(grid[0]) * 2 + int(recorded[1].loss_mask_BT.sum())


def _packed(
  tables: list[Any], probabilities: np.ndarray, recorded: Tokens
) -> dict[str, Any]:
  """Returns the entries for tables of (gain_N, weight_N, weight_BT)."""
  mask_BT = np.asarray(recorded[1].loss_mask_BT)
  gains, weights, weights_BT = zip(*tables, strict=True)
  return {
    'probabilities': probabilities.tolist(),
    'gains': packed(gains),
    'weights': packed(weights),
    'tokens': packed([np.asarray(weight_BT)[mask_BT] for weight_BT in weights_BT]),
  }


def _bounds(rule: ClipFunction, logp_BT: Array, batch: Batch) -> Bounds:
  """Applies a clip rule beside the loss rule `clipped` with its default knobs."""
  scale_B = loss.row_scale(batch.loss_mask_BT, 'token', 1)
  weigh = loss.weigher(CLIPPED, logp_BT, batch, scale_B)
  return rule(loss.ratio(logp_BT, batch), batch, weigh)


def _staler(recorded: Tokens, factor: Array) -> Tokens:
  """Multiplies the log-ratios of the recorded tokens."""
  logp_BT, batch = recorded
  moved_BT = loss.log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
  return batch.behavior_logp_BT + factor * moved_BT, batch


def _scalars(
  rule: ClipFunction, recorded: Tokens, grid: Tokens, factor: Array
) -> Array:
  """Returns the numbers OF_BOUNDS for the batch at a staleness."""
  del grid
  bounds = _bounds(rule, *_staler(recorded, factor))
  return jnp.stack([jnp.float32(getattr(bounds, name)) for name in OF_BOUNDS])


def _weighed(
  rule: ClipFunction, recorded: Tokens, grid: Tokens, factor: Array
) -> tuple[Array, Array, Array]:
  """Returns (gain_N, weight_N, weight_BT): of single tokens, and of the recorded ones.

  A single token is one more row of the batch.
  """
  logp_BT, batch = _staler(recorded, factor)

  def single(logp_T: Array, token: Batch) -> tuple[Array, Array]:
    def added(array: Array, row: Array) -> Array:
      padded = jnp.pad(row, (0, array.shape[1] - 1)) if array.ndim == 2 else row
      return jnp.concatenate([array, padded[None]])

    tokens_BT, more = added(logp_BT, logp_T), jax.tree.map(added, batch, token)
    bounds = _bounds(rule, tokens_BT, more)
    gain_BT, _ = loss.gain(CLIPPED, tokens_BT, more, lambda _: bounds)
    weight_BT = loss.weights(CLIPPED, tokens_BT, more, bounds)
    return gain_BT[-1, 0], weight_BT[-1, 0]

  gain_N, weight_N = jax.lax.map(lambda x: single(*x), grid, batch_size=64)
  bounds = _bounds(rule, logp_BT, batch)
  return gain_N, weight_N, loss.weights(CLIPPED, logp_BT, batch, bounds)


def about(kind: type[Any]) -> str:
  """Returns the docstring of a rule without arguments, results and example."""
  rule = kind.function.function if issubclass(kind, Custom) else kind
  text = inspect.getdoc(rule) or ''
  for heading in ('Args:', 'Returns:', 'Raises:', 'Example:'):
    text = text.partition(f'\n{heading}')[0]
  return text.strip()


def packed(array: Any) -> dict[str, str]:
  """Returns float32 numbers for JSON."""
  numbers = np.ascontiguousarray(jnp.asarray(array), '<f4')
  return {'float32': base64.b64encode(numbers.tobytes()).decode()}


def _floats(kind: type[Part]) -> dict[str, float]:
  """Returns the knobs that only this rule has and whose default is a float."""
  shared = kind.rules.base.model_fields
  return {
    name: x.default
    for name, x in kind.model_fields.items()
    if name not in shared and isinstance(x.default, float)
  }


def _axes(
  make: Make,
  defaults: dict[str, float],
  trial: Callable[..., Any],
  recorded: Tokens,
  others: Axes,
  largest: int,
) -> Axes:
  """Returns knob -> values: with `others`, at most `largest` combinations.

  Every knob has as many values as possible, from a quarter to four times its default,
  without those that the rule refuses: `trial` applies it to the recorded tokens.
  """
  space = largest // math.prod(map(len, others.values()))

  @functools.cache
  def accepted(name: str, count: int) -> list[float]:
    values = []
    for value in dict.fromkeys(_around(defaults[name], count)):
      with contextlib.suppress(ValueError):
        jax.eval_shape(functools.partial(trial, make(**{name: value})), *recorded)
        values.append(value)
    return values

  for kept, count in itertools.product(range(len(defaults), -1, -1), COUNTS):
    axes = {name: accepted(name, count) for name in list(defaults)[:kept]}
    if math.prod(map(len, axes.values())) <= space:
      return axes
  raise ValueError(f'the batch is too long for a table; {rule_curves.WAY_OUT}')


def _around(default: float, count: int) -> list[float]:
  """Returns `count` values around a default, which is one of them."""
  if not math.isfinite(default):
    return [default] * count
  step_N = (np.arange(count) - count // 2) / (count // 2)
  value_N = default * 4.0**step_N if default else step_N
  return [x if x == default else float(f'{x:.3g}') for x in value_N.tolist()]


def _uses(
  make: Make, defaults: dict[str, float], recorded: Tokens
) -> tuple[bool, bool]:
  """Returns whether the clip bounds and the probability of a token make a difference.

  A knob at its default may hide a difference, so the knobs have other values as well.
  """
  settings = zip(*(_around(x, COUNTS[-1]) for x in defaults.values()), strict=True)
  rules = [make(**dict(zip(defaults, x, strict=True))) for x in settings] or [make()]
  unbounded = rule_curves.constant()
  closed = rule_curves.constant(1.0, 1.0)
  around = rule_curves.constant(0.8, 1.2)
  pairs = [
    [loss.weights(rule, *recorded, x) for x in (unbounded, closed)] for rule in rules
  ]
  uses_bounds = any(bool((x_BT != y_BT).any()) for x_BT, y_BT in pairs)
  curves = [rule_curves.curve(x, *_grid(PROBABILITIES), around) for x in rules]
  curve_NPR = np.reshape(curves, (-1, len(PROBABILITIES), len(RATIOS)))
  return uses_bounds, bool((curve_NPR != curve_NPR[:, :1]).any())


def _grid(probabilities: np.ndarray) -> Tokens:
  """Returns tokens for A = 1 and A = -1, every probability and every ratio."""
  signs = np.asarray([1, -1], np.float32)
  axes = np.meshgrid(signs, probabilities, RATIOS, indexing='ij')
  adv_N, probability_N, ratio_N = (x.reshape(-1) for x in axes)
  return rule_curves.single(ratio_N, probability_N, adv_N)
