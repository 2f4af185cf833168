r"""Finds the answer in a response: the last box, a line `Answer: ...`, ####, ...

Every reader takes time linear in the text, whatever the text is.
"""

import re

BOX = r'\boxed{'
BRACES = re.compile(r'\\boxed\{|(?<!\\)\\[{}]|[{}]')  # \{ and \} group nothing


def boxed(text: str) -> str | None:
  r"""The content of the \boxed{...} that closes last; None where none is balanced.

  One pass from the first box with a stack, so nested boxes cost linear time.
  """
  first = text.find(BOX)
  if first < 0:
    return None
  last: slice | None = None
  stack: list[int] = []
  for brace in BRACES.finditer(text, first):
    if brace[0] == BOX:
      stack.append(brace.end())
    elif brace[0] == '{':
      stack.append(-1)
    elif brace[0] == '}' and stack and (start := stack.pop()) >= 0:
      last = slice(start, brace.start())  # cut out once: a copy each is quadratic
  return None if last is None else text[last]


LINE = re.compile(
  r'^[ \t>#*-]*(?:(?:so|thus|hence|therefore),? +)?(?:the +)?(?:final +)?'
  r'answer(?: +is)?[ \t*]*:(.*)$',
  re.I | re.M,
)


def answer_line(text: str) -> str | None:
  """The rest of the last line `Answer: ...` or `The answer is: ...`.

  Without its Markdown, $ and full stop.
  """
  lines = LINE.findall(text)
  return lines[-1].strip(' \t\r*$').rstrip('.').strip(' *$') if lines else None


def box_or_line(text: str) -> str | None:
  """The last balanced box, else the last line `Answer: ...`, else None."""
  found = boxed(text)
  return answer_line(text) if found is None else found


def hashes_or_box(text: str) -> str | None:
  """The last balanced box, else the first line after the last ####, else None."""
  found = boxed(text)
  if found is None and '####' in text:
    return text.rpartition('####')[2].strip().partition('\n')[0]
  return found


def tagged(text: str) -> str | None:
  """The last balanced box, else the last <answer>...</answer>, else None."""
  found = boxed(text)
  if found is None and '</answer>' in text:
    before = text.rpartition('</answer>')[0]
    opened = before.rfind('<answer>')
    return None if opened < 0 else before[opened + len('<answer>') :]
  return found
