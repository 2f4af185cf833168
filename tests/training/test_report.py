"""A run on one page: the numbers by hand, and no gap in the data breaks the page."""

import json
import math

import numpy as np
import pytest

from bapo_jax.runtime import metrics
from bapo_jax.training import report

NAN = math.nan


def write_report(workdir, rows, **overrides):
  with metrics.open_writers(workdir, -1, tensorboard=False) as write:
    for step, row in enumerate(rows, 1):
      write(step, row)
  sample = dict(problem='What is 2+3?', answer='5', response='5', correct=True)
  facts = dict(
    title='A run',
    config_text='seed = 0',
    config_hash='abc',
    eval_before=dict(accuracy=0.25, stderr=0.03, n=200),
    eval_after=dict(accuracy=np.float32(0.5), stderr=0.04, n=200),
    samples_before=[{**sample, 'response': '```\n4', 'correct': False}],
    samples_after=[sample],
    phases={'score': 10.0, 'sample': 60.0},
    wall_s=100.0,
    peak_rss_bytes=3 * 2**29,
    steps=len(rows),
  )
  page = report.write(workdir, **{**facts, **overrides}).read_text()
  return page, json.loads((workdir / 'report.json').read_text())


def lengths(right, wrong):
  return {'rollout/length_right': right, 'rollout/length_wrong': wrong}


def test_numbers_by_hand(tmp_path):
  # ten steps: a fifth is two. First: wrong (30 + 50)/2 = 40 over right 20 (nan: none
  # is right) = 2; last: wrong 60 over right (10 + 30)/2 = 20 = 3
  rows = [lengths(20, 30), lengths(NAN, 50), *[lengths(1, 1000)] * 6]
  rows += [lengths(10, 60), lengths(30, 60)]
  rows = [dict(row, **{'clip/moved': i >= 6}) for i, row in enumerate(rows)]
  page, facts = write_report(tmp_path, rows, target=0.4)
  assert facts['length_ratio'] == {'first_fifth': 2.0, 'last_fifth': 3.0}
  assert facts['clip_moved_fraction'] == 0.4  # 4 of 10
  assert facts['eval_after'] == {'accuracy': 0.5, 'stderr': 0.04, 'n': 200}
  assert facts['phases'] == {'score': 10.0, 'sample': 60.0}
  assert sorted(facts) == [
    'clip_moved_fraction',
    'config_hash',
    'eval_after',
    'eval_before',
    'length_ratio',
    'peak_rss_bytes',
    'phases',
    'responses',
    'steps',
    'wall_s',
  ]
  first = page.split('\n\n')[1]
  assert 'from 0.250 ± 0.030 to 0.500 ± 0.040 on 200 held-out problems' in first
  assert '10 steps, 1 min 40 s of wall time and 1.50 GiB' in first
  assert 'more than two standard errors' in first  # 0.25 against 2 * 0.05
  # phases longest first, then what they leave of 100 s
  table = page[page.index('| sample | 60.0 | 60.0 |') :].splitlines()
  assert table[1] == '| score | 10.0 | 10.0 |'
  assert table[2] == '| other | 30.0 | 30.0 |'
  assert '| `rollout/length_right` | 20 | 20 |' in page
  # the wrong response opens a fence of three: its block needs four to hold it
  assert '````text\n```\n4\n````' in page
  for name in ('curves.png', 'phases.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')


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
  page, facts = write_report(tmp_path, rows, samples_before=[])
  assert facts['length_ratio'] == {'first_fifth': None, 'last_fifth': None}
  assert facts['clip_moved_fraction'] is None
  assert 'After: **right**' in page and 'Before:' not in page


def test_running_mean_narrows_at_the_ends():
  # window 3: (0), (0+3+6)/3, (3+6+0)/3, (0): the ends stand alone
  assert report.running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [0, 3, 3, 0]


def test_a_long_response_loses_its_middle():
  text = report.fence('a' * 10 + 'x' * 100 + 'b' * 10, limit=20)
  assert text == (
    '```text\naaaaaaaaaa\n[... 100 characters left out ...]\nbbbbbbbbbb\n```'
  )
