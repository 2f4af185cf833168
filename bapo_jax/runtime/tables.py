"""Tables as Markdown text."""

from collections.abc import Iterable, Sequence

RULES = {'l': ':--', 'r': '--:'}


def markdown(rows: Iterable[Sequence[str]], header: Sequence[str], align: str) -> str:
  """A table, one line per row; it ends without a newline.

  >>> print(markdown([['grpo', '0.5']], ['cell', 'accuracy'], 'lr'))
  | cell | accuracy |
  |:--|--:|
  | grpo | 0.5 |

  Args:
    align: a letter per column, 'l' for left and 'r' for right.

  Raises:
    ValueError: a row has more or fewer cells than `align` has letters.
  """
  lines = [_line(header, len(align)), f'|{"|".join(RULES[one] for one in align)}|']
  return '\n'.join([*lines, *(_line(row, len(align)) for row in rows)])


def _line(cells: Sequence[str], columns: int) -> str:
  if len(cells) != columns:
    raise ValueError(f'{len(cells)} cells for {columns} columns: {list(cells)}')
  # A bar or a newline inside a cell would end it.
  shown = (cell.replace('|', '\\|').replace('\n', ' ') for cell in cells)
  return f'| {" | ".join(shown)} |'
