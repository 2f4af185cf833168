"""A run on one page: the numbers by hand, and no gap in the data breaks the page."""

import collections
import json
import math

import numpy as np
import pytest
from markdown_it import MarkdownIt

from bapo_jax.run import report, series
from bapo_jax.runtime import markdown, metrics
from bapo_jax.training.config import Config, parse

NAN = math.nan
CONFIG = Config(title='A run')


SAMPLE = dict(problem='What is 2+3?', answer='5', response='5', correct=True)
WRONG = SAMPLE | {'response': '```\n4', 'correct': False}


def write_report(workdir, rows, before=(WRONG,), after=(SAMPLE,), config=CONFIG):
  """Returns (report.md, report.json) of these rows and samples."""
  with metrics.writing(workdir, -1) as write:
    for step, row in enumerate(rows, 1):
      write(step, row)
  results = (
    {'result': dict(accuracy=0.25, stderr=0.03, n=200), 'samples': before},
    {'result': dict(accuracy=0.5, stderr=0.04, n=200), 'samples': after},
  )
  spent = {'wall_s': 100.0, 'phases': {'verify': 10.0, 'sample': 60.0}}
  spent['peak_rss_bytes'] = 3 * 2**29
  report.write(workdir, config, *results, spent, len(rows))
  page = (workdir / 'report.md').read_text()
  return page, json.loads((workdir / 'report.json').read_text())


def lengths(right, wrong):
  return {'rollout/length_right': right, 'rollout/length_wrong': wrong}


def test_numbers_by_hand(tmp_path):
  # ten steps: a fifth is two. First: wrong (30 + 50)/2 = 40 over right 20 (nan: none
  # is right) = 2; last: wrong 60 over right (10 + 30)/2 = 20 = 3
  rows = [lengths(20, 30), lengths(NAN, 50), *[lengths(1, 1000)] * 6]
  rows += [lengths(10, 60), lengths(30, 60)]
  rows = [dict(row, **{'clip/moved': i >= 6}) for i, row in enumerate(rows)]
  page, facts = write_report(tmp_path, rows)
  assert facts['length_ratio'] == {'first_fifth': 2.0, 'last_fifth': 3.0}
  assert facts['clip_moved_fraction'] == 0.4  # 4 of 10
  assert facts['eval_after'] == {'accuracy': 0.5, 'stderr': 0.04, 'n': 200}
  assert facts['phases'] == {'verify': 10.0, 'sample': 60.0}
  heading, first = page.split('\n\n')[:2]
  assert heading == '# ' + markdown.escape(f'A run, {tmp_path.name}')
  assert 'Every knob has its default.' in page
  assert 'from 0.250 ± 0.030 to 0.500 ± 0.040 on 200 held-out problems' in first
  assert '10 steps, 0:01:40 h of wall time and 1.50 GiB' in first
  assert 'more than two standard errors' in first  # 0.25 against 2 * 0.05
  # phases longest first, then what they leave of 100 s
  table = page[page.index('| sample | 60.0 | 60.0 |') :].splitlines()
  assert table[1] == '| verify | 10.0 | 10.0 |'
  assert table[2] == '| other | 30.0 | 30.0 |'
  assert '| `rollout/length_right` | 20 | 20 |' in page
  # the wrong response opens a fence of three: its block needs four to hold it
  assert '````text\n```\n4\n````' in page


def test_graded_rewards_are_compared_with_their_errors():
  def result(reward, fit):
    parts = {'fit': {'mean': fit, 'stderr': 0.04}, 'a|b': {'mean': 1, 'stderr': 0}}
    return {'reward': reward, 'reward_stderr': 0.03, 'parts': parts}

  # The error of a difference: sqrt(.03^2 + .03^2), sqrt(.04^2 + .04^2).
  assert list(report.rewards(result(0.5, 0.5), result(0.25, 0.75))) == [
    ('reward', '0.500 ± 0.030', '0.250 ± 0.030', '-0.250 ± 0.042'),
    ('reward/fit', '0.500 ± 0.040', '0.750 ± 0.040', '+0.250 ± 0.057'),
    ('reward/a|b', '1.000 ± 0.000', '1.000 ± 0.000', '+0.000 ± 0.000'),
  ]
  assert not list(report.rewards(dict(accuracy=0.5), result(0.5, 0.5)))


