"""Finds repeated problems, within a data set or across training and evaluation.

Problems are equal if their pictures and, up to white space, their texts and those of
earlier turns are equal.
Lines that start or end every problem of a data set (an instruction) are ignored.
"""

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

from bapo_jax.data import pictures
from bapo_jax.data.row import Row


def keys(rows: Sequence[Row], *, whole: bool = False) -> list[str]:
  """Returns a key for each row; two keys are equal exactly if the problems are.

  `whole` keeps the instruction that all rows have.
  """
  # Splits each distinct text once.
  lines = {row.problem: tuple(row.problem.strip().splitlines()) for row in rows}
  texts = set(lines.values())
  start = 0
  end = 0
  # A single problem has all lines in common with itself.
  if len(texts) > 1 and not whole:
    longest = min(map(len, texts)) - 1
    start = min(longest, _count_common(texts))
    end = min(longest - start, _count_common(lines[::-1] for lines in texts))

  def key(text: Sequence[str]):
    return ' '.join(unicodedata.normalize('NFC', '\n'.join(text)).split())

  key_of = {text: key(x[start : len(x) - end]) for text, x in lines.items()}
  return [
    ' '.join(
      [
        key_of[row.problem],
        # No text contains NUL.
        *(f'\0{role} {key([text])}' for role, text in row.history),
        *pictures.digests(row.pictures),
      ]
    )
    for row in rows
  ]


def _count_common(texts: Iterable[Sequence[str]]):
  """Counts the first lines that all texts have."""
  same = (len(set(lines)) == 1 for lines in zip(*texts, strict=False))
  return sum(1 for _ in itertools.takewhile(bool, same))


def deduplicate(rows: Sequence[Row], name: str) -> tuple[list[Row], str]:
  """Returns the first row of each problem, and a message that counts repeats, or ''."""
  unique: dict[str, Row] = {}
  other_answer: dict[str, str] = {}
  for key, row in zip(keys(rows), rows, strict=True):
    if unique.setdefault(key, row).answer != row.answer:
      other_answer.setdefault(key, row.answer)
  message = ''
  if len(unique) < len(rows):
    message = f'{name}: {len(rows)} rows contain {len(unique)} different problems'
  if other_answer:
    key, other = next(iter(other_answer.items()))
    message += (
      f'; {len(other_answer)} of them come with different answers, such as '
      f'{key[:60]!r} with {unique[key].answer!r} and {other!r}'
    )
  return list(unique.values()), message


def overlap(training: Sequence[Row], held_out: Sequence[Row]) -> tuple[set[int], str]:
  """Returns the indices of training problems found in held_out, and a message or ''."""
  held_out_keys = set(keys(held_out))
  training_keys = keys(training)
  # A problem with an instruction that only one of the sets has in every row, as in a
  # mixture of data sets, is equal as a whole.
  whole_keys = set(keys(held_out, whole=True))
  texts = keys(training, whole=True)
  both = {
    i
    for i, key in enumerate(training_keys)
    if key in held_out_keys or texts[i] in whole_keys
  }
  if not both:
    return both, ''
  count = len({training_keys[i] for i in both})
  return both, (
    f'{count} of {len(held_out_keys)} held-out problems are training problems too, '
    f'such as {training_keys[min(both)][:60]!r}'
  )
