"""Text that nobody has vetted: a Markdown parser sees characters, and no markup."""

import pytest
from markdown_it import MarkdownIt

from bapo_jax.runtime import markdown

HOSTILE = (
  '`',
  '``` `` `',
  '```\n# heading\n```',
  'a `b` c',
  ' `x` ',
  '# heading',
  'x\n# heading\n\n- item\n\n---\n',
  '</details><script>alert(1)</script>',
  '<!-- comment',
  '<https://example.org> https://example.org www.example.org a@b.org',
  '![image](http://x/y.png) [link](http://x) *em* **strong** ~~gone~~',
  '| a | b |\n|:--|--:|\n| 1 | 2 |',
  '\x1b[31mred\x1b[0m \x9b1m',
  'one\rtwo\r\nthree',
  'nul\x00 bell\x07 page\x0c line\x85 paragraph\u2029',
  '\u202eright to left\u202c \u2066isolate\u2069 \u200fmark',
  'half a pair \ud800',
  '\\`not escaped\\`',
  '&lt;b&gt; &amp; &#35;',
  '$x$ $$y$$ :smile: ==mark== ^up^',
  'title #',
  '\t tab',
)


@pytest.mark.parametrize('text', HOSTILE)
def test_nothing_in_a_fence_takes_effect(text):
  page = markdown.fence(text)
  page.encode()  # a lone surrogate would raise
  raw = [c for c in page if not c.isprintable() and c not in '\n\t']
  assert not raw, raw
  parser = MarkdownIt('commonmark', {'html': True}).enable(['table', 'strikethrough'])
  (token,) = parser.parse(page)
  assert (token.type, token.content) == ('fence', markdown.visible(text) + '\n')


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
