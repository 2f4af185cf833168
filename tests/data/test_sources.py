"""From the names in the config to rows: made, read, or not there."""

import hashlib
import json
import pathlib
import re

import numpy as np
import pytest
import recordings
from pictured import ONE_LAYER, READER, png
from runs import tiny

from bapo_jax.data import prompts, sources
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.training import inputs, refusals, sft

FOLDER = pathlib.Path(__file__).parents[2]
PAIRS, COUNTDOWN, DRAWN = (
  f'{FOLDER}/examples/{name}.py:{name}' for name in ('pairs', 'countdown', 'drawn')
)


def problems(source='synthetic', **custom):
  return ProblemsConfig(source=source, test_source=source, custom=custom)


def load(knobs, knob='source'):
  """The rows of a source, without repeats."""
  return sources.unique(knobs, sources.read(knobs), knob)


def write(tmp_path, name, *pairs):
  rows = ({'problem': p, 'answer': a} for p, a in pairs)
  return recordings.jsonl(tmp_path / name, rows)


# Fingerprints of training and held-out problems, ids and order included: runs were
# recorded and are resumed with these. Pictures are left out: their compression changes
# with versions of Pillow, their pixels are tested in test_drawn.py.
FOUR = {'largest': 99, 'target': 999, 'numbers': (3, 4)}
SIX = FOUR | {'numbers': (2, 4, 6), 'seed': 7}
ALL = {'hard': 0.3, 'answer': 'all'}
MIXED = {'kind': 'mixed', 'seed': 5}
RECORDED = [  # source, its knobs, their number, fingerprints
  ('synthetic', {}, (200, 50), '442e88803ecb6e8a 0be538f4f023f1be'),
  ('synthetic', {}, (2048, 512), '6cd6fbc115722a39 20dd37ef74ec9b7b'),
  (PAIRS, {'level': 4}, (2048, 512), '940bbe565812b603 ef8a44878cb59b48'),
  (PAIRS, ALL, (500, 100), 'ccec92b1b68e3fdc b9cb3c792fa7f43d'),
  (COUNTDOWN, FOUR, (2048, 512), 'bb54020628f5a962 dbe80a31c978b11f'),
  (COUNTDOWN, SIX, (20, 10), '541fd3fafd3cdfbd 44fb2e3931f2840d'),
  (DRAWN, {}, (40, 8), '634877f9b907fa1c 3c103d0c4031950a'),
  (DRAWN, MIXED, (100, 10), '1e141565a41ff876 2f352f16e1d37bf0'),
]


@pytest.mark.parametrize(('source', 'knobs', 'count', 'recorded'), RECORDED)
def test_made_problems_come_in_the_order_of_recorded_runs(
  source, knobs, count, recorded
):
  knobs = problems(source, **knobs, train=count[0], test=count[1])
  found = []
  for knob in sources.SPLITS:
    rows = load(knobs, knob)
    table = prompts.tabulate(READER, rows, 40, ONE_LAYER, drop=True)
    assert table.rows == rows
    rows = [row._replace(pictures=()) for row in rows]
    found.append(prompts.fingerprint(table._replace(rows=rows)))
  assert ' '.join(found) == recorded


SOLVED = [  # source, its knobs, the digest of 20 problems and noisy solutions
  ('synthetic', {}, 'adfd46221d5fa9a1'),
  (PAIRS, {'hard': 0.4}, '9c7be673877744b7'),
  (PAIRS, {'stops': False, 'answer': 'all'}, '40f86d10f33c870e'),
  (COUNTDOWN, FOUR, '6ad4afad5b792819'),
  (DRAWN, {}, '78325735cf64ad1a'),
]


@pytest.mark.parametrize(('source', 'knobs', 'recorded'), SOLVED)
def test_worked_solutions_are_those_of_recorded_runs(source, knobs, recorded):
  knobs = problems(source, **knobs, train=20, test=10)
  digest = hashlib.sha256()
  for i, row in enumerate(sources.imitated(knobs, sources.read(knobs))):
    solution = row.solution(np.random.default_rng(i), 0.3, 0.3)
    digest.update(f'{row.problem} -> {solution}\n'.encode())
  assert digest.hexdigest()[:16] == recorded


