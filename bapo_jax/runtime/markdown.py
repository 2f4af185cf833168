"""Shows text that nobody has vetted inside Markdown, where none of it takes effect.

A problem, an answer or a response may hold backticks, HTML, terminal escapes, or marks
that turn the direction of writing. `fence`, `inline` and `escape` show all of them as
characters: a block, a piece of a sentence, a heading; `html` inside a tag of ours.
"""

import html as html_lib
import re
import unicodedata

# Control, format (bidirectional marks too), surrogate, line and paragraph separator.
INVISIBLE = frozenset({'Cc', 'Cf', 'Cs', 'Zl', 'Zp'})
# Punctuation that begins markup, and the dot that makes a link of www.example.
MARKUP = re.compile(r'[\\`*_{}\[\]<>#|!~$&@:^=]|(?<=www)\.', re.IGNORECASE)


def visible(text: str, keep: str = '\n\t') -> str:
  """The text, its invisible characters save those of `keep` as Python escapes."""
  return ''.join(
    char.encode('unicode_escape').decode()
    if char not in keep and unicodedata.category(char) in INVISIBLE
    else char
    for char in text
  )


def fence(text: str, limit: int | None = None) -> str:
  """The text as a code block that no backticks inside it can close.

  Args:
    limit: of a longer text the middle is left out; None shows all of it.
  """
  if limit is not None and len(text) > limit:
    half = limit // 2
    cut = f'[... {len(text) - 2 * half} characters left out ...]'
    text = f'{text[:half]}\n{cut}\n{text[-half:]}'
  text = visible(text)
  ticks = _ticks(text, at_least=3)
  return f'{ticks}text\n{text}\n{ticks}'


def inline(text: str, limit: int = 200) -> str:
  """The text as code within a line, cut off at the limit."""
  text = visible(text if len(text) <= limit else f'{text[:limit]}...', keep='')
  if not text.strip():
    return '(empty)'
  ticks = _ticks(text, at_least=1)
  # Markdown takes one blank off each end where both ends are blank.
  pad = ' ' if {text[0], text[-1]} & {'`', ' '} else ''
  return f'{ticks}{pad}{text}{pad}{ticks}'


def escape(text: str) -> str:
  """The text as plain words of one line, its markup escaped by backslashes."""
  return MARKUP.sub(r'\\\g<0>', visible(text, keep=''))


def html(text: str) -> str:
  """The text as one line between two tags, where Markdown's escapes do not count."""
  return html_lib.escape(visible(text, keep=''))


def _ticks(text: str, at_least: int) -> str:
  """More backticks in a row than the text has anywhere."""
  longest = max((len(run) for run in re.findall('`+', text)), default=0)
  return '`' * max(at_least, longest + 1)
