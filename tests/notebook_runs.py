"""Expected outputs of the notebooks."""

import pathlib

import nbformat

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
