"""Writes the loss explorer: one HTML page that needs no server and no network.

  python -m lab.explorer                                     docs/explorer.html
  python -m lab.explorer my.py:sapo --out=my.html   with a loss or clip rule of yours
  python -m lab.explorer loss.gmpo --out=a.html     with a rule that the page lacks
  python -m lab.explorer --batch=runs/a/groups/80.jsonl --out=a.html

1. `knobs_of` describes the knobs with their sliders, `refusals` the pairs of rules that
   a run refuses;
2. `page` puts these, the recorded batch, the table of a rule of yours (own_table.py)
   and the files of explorer_page/ into a page of the package (run/document.py).

The page shows the rules whose formulas are in explorer_page/rules.js; what it says
about them is in explorer_page/formulas.html, and about a rule of yours in its
docstring. It names the knobs of a rule by part, rule and knob, `clip.fixed.high`,
because two rules may have a knob of the same name.
"""

import argparse
import itertools
import math
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic.fields import FieldInfo

from bapo_jax import knobs
from bapo_jax.algorithms import clip
from bapo_jax.algorithms.clip import Balanced, ClipRule
from bapo_jax.algorithms.loss import LossRule
from bapo_jax.algorithms.masks import MaskRule
from bapo_jax.methods import METHODS
from bapo_jax.parts import Part
from bapo_jax.run import document
from bapo_jax.runtime import files
from bapo_jax.training import refusals as refusals_lib
from bapo_jax.training.config import Config
from lab import own_table, rule_curves

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = pathlib.Path(__file__).with_name('explorer_page')
PAGE = ROOT / 'docs' / 'explorer.html'
BATCH = ROOT / 'notebooks' / '2_batch.npz'
PARTS: dict[str, type[Part]] = {'loss': LossRule, 'clip': ClipRule, 'mask': MaskRule}

# First and last position and step of the sliders; a knob that may be infinite has one
# more position at the end. `loss.cap` is for all rules without an entry of their own,
# and `_slider` gives the sliders of other knobs.
SLIDERS = {
  'loss.kl': (0.0, 1.0, 0.01),
  'loss.clipped.limit': (0.1, 3.0, 0.1),
  'loss.cap': (0.1, 5.0, 0.1),
  'loss.positive': (0.1, 6.0, 0.1),
  'loss.negative': (0.1, 6.0, 0.1),
  'loss.sapo.positive': (0.05, 10.0, 0.05),
  'loss.sapo.negative': (0.05, 10.0, 0.05),
  'loss.aspo.cap': (1.0, 10.0, 0.1),
  'loss.half_life': (1.0, 128.0, 1.0),
  'loss.limits': (0.1, 3.0, 0.05),
  'loss.safety': (0.5, 10.0, 0.5),
  'clip.low': (0.01, 1.0, 0.01),
  'clip.high': (0.01, 1.0, 0.01),
  'clip.dual': (1.1, 8.0, 0.1),
  'clip.cap': (1.5, 20.0, 0.5),
  'clip.fixed.low': (0.0, 1.0, 0.01),
  'clip.fixed.high': (1.0, 4.0, 0.01),
  'clip.target': (0.0, 1.0, 0.002),
  'clip.balanced.low': (0.02, 1.0, 0.02),
  'clip.balanced.high': (1.0, 6.0, 0.05),
  'clip.low_step': (0.0, 0.1, 0.005),
  'clip.high_step': (0.0, 0.5, 0.01),
  'mask.low': (0.01, 1.0, 0.01),
  'mask.high': (0.01, 1.0, 0.01),
  'mask.icepop.low': (0.0, 1.0, 0.05),
  'mask.icepop.high': (1.0, 10.0, 0.1),
  'mask.limit': (0.01, 1.0, 0.01),
  'mask.m2po.limit': (0.002, 0.2, 0.002),
}
# The batch of the page has rows of one source, and no teacher.
LEFT_OUT = {'clip.balanced.sources', 'clip.balanced.reused_high'}
LEFT_OUT |= {'loss.reference', 'loss.reference_estimator', 'loss.entropy'}
LEFT_OUT |= {'loss.given', 'loss.given_gamma', 'loss.imitation'}
RANGES = {'gspo': 1.002}  # of the axis of ratios, 4 for the other methods
LIMITS = {'ge': 'least', 'le': 'most', 'gt': 'above', 'lt': 'below'}  # on the page


def knobs_of() -> dict[str, dict[str, Any]]:
  """Returns name -> value, meaning, limits, and slider or choices of every knob."""
  described = {}
  for part, base in PARTS.items():
    rules = base.rules
    field = base.described()['rule']
    described[f'{part}.rule'] = {
      'value': rules.default,
      'meaning': field.description,
      'choices': list(rules.names),
    }
    fields = {f'{part}.{name}': x for name, x in base.model_fields.items()}
    for rule, kind in rules.names.items():
      fields |= {
        f'{part}.{rule}.{name}': x
        for name, x in kind.model_fields.items()
        if name not in base.model_fields
      }
    del fields[f'{part}.rule']
    described |= {
      name: _described(name, x) for name, x in fields.items() if name not in LEFT_OUT
    }
  return described


