"""Problems that come twice: in one data set, or in training and evaluation both.

Two problems are the same where their texts are, up to white space. Lines that stand
before or after every problem of a data set (an instruction) do not count.
Functions return their finding and a message, '' for none.
"""

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

from bapo_jax.data.row import Row


def keys(rows: Sequence[Row]) -> list[str]:
  """Each row's problem in a normal form: two are the same where these are equal."""
  # A text is split once, however often it comes.
  lines = {row.problem: tuple(row.problem.strip().splitlines()) for row in rows}
  texts = set(lines.values())
  first = last = 0
  if len(texts) > 1:  # of one problem alone all lines are common
    most = min(map(len, texts)) - 1
    first = _common(texts, range(most))
    last = _common(texts, range(-1, first - most - 1, -1))

  def key(own: tuple[str, ...]) -> str:
    text = '\n'.join(own[first : len(own) - last])
    return ' '.join(unicodedata.normalize('NFC', text).split())

  key_of = {text: key(own) for text, own in lines.items()}
  return [key_of[row.problem] for row in rows]


def _common(texts: set[tuple[str, ...]], positions: Iterable[int]) -> int:
  """How many of these lines are the same in all texts, before the first that is not."""
  same = (len({lines[i] for lines in texts}) == 1 for i in positions)
  return sum(1 for _ in itertools.takewhile(bool, same))


def deduplicate(rows: Sequence[Row], name: str) -> tuple[list[Row], str]:
  """(the first row of each problem, a message on the others).

  Args:
    name: of the data set, for the message.
  """
  first: dict[str, Row] = {}
  other_answer: dict[str, str] = {}
  for key, row in zip(keys(rows), rows, strict=True):
    if first.setdefault(key, row).answer != row.answer:
      other_answer.setdefault(key, row.answer)
  unique, message = list(first.values()), ''
  if len(unique) < len(rows):
    message = f'{name}: {len(rows)} rows hold {len(unique)} different problems'
  if other_answer:
    key, other = next(iter(other_answer.items()))
    message += (
      f'; {len(other_answer)} of them come with different answers, as {key[:60]!r} '
      f'with {first[key].answer!r} and {other!r}'
    )
  return unique, message


def overlap(training: Sequence[Row], held_out: Sequence[Row]) -> tuple[set[int], str]:
  """(indices in `training` of problems that are in `held_out` too, a message)."""
  held_out_keys, training_keys = set(keys(held_out)), keys(training)
  both = {i for i, key in enumerate(training_keys) if key in held_out_keys}
  if not both:
    return both, ''
  count = len({training_keys[i] for i in both})
  return both, (
    f'{count} of {len(held_out_keys)} held-out problems are training problems too, as '
    f'{training_keys[min(both)][:60]!r}'
  )
