"""The verdict that every rule returns, and the words of the common ones."""

from typing import NamedTuple


class Verdict(NamedTuple):
  """The verdict on one response."""

  right: bool | None  # None: undecided, which earns what wrong earns, and is counted
  reason: str  # in a few words
  answer: str | None  # the answer found, spelled as votes are counted; None: none


EQUAL, OTHER = 'equal', 'another answer'


def unusable(answer: str, wanted: str) -> Verdict:
  """Undecided: the right answer itself is malformed."""
  return Verdict(None, f'the right answer {answer[:40]!r} is not {wanted}', None)
