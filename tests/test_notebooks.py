"""The notebooks are committed with the outputs of the code that they contain."""

import ast
import inspect
import pathlib
import pkgutil
import re

import nbformat
import pytest

from notebooks import execute, index

FOLDER = pathlib.Path(__file__).parents[1] / 'notebooks'
# Each notebook, what it prints, and how many figures it shows.
NOTEBOOKS = {
  '1_one_prompt.ipynb': ('target share', 1),
  '2_clip_rule.ipynb': ('positive share', 8),
  '3_batch_rule.ipynb': ('in the hard part, at every step: True', 7),
  '4_your_run.ipynb': ('clip.rule: fixed | balanced', 3),
  '5_counterfactual.ipynb': ('Freed: ', 5),
  '6_microscope.ipynb': ('cosine with the true gradient', 3),
  '7_your_own_loss.ipynb': ('share of A > 0', 6),
  '8_three_rules.ipynb': ('status 0', 1),
  '9_records.ipynb': ('stopped at', 2),
  '10_recorded_run.ipynb': ('balanced: rewards of the record: True', 1),
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
def test_outputs_are_those_of_the_code(name):
  notebook = execute.read(FOLDER / name)
  check_outputs(notebook, name)
  assert notebook.metadata.executed_code == execute.digest(notebook), (
    f'the code of {name} changed after it ran; python -m notebooks.execute {name}'
  )


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_every_notebook_has_links_to_the_others(name):
  cell = execute.read(FOLDER / name).cells[1]
  assert set(re.findall(r'\]\((\S+)\)', cell.source)) == {*NOTEBOOKS} - {name}
  assert cell.source == index.text(name.removesuffix('.ipynb')), (
    'the list of notebooks has changed; python -m notebooks.execute --list'
  )


def test_the_digest_covers_code_and_nothing_else():
  notebook = execute.read(FOLDER / '2_clip_rule.ipynb')
  before = execute.digest(notebook)
  notebook.cells[0].source += ' Prose.'
  first = next(cell for cell in notebook.cells if cell.cell_type == 'code')
  first.outputs = []
  assert notebook.cells[0].cell_type == 'markdown'
  assert execute.digest(notebook) == before
  first.source += '\n'
  assert execute.digest(notebook) != before


def parsed(name):
  """The code of a file without magics, and the package's objects it imports."""
  if name.endswith('.py'):
    text = (FOLDER / name).read_text()
  else:
    text = '\n'.join(execute.code(execute.read(FOLDER / name)))
  lines = [line for line in text.splitlines() if not line.startswith('%')]
  tree = ast.parse('\n'.join(lines))
  imported = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module.startswith(('bapo_jax', 'lab')):
      for alias in node.names:
        local = alias.asname or alias.name
        imported[local] = pkgutil.resolve_name(f'{node.module}.{alias.name}')
  return tree, imported


SOURCES = (*NOTEBOOKS, 'make.py')  # nothing runs make.py, which makes their recordings


@pytest.mark.parametrize('name', SOURCES)
def test_the_names_that_it_uses_exist(name):
  tree, imported = parsed(name)
  used = [
    (node.value.id, node.attr)
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  ]
  missing = [x for x in used if x[0] in imported and not hasattr(imported[x[0]], x[1])]
  assert not missing


def called(node, imported):
  """The object of the package that a call calls, or None."""
  match node.func:
    case ast.Name(id=name):
      return imported.get(name)
    case ast.Attribute(value=ast.Name(id=name), attr=attribute):
      return getattr(imported.get(name), attribute, None)


def misfits(tree, imported):
  """The calls of the package's functions whose arguments do not fit."""
  for node in ast.walk(tree):
    if not isinstance(node, ast.Call) or not (found := called(node, imported)):
      continue
    names = [keyword.arg for keyword in node.keywords]
    if None in names or any(isinstance(x, ast.Starred) for x in node.args):
      continue  # the number of arguments is known only when the code runs
    if inspect.isbuiltin(found):  # without a signature
      continue
    try:
      inspect.signature(found).bind(*node.args, **dict.fromkeys(names))
    except TypeError as error:
      yield f'{ast.unparse(node)[:60]}: {error}'


@pytest.mark.parametrize('name', SOURCES)
def test_its_calls_fit_the_functions(name):
  assert not list(misfits(*parsed(name)))


def test_a_call_with_other_arguments_is_found():
  tree = ast.parse('execute.read(path, 1)\nexecute.read(path)\nother.read()')
  (found,) = misfits(tree, {'execute': execute})
  assert 'execute.read(path, 1)' in found
