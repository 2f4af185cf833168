r"""Extracts the answer from a response, and defines the verdict on it.

A reader, a function of this module, looks for the answer in a fixed place: the last
\boxed{...}, then, depending on the rule, a line `Answer: ...`, the text after ####, or
<answer>...</answer>. For any text, it takes time linear in the length of the text.
"""

import re
from typing import NamedTuple


class Verdict(NamedTuple):
  right: bool | None  # None: undecided, counted and rewarded like a wrong answer
  reason: str  # a few words
  answer: str | None  # the extracted answer, spelled for counting votes; None: none


def compared(equal: bool, answer: str) -> Verdict:
  """Returns the verdict on an extracted answer; `equal`: it equals the right one."""
  return Verdict(equal, 'equal' if equal else 'another answer', answer)


def unusable(answer: str, expected: str) -> Verdict:
  """Returns an undecided verdict: the right answer is not of the form `expected`."""
  return Verdict(None, f'the right answer {answer[:40]!r} is not {expected}', None)


BOX = r'\boxed{'
BRACES = re.compile(r'\\boxed\{|(?<!\\)\\[{}]|[{}]')  # \{ and \} do not group


def boxed(text: str) -> str | None:
  r"""Returns the content of the \boxed{...} that closes last, or None.

  Matches braces with a stack in one pass, so nested boxes cost linear time.
  """
  start = text.find(BOX)
  if start < 0:
    return None
  content: slice | None = None
  stack: list[int] = []  # start of the content of each open box; -1 for a plain brace
  for brace in BRACES.finditer(text, start):
    if brace[0] == BOX:
      stack.append(brace.end())
    elif brace[0] == '{':
      stack.append(-1)
    elif brace[0] == '}' and stack and (begin := stack.pop()) >= 0:
      content = slice(begin, brace.start())  # copying every box would be quadratic
  return None if content is None else text[content]


LINE = re.compile(
  r'^[ \t>#*-]*(?:(?:so|thus|hence|therefore),? +)?(?:the +)?(?:final +)?'
  r'answer(?: +is)?[ \t*]*:(.*)$',
  re.I | re.M,
)


def box_or_line(text: str) -> str | None:
  """Returns the last balanced box, or else the last line `Answer: ...`, or None.

  The line may also read `The answer is: ...`. Markdown, dollar signs and the full stop
  around the answer are removed.
  """
  box = boxed(text)
  if box is not None or not (lines := LINE.findall(text)):
    return box
  return lines[-1].strip(' \t\r*$').rstrip('.').strip(' *$')


def hashes_or_box(text: str) -> str | None:
  """Returns the last balanced box, or else the first line after the last ####."""
  box = boxed(text)
  if box is None and '####' in text:
    return text.rpartition('####')[2].strip().partition('\n')[0]
  return box


def tagged(text: str) -> str | None:
  """Returns the last balanced box, or else the content of the last <answer> tag."""
  box = boxed(text)
  if box is None and '</answer>' in text:
    _, tag, content = text.rpartition('</answer>')[0].rpartition('<answer>')
    return content if tag else None
  return box
