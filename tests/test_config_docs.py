"""docs/config.md is what the descriptions of the knobs say."""

import pathlib

from bapo_jax.tools import config_docs

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'config.md'


def test_the_page_is_current():
  command = 'python -m bapo_jax.tools.config_docs > docs/config.md'
  assert PAGE.read_text() == config_docs.document(), command
