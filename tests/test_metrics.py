"""Rows survive kills and resumes; a name without a meaning is refused."""

import json
import math

import pytest

from bapo_jax import metrics


def write(workdir, start, *rows):
  with metrics.open_writers(workdir, start, tensorboard=False) as put:
    for step, row in rows:
      put(step, row)


def test_every_sentence_is_one():
  for name, sentence in metrics.GLOSSARY.items():
    assert name.count('/') == 1
    assert sentence[0].isupper() or sentence.startswith('k3')
    assert sentence.endswith('.')


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
  with pytest.raises(ValueError, match=r'loss/entrpy.*loss/entropy'):
    write(tmp_path, -1, (1, {'loss/entrpy': 1.0}))


def test_rows_after_the_resumed_step_are_dropped(tmp_path):
  write(tmp_path, -1, *((i, {'loss/value': i}) for i in range(5)))
  write(tmp_path, 2, (3, {'loss/value': 30}))
  assert [(r['step'], r['loss/value']) for r in metrics.read(tmp_path)] == [
    (0, 0),
    (1, 1),
    (2, 2),
    (3, 30),
  ]


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_named(tmp_path):
  write(tmp_path, -1, (1, {'loss/value': 1}), (2, {'loss/value': 2}))
  path = tmp_path / 'metrics.jsonl'
  path.write_text(path.read_text() + '{"step": 3, "loss/va')
  assert [row['step'] for row in metrics.read(tmp_path)] == [1, 2]
  write(tmp_path, 2, (3, {'loss/value': 3}))
  assert [row['step'] for row in metrics.read(tmp_path)] == [1, 2, 3]
  path.write_text('{"step"\n' + path.read_text())
  with pytest.raises(ValueError, match='line 1'):
    metrics.read(tmp_path)


def test_nan_and_infinity_are_valid_json_and_come_back(tmp_path):
  write(tmp_path, -1, (1, {'loss/value': math.nan, 'loss/ratio_max': math.inf}))
  json.loads((tmp_path / 'metrics.jsonl').read_text(), parse_constant=pytest.fail)
  (row,) = metrics.read(tmp_path)
  assert math.isnan(row['loss/value'])
  assert row['loss/ratio_max'] == math.inf


def test_tensorboard_files_are_written(tmp_path):
  with metrics.open_writers(tmp_path, -1) as put:
    put(1, {'loss/value': 1.0})
  assert list((tmp_path / 'tensorboard').glob('events.*'))


def test_columns_stand_under_each_other():
  row = {name: 0.5 for _, name, _ in metrics.COLUMNS}
  lines = [metrics.line(9, 100, row), metrics.line(100, 100, row | {'clip/low': 0.123})]
  assert len({line.index('entropy') for line in lines}) == 1
  assert '-' in metrics.line(1, 100, {})
