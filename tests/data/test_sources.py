"""From a name in the config to rows: what is made, what is read, what is not there."""

import json

import pytest

from bapo_jax.data import countdown, families, sources
from configs import base


def problems(**knobs):
  return base.get_config().problems.to_dict() | {'train': 20, 'test': 10} | knobs


def written(tmp_path, name, *pairs):
  path = tmp_path / name
  path.write_text('\n'.join(json.dumps({'problem': p, 'answer': a}) for p, a in pairs))
  return str(path)


def test_made_problems_are_split_by_the_knob(tmp_path):
  for name, texts in (
    ('synthetic', [p.text for p in families.generate('search', 3, 0, 30)]),
    (
      'countdown',
      [
        countdown.row(*each)['problem']
        for each in countdown.generate(0, 30, **problems()['countdown'])
      ],
    ),
  ):
    knobs = problems(source=name, test_source=name)
    train, test = (
      {row['problem'] for row in sources.rows(knob, str(tmp_path), knobs)}
      for knob in ('source', 'test_source')
    )
    assert train == set(texts[:20]) and test == set(texts[20:])
    assert sources.check('source', name, knobs) == []


def test_files_are_read_in_order_and_repeats_counted_over_all(tmp_path, capsys):
  paths = [
    written(tmp_path, 'a.jsonl', ('1+1', 2), ('1+2', 3)),
    written(tmp_path, 'b.jsonl', ('1+2', 3), ('1+3', 4)),
  ]
  knobs = problems(source=','.join(paths))
  rows = sources.rows('source', str(tmp_path), knobs)
  assert [row['answer'] for row in rows] == ['2', '3', '4']
  assert '4 rows hold 3 different problems; the first' in capsys.readouterr().out
  rows = sources.rows('source', str(tmp_path), knobs | {'duplicates': 'keep'})
  assert [row['answer'] for row in rows] == ['2', '3', '3', '4']
  assert 'problems; problems.duplicates=keep' in capsys.readouterr().out


def test_what_is_not_there_is_listed_and_what_is_wrong_raised(tmp_path):
  good = written(tmp_path, 'a.jsonl', ('1+1', 2))
  knobs = problems()
  assert sources.check('source', f'{good},x.jsonl,y.jsonl', knobs) == [
    '--config.problems.source=x.jsonl',
    '--config.problems.source=y.jsonl',
  ]
  assert sources.check('source', good, knobs) == []
  bad = written(tmp_path, 'b.jsonl', ('1+1', None))
  with pytest.raises(ValueError, match=r"b\.jsonl, line 1: field 'answer' holds None"):
    sources.check('source', f'{good},{bad}', knobs)
  with pytest.raises(ValueError, match='level 9'):
    sources.check('source', 'synthetic', problems(level=9))
  small = dict(numbers=(2,), largest=10, target=10)
  with pytest.raises(ValueError, match=r'fewer than train \+ test = 510'):
    sources.check('source', 'countdown', problems(countdown=small, train=500))


def test_the_warm_start_imitates_what_is_trained_on():
  small = {'numbers': (3,), 'largest': 9, 'target': 30, 'wording': 'short'}
  made, solve = sources.worked(problems(source='countdown', countdown=small))
  texts = [
    countdown.row(*each, 'short')['problem']
    for each in countdown.generate(0, 30, **small)
  ]
  assert [p.text for p in made] == texts[:20]
  assert solve.func is countdown.solve and solve.keywords == {'largest': 30}
  for source in ('synthetic', 'own.jsonl'):
    made, solve = sources.worked(problems(source=source, family='chain', level=2))
    assert made == families.generate('chain', 2, 0, 30)[:20]
    assert solve is families.solve_chain
  with pytest.raises(ValueError, match=r"give wording='short', or a model\.path"):
    sources.worked(problems(source='countdown'))