def _described(name: str, field: FieldInfo) -> dict[str, Any]:
  common = {'value': field.default, 'meaning': field.description}
  if isinstance(field.default, str):
    return common | {'choices': typing.get_args(field.annotation)}
  limits: dict[str, Any] = {LIMITS[x]: end for x, end in knobs.limits(field).items()}
  if limits.get('most') == math.inf:
    limits['infinite'] = bool(limits.pop('most'))
  limits['rising'] = knobs.is_rising(field)
  part, *_, knob = name.split('.')
  slider = SLIDERS.get(name) or SLIDERS.get(f'{part}.{knob}') or _slider(field.default)
  return common | limits | {'slider': slider}


def _slider(default: float | tuple[float, ...]) -> tuple[float, float, float]:
  """Returns a slider from 0 to about twice a default."""
  step = 10.0 ** round(math.log10(np.max(default)) - 2)
  return (0.0, float(np.ceil(2 * np.max(default) / step) * step), step)


def keyed(overrides: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the overrides of a config with the names that the page has for knobs."""
  keys = {}
  for name, value in overrides.items():
    part, _, knob = name.partition('.')
    base = PARTS.get(part)
    if base and knob not in base.model_fields:
      rule = overrides.get(f'{part}.rule', base.rules.default)
      name = f'{part}.{rule}.{knob}'
    keys[name] = value
  return keys


def methods() -> dict[str, dict[str, Any]]:
  """Returns title -> settings of the published methods that the page can show."""
  known = knobs_of()
  shown = {}
  for name, method in METHODS.items():
    settings = keyed(method.overrides)
    if settings.keys() <= known.keys():
      axis = {'range': RANGES[name]} if name in RANGES else {}
      shown[method.title] = settings | axis
  return shown


def refusals() -> dict[str, str]:
  """Returns 'loss|clip|aggregate|contribution|weight' -> the sentence of a refusal."""
  config = Config()
  refused = {}
  for values in itertools.product(
    LossRule.rules.names,
    ClipRule.rules.names,
    _choices(LossRule, 'aggregate'),
    _choices(Balanced, 'contribution'),
    _choices(Balanced, 'weight'),
  ):
    rule, bounds, aggregate, contribution, weight = values
    of_search = {'contribution': contribution, 'weight': weight}
    of_clip = {'rule': bounds} | (of_search if bounds == 'balanced' else {})
    parts = {
      'clip': ClipRule.rules.validate(of_clip),
      'loss': LossRule.rules.validate({'rule': rule, 'aggregate': aggregate}),
    }
    for refusal in refusals_lib.of_config(config.model_copy(update=parts)):
      refused.setdefault('|'.join(values), refusal)
  return refused


def _choices(section: type[Part], name: str) -> tuple[str, ...]:
  return typing.get_args(section.model_fields[name].annotation)


def recorded_of(path: pathlib.Path) -> dict[str, Any]:
  """Returns the tokens of a recorded batch, row by row."""
  logp_BT, batch = rule_curves.recorded(path)
  mask_BT = np.asarray(batch.loss_mask_BT)
  adv_BT = np.asarray(batch.adv_BT)
  # One number per response if all of its tokens have the same advantage.
  equal = not np.ptp(np.where(mask_BT, adv_BT, adv_BT[:, :1]), axis=1).any()
  at = path.resolve()
  return {
    'name': str(at.relative_to(ROOT) if at.is_relative_to(ROOT) else path),
    'length': mask_BT.sum(1).tolist(),
    'adv': own_table.packed(adv_BT[:, 0] if equal else adv_BT[mask_BT]),
    'logp': own_table.packed(np.asarray(logp_BT)[mask_BT]),
    'old': own_table.packed(np.asarray(batch.behavior_logp_BT)[mask_BT]),
  }


def page(own: str = '', batch: pathlib.Path = BATCH) -> str:
  """Returns the HTML of the explorer.

  Args:
    own: a loss or clip rule, `path/to/file.py:function` or `loss.gmpo`, or ''.
    batch: see rule_curves.recorded.
  """
  refused = refusals()
  sentences = sorted(set(refused.values()))
  data = {
    'knobs': knobs_of(),
    'sentences': sentences,
    'refused': {key: sentences.index(text) for key, text in refused.items()},
    'bounds': {
      name: getattr(kind, 'bounds', '') for name, kind in LossRule.rules.names.items()
    },
    'recipe': clip.Recipe.settings._asdict(),
    'tolerance': clip.TOLERANCE,
    'methods': methods(),
    'typed': {method.title: name for name, method in METHODS.items()},
    'batch': recorded_of(batch),
    'own': own_table.table(own, batch) if own else None,
  }
  style, body, formulas, *scripts = (
    (SOURCES / file).read_text().strip()
    for file in ('explorer.css', 'page.html', 'formulas.html', 'rules.js', 'page.js')
  )
  body = body.replace('{{formulas.html}}', formulas)
  return document.document(
    'Loss explorer', _finite(data), body, style, '\n'.join(scripts)
  )


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


def _finite(value: Any) -> Any:
  """Replaces infinity by the string 'inf', which JSON can have."""
  if isinstance(value, Mapping):
    return {key: _finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(x) for x in value]
  return 'inf' if value == math.inf else value


if __name__ == '__main__':
  main()
