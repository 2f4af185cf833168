"""Every notebook runs from a clean checkout, and is committed without outputs."""

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path, tmp_path):
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get('outputs') for cell in notebook.cells)
  client = nbclient.NotebookClient(
    notebook, timeout=600, resources={'metadata': {'path': str(path.parent)}}
  )
  client.execute()
  printed = [o.get('text', '') for c in notebook.cells for o in c.get('outputs', [])]
  assert any('positive share' in text for text in printed)
