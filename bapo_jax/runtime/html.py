"""Builds HTML pages from elements, so that tags match and every text is escaped.

Invisible characters (control, direction of writing) are shown as Python escapes, as in
Markdown.
"""

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from bapo_jax.runtime.markdown import visible

Content = str | Element | None


def element(tag: str, *content: Content, **attributes: str | float) -> Element:
  """Returns an element with children and texts, in order; None is left out.

  A trailing underscore of an attribute's name is removed, other underscores become
  hyphens: class_='wide', stroke_width=2.
  """
  named = {name.rstrip('_').replace('_', '-'): v for name, v in attributes.items()}
  made = Element(tag, {name: visible(str(value)) for name, value in named.items()})
  last = None
  for item in content:
    if isinstance(item, Element):
      made.append(item)
      last = item
    elif item and last is None:
      made.text = (made.text or '') + visible(item)
    elif item and last is not None:
      last.tail = (last.tail or '') + visible(item)
  return made


def table(
  rows: Iterable[Sequence[Content]], header: Sequence[str], align: str, kind: str = ''
) -> Element:
  """Returns a table that scrolls sideways where it is too wide.

  `align` has one letter per column, 'l' for left and 'r' for right. `kind` is a class
  of the style.
  """

  def line(tag, cells: Sequence[Content]):
    pairs = zip(cells, align, strict=True)
    return element('tr', *(element(tag, cell, class_=side) for cell, side in pairs))

  body = element('tbody', *(line('td', row) for row in rows))
  grid = element('table', element('thead', line('th', header)), body)
  return element('div', grid, class_=f'scroll {kind}'.strip())
