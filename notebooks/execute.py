"""Executes notebooks and saves them with their outputs: commit them so.

  python -m notebooks.execute [1_one_prompt.ipynb ...]
  python -m notebooks.execute --list   writes the list of all notebooks, runs nothing

The list is the second cell of every notebook (index.py).
Progress bars and warnings (stderr) are not saved: they differ from machine to machine.
Pictures are saved with 256 colours.
A digest of the code that ran is saved beside the outputs.
"""

import base64
import hashlib
import pathlib
import sys
import time

import nbclient
import nbformat

from lab import plots
from notebooks import index

HERE = pathlib.Path(__file__).parent
INDEX = 'index'  # tag and id of the list of notebooks


def read(path: pathlib.Path) -> nbformat.NotebookNode:
  """Reads a saved notebook."""
  notebook = nbformat.read(path, as_version=4)
  assert isinstance(notebook, nbformat.NotebookNode)
  return notebook


def code(notebook: nbformat.NotebookNode) -> list[str]:
  """Returns the source of every code cell."""
  return [cell.source for cell in notebook.cells if cell.cell_type == 'code']


def digest(notebook: nbformat.NotebookNode) -> str:
  """Returns a digest of the code cells, 16 hexadecimal digits long."""
  return hashlib.sha256('\0'.join(code(notebook)).encode()).hexdigest()[:16]


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
  """Runs a notebook from its first cell to its last in a fresh kernel.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell fails.
  """
  notebook = read(path)
  list_notebooks(notebook, path.stem)
  folder = {'metadata': {'path': str(path.parent)}}
  client = nbclient.NotebookClient(
    notebook,
    timeout=600,
    resources=folder,
    coalesce_streams=True,  # else the cuts between outputs depend on timing
  )
  client.execute()
  for cell in notebook.cells:
    cell.metadata.pop('execution', None)  # times of day
    if cell.cell_type == 'code':
      cell.outputs = [out for out in cell.outputs if out.get('name') != 'stderr']
  shrink(notebook)
  notebook.metadata.language_info = {'name': 'python'}
  notebook.metadata.executed_code = digest(notebook)
  return notebook


def list_notebooks(notebook: nbformat.NotebookNode, name: str) -> None:
  """Writes the list of all notebooks into the second cell, which it adds if needed."""
  cells = notebook.cells
  if cells[1].metadata.get('tags') != [INDEX]:
    metadata = {'tags': [INDEX]}
    cells.insert(1, nbformat.v4.new_markdown_cell(metadata=metadata, id=INDEX))
  cells[1].source = index.text(name)


def shrink(notebook: nbformat.NotebookNode) -> None:
  """Reduces the pictures of a notebook to 256 colours."""
  for cell in notebook.cells:
    for output in cell.get('outputs', ()):
      data = output.get('data', {})
      if 'image/png' in data:
        small = plots.with_256_colours(base64.b64decode(data['image/png']))
        data['image/png'] = base64.b64encode(small).decode() + '\n'


def main() -> None:
  """Saves each notebook named on the command line, or all."""
  arguments = sys.argv[1:]
  only_list = arguments == ['--list']
  if only_list or not arguments:
    arguments = sorted(path.name for path in HERE.glob('*.ipynb'))
  for name in arguments:
    path, began = HERE / name, time.monotonic()
    if only_list:
      notebook = read(path)
      list_notebooks(notebook, path.stem)
    else:
      notebook = execute(path)
    nbformat.write(notebook, path)
    seconds = time.monotonic() - began
    print(f'{name}: {path.stat().st_size} bytes, {seconds:.0f} s')


if __name__ == '__main__':
  main()
