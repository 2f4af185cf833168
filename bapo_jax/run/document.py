"""Puts data, style and scripts into one HTML file that loads no other file.

The files are in bapo_jax/pages: page.html is the frame, style.css and charts.js are for
all pages, page.css and page.js draw the report and the comparison of runs. The loss
explorer brings files of its own.
"""

import html
import json
import pathlib
import re
from typing import Any

from bapo_jax.runtime.markdown import visible

FOLDER = pathlib.Path(__file__).parents[1] / 'pages'
# With this policy the browser fetches nothing, even if a text of a model slipped
# through the escaping; by it `files.check_ours` knows a page of ours.
MARK = (
  "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
  "script-src 'unsafe-inline'"
)


def document(title: str, data: Any, body: str, style: str, script: str) -> str:
  """Returns the HTML of a page.

  Args:
    data: for JSON; the script finds it in the element with the id `data`.
    body: HTML before the data.
    style, script: come after those of all pages.
  """
  parts = {
    'title': html.escape(visible(title)),
    'style': f'{read("style.css")}\n{style}',
    'body': body,
    # A text may contain '</script>', which would end the element.
    'data': json.dumps(data, separators=(',', ':'), allow_nan=False).replace(
      '<', '\\u003c'
    ),
    'script': f'{read("charts.js")}\n{script}',
  }
  return re.sub(r'{{(\w+)}}', lambda match: parts[match[1]], read('page.html')) + '\n'


def read(name: str) -> str:
  """Returns the text of a file of bapo_jax/pages."""
  return (FOLDER / name).read_text(encoding='utf-8').strip()
