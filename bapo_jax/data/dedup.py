"""Problems that come twice: in one data set, and in training and evaluation both.

Two problems are the same where their texts are, up to white space. What stands before
or after every problem of a data set (whole lines: an instruction) does not count.
Functions give rows back, and what there is to tell, '' for nothing.
"""

import itertools
import unicodedata


def keys(rows: list[dict]) -> list[str]:
  """A row's problem, stripped of what does not make it another problem."""
  # A text is looked at once, however often it comes.
  lines = {text: tuple(text.strip().splitlines()) for text in _problems(rows)}
  texts = set(lines.values())
  first = last = 0
  if len(texts) > 1:  # of one problem alone all lines are common
    most = min(map(len, texts)) - 1
    first = _common(texts, range(most))
    last = _common(texts, range(-1, first - most - 1, -1))

  def key(own: tuple[str, ...]) -> str:
    text = '\n'.join(own[first : len(own) - last])
    return ' '.join(unicodedata.normalize('NFC', text).split())

  known = {text: key(own) for text, own in lines.items()}
  return [known[text] for text in _problems(rows)]


def _problems(rows: list[dict]) -> list[str]:
  return [row['problem'] for row in rows]


def _common(texts: set[tuple[str, ...]], places) -> int:
  """How many of these lines are the same in all texts, before the first that is not."""
  same = (len({lines[i] for lines in texts}) == 1 for i in places)
  return sum(1 for _ in itertools.takewhile(bool, same))


def distinct(rows: list[dict], name: str) -> tuple[list[dict], str]:
  """Each problem once, as it stands first; the answer that stands first counts.

  Args:
    name: what is said to hold the repeats.
  """
  first: dict[str, dict] = {}
  differs: dict[str, str] = {}
  for key, row in zip(keys(rows), rows, strict=True):
    kept = first.setdefault(key, row)
    if kept['answer'] != row['answer']:
      differs.setdefault(key, row['answer'])
  kept, told = list(first.values()), ''
  if len(kept) < len(rows):
    told = f'{name}: {len(rows)} rows hold {len(kept)} different problems'
  if differs:
    key, other = next(iter(differs.items()))
    told += (
      f'; {len(differs)} of them come with different answers, as {key[:60]!r} with '
      f'{first[key]["answer"]!r} and {other!r}'
    )
  return kept, told


def overlap(training: list[dict], held_out: list[dict]) -> tuple[set[int], str]:
  """Places in `training` of problems that are in `held_out` too."""
  tested = set(keys(held_out))
  asked = keys(training)
  both = {i for i, key in enumerate(asked) if key in tested}
  if not both:
    return both, ''
  count = len({asked[i] for i in both})
  return both, (
    f'{count} of {len(tested)} held-out problems are training problems too, as '
    f'{asked[min(both)][:60]!r}'
  )
