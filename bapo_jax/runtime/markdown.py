"""Formats tables in Markdown, and makes untrusted text visible.

A problem, an answer or a response may contain terminal escapes, or marks that reverse
the direction of writing.
"""

import unicodedata
from collections.abc import Iterable, Sequence

# Control, format (bidirectional marks too), surrogate, line and paragraph separator.
INVISIBLE = frozenset({'Cc', 'Cf', 'Cs', 'Zl', 'Zp'})


def table(rows: Iterable[Sequence[str]], header: Sequence[str], align: str) -> str:
  """Formats a table, one line per row, without a newline at the end.

  `align` has one letter per column, 'l' for left and 'r' for right.
  """
  rules = ['--:' if letter == 'r' else ':--' for letter in align]
  lines = [
    # A bar or a newline inside a cell would end it.
    ' | '.join(cell.replace('|', '\\|').replace('\n', ' ') for cell in row)
    for row in (header, *rows)
  ]
  first, *others = (f'| {line} |' for line in lines)
  return '\n'.join([first, f'|{"|".join(rules)}|', *others])


def visible(text: str) -> str:
  """Replaces invisible characters, except newlines and tabs, by Python escapes."""
  return ''.join(
    char.encode('unicode_escape').decode()
    if char not in '\n\t' and unicodedata.category(char) in INVISIBLE
    else char
    for char in text
  )


def shortened(text: str, limit: int) -> str:
  """Replaces the middle of a text longer than the limit by the number of characters."""
  if len(text) <= limit:
    return text
  half = limit // 2
  cut = f'[... {len(text) - 2 * half} characters left out ...]'
  return f'{text[:half]}\n{cut}\n{text[-half:]}'
