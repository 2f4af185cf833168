"""Every notebook runs from a clean checkout, and is committed with its outputs."""

import ast
import importlib
import pathlib
import pkgutil

import nbformat
import pytest

from notebooks import execute

FOLDER = pathlib.Path(__file__).parents[1] / 'notebooks'
# Each notebook, what it prints, and how many figures it shows.
NOTEBOOKS = {
  '1_one_prompt.ipynb': ('target share', 0),
  '2_clip_rule.ipynb': ('positive share', 8),
  '3_batch_rule.ipynb': ('in the hard part, at every step: True', 6),
  '4_your_run.ipynb': ('clip.rule: fixed | balanced', 3),
  '5_counterfactual.ipynb': ('Freed: ', 4),
  '6_microscope.ipynb': ('cosine with the true gradient', 1),
}


def check_outputs(notebook: nbformat.NotebookNode, name: str) -> None:
  """Every cell ran, in order; the text is there, and the figures, and nothing else."""
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  outputs = [output for cell in cells for output in cell.outputs]
  assert not [out for out in outputs if out.output_type == 'error']
  assert not [out for out in outputs if out.get('name') == 'stderr']
  printed, figures = NOTEBOOKS[name]
  assert any(printed in out.get('text', '') for out in outputs)
  assert sum('image/png' in out.get('data', {}) for out in outputs) == figures


def test_every_notebook_is_run():
  assert {path.name for path in FOLDER.glob('*.ipynb')} == set(NOTEBOOKS)


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_outputs_are_committed(name):
  check_outputs(execute.read(FOLDER / name), name)


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_the_names_that_it_uses_exist(name):
  cells = [c.source for c in execute.read(FOLDER / name).cells if c.cell_type == 'code']
  lines = '\n'.join(cells).splitlines()
  tree = ast.parse('\n'.join(line for line in lines if not line.startswith('%')))
  imported = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module.startswith(('bapo_jax', 'lab')):
      for alias in node.names:
        module = importlib.import_module(node.module)
        if not hasattr(module, alias.name):
          importlib.import_module(f'{node.module}.{alias.name}')
        imported[alias.name] = pkgutil.resolve_name(f'{node.module}:{alias.name}')
  used = [
    (node.value.id, node.attr)
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  ]
  missing = [x for x in used if x[0] in imported and not hasattr(imported[x[0]], x[1])]
  assert not missing


@pytest.mark.nightly
@pytest.mark.parametrize('name', NOTEBOOKS)
def test_runs(name):
  check_outputs(execute.execute(FOLDER / name), name)
