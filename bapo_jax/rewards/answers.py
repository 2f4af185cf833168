r"""Extracts the answer from a response, and defines the verdict on it.

A reader, a function of this module, looks for the answer in a fixed position: the last
\boxed{...}, then, depending on the rule, a line `Answer: ...` or a sentence `The answer
is ...`, the text after ####, or <answer>...</answer>. A box or tag that only marks the
place of an answer (`is_blank`) hides no answer. For any text, a reader takes time
linear in the length of the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
  right: bool | None  # None: undecided, in no mean and not in the loss
  reason: str  # a few words
  answer: str | None  # the extracted answer, spelled for counting votes; None: none
  reward: float | None = None  # None: 1 if right, else 0
  parts: Mapping[str, float] | None = None  # named parts of the reward; None: none
  # (end, reward) of each step; `end` counts tokens once a Scorer has read it.
  steps: Sequence[tuple[int, float]] | None = None
  abstains: bool = False  # undecided because the rule says so, not by an error
  formatted: bool = False  # whether there is an answer where the rule looks for it

  @classmethod
  def failed(cls, reason: str) -> 'Verdict':
    """Returns the verdict undecided, by an error or a right answer of no use."""
    return cls(None, reason, None)

  @property
  def failure(self) -> str:
    """Why no rule could decide; '' if one has, or has abstained."""
    return self.reason if self.right is None and not self.abstains else ''

  @property
  def earned(self) -> float:
    """The reward before shaping; an undecided response has none, and 0 here."""
    return float(self.right is True) if self.reward is None else self.reward


class Message(NamedTuple):
  """Holds the answer of an environment to a turn."""

  text: str | None  # None: the response ends here
  failure: str = ''  # why there is no text that can be used; '': nothing failed

  @classmethod
  def failed(cls, reason: str) -> 'Message':
    """Returns a message that could not be written."""
    return cls(None, reason)


def compared(equal: bool, answer: str) -> Verdict:
  """Returns the verdict right if `equal` (to the right answer), else wrong."""
  return Verdict(equal, 'equal' if equal else 'another answer', answer)


def unusable(answer: str, expected: str) -> Verdict:
  """Returns the verdict undecided, because the right answer is not `expected`."""
  return Verdict.failed(f'the right answer {answer[:40]!r} is not {expected}')


# The contents of a box or tag that only mark the place of an answer.
SPACE = re.compile(r'(?:\\[,;:! ]|\\q?quad(?![a-zA-Z])|[\s~$])+')
PLACE = re.compile(
  r'(?:\\?_ ?)+|\.{2,}|…|\\[lc]?dots|'
  r'(?:\\[a-z]+ ?\{ ?)?'
  r'[<\[]?(?:(?:the|your|my) )?(?:final )?answer(?: here)?[>\]]? ?\}?',
  re.I,
)
LONGEST_BLANK = 60  # characters; a longer content is an answer


def is_blank(content: str) -> bool:
  r"""Returns whether the content of a box or tag only marks the place of an answer.

  It is then empty, or it is dots, underscores or words such as `your answer`, as in a
  response that quotes its instruction: `Put your answer in \boxed{}`.
  """
  if len(content) > LONGEST_BLANK or content[:1].isdigit():
    return False
  bare = SPACE.sub(' ', content).strip()
  return not bare or bool(PLACE.fullmatch(bare))


BRACES = re.compile(r'\\boxed\s*\{|(?<!\\)\\[{}]|[{}]')  # \{ and \} do not group


def boxed(text: str) -> str | None:
  r"""Returns the content of the \boxed{...} that closes last, or None.

  A blank box counts only if there is no other, and a box around nothing but a box is
  that box. Matches braces with a stack in one pass, so nested boxes cost linear time.
  """
  start = text.find(r'\boxed')
  if start < 0:
    return None
  content = blank = None
  last = slice(0, 0)  # the box that closed last, with its command
  stack: list[int] = []  # start of the content of each open box; -1 for a plain brace
  for brace in BRACES.finditer(text, start):
    if brace[0] == '{':
      stack.append(-1)
    elif brace[0][-1] == '{' and brace[0] != r'\{':
      stack.append(brace.end())
    elif brace[0] == '}' and stack and (begin := stack.pop()) >= 0:
      part = slice(begin, brace.start())  # copying every box would be quadratic
      if part.stop - begin <= LONGEST_BLANK and is_blank(text[part]):
        blank = part
        continue
      # A box that contains only a box. No two margins overlap, so they are linear.
      margins = text[begin : last.start] + text[last.stop : part.stop]
      if last.start < begin or margins.strip(' \n$'):
        content = part
      last = slice(text.rfind('\\', 0, begin), brace.end())
  part = content or blank
  return None if part is None else text[part]


CONNECTIVES = (
  'and|but|so|thus|hence|therefore|then|now|finally|actually|consequently|clearly|'
  'this means|we conclude|it follows'
)
HEAD = re.compile(
  # `Answer:` at the start of a line, after signs or the number of a list, or alone ...
  r'^[^a-z0-9\n"\'`~(){}\[\]<$\\❌✗✘🚫≠]*(?:(?:[0-9]{1,2}|[a-z])[.)] +\**)?'
  r'(?:\$?\\text(?:bf)? *\{ *)?'
  r'(?:(?:so|thus|hence|therefore),? +)?(?:the +)?(?:final +)?'
  r'ans(?:wer|\.)?(?: +is)?[ \t\r*_]*(?:[:\uff1a→—]|=>?|->|(?=\n))(?: *\})?|'
  # ... or `The answer is` at the start of a sentence or a clause.
  r'(?:^[ \t>#*-]*|(?<=[.!?:;,])[ *]+)'
  rf'(?:(?:{CONNECTIVES})(?: that)?[,:]? +){{0,2}}(?:(?:the|our|my) +)?'
  r'(?:(?:final|correct|right|required|desired|exact|numerical) +)?'
  r'answer(?: +to +th(?:e|is) +\w+)? +(?:is|equals|(?:must|should) +be):?'
  r'(?:[ \t\r*]*(?=\n)| +'
  r'(?P<sentence>(?:(?:therefore|thus|then|hence|simply|exactly|equal +to) +)?)'
  # A word in lower case is an answer only if the sentence ends with it.
  r'(?=(?-i:[^a-z\s]|[a-z](?! *[a-z])|'
  r'(?!(?:in)?correct|right|wrong|(?:un)?reasonable|(?:in)?valid|clear|obvious)'
  r'[a-z]+[*.! ]*$)))',
  re.I | re.M,
)
WORD = re.compile('ans', re.I)
# A blank line, unless a number follows: a second answer.
PARAGRAPH_END = re.compile(r'\n[ \t\r]*\n(?!\W{0,9}\d)')
SENTENCE_END = re.compile(r'[.!](?=[\s*]|$)')
# Comments, which are not displayed, and tags that leave a number unchanged. A tag in
# the middle of a number or word, as in 1<b>8</b>, does not match.
TAG = (
  r'/?(?:(?:final[_-]?)?(?:answer|result|solution|output)|final|[biup]|strong|em|mark|span|'
  r'code|div|li|td|br ?/?)>'
)
MARKUP = re.compile(
  r'<(?:!--.*?(?:-->|\Z)|/\w+>(?=\s)|'
  rf'(?<![\w>]<){TAG}(?:<{TAG})*|{TAG}(?:<{TAG})*+(?!\w))',
  re.I | re.S,
)
DECORATION = ' \t\r*$_"`✅✔✓🎉\ufe0f∎■□'


def line(text: str) -> str | None:
  """Returns the answer of the last line `Answer: ...` or sentence `The answer is ...`.

  If nothing follows on the line, the answer is the next paragraph. Markdown, dollar
  signs and the full stop around the answer are removed.
  """
  word = WORD.search(text)
  if word is None:
    return None
  start = text.rfind('\n', 0, word.start()) + 1  # HEAD is slow, and within one line
  head = None
  for head in HEAD.finditer(text, start):  # noqa: B007 (the last match counts)
    pass
  if head is None:
    return None
  content, _, below = text[head.end() :].partition('\n')
  if not content.strip(DECORATION + r'\['):
    content = PARAGRAPH_END.split(below.lstrip(), maxsplit=1)[0]
  if head['sentence'] is not None:
    content = SENTENCE_END.split(content, maxsplit=1)[0]
  return content.strip(DECORATION).rstrip('.').strip(DECORATION)


def _after_hashes(text):
  if '####' not in text:
    return None
  return text.rpartition('####')[2].strip().partition('\n')[0]


TAGGED = re.compile(r'<answer>((?:(?!</?answer>).)*)</answer>', re.S)


def _in_tag(text):
  """Returns the content of the last <answer> tag; a blank tag only if all are blank."""
  contents = TAGGED.findall(text)
  filled = [content for content in contents if not is_blank(content)]
  return (filled or contents or [None])[-1]


def _first(text, *readers: Callable[[str], str | None]):
  """Returns the first answer that a reader finds; a blank only if all are blank."""
  blank = None
  for reader in readers:
    content = reader(text)
    if content is not None and not is_blank(content):
      return content
    blank = content if blank is None else blank
  return blank


def box_or_line(text: str) -> str | None:
  """Returns the last balanced box, else the last answer line or sentence, or None."""
  return _first(MARKUP.sub(' ', text), boxed, line)


def hashes_or_box(text: str) -> str | None:
  """Returns the last balanced box, or else the first line after the last ####."""
  return _first(MARKUP.sub(' ', text), boxed, _after_hashes)


def tagged(text: str) -> str | None:
  """Returns the last balanced box, or else the content of the last <answer> tag."""
  return _first(text, boxed, _in_tag)


MARKDOWN = re.compile(r'(\*{1,3}|_{1,2}|`)(.*)\1')
END = re.compile(r'(?:\\[,;:! ]|[\s,;])+$')


def without_markdown(text: str) -> str:
  r"""Removes Markdown around a text, and a full stop, comma or \, after it."""
  text = END.sub('', text)
  while marked := MARKDOWN.fullmatch(text := text.strip().removesuffix('.').rstrip()):
    text = marked[2]
  return text
