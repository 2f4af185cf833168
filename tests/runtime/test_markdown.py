"""Text that nobody has vetted: every character is visible."""

import pytest

from bapo_jax.runtime import markdown

HOSTILE = (
  'a `b` c',
  '\x1b[31mred\x1b[0m \x9b1m',
  'one\rtwo\r\nthree',
  'nul\x00 bell\x07 page\x0c line\x85 paragraph\u2029',
  '\u202eright to left\u202c \u2066isolate\u2069 \u200fmark',
  'half a pair \ud800',
  '\t tab',
)


@pytest.mark.parametrize('text', HOSTILE)
def test_every_character_is_visible(text):
  page = markdown.visible(text)
  page.encode()  # a lone surrogate would raise
  raw = [c for c in page if not c.isprintable() and c not in '\n\t']
  assert not raw, raw


def test_invisible_characters_are_shown_as_escapes():
  shown = markdown.visible('a\x1b[1m\r\n\u202e\x00\té ∑ 😀')
  assert shown == 'a\\x1b[1m\\r\n\\u202e\\x00\té ∑ 😀'


def test_a_table_is_a_header_a_rule_and_a_line_per_row():
  rows = [['grpo', '0.5'], ['|x|', 'two\nlines']]
  assert markdown.table(rows, ['cell', 'accuracy'], 'lr').split('\n') == [
    '| cell | accuracy |',
    '|:--|--:|',
    '| grpo | 0.5 |',
    '| \\|x\\| | two lines |',
  ]


def test_a_long_text_loses_its_middle():
  text = markdown.shortened('aa' + 'x' * 100 + 'bb', 4)
  assert text == 'aa\n[... 100 characters left out ...]\nbb'