def test_pictures_stand_beside_the_sample(tmp_path):
  sample = SAMPLE | {'pictures': ['pictures/a.png', 'pictures/b.png']}
  page, _ = write_report(tmp_path, [], [sample], [sample])
  shown = page[page.index('### Sample 1') : page.index('Before:')]
  assert '![Picture 1](pictures/a.png)\n\n![Picture 2](pictures/b.png)' in shown
  assert page.count('pictures/a.png') == 1


@pytest.mark.parametrize(
  'rows',
  [
    [],
    [{'rollout/reward': 0.5}],
    [{'eval/accuracy': 0.5}],  # no standard error, no training step
    [{'loss/entropy': NAN, 'eval/accuracy': NAN, 'eval/stderr': NAN}] * 2,
    [{'learner/grad_norm': g, 'clip/share': math.inf} for g in (1.0, 0.0, 1000.0)],
  ],
)
def test_gaps_are_shown_as_gaps(tmp_path, rows):
  page, facts = write_report(tmp_path, rows, before=[])
  assert facts['length_ratio'] == {'first_fifth': None, 'last_fifth': None}
  assert facts['clip_moved_fraction'] is None
  assert 'After: **right**' in page and 'Before:' not in page


def test_a_running_mean_begins_and_ends_half_a_window_inside():
  step_N, value_N = np.arange(5.0), np.array([0.0, 3.0, 6.0, 0.0, 30.0])
  # window 3: (0+3+6)/3, (3+6+0)/3, (6+0+30)/3; the raw last value stands nowhere
  steps, smooth = series.running_mean(step_N, value_N, 3)
  assert steps.tolist() == [1, 2, 3]
  np.testing.assert_allclose(smooth, [3, 3, 12], rtol=1e-14)  # 45 times float64's


def test_every_metric_of_the_table_is_in_the_glossary():
  assert set(report.MAIN.split()) <= set(metrics.GLOSSARY)


def test_a_missed_target_is_explained(tmp_path):
  # 1/2, 0, 1: met in half of the updates
  rows = [{'clip/target_met': met} for met in (0.5, 0.0, 1.0)]
  balanced = {'clip': {'rule': 'balanced', 'balanced': {'target': 0.45}}}
  page, _ = write_report(tmp_path, rows, config=parse(balanced))
  sentence = page.split('\n\n')[2]
  assert all(words in sentence for words in ('0.45', '50.0 %', 'limits'))
  met = report.target_sentence([{'step': 1, 'clip/target_met': 1.0}], 0.45)
  assert '100.0 %' in met and 'limits' not in met
  assert report.target_sentence(metrics.read(tmp_path), None) == ''
  assert report.target_sentence([], 0.45) == ''


HOSTILE = (
  '``` `` `\n```\n# heading\n\n</details></summary><script>alert(1)</script>\n'
  '| a | b |\n|--|--|\n\x1b[31mred\x1b[0m\rback\x00\u202eright to left\ud800\n'
  '<!-- [link](http://x) ![image](y.png) **strong** &lt;'
)


def test_texts_of_models_take_no_effect_on_the_page(tmp_path):
  sample = dict(problem=HOSTILE, answer=HOSTILE, response=HOSTILE, correct=True)
  after = [sample, sample | {'problem': '# other'}]
  config = CONFIG.model_copy(update={'title': HOSTILE})
  rows = [{'rollout/reward': 0.5, 'batch/filled': 1.0}]
  page, _ = write_report(tmp_path, rows, [sample], after, config)
  assert not [c for c in page if not c.isprintable() and c != '\n']
  tokens = MarkdownIt('commonmark', {'html': True}).enable('table').parse(page)
  kinds = collections.Counter(token.type for token in tokens)
  # Our six sections and the title; two problems, three responses and the config.
  assert kinds['heading_open'] == 7 and kinds['fence'] == 6
  # Our two tables: a head and 4 rows, a head and 2 rows.
  assert kinds['table_open'] == 2 and kinds['tr_open'] == 5 + 3
  # The only tags are ours: they fold the config away.
  opened, closed = (t.content for t in tokens if t.type == 'html_block')
  assert opened.count('<') == 3 and closed == '</details>\n'
  children = [child for token in tokens for child in token.children or []]
  assert not {'html_inline', 'link_open', 'image'} & {child.type for child in children}
