"""The viewer lists and draws the groups that a run recorded."""

import io
import json
import re

import numpy as np
import pytest
import recordings
from recordings import response
from rich.console import Console

from bapo_jax.tools import viewer
from bapo_jax.training import checkpoint


def printed(workdir, number=None, views='', terminal=False):
  stream = io.StringIO()
  console = Console(file=stream, width=78, force_terminal=terminal, _environ={})
  viewer.show(str(workdir), number, views, console=console)
  return stream.getvalue()


def evaluated(tmp_path, *problems):
  """A run with one evaluation: each problem, its responses and their verdicts."""
  (tmp_path / 'config.json').write_text('{"steps": 1, "sampler": {}, "clip": {}}')
  samples = [
    {'problem': f'{problem} mod 7', 'answer': '3', 'response': text, 'correct': right}
    | {'id': i, 'reward': float(right), 'extracted': '3', 'reason': '', 'parts': {}}
    for i, (problem, responses) in enumerate(problems)
    for text, right in responses
  ]
  (tmp_path / 'eval').mkdir()
  for step, recorded in ((0, samples[:1]), (10, samples), (9, samples[:1])):
    path = tmp_path / 'eval' / f'{step}.json'
    path.write_text(json.dumps({'result': {'accuracy': 0.5}, 'samples': recorded}))
  return tmp_path


TWO = (
  ('1+2', [('so 3', True), ('so 4', False), ('so 5', False), ('so 3!', True)]),
  ('2+3', [('so 5', False)]),
)


def test_the_newest_evaluation_is_listed_and_printed_by_problem(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  first, second, *advice = printed(workdir).splitlines()
  assert re.fullmatch(r' +1 +2 of 4 right +evaluation at step 10', first)
  assert re.fullmatch(r' +2 +0 of 1 right +evaluation at step 10', second)
  assert '--group=1 to --group=2 prints a group' in ' '.join(advice)
  drawn = printed(workdir, 1)
  assert 'group 1 of 2: evaluation at step 10' in drawn
  assert '1+2 mod 7' in drawn and 'Right answer: 3' in drawn
  lines = [line.strip() for line in drawn.splitlines() if ' of 4: ' in line]
  verdicts = ['1 of 4: right', '2 of 4: wrong', '3 of 4: wrong', '4 of 4: right']
  assert lines == [f'{verdict}; the verifier read 3' for verdict in verdicts]
  # An evaluation records only text, so that no token can be marked.
  assert printed(workdir, 2, 'pc') == printed(workdir, 2)


def test_what_the_newest_step_trained_on_comes_first(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  logp = np.log([0.5, 0.95]).tolist()
  cut = dict(pieces=['4', '3'], sampler_logp=logp, ratio=[1.3, None], cut=[1, 0])
  two = [response('43', True, 1.5, **cut), response('x' * 9, False, -0.5)]
  recordings.step(workdir, 7, {'responses': two, 'id': 4})
  recordings.step(workdir, 6, {'responses': []})
  drawn = printed(workdir, 1)
  assert 'group 1 of 3: problem 4, trained on in step 7, reused' in drawn
  assert 'right · reward 1.00 · advantage +1.50 · 2 tokens' in drawn
  assert 'wrong · reward 0.00 · advantage -0.50' in drawn
  assert '\x1b[32m43' in printed(workdir, 1, terminal=True)
  # Of the marks, those of the page (test_page.py), each behind its token.
  both = ' '.join(printed(workdir, 1, 'pc').split())
  assert '4[probability 0.50, ratio 1.3, clipped]3' in both and '3[' not in both
  assert 'bounds 0.8 to 1.25 in update 2' in both


def test_a_response_is_plain_text_and_a_long_one_loses_its_middle(tmp_path):
  # It can neither steer the terminal nor be read as markup.
  nasty = 'a\x1b[2Jb\x07[bold]c[/bold]\x9bd\x7f'
  long = 'begin ' + 'x' * 5000 + ' end'
  workdir = evaluated(tmp_path, ('1', [(long, True)]), ('2', [(nasty, True)]))
  assert r'a\x1b[2Jb\x07[bold]c[/bold]\x9bd\x7f' in printed(workdir, 2)
  short = printed(workdir, 1)
  assert 'begin' in short and ' end' in short
  assert '3510 characters left out' in short and short.count('x') < 1510
  assert printed(workdir, 1, 'a').count('x') >= 5000


def test_nothing_later_than_a_checkpoint_is_shown(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  for step in (7, 9):
    recordings.step(workdir, step, {'responses': [response('43', True, 1.5)]})
  with checkpoint.manager(str(workdir), 2) as checkpoints:
    for step in (8, 10):
      checkpoint.save(checkpoints, step, {'params': {'w': np.zeros(2)}}, {})

  def sources(which):
    return [g['head'][-11:] for g in viewer.read(str(workdir), which)]

  evaluation = ' at step 10'
  assert sources('newest') == ['p 9, reused', evaluation, evaluation]
  # The evaluation of step 0 has one response.
  assert sources('8') == ['p 7, reused', 'n at step 0']
  with pytest.raises(ValueError, match=r'checkpoint=4 .* \[8, 10\]'):
    sources('4')


def test_nothing_recorded_and_no_such_group_are_one_sentence(tmp_path):
  with pytest.raises(ValueError, match='--workdir'):
    viewer.show(str(tmp_path))
  evaluated(tmp_path, *TWO)
  for group, views, named in ((3, '', '--group=3'), (1, 'px', '--views=px')):
    with pytest.raises(ValueError, match=named):
      viewer.show(str(tmp_path), group, views)