def test_columns_are_those_of_both_sources(tmp_path):
  columns = {'problem': 'q', 'answer': 'a'}
  rows = [{'q': '1+1', 'a': 2, 'solutions': ['2']}]
  path = recordings.jsonl(tmp_path / 'a.jsonl', rows)
  own = tmp_path / 'own.py'
  own.write_text(f'def f(split):\n  return {rows}\n')
  names = {'problems.source': path, 'problems.test_source': f'{own}:f'}
  config = tiny(**names, **{f'problems.columns.{x}': columns[x] for x in columns})
  training, held_out = sources.read(config.problems)
  assert [(row.problem, row.answer) for row in training + held_out] == [
    ('1+1', '2')
  ] * 2
  # The warm start imitates the solutions of these problems, in these columns.
  other = tiny(**names, **{'problems.columns.problem': 'q'})
  before = sft.fingerprint(config)
  assert before != sft.fingerprint(other)
  recordings.jsonl(tmp_path / 'a.jsonl', rows * 2)
  assert before != sft.fingerprint(config)


def test_absent_files_are_listed_and_bad_ones_raise(tmp_path):
  good = write(tmp_path, 'a.jsonl', ('1+1', 2))
  assert sources.absent(problems(f'{good},x.jsonl,y.jsonl'), 'source') == [
    '--config.problems.source=x.jsonl',
    '--config.problems.source=y.jsonl',
  ]
  bad = write(tmp_path, 'b.jsonl', ('1+1', None))
  with pytest.raises(ValueError, match=r"b\.jsonl, line 1: field 'answer'"):
    sources.read(problems(f'{good},{bad}'))
  with pytest.raises(ValueError, match=r'fewer than train \+ test = 1012'):
    sources.read(problems(level=1, train=500))

  def check(row):
    raise ValueError(f'no {row.answer}')

  with pytest.raises(ValueError, match=r'a\.jsonl, line 1: no 2'):
    sources.check(problems(good), sources.read(problems(good)), check)


def test_pictures_are_read_if_the_model_has_a_tower(tmp_path, one_device):
  (tmp_path / '0.png').write_bytes(png(56, 56))
  row = {'problem': '<image>1', 'answer': '3', 'images': [], 'image': '0.png'}
  (tmp_path / 'a.jsonl').write_text(json.dumps(row))
  source = str(tmp_path / 'a.jsonl')

  def refused(source, layers):
    sizes = {'sft.tower.layers': layers, 'prompts.max_prompt_tokens': 29}
    names = {'problems.source': source, 'problems.test_source': source}
    config = tiny(**sizes, **names)
    return ' '.join(refusals.of_inputs(config, inputs.read(config)))

  for source_, place in ((source, 'line 1: '), (DRAWN, 'row 1: ')):
    assert refused(source_, 1) == ''
    assert re.search(place + '.*text-only', refused(source_, 0))
  (tmp_path / 'a.jsonl').write_text(json.dumps(row | {'problem': '1'}))
  assert 'has 0 <image> for 1 pictures' in refused(source, 1)


def test_the_warm_start_imitates_the_solutions_of_every_source(tmp_path):
  rows = [{'problem': f'1+{i}', 'answer': 1 + i} for i in range(3)]
  rows[1]['solutions'] = ['2', ['1+1=', '2\n', 'so 2']]
  own = tmp_path / 'own.py'
  own.write_text(f'def f(split):\n  return {rows}\n')
  for source in (recordings.jsonl(tmp_path / 'a.jsonl', rows), f'{own}:f'):
    knobs = problems(source)
    data = sources.read(knobs)
    (row,) = sources.imitated(knobs, data)
    rng = np.random.default_rng(0)
    found = {row.solution(rng, 0.0, 0.0) for _ in range(20)}
    assert row.problem == '1+1' and found == {'2', ('1+1=', '2\n', 'so 2')}
    bad = data.training[0]._replace(solutions='2')
    with pytest.raises(ValueError, match="'1\\+0' has the solutions '2'; give a list"):
      sources.imitated(knobs, data._replace(training=[bad]))
  without = data._replace(training=data.training[:1])
  default = sources.read(ProblemsConfig()).training
  assert len(sources.imitated(knobs, without)) == len(default)


