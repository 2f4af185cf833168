"""Writes the loss explorer: one HTML page that needs no server and no network.

  python -m lab.explorer                                     docs/explorer.html
  python -m lab.explorer my.py:sapo --out=my.html            with a loss rule of yours
  python -m lab.explorer --batch=runs/a/groups/80.jsonl --out=a.html

1. `knobs_of` describes the knobs with their sliders, `refusals` the pairs of rules that
   a run refuses;
2. `table` evaluates a loss rule of yours on a grid, because the page has no Python;
3. `page` puts these, the recorded batch and the files of explorer_page/ into one file.

The built-in rules are written again in explorer_page/rules.js.
"""

import argparse
import base64
import functools
import inspect
import itertools
import json
import math
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from bapo_jax import knobs as knobs_lib
from bapo_jax import own_code
from bapo_jax.algorithms import clip, knobs, loss
from bapo_jax.algorithms.knobs import ClipConfig, LossConfig
from bapo_jax.knobs import Section
from bapo_jax.runtime import files
from bapo_jax.types import LossRule
from lab import rule_curves

ROOT = pathlib.Path(__file__).parents[1]
PARTS = pathlib.Path(__file__).with_name('explorer_page')
PAGE = ROOT / 'docs' / 'explorer.html'
BATCH = ROOT / 'notebooks' / '2_batch.npz'

# First and last position and step of the sliders; a knob that may be infinite has one
# more position at the end.
SLIDERS = {
  'loss.clipped.limit': (0.1, 3.0, 0.1),
  'loss.decoupled.cap': (0.1, 5.0, 0.1),
  'loss.tis.cap': (0.1, 5.0, 0.1),
  'loss.dppo_tv.low': (0.01, 1.0, 0.01),
  'loss.dppo_tv.high': (0.01, 1.0, 0.01),
  'loss.dppo_tv.cap': (0.5, 20.0, 0.5),
  'loss.sapo.positive': (0.05, 10.0, 0.05),
  'loss.sapo.negative': (0.05, 10.0, 0.05),
  'clip.fixed.low': (0.0, 1.0, 0.01),
  'clip.fixed.high': (1.0, 4.0, 0.01),
  'clip.fixed.dual': (1.1, 8.0, 0.1),
  'clip.balanced.target': (0.0, 1.0, 0.002),
  'clip.balanced.low': (0.02, 1.0, 0.02),
  'clip.balanced.high': (1.0, 6.0, 0.05),
  'clip.balanced.low_step': (0.0, 0.1, 0.005),
  'clip.balanced.high_step': (0.0, 0.5, 0.01),
  'clip.balanced.dual': (1.1, 8.0, 0.1),
}
# The penalty is no part of a rule; the batch of the page has rows of one source.
LEFT_OUT = {
  'loss.kl',
  'loss.kl_direction',
  'clip.balanced.sources',
  'clip.balanced.reused_high',
}
RULES = {'loss': loss.RULES, 'clip': clip.RULES}
OWN = 'loss.own'  # the section of a user's rule
# Settings of published methods; `range` is how far the axis of ratios goes.
METHODS: dict[str, dict[str, Any]] = {
  'Balanced PO': {},
  'PPO, GRPO': {'clip.rule': 'fixed'},
  'DAPO (clip-higher)': {'clip.rule': 'fixed', 'clip.fixed.high': 1.28},
  'dual clip': {'clip.rule': 'fixed', 'clip.fixed.dual': 3.0},
  'Balanced PO, public code': {'clip.rule': 'recipe', 'loss.clipped.limit': 20.0},
  'decoupled PPO (AReaL)': {'loss.rule': 'decoupled', 'clip.rule': 'fixed'},
  'GSPO': {
    'loss.rule': 'sequence',
    'loss.aggregate': 'sequence',
    'clip.rule': 'fixed',
    'clip.fixed.low': 0.9997,
    'clip.fixed.high': 1.0004,
    'range': 1.002,
  },
  'CISPO': {'loss.rule': 'cispo', 'clip.rule': 'fixed', 'clip.fixed.low': 0.0},
  'TIS': {'loss.rule': 'tis', 'clip.rule': 'unclipped'},
  'DPPO': {'loss.rule': 'dppo_tv', 'clip.rule': 'unclipped'},
  'SAPO': {
    'loss.rule': 'sapo',
    'loss.aggregate': 'sequence',
    'clip.rule': 'unclipped',
  },
}
# The grid of a user's rule: 16 ratios per octave, and ten probabilities.
RATIOS = np.exp2(np.arange(-48, 49) / 16).astype(np.float32)
PROBABILITIES = np.linspace(0.05, 0.95, 10).astype(np.float32)
BOUNDS = {'clip.fixed.low': [0.6, 0.8, 0.9], 'clip.fixed.high': [1.2, 1.28, 2.0]}
COUNTS = (17, 9, 5, 3)  # values of each knob, as many as fit
LARGEST_TABLE = 200_000  # numbers; 1.1 MB of the page


