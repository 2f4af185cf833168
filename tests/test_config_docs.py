"""docs/config.md is what the descriptions of the knobs say."""

import pathlib

from docs import write_config

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'config.md'


def test_the_page_is_current():
  command = 'python -m docs.write_config > docs/config.md'
  assert PAGE.read_text() == write_config.document(), command