def test_rows_without_a_rank_keep_their_order(tmp_path):
  rows = [{'problem': x, 'answer': 1, 'solutions': [x], 'rank': 9} for x in 'cab']
  knobs = problems(recordings.jsonl(tmp_path / 'a.jsonl', rows))
  imitated = sources.imitated(knobs, sources.read(knobs))
  assert [row.problem for row in imitated] == [*'cab']


def test_a_held_out_set_has_its_problems_once_each(tmp_path, capsys):
  first = write(tmp_path, 'a.jsonl', ('1+1', 2), ('2+2', 4), ('1+1', 2))
  second = write(tmp_path, 'b.jsonl', ('1+1', 2), ('3+3', 6))
  third = write(tmp_path, 'c.jsonl', ('3+3', 6), ('4+4', 8))
  named = ProblemsConfig(source=first, test_source=f'x={first},y_1={second},{third}')
  data = sources.read(named)
  assert {row.set for row in data.training} == {''}
  rows = sources.unique(named, data, 'test_source')
  assert [(row.set, row.problem) for row in rows] == [
    *(('x', problem) for problem in ('1+1', '2+2')),
    *(('y_1', problem) for problem in ('1+1', '3+3', '4+4')),
  ]
  assert capsys.readouterr().out.splitlines() == [
    f'problems.test_source={x}: {count} different problems; the first of each is kept'
    for x, count in (
      (first, '3 rows contain 2'),
      (f'{second},{third}', '4 rows contain 3'),
    )
  ]
  kept = named.model_copy(update={'duplicates': 'keep'})
  rows = sources.unique(kept, data, 'test_source', quiet=True)
  assert [row.set for row in rows] == ['x'] * 3 + ['y_1'] * 4
  # The line of a row that fails a check is that of its file, whatever its set.
  with pytest.raises(ValueError, match=r'c\.jsonl, line 2: no 8'):
    sources.check(named, data, refuse_eight)


def refuse_eight(row):
  if row.answer == '8':
    raise ValueError('no 8')


def test_files_of_named_sets_are_found_or_listed(tmp_path):
  path = write(tmp_path, 'a.jsonl', ('1+1', 2))
  named = ProblemsConfig(source=f'x={path}', test_source=f'x={path},b.jsonl,y=hub:a/b')
  assert sources.absent(named, 'test_source') == [
    '--config.problems.test_source=b.jsonl'
  ]
  (line,) = sources.absent(named, 'source')  # a training set has no name
  assert line.startswith(f'--config.problems.source=x={path} (only sets of problems.te')
  # An evaluation has its problems in both places.
  both = problems(f'x={path}')
  assert sources.absent(both, 'source') == []
  data = sources.read(both)
  assert [row.set for row in data.held_out] == ['x']
  assert sources.file_digests(both) == sources.file_digests(problems(path)) != []


def test_a_comma_may_be_in_the_name_of_a_file(tmp_path):
  path = tmp_path / 'a,b.jsonl'
  path.write_text('{"problem": "1 + 1", "answer": "2"}\n')
  problems = ProblemsConfig(source=str(path), test_source=f'{path},{path}')
  assert sources.absent(problems, 'source') == []
  assert len(sources.absent(problems, 'test_source')) == 4  # a list has its commas
  problems = problems.model_copy(update={'test_source': str(path)})
  assert len(sources.read(problems).training) == 1
