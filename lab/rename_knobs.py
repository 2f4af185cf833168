"""Renames the knobs in recorded configs.

  python -m lab.rename_knobs RUN...        rewrites the config.json of these workdirs

Of {'rule': 'fixed', 'fixed': {'low': 0.8}, 'balanced': {...}, 'own': {}} only
{'rule': 'fixed', 'low': 0.8} stays: the knobs of the chosen rule, and those that all
rules of the part have. The sizes of the embedded policy move from `model` to `sft`. A
config with the new names stays as it is.
"""

import argparse
import copy
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from bapo_jax.runtime import files
from bapo_jax.training.config import PARTS
from bapo_jax.training.knobs import SftConfig


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the nested values of a config with the new names of its knobs."""
  new = copy.deepcopy(dict(values))
  for path, rules in PARTS.items():
    *sections, name = path.split('.')
    section = functools.reduce(lambda x, key: x.get(key, {}), sections, new)
    part = section.get(name, {})  # older configs lack some parts
    levels = {x for x in (*rules.names, 'own') if isinstance(part.get(x), dict)}
    if levels:
      chosen = part['rule'] if part['rule'] in rules.names else 'own'
      shared = {key: value for key, value in part.items() if key not in levels}
      section[name] = shared | part.get(chosen, {})
  for name in ('rewards', 'problems'):
    if 'own' in new.get(name, {}):
      new[name]['custom'] = new[name].pop('own')
  model = new.get('model', {})
  sizes = {name: model.pop(name) for name in SftConfig.model_fields if name in model}
  if sizes:
    new['sft'] = sizes | new.get('sft', {})
  return new


def main() -> None:
  """Rewrites the config.json of the workdirs on the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('runs', nargs='+', metavar='RUN', help='workdir of a run')
  for run in parser.parse_args().runs:
    path = pathlib.Path(run, 'config.json')
    files.write_json(str(path), renamed(json.loads(path.read_text())))


if __name__ == '__main__':
  main()
