"""HTML of tokens by hand, and the slider in a browser."""

import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from lab import counterfactual, token_pages
from lab.counterfactual import Applied

BLUE, ORANGE = 'rgba(0,114,178,', 'rgba(213,94,0,'


def recorded(tmp_path):
  """Two responses: '<b>', a masked 'tool', and 'c'; then 'd' and a line break."""
  rows = [
    {'reward': 1, 'pieces': ['<b>', 'tool', 'c'], 'mask': [1, 0, 1]},
    {'reward': 0, 'pieces': ['d', '\n'], 'mask': [1, 1]},
  ]
  for row in rows:
    count = len(row['pieces'])
    row |= {'group': 0, 'tokens': [1] * count, 'behavior_logp': [np.log(0.25)] * count}
    row['logp'] = [np.log(0.5)] * count
  path = tmp_path / 'batch.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return counterfactual.read(path)


def applied(weight_BT, cut_BT):
  adv_B = np.asarray([1.0, -1.0])
  weight_BT, cut_BT = np.asarray(weight_BT, np.float32), np.asarray(cut_BT)
  return Applied(None, np.full((2, 3), 2.0), adv_B, weight_BT, cut_BT)


def spans(text):
  return re.findall(r'<span (?:title="([^"]*)" )?style="([^"]*)">([^<]*)', text)


def test_tokens_have_the_colour_of_their_weight_under_each_rule(tmp_path):
  one = applied([[4, 0, 2], [-4, -1, 0]], [[0, 0, 0], [0, 0, 0]])
  other = applied([[0, 0, 1], [-4, 0, 0]], [[1, 0, 0], [0, 2, 0]])
  page = token_pages.coloured(recorded(tmp_path), {'A & B': one, 'C': other}, [0, 1])
  assert 'A &amp; B' in page and '<b>' not in page.replace('<b>response', '')
  legend, first, second, third, fourth = page.split('<div style=')[0:5]
  assert legend.count('<span') == 3
  (b, tool, c) = spans(first)[1:]  # after the span around the response
  assert b[2] == '&lt;b&gt;' and b[1] == f'background:{BLUE}1.00)'
  assert b[0] == 'sampled at 0.250, now 0.500, ratio 2.00, weight 100% of the largest'
  assert tool == ('', 'color:#999', 'tool')
  assert c[1] == f'background:{BLUE}0.56)'  # .12 + .88 / 2
  (b, _, c) = spans(second)[1:]
  assert 'line-through' in b[1] and b[0].endswith('cut') and '1 cut' in second
  assert c[1] == f'background:{BLUE}0.34)'
  d, newline = spans(third)[1:]
  assert d[1] == f'background:{ORANGE}1.00)' and newline[2] == '↵'
  assert newline[1] == f'background:{ORANGE}0.34)'
  assert 'line-through' in spans(fourth)[2][1] and '0 cut' in third


def test_a_token_without_weight_that_is_not_cut_has_no_colour(tmp_path):
  nothing = applied(np.zeros((2, 3)), np.zeros((2, 3), int))
  page = token_pages.coloured(recorded(tmp_path), {'none': nothing}, [1])
  assert f'background:{ORANGE}0.00)' in page and 'nan' not in page


FRAMES = {'0': '<i>zero</i>', 'a "b"': '<i>one</i>', '2': '<i>two</i>'}


def test_one_frame_is_shown_without_a_script():
  page = token_pages.slider('<times>', FRAMES, first=1)
  shown = re.findall(r'<div style="display:(\w+)">.*?<i>(\w+)</i>', page)
  assert shown == [('none', 'zero'), ('block', 'one'), ('none', 'two')]
  assert '&lt;times&gt;: a &quot;b&quot;' in page
  assert 'max="2" value="1"' in page
  assert '<script' not in page and 'http' not in page


def test_the_slider_shows_the_frame_of_its_position(browser, tmp_path):
  page = tmp_path / 'page.html'
  two = token_pages.slider('x', FRAMES) + token_pages.slider('y', FRAMES, first=2)
  page.write_text(f'<!doctype html><title>t</title>{two}')
  move = """(value) => {
    const input = document.querySelector('input');
    input.value = value;
    input.dispatchEvent(new Event('input'));
    return document.body.innerText;
  }"""
  with browser.open(page) as tab:
    for value, word in (('1', 'one'), ('2', 'two'), ('0', 'zero')):
      text = tab.evaluate(f'({move})({value})')
      assert [x for x in ('zero', 'one', 'two') if x in text.split('y: 2')[0]] == [word]
      assert text.split('y: 2')[1].split() == ['two']  # the other slider stays
    assert tab.requests == tab.errors == []


def test_a_figure_becomes_an_image_with_its_data():
  figure = Figure(figsize=(1, 1))
  figure.subplots().plot([0, 1])
  image = token_pages.picture(figure)
  assert image.startswith('<img alt="" src="data:image/png;base64,iVBOR')
  assert token_pages.picture(figure) == image
  assert len(token_pages.picture(figure, dpi=90)) > len(image)


@pytest.mark.parametrize('first', [0, 2])
def test_the_first_frame_is_where_the_slider_stands(first):
  assert f'value="{first}"' in token_pages.slider('x', FRAMES, first)
