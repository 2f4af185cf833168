"""docs/reference/config.md is what the descriptions of the knobs say."""

import pathlib

from docs.reference import write_config

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'reference' / 'config.md'


def test_the_page_is_current():
  command = 'python -m docs.reference.write_config > docs/reference/config.md'
  assert PAGE.read_text() == write_config.document(), command
