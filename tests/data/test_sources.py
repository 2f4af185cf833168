"""From the names in the config to rows: made, read, or not there."""

import json

import pytest

from bapo_jax.data import builder, countdown, sources, synthetic
from bapo_jax.data.knobs import CountdownConfig, ProblemsConfig
from bapo_jax.data.row import Row

SMALL = {'numbers': (3,), 'largest': 9, 'target': 30}


def problems(source='synthetic', **knobs):
  return ProblemsConfig(
    **{'source': source, 'test_source': source, 'train': 20, 'test': 10} | knobs
  )


def write(tmp_path, name, *pairs):
  path = tmp_path / name
  path.write_text('\n'.join(json.dumps({'problem': p, 'answer': a}) for p, a in pairs))
  return str(path)


def test_made_problems_are_split_by_the_knob(tmp_path):
  made, other = synthetic.generate(problems()), countdown.generate(problems())
  for source, rows in (
    ('synthetic', [Row(p.text, str(p.answer)) for p in made]),
    ('countdown', [countdown.row(p.numbers, p.answer, 'sentence') for p in other]),
  ):
    knobs = problems(source)
    train, test = (
      sources.load(knobs, knob, str(tmp_path)) for knob in ('source', 'test_source')
    )
    assert (len(train), len(test)) == (20, 10)
    assert set(train) == set(rows[:20]) and set(test) == set(rows[20:])
    assert sources.missing(knobs, 'source') == []


def test_made_problems_come_in_the_order_of_recorded_runs(tmp_path):
  # array_record shuffles by id and split: what problem 0 of a run is depends on it.
  knobs = problems(level=3, train=200, test=50)
  train = sources.load(knobs, 'source', str(tmp_path))
  test = sources.load(knobs, 'test_source', str(tmp_path))
  assert [row.problem for row in train[:3]] == [
    '19x+27=10 mod 8',
    '25x+33=25 mod 9',
    '5x+1=38 mod 8',
  ]
  assert [row.problem for row in test[:2]] == ['23x+25=28 mod 8', '26x+37=40 mod 7']


def test_files_are_read_in_order_and_repeats_counted_over_all(tmp_path, capsys):
  paths = [
    write(tmp_path, 'a.jsonl', ('1+1', 2), ('1+2', 3)),
    write(tmp_path, 'b.jsonl', ('1+2', 3), ('1+3', 4)),
  ]
  knobs = problems(','.join(paths))
  rows = sources.load(knobs, 'source', str(tmp_path))
  assert [row.answer for row in rows] == ['2', '3', '4']
  assert '4 rows hold 3 different problems; the first' in capsys.readouterr().out
  knobs = problems(','.join(paths), duplicates='keep')
  rows = sources.load(knobs, 'source', str(tmp_path))
  assert [row.answer for row in rows] == ['2', '3', '3', '4']
  assert 'problems; problems.duplicates=keep' in capsys.readouterr().out


def test_rows_of_files_are_stored_in_the_data_directory(tmp_path, monkeypatch):
  stored = []
  store = builder.store
  monkeypatch.setattr(
    builder, 'store', lambda *args: stored.append(store(*args)) or stored[-1]
  )
  pairs = [(f'{i}+é', i) for i in range(40)]
  source = write(tmp_path, 'a b.jsonl', *pairs)
  rows = sources.load(problems(source), 'source', str(tmp_path / 'data'))
  assert rows == [Row(problem, str(answer)) for problem, answer in pairs]
  (tmp_path / 'a b.jsonl').unlink()
  found = builder.problems(stored[0], 'rows')
  assert [found[i] for i in range(40)] == rows
  assert tmp_path / 'data' in stored[0].data_path.parents


def test_absent_files_are_listed_and_bad_ones_raise(tmp_path):
  good = write(tmp_path, 'a.jsonl', ('1+1', 2))
  assert sources.missing(problems(f'{good},x.jsonl,y.jsonl'), 'source') == [
    '--config.problems.source=x.jsonl',
    '--config.problems.source=y.jsonl',
  ]
  assert sources.missing(problems(good), 'source') == []
  bad = write(tmp_path, 'b.jsonl', ('1+1', None))
  with pytest.raises(ValueError, match=r"b\.jsonl, line 1: field 'answer' holds None"):
    sources.missing(problems(f'{good},{bad}'), 'source')
  with pytest.raises(ValueError, match=r'fewer than train \+ test = 510'):
    sources.missing(problems(level=1, train=500), 'source')
  few = CountdownConfig(numbers=(2,), largest=10, target=10)
  with pytest.raises(ValueError, match=r'fewer than train \+ test = 510'):
    sources.missing(problems('countdown', countdown=few, train=500), 'source')


def test_the_warm_start_imitates_the_training_problems():
  knobs = problems('countdown', countdown=CountdownConfig(**SMALL, wording='short'))
  made, solve = sources.sft_problems(knobs)
  assert made == countdown.generate(knobs)[:20]
  assert made[0].text.endswith(f'={made[0].answer}')
  assert solve.func is countdown.solve and solve.keywords == {'largest': 30}
  for source in ('synthetic', 'own.jsonl'):
    knobs = problems(source, family='chain', level=2)
    made, solve = sources.sft_problems(knobs)
    assert made == synthetic.generate(knobs)[:20]
    assert solve is synthetic.solve_chain
  with pytest.raises(ValueError, match=r"give wording='short', or a model\.path"):
    sources.sft_problems(problems('countdown'))
