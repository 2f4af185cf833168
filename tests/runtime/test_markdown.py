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
PLACES = {
  'fence': (markdown.fence, ['fence']),
  'inline': (
    lambda text: f'a {markdown.inline(text)} b',
    ['paragraph_open', 'inline', 'paragraph_close'],
  ),
  'escape': (
    lambda text: f'# {markdown.escape(text)}',
    ['heading_open', 'inline', 'heading_close'],
  ),
  'cell': (
    lambda text: f'| {markdown.escape(text)} | b |\n|:--|--:|\n| 1 | 2 |',
    ['table_open', 'thead_open', 'tr_open']
    + ['th_open', 'inline', 'th_close'] * 2
    + ['tr_close', 'thead_close', 'tbody_open', 'tr_open']
    + ['td_open', 'inline', 'td_close'] * 2
    + ['tr_close', 'tbody_close', 'table_close'],
  ),
}


@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('text', HOSTILE)
def test_nothing_in_it_takes_effect(place, text):
  show, expected = PLACES[place]
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
    shown = ''.join(
      child.content for child in tokens[expected.index('inline')].children
    )
    assert shown == markdown.visible(text, keep='').strip()


def test_a_cell_with_pipes_stays_one_cell():
  tokens = MarkdownIt('commonmark').enable('table').parse(PLACES['cell'][0]('a|b\\|c'))
  assert sum(token.type == 'th_open' for token in tokens) == 2


def test_invisible_characters_are_shown_as_escapes():
  assert markdown.visible('a\x1b[1m\r\n\u202e\x00\té ∑ 😀') == (
    'a\\x1b[1m\\r\n\\u202e\\x00\té ∑ 😀'
  )
  assert markdown.visible('a\nb', keep='') == 'a\\nb'


def test_a_long_text_loses_its_middle():
  text = markdown.fence('a' * 10 + 'x' * 100 + 'b' * 10, limit=20)
  assert text == (
    '```text\naaaaaaaaaa\n[... 100 characters left out ...]\nbbbbbbbbbb\n```'
  )
  assert markdown.inline('x' * 30, limit=20) == f'`{"x" * 20}...`'
  assert markdown.inline('') == markdown.inline('  ') == '(empty)'
