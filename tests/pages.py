"""Reads HTML pages in tests: whether tags match, and what a page names."""

import html.parser
import re
from collections.abc import Sequence

VOID = {'meta', 'link', 'img', 'br', 'hr', 'input'}


class Page(html.parser.HTMLParser):
  """The elements of a page; an AssertionError for a tag that does not match."""

  def __init__(self, text: str):
    super().__init__()
    self.text, self.open, self.tags = text, [], []
    self.texts: dict[str, list[str]] = {}  # tag -> its texts, its children's excluded
    self.feed(text)
    self.close()
    assert not self.open, f'{self.open} are not closed'

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag, f'{tag} is not open'

  def handle_data(self, data):
    self.texts.setdefault(self.open[-1] if self.open else '', []).append(data)

  def addresses(self) -> list[str]:
    """Everything that a browser might fetch, except data: addresses."""
    names = ('src', 'href', 'srcset', 'action', 'data', 'poster', 'xlink:href')
    found = [attrs[n] for _, attrs in self.tags for n in names if n in attrs]
    found += re.findall(r'url\(|@import|fetch\(|https?://[^\s<"]*', self.text)
    return [address for address in found if not address.startswith('data:')]

  def values(self, chart: str) -> dict[float, list[float]]:
    """Step -> the numbers that hovering over the chart of this title shows."""
    part = self.text.partition(f'<b>{chart}</b>')[2].partition('</figure>')[0]
    titles = re.findall(r'<title>step ([^:]*): ([^<]*)</title>', part)
    numbers = {
      float(step): [float(each.rsplit(' ', 1)[-1]) for each in values.split(', ')]
      for step, values in titles
    }
    assert numbers, f'no chart {chart!r}'
    return numbers


def cells(text: str, first: str) -> Sequence[str]:
  """The texts of a table's row that begins with <code>first</code>."""
  part = text.partition(f'<code>{first}</code>')[2].partition('</tr>')[0]
  return [re.sub('<[^>]*>', '', cell) for cell in part.split('</td>')[1:-1]]
