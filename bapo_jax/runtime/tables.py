"""Formats tables as Markdown."""

from collections.abc import Iterable, Sequence

RULES = {'l': ':--', 'r': '--:'}


def markdown(rows: Iterable[Sequence[str]], header: Sequence[str], align: str) -> str:
  """Formats a table, one line per row, without a newline at the end.

  >>> print(markdown([['grpo', '0.5']], ['cell', 'accuracy'], 'lr'))
  | cell | accuracy |
  |:--|--:|
  | grpo | 0.5 |

  Args:
    rows: the cells.
    header: the names of the columns.
    align: one letter per column, 'l' for left and 'r' for right.

  Raises:
    ValueError: a row does not have one cell per column.
  """
  lines = [
    _line(header, len(align)),
    f'|{"|".join(RULES[letter] for letter in align)}|',
  ]
  return '\n'.join([*lines, *(_line(row, len(align)) for row in rows)])


def _line(cells: Sequence[str], columns: int) -> str:
  if len(cells) != columns:
    raise ValueError(f'{len(cells)} cells for {columns} columns: {list(cells)}')
  # A bar or a newline would end the cell.
  escaped = (cell.replace('|', '\\|').replace('\n', ' ') for cell in cells)
  return f'| {" | ".join(escaped)} |'
