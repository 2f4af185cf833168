"""Every notebook runs from a clean checkout, and is committed without outputs."""

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each notebook, and what it must have printed by its end.
NOTEBOOKS = {
  '1_one_prompt.ipynb': 'positive share',
  '2_clip_rule.ipynb': 'positive share',
  '3_batch_rule.ipynb': 'on the shelf at every step: True',
}


def test_every_notebook_is_run():
  assert {path.name for path in (ROOT / 'notebooks').glob('*.ipynb')} == set(NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize('name', NOTEBOOKS)
def test_runs(name):
  path = ROOT / 'notebooks' / name
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get('outputs') for cell in notebook.cells)
  client = nbclient.NotebookClient(
    notebook, timeout=600, resources={'metadata': {'path': str(path.parent)}}
  )
  client.execute()
  printed = [o.get('text', '') for c in notebook.cells for o in c.get('outputs', [])]
  assert any(NOTEBOOKS[name] in text for text in printed)
