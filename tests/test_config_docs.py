"""docs/config.md is what the descriptions of the knobs say, and they say enough."""

import pathlib
import subprocess
import sys

from bapo_jax import knobs
from bapo_jax.tools import config_docs
from bapo_jax.training.config import Config

ROOT = pathlib.Path(__file__).parents[1]


def test_the_page_is_current():
  written = (ROOT / 'docs' / 'config.md').read_text()
  assert written == config_docs.document(), (
    'python -m bapo_jax.tools.config_docs > docs/config.md'
  )


def test_every_knob_has_a_range_in_words_and_a_sentence():
  described = list(knobs.describe(Config()))
  assert len(described) > 100
  for name, default, allowed, sentence in described:
    assert not any(word in allowed for word in ('<class', 'typing', '~')), name
    assert len(sentence) > 4 and sentence.endswith('.'), (name, sentence)
    assert name in config_docs.document() and default


def test_neither_the_page_nor_a_config_waits_for_jax():
  code = (
    'import sys; from bapo_jax import main; from bapo_jax.tools import config_docs; '
    "print(*{'jax', 'numpy', 'flax'} & set(sys.modules))"
  )
  found = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, check=True, capture_output=True, text=True
  )
  assert found.stdout.strip() == ''
