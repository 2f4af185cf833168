r"""Verdicts: is the answer in this text the right one?

`aime` reads the last balanced \boxed{...}, which must be an integer in 0..999; text is
parsed, never evaluated. (Rules for other kinds of answers join the dict.)
"""

from collections.abc import Callable, Sequence

import numpy as np


def boxed(text: str) -> str | None:
  r"""What stands in the last balanced \boxed{...}; None where there is none.

  One pass from the left with a stack, so a bomb of nested boxes costs linear time.
  """
  opener = r'\boxed{'
  last, i, stack = None, 0, []
  while i < len(text):
    if text.startswith(opener, i):
      i += len(opener)
      stack.append(i)
      continue
    if text[i] == '{':
      stack.append(-1)
    elif text[i] == '}' and stack:
      start = stack.pop()
      if start >= 0:
        last = slice(start, i)  # cut out once, at the end: a copy each is quadratic
    i += 1
  return None if last is None else text[last]


def integer(text: str | None) -> int | None:
  """The integer 0..999 that the text spells in ASCII digits, leading zeros allowed."""
  digits = (text or '').strip()
  # isdigit alone would let superscripts and other scripts' digits through to int().
  if not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
    return None
  return int(digits) if int(digits) <= 999 else None


def aime(answer: str, text: str) -> bool:
  r"""The last \boxed{} of the text is the integer 0..999 that the answer is."""
  right = integer(answer)
  return right is not None and integer(boxed(text)) == right


RULES: dict[str, Callable[[str, str], bool]] = {'aime': aime}


def verify(answers: Sequence[str], texts: Sequence[str], rule=aime) -> np.ndarray:
  """One verdict (bool) a text; answers[i] is the right answer of texts[i]."""
  return np.asarray(
    [rule(answer, text) for answer, text in zip(answers, texts, strict=True)], bool
  )
