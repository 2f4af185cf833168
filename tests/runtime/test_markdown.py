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
# Which tokens each place may become, and nothing else.
HEAD, CELL = ('th_open inline th_close', 'td_open inline td_close')
PLACES = {
  'fence': (markdown.fence, 'fence'),
  'inline': (
    lambda text: f'a {markdown.inline(text)} b',
    'paragraph_open inline paragraph_close',
  ),
  'escape': (
    lambda text: f'# {markdown.escape(text)}',
    'heading_open inline heading_close',
  ),
  'cell': (
    lambda text: f'| {markdown.escape(text)} | b |\n|:--|--:|\n| 1 | 2 |',
    f'table_open thead_open tr_open {HEAD} {HEAD} tr_close thead_close '
    f'tbody_open tr_open {CELL} {CELL} tr_close tbody_close table_close',
  ),
}


@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('text', HOSTILE)
def test_nothing_in_it_takes_effect(place, text):
  show, expected = PLACES[place][0], PLACES[place][1].split()
  page = show(text)
  page.encode()  # a lone surrogate would raise
  raw = [c for c in page if not c.isprintable() and c not in '\n\t']
  assert not raw, raw
  parser = MarkdownIt('commonmark', {'html': True}).enable(['table', 'strikethrough'])
  tokens = parser.parse(page)
  assert [token.type for token in tokens] == expected
  inside = [child for token in tokens for child in token.children or ()]
  kinds = {child.type for child in inside}
  if place == 'fence':
    assert tokens[0].content == markdown.visible(text) + '\n'
  elif place == 'inline':
    assert kinds == {'text', 'code_inline'}
    (code,) = (child for child in inside if child.type == 'code_inline')
    assert code.content == markdown.visible(text, keep='')
  else:
    assert kinds <= {'text', 'text_special'}
    children = tokens[expected.index('inline')].children
    shown = ''.join(child.content for child in children)
    assert shown == markdown.visible(text, keep='').strip()


def test_invisible_characters_are_shown_as_escapes():
  shown = markdown.visible('a\x1b[1m\r\n\u202e\x00\té ∑ 😀')
  assert shown == 'a\\x1b[1m\\r\n\\u202e\\x00\té ∑ 😀'
  assert markdown.visible('a\nb', keep='') == 'a\\nb'


def test_a_table_is_a_header_a_rule_and_a_line_per_row():
  rows = [['grpo', '0.5'], ['|x|', 'two\nlines']]
  assert markdown.table(rows, ['cell', 'accuracy'], 'lr').split('\n') == [
    '| cell | accuracy |',
    '|:--|--:|',
    '| grpo | 0.5 |',
    '| \\|x\\| | two lines |',
  ]


def test_a_long_text_loses_its_middle():
  text = markdown.fence('aa' + 'x' * 100 + 'bb', limit=4)
  assert text == '```text\naa\n[... 100 characters left out ...]\nbb\n```'
  assert markdown.inline('x' * 30, limit=20) == f'`{"x" * 20}...`'
  assert markdown.inline('') == markdown.inline('  ') == '(empty)'
