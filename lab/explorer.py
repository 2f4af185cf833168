"""Writes the loss explorer: one HTML page that needs no server and no network.

  python -m lab.explorer                                     docs/explorer.html
  python -m lab.explorer my.py:sapo --out=my.html   with a loss or clip rule of yours
  python -m lab.explorer --batch=runs/a/groups/80.jsonl --out=a.html

1. `knobs_of` describes the knobs with their sliders, `refusals` the pairs of rules that
   a run refuses;
2. `page` puts these, the recorded batch, the table of a rule of yours (own_table.py)
   and the files of explorer_page/ into one file.

The built-in rules are written again in explorer_page/rules.js.
"""

import argparse
import itertools
import json
import math
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from bapo_jax.algorithms.knobs import ClipConfig, LossConfig, MaskConfig

from bapo_jax import knobs as knobs_lib
from bapo_jax.algorithms import clip, knobs, loss, masks
from bapo_jax.knobs import Section
from bapo_jax.runtime import files
from lab import own_table, rule_curves

ROOT = pathlib.Path(__file__).parents[1]
PARTS = pathlib.Path(__file__).with_name('explorer_page')
PAGE = ROOT / 'docs' / 'explorer.html'
BATCH = ROOT / 'notebooks' / '2_batch.npz'

# First and last position and step of the sliders; a knob that may be infinite has one
# more position at the end.
SLIDERS = {
  'loss.limit': (0.1, 3.0, 0.1),
  'loss.cap': (0.1, 5.0, 0.1),
  'loss.cap': (0.1, 5.0, 0.1),
  'loss.positive': (0.05, 10.0, 0.05),
  'loss.negative': (0.05, 10.0, 0.05),
  'loss.positive': (0.1, 6.0, 0.1),
  'loss.negative': (0.1, 6.0, 0.1),
  'loss.cap': (1.0, 10.0, 0.1),
  'loss.half_life': (1.0, 128.0, 1.0),
  'loss.limits': (0.1, 3.0, 0.05),
  'loss.safety': (0.5, 10.0, 0.5),
  'clip.low': (0.0, 1.0, 0.01),
  'clip.high': (1.0, 4.0, 0.01),
  'clip.dual': (1.1, 8.0, 0.1),
  'clip.target': (0.0, 1.0, 0.002),
  'clip.low': (0.02, 1.0, 0.02),
  'clip.high': (1.0, 6.0, 0.05),
  'clip.low_step': (0.0, 0.1, 0.005),
  'clip.high_step': (0.0, 0.5, 0.01),
  'clip.dual': (1.1, 8.0, 0.1),
  'clip.low': (0.01, 1.0, 0.01),
  'clip.high': (0.01, 1.0, 0.01),
  'clip.cap': (1.5, 20.0, 0.5),
  'clip.dual': (1.1, 8.0, 0.1),
  'mask.low': (0.01, 1.0, 0.01),
  'mask.high': (0.01, 1.0, 0.01),
  'mask.low': (0.01, 1.0, 0.01),
  'mask.high': (0.01, 1.0, 0.01),
  'mask.low': (0.0, 1.0, 0.05),
  'mask.high': (1.0, 10.0, 0.1),
  'mask.limit': (0.01, 1.0, 0.01),
  'mask.limit': (0.002, 0.2, 0.002),
  'mask.limit': (0.01, 1.0, 0.01),
}
# The penalty is no part of a rule; the batch of the page has rows of one source.
LEFT_OUT = {
  'loss.kl',
  'loss.kl_direction',
  'clip.sources',
  'clip.reused_high',
}
RULES = {'loss': loss.RULES, 'clip': clip.RULES, 'mask': masks.RULES}
SLOTS = {'loss': LossConfig, 'clip': ClipConfig, 'mask': MaskConfig}
# Settings of published methods; `range` is how far the axis of ratios goes.
METHODS: dict[str, dict[str, Any]] = {
  'Balanced PO': {},
  'PPO, GRPO': {'clip.rule': 'fixed'},
  'DAPO (clip-higher)': {'clip.rule': 'fixed', 'clip.high': 1.28},
  'dual clip': {'clip.rule': 'fixed', 'clip.dual': 3.0},
  'Balanced PO, public code': {'clip.rule': 'recipe', 'loss.limit': 20.0},
  'decoupled PPO (AReaL)': {'loss.rule': 'decoupled', 'clip.rule': 'fixed'},
  'GSPO': {
    'loss.rule': 'sequence',
    'loss.aggregate': 'sequence',
    'clip.rule': 'fixed',
    'clip.low': 0.9997,
    'clip.high': 1.0004,
    'range': 1.002,
  },
  'CISPO': {'loss.rule': 'cispo', 'clip.rule': 'fixed', 'clip.low': 0.0},
  'TIS': {'loss.rule': 'tis', 'clip.rule': 'unclipped'},
  'DPPO, binary TV': {
    'loss.rule': 'tis',
    'loss.cap': 20.0,
    'clip.rule': 'unclipped',
    'mask.rule': 'dppo_tv',
  },
  'DPPO, binary KL': {
    'loss.rule': 'tis',
    'loss.cap': 20.0,
    'clip.rule': 'unclipped',
    'mask.rule': 'dppo_kl',
  },
  'IcePop': {
    'loss.rule': 'tis',
    'loss.cap': math.inf,
    'clip.rule': 'unclipped',
    'mask.rule': 'icepop',
  },
  'KPop': {
    'loss.rule': 'tis',
    'loss.cap': math.inf,
    'clip.rule': 'unclipped',
    'mask.rule': 'kpop',
  },
  'M2PO': {'clip.rule': 'unclipped', 'mask.rule': 'm2po'},
  'DeepSeek-V3.2 (sequence masking)': {'clip.rule': 'fixed', 'mask.rule': 'opsm'},
  'DCPO': {'clip.rule': 'dcpo'},
  'VESPO': {'loss.rule': 'vespo', 'clip.rule': 'unclipped'},
  'ASPO': {'loss.rule': 'aspo', 'clip.rule': 'fixed'},
  'FIPO': {'loss.rule': 'fipo', 'clip.rule': 'fixed'},
  'SAPO': {
    'loss.rule': 'sapo',
    'loss.aggregate': 'sequence',
    'clip.rule': 'unclipped',
  },
}


