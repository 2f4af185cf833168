"""The tables of algorithms.md are what configs, tests and measurements say."""

import math
import pathlib
import re

import numpy as np
import pytest

from bapo_jax.training import config as config_lib
from docs.reference import write_algorithms
from docs.reference.write_algorithms import METHODS, PAGE

ROOT = pathlib.Path(__file__).parents[1]
CASES = [(slot, name) for slot, methods in METHODS.items() for name in methods]
MEASURED = re.compile(r'\b\d+e[-+]\d+\b')


def test_the_tables_are_current():
  """Up to the measured differences, whose last bits depend on the processor."""
  text = PAGE.read_text()
  written = write_algorithms.document(text)
  command = 'python -m docs.reference.write_algorithms'
  assert MEASURED.sub('', written) == MEASURED.sub('', text), command


def test_stored_and_measured_differences_are_small():
  rows = write_algorithms.parity()
  lines = [write_algorithms.parity_row(*row)[:3] for row in rows]
  text = PAGE.read_text()
  for cells, (*_, value, gradient) in zip(lines, rows, strict=True):
    (line,) = [x for x in text.splitlines() if x.startswith(f'| {" | ".join(cells)} |')]
    stored = [float(x) for x in line.strip(' |').split(' | ')[3:]]
    assert max(*stored, value, gradient) < 1e-6
  # Something was compared: no two programs round alike.
  assert sum(gradient > 0 for *_, gradient in rows) > len(rows) / 2


@pytest.mark.parametrize(('slot', 'name'), CASES)
def test_every_limit_of_a_rule_has_a_source(slot, name):
  method = METHODS[slot][name]
  overrides = method.overrides
  if isinstance(overrides, str):  # a config file, with sources beside its values
    return
  values = config_lib.Config().model_dump()
  config = config_lib.parse(config_lib.merged(values, overrides))
  for key, rule in overrides.items():
    if key.endswith('.rule'):
      section = config.model_dump()
      for part in [*key.split('.')[:-1], rule]:
        section = section[part]
      for knob, value in section.items():
        limits = [x for x in np.atleast_1d(value) if isinstance(x, int | float)]
        if limits and all(math.isfinite(x) for x in limits):
          assert f'{key.removesuffix(".rule")}.{rule}.{knob}' in method.values


def test_every_named_test_exists():
  sources = [path.read_text() for path in ROOT.glob('tests/**/test_*.py')]
  defined = {x for text in sources for x in re.findall(r'^def test_(\w+)', text, re.M)}
  named = {x for slot, name in CASES for x in METHODS[slot][name].tests}
  assert named and named <= defined, named - defined


def test_a_default_that_is_not_the_published_value_is_refused():
  method = METHODS['clip']['dual clip']
  wrong = method._replace(values={'clip.dual': (4.0, 'paper')})
  with pytest.raises(ValueError, match=r'clip\.fixed\.dual=3\.0, but 4\.0'):
    write_algorithms.row('dual clip', wrong)
