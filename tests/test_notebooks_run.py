"""Every notebook runs from a clean checkout; the two shortest in every suite."""

import pytest
from test_notebooks import FOLDER, NOTEBOOKS, check_outputs

from notebooks import execute

SHORT = ('2_clip_rule.ipynb', '4_your_run.ipynb')


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.nightly)
    for name in NOTEBOOKS
  ],
)
def test_runs(name, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS')  # eight devices, on which nobody runs a notebook
  check_outputs(execute.execute(FOLDER / name), name)