def knobs_of() -> dict[str, dict[str, Any]]:
  """Returns name -> value, meaning, limits, and slider or choices of every knob."""
  described = {}
  for slot, section in SLOTS.items():
    for name, field, value in knobs_lib.fields(section(), slot):
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
      'about': own_table.about(rule),
      'bounds': getattr(getattr(slot, name), 'bounds', ''),
    }

  return {
    slot: {name: described(section(), name, rule) for name, rule in RULES[slot].items()}
    for slot, section in SLOTS.items()
  }


def recorded_of(path: pathlib.Path) -> dict[str, Any]:
  """Returns the tokens of a recorded batch, row by row."""
  logp_BT, batch = rule_curves.recorded(path)
  mask_BT = np.asarray(batch.loss_mask_BT)
  at = path.resolve()
  return {
    'name': str(at.relative_to(ROOT) if at.is_relative_to(ROOT) else path),
    'length': mask_BT.sum(1).tolist(),
    'adv': own_table.packed(batch.adv_B),
    'logp': own_table.packed(np.asarray(logp_BT)[mask_BT]),
    'old': own_table.packed(np.asarray(batch.behavior_logp_BT)[mask_BT]),
  }


def page(own: str = '', batch: pathlib.Path = BATCH) -> str:
  """Returns the HTML of the explorer.

  Args:
    own: the place of a loss or clip rule, `path/to/file.py:function`, or ''.
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
    'own': own_table.table(own, batch) if own else None,
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
