"""The tables of algorithms.md are what configs, tests and measurements say."""

import math
import operator
import pathlib
import re

import numpy as np
import pytest

from bapo_jax.methods import METHODS
from bapo_jax.training.config import PARTS, Config, merged, parse
from docs.reference import write_algorithms
from docs.reference.write_algorithms import PAGE, ROWS

ROOT = pathlib.Path(__file__).parents[1]
CASES = {name: row for rows in ROWS.values() for name, row in rows.items()}
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


def test_every_method_is_on_the_page():
  assert sorted(CASES) == sorted(METHODS)


@pytest.mark.parametrize('name', CASES)
def test_every_limit_of_a_rule_has_a_source(name):
  overrides = METHODS[name].overrides
  config = parse(merged(Config().model_dump(), overrides))
  for part in PARTS.keys() & {key.removesuffix('.rule') for key in overrides}:
    rule = operator.attrgetter(part)(config)
    for knob in type(rule).model_fields.keys() - PARTS[part].base.model_fields.keys():
      limits = np.atleast_1d(getattr(rule, knob)).tolist()
      limits = [x for x in limits if isinstance(x, int | float)]
      if limits and all(math.isfinite(x) for x in limits):
        assert f'{part}.{knob}' in CASES[name].values


def test_every_named_test_exists():
  sources = [path.read_text() for path in ROOT.glob('tests/**/test_*.py')]
  defined = {x for text in sources for x in re.findall(r'^def test_(\w+)', text, re.M)}
  named = {x for row in CASES.values() for x in row.tests}
  assert named and named <= defined, named - defined


def test_a_default_that_is_not_the_published_value_is_refused():
  wrong = CASES['dual_clip']._replace(values={'clip.dual': (4.0, 'paper')})
  with pytest.raises(ValueError, match=r'clip\.dual=3\.0, but 4\.0'):
    write_algorithms.row('dual_clip', wrong)
