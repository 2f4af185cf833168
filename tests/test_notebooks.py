"""Every notebook runs from a clean checkout, and is committed with its outputs."""

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each notebook, what it prints by its end, and how many figures it shows.
NOTEBOOKS = {
  '1_one_prompt.ipynb': ('target share', 0),
  '2_clip_rule.ipynb': ('positive share', 6),
  '3_batch_rule.ipynb': ('in the hard part, at every step: True', 5),
}


def read(name: str) -> nbformat.NotebookNode:
  return nbformat.read(ROOT / 'notebooks' / name, as_version=4)


def check_outputs(notebook: nbformat.NotebookNode, name: str) -> None:
  """Every cell ran, in order; the text is there, and the figures."""
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  outputs = [output for cell in cells for output in cell.outputs]
  assert not [output for output in outputs if output.output_type == 'error']
  printed, figures = NOTEBOOKS[name]
  assert any(printed in output.get('text', '') for output in outputs)
  assert sum('image/png' in output.get('data', {}) for output in outputs) == figures


def test_every_notebook_is_run():
  assert {path.name for path in (ROOT / 'notebooks').glob('*.ipynb')} == set(NOTEBOOKS)


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_outputs_are_committed(name):
  check_outputs(read(name), name)


@pytest.mark.slow
@pytest.mark.parametrize('name', NOTEBOOKS)
def test_runs(name):
  notebook = read(name)
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      cell.outputs, cell.execution_count = [], None
  folder = {'metadata': {'path': str(ROOT / 'notebooks')}}
  nbclient.NotebookClient(notebook, timeout=600, resources=folder).execute()
  check_outputs(notebook, name)
