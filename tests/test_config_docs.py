"""docs/config.md is what the descriptions of the knobs say, and they say enough."""

import pathlib

from bapo_jax import knobs
from bapo_jax.tools import config_docs
from bapo_jax.training.config import Config

ROOT = pathlib.Path(__file__).parents[1]


def test_the_page_is_current():
  written = (ROOT / 'docs' / 'config.md').read_text()
  assert written == config_docs.document(), (
    'python -m bapo_jax.tools.config_docs > docs/config.md'
  )


def test_the_page_has_every_knob():
  page = config_docs.document()
  for name, default, *_ in knobs.describe(Config()):
    assert name in page and default
