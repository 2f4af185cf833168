"""Executes notebooks and saves them with their outputs: commit them so.

  python -m notebooks.execute [1_one_prompt.ipynb ...]

Progress bars and warnings (stderr) are not saved: they differ from machine to machine.
"""

import pathlib
import sys

import nbclient
import nbformat

HERE = pathlib.Path(__file__).parent


def read(path: pathlib.Path) -> nbformat.NotebookNode:
  """The notebook as it is saved."""
  notebook = nbformat.read(path, as_version=4)
  assert isinstance(notebook, nbformat.NotebookNode)
  return notebook


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
  """The notebook, run from its first cell to its last in a fresh kernel.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell fails.
  """
  notebook = read(path)
  folder = {'metadata': {'path': str(path.parent)}}
  nbclient.NotebookClient(notebook, timeout=600, resources=folder).execute()
  for cell in notebook.cells:
    cell.metadata.pop('execution', None)  # times of day
    if cell.cell_type == 'code':
      cell.outputs = [out for out in cell.outputs if out.get('name') != 'stderr']
  notebook.metadata.language_info = {'name': 'python'}
  return notebook


def main() -> None:
  """Saves each notebook named on the command line, or all."""
  names = sys.argv[1:] or sorted(path.name for path in HERE.glob('*.ipynb'))
  for name in names:
    notebook = execute(HERE / name)
    nbformat.write(notebook, HERE / name)
    print(f'{name}: {(HERE / name).stat().st_size} bytes')


if __name__ == '__main__':
  main()
