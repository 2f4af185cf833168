"""Reads the data of HTML pages in tests, and the text of their rows and charts."""

import html.parser
import json
import os
import pathlib
import re
from collections.abc import Sequence


class Page(html.parser.HTMLParser):
  """The elements of a page before its script runs, and its data."""

  def __init__(self, path: str | os.PathLike[str]):
    super().__init__()
    self.text = pathlib.Path(path).read_text(encoding='utf-8')
    self.tags = []
    self.data = {}
    self.feed(self.text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    if self.tags and self.tags[-1] == ('script', DATA):
      self.data = json.loads(data)

  def handle_endtag(self, tag):
    self.tags.append((f'/{tag}', {}))

  def addresses(self) -> list[str]:
    """Everything that a browser might fetch, except data: addresses."""
    names = ('src', 'href', 'srcset', 'action', 'data', 'poster', 'xlink:href')
    found = [attrs[n] for _, attrs in self.tags for n in names if n in attrs]
    found += re.findall(r'url\(|@import|fetch\(|https?://[^\s<"]*', self.text)
    return [address for address in found if not address.startswith('data:')]

  def values(self, name: str, run: int = 0) -> dict[float, float]:
    """Step -> value of a metric, where the run has it."""
    runs = [run for group in self.data['groups'] for run in group['runs']]
    pairs = zip(runs[run]['step'], runs[run][name], strict=True)
    return {step: value for step, value in pairs if value is not None}

  def titles(self) -> list[str]:
    """The titles of all charts."""
    return [panel['title'] for panel in self.data['panels']]

  def cells(self, first: str) -> Sequence[str]:
    """The texts of the table's row that begins with `first`, without it."""
    rows = [row for table in self.data['tables'].values() for row in table]
    return next((row[1:] for row in rows if row[0] == first), [])


DATA = {'type': 'application/json', 'id': 'data'}