def knobs_of() -> dict[str, dict[str, Any]]:
  """Returns name -> value, meaning, limits, and slider or choices of every knob."""
  described = {}
  for slot, section in (('loss', LossConfig()), ('clip', ClipConfig())):
    for name, field, value in knobs_lib.fields(section, slot):
      if name in LEFT_OUT:
        continue
      found = {'value': value, 'meaning': field.description}
      if name in SLIDERS:
        limits = field.json_schema_extra
        found |= {
          'slider': SLIDERS[name],
          **(limits if isinstance(limits, dict) else {}),
        }
      elif name.endswith('.rule'):
        found['choices'] = list(RULES[slot])
      else:
        found['choices'] = typing.get_args(field.annotation)
      described[name] = found
  return described


def refusals() -> dict[str, str]:
  """Returns 'loss|clip|aggregate|contribution|weight' -> the sentence of a refusal."""
  fields = LossConfig.model_fields, knobs.BalancedClip.model_fields
  aggregates = typing.get_args(fields[0]['aggregate'].annotation)
  contributions, weights = (
    typing.get_args(fields[1][name].annotation) for name in ('contribution', 'weight')
  )
  refused = {}
  for values in itertools.product(
    loss.RULES, clip.RULES, aggregates, contributions, weights
  ):
    rule, bounds, aggregate, contribution, weight = values
    balanced = {'contribution': contribution, 'weight': weight}
    chosen = knobs_lib.validate(ClipConfig, {'rule': bounds, 'balanced': balanced})
    objective = knobs_lib.validate(LossConfig, {'rule': rule, 'aggregate': aggregate})
    try:
      knobs.check_clip(chosen, objective)
    except ValueError as error:
      refused['|'.join(values)] = str(error)
  return refused


def rules() -> dict[str, dict[str, dict[str, str]]]:
  """Returns slot -> rule -> title, docstring and what it does with the clip bounds."""

  def described(slot: Section, name: str, rule: Callable) -> dict[str, str]:
    return {
      'title': type(slot).model_fields[name].description or '',
      'about': _about(rule),
      'bounds': getattr(getattr(slot, name), 'bounds', ''),
    }

  slots: dict[str, Section] = {'loss': LossConfig(), 'clip': ClipConfig()}
  return {
    slot: {name: described(section, name, rule) for name, rule in RULES[slot].items()}
    for slot, section in slots.items()
  }


def recorded_of(path: pathlib.Path) -> dict[str, Any]:
  """Returns the tokens of a recorded batch, row by row."""
  logp_BT, batch = rule_curves.recorded(path)
  mask_BT = np.asarray(batch.loss_mask_BT)
  at = path.resolve()
  return {
    'name': str(at.relative_to(ROOT) if at.is_relative_to(ROOT) else path),
    'length': mask_BT.sum(1).tolist(),
    'adv': _packed(batch.adv_B),
    'logp': _packed(np.asarray(logp_BT)[mask_BT]),
    'old': _packed(np.asarray(batch.behavior_logp_BT)[mask_BT]),
  }


def table(place: str, batch: pathlib.Path) -> dict[str, Any]:
  """Evaluates a user's loss rule on a grid and on the recorded batch.

  The axes are the clip bounds, if the rule uses them, and the keyword-only arguments
  whose default is a float. If the table would be too large, the last arguments have no
  axis and keep their defaults.
  """
  rule, recorded = own_code.load(place), rule_curves.recorded(batch)
  mask_BT = np.asarray(recorded[1].loss_mask_BT)
  uses_bounds, uses_probability = _uses(rule, recorded)
  probabilities = PROBABILITIES if uses_probability else PROBABILITIES[:1]
  grid = _grid(probabilities)
  largest = LARGEST_TABLE // (len(grid[0]) * 2 + mask_BT.sum())
  axes = _axes(rule, uses_bounds, int(largest))
  gains, weights, tokens = [], [], []
  for values in itertools.product(*axes.values()):
    at = dict(zip(axes, values, strict=True))
    bounds = rule_curves.constant(*(at.pop(name) for name in BOUNDS if uses_bounds))
    own = {name.rpartition('.')[2]: value for name, value in at.items()}
    bound = functools.partial(rule, **own)
    gain_N, weight_N = rule_curves.curve(bound, *grid, bounds)
    gains.append(gain_N)
    weights.append(weight_N)
    tokens.append(np.asarray(loss.weights(bound, *recorded, bounds))[mask_BT])
  return {
    'title': place,
    'about': _about(rule),
    'clip': 'fixed' if uses_bounds else 'unclipped',
    'axes': [{'name': name, 'values': values} for name, values in axes.items()],
    'defaults': {f'{OWN}.{name}': value for name, value in _floats(rule).items()},
    'ratios': RATIOS.tolist(),
    'probabilities': probabilities.tolist(),
    'gains': _packed(gains),
    'weights': _packed(weights),
    'tokens': _packed(tokens),
  }


def page(own: str = '', batch: pathlib.Path = BATCH) -> str:
  """Returns the HTML of the explorer.

  Args:
    own: the place of a loss rule, `path/to/file.py:function`, or ''.
    batch: see rule_curves.recorded.
  """
  refused = refusals()
  sentences = sorted(set(refused.values()))
  data = {
    'knobs': knobs_of(),
    'sentences': sentences,
    'refused': {key: sentences.index(text) for key, text in refused.items()},
    'rules': rules(),
    'recipe': clip.Recipe()._asdict(),
    'tolerance': knobs.TOLERANCE,
    'methods': METHODS,
    'batch': recorded_of(batch),
    'own': table(own, batch) if own else None,
  }
  text = (PARTS / 'page.html').read_text()
  for part in ('style.css', 'formulas.html', 'rules.js', 'charts.js', 'page.js'):
    text = text.replace(f'{{{{{part}}}}}', (PARTS / part).read_text().strip())
  # A docstring may contain '</script>', which would end the element.
  return text.replace('{{data}}', _json(data).replace('<', '\\u003c'))


def main() -> None:
  """Writes the page that the command line describes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('own', nargs='?', default='', help='path/to/file.py:function')
  parser.add_argument('--batch', type=pathlib.Path, default=BATCH)
  parser.add_argument('--out', type=pathlib.Path, default=PAGE)
  given = parser.parse_args()
  if given.out == PAGE and (given.own or given.batch != BATCH):
    parser.error(
      'give --out=<file>.html: docs/explorer.html has no rule or batch of yours'
    )
  try:
    text = page(given.own, given.batch)
  except ValueError as error:
    parser.exit(2, f'{error}\n')
  files.write(given.out, text)
  print(f'{given.out}: {len(text.encode())} bytes')


def _about(rule: Callable) -> str:
  """Returns the docstring of a rule without its list of arguments and results."""
  text = inspect.getdoc(rule) or ''
  for heading in ('Args:', 'Returns:', 'Raises:'):
    text = text.partition(f'\n{heading}')[0]
  return text.strip()


def _floats(rule: Callable) -> dict[str, float]:
  """Returns the keyword-only arguments whose default is a float."""
  parameters = inspect.signature(rule).parameters.values()
  own = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
  return {p.name: p.default for p in own if isinstance(p.default, float)}


def _axes(rule: Callable, uses_bounds: bool, largest: int) -> dict[str, list[float]]:
  """Returns knob -> values, with at most `largest` combinations.

  Every knob has as many values as possible, from a quarter to four times its default.
  """
  floats = list(_floats(rule).items())
  for kept, count in itertools.product(range(len(floats), -1, -1), COUNTS):
    axes = dict(BOUNDS) if uses_bounds else {}
    for name, default in floats[:kept]:
      axes[f'{OWN}.{name}'] = list(dict.fromkeys(_around(default, count)))
    if math.prod(len(values) for values in axes.values()) <= largest:
      return axes
  raise ValueError(f'the batch is too long for a table; {rule_curves.WAY_OUT}')


def _around(default: float, count: int) -> list[float]:
  """Returns `count` values around a default, which is one of them."""
  if not math.isfinite(default):
    return [default] * count
  step_N = (np.arange(count) - count // 2) / (count // 2)
  value_N = default * 4.0**step_N if default else step_N
  return [x if x == default else float(f'{x:.3g}') for x in value_N.tolist()]


def _uses(rule: LossRule, recorded: tuple[Any, Any]) -> tuple[bool, bool]:
  """Returns whether the clip bounds and the probability of a token make a difference.

  A knob at its default may hide a difference, so the knobs have other values as well.
  """
  grid, uses_bounds, uses_probability = _grid(PROBABILITIES), False, False
  some = [_around(x, COUNTS[-1]) for x in _floats(rule).values()]
  for values in zip(*some, strict=True) if some else [()]:
    bound = functools.partial(rule, **dict(zip(_floats(rule), values, strict=True)))
    open_BT, closed_BT = (
      loss.weights(bound, *recorded, bounds)
      for bounds in (rule_curves.constant(), rule_curves.constant(1.0, 1.0))
    )
    uses_bounds |= bool((open_BT != closed_BT).any())
    for x_N in rule_curves.curve(bound, *grid, rule_curves.constant(0.8, 1.2)):
      x_SPR = x_N.reshape(2, -1, len(RATIOS))
      uses_probability |= bool((x_SPR != x_SPR[:, :1]).any())
  return uses_bounds, uses_probability


def _grid(probabilities: np.ndarray) -> tuple[Any, Any]:
  """Returns tokens for A = 1 and A = -1, every probability and every ratio."""
  signs = np.asarray([1, -1], np.float32)
  axes = np.meshgrid(signs, probabilities, RATIOS, indexing='ij')
  adv_N, probability_N, ratio_N = (x.reshape(-1) for x in axes)
  return rule_curves.single(ratio_N, probability_N, adv_N)


def _packed(array: Any) -> dict[str, str]:
  """Returns float32 numbers for JSON."""
  numbers = np.ascontiguousarray(jnp.asarray(array), '<f4')
  return {'float32': base64.b64encode(numbers.tobytes()).decode()}


def _json(value: Any) -> str:
  """Returns JSON in which infinity is the string 'inf'."""

  def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
      return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
      return [finite(x) for x in value]
    return 'inf' if value == math.inf else value

  return json.dumps(finite(value), separators=(',', ':'), allow_nan=False)


if __name__ == '__main__':
  main()
