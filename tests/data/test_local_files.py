"""Users' files: real ones, each format, and every error of a bad one."""

import json
import pathlib
import re

import pyarrow
import pyarrow.parquet
import pytest

from bapo_jax.data import local_files
from bapo_jax.data.row import Row

SHARED = pathlib.Path(__file__).parents[3] / 'shared/data'
REAL = [  # file, problems, the first answer, verifier
  ('aime24.jsonl', 30, '204', ''),
  ('gsm8k_test_300.jsonl', 300, '18', 'gsm8k'),
  ('math500_200.jsonl', 200, r'\left( 3, \frac{\pi}{2} \right)', ''),
]
GOOD = '{"problem": "1+1", "answer": "2"}'
VERL = [
  {
    'data_source': 'math_dapo',
    'prompt': [{'role': 'user', 'content': f'{i}+1'}],
    'reward_model': {'ground_truth': str(i + 1), 'style': 'rule'},
    'extra_info': {'index': i},
  }
  for i in range(3)
]


def file_with(tmp_path, *lines, name='problems.jsonl'):
  path = tmp_path / name
  path.write_text('\n'.join(lines))
  return str(path)


def parquet(tmp_path, rows, name='problems.parquet'):
  path = str(tmp_path / name)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  return path


@pytest.mark.parametrize(('file', 'count', 'answer', 'verifier'), REAL)
def test_real_files_have_as_many_problems_as_they_should(file, count, answer, verifier):
  if not (SHARED / file).exists():
    pytest.skip(f'no {SHARED / file} here')
  rows = local_files.read(str(SHARED / file))
  assert len(rows) == count == len({row.problem for row in rows})
  assert rows[0].answer == answer
  assert {row.verifier for row in rows} == {verifier}


def test_a_file_of_problems_is_read_in_order(tmp_path):
  path = file_with(
    tmp_path,
    '{"problem": "1+1", "answer": 2, "source": "mine"}',
    '{"answer": "3", "problem": "1+2"}',
  )
  assert local_files.read(path) == [Row('1+1', '2'), Row('1+2', '3')]


def test_a_changed_file_is_read_a_second_time(tmp_path):
  path = file_with(tmp_path, GOOD)
  assert len(local_files.read(path)) == 1
  file_with(tmp_path, GOOD, GOOD)
  assert len(local_files.read(path)) == 2
  local_files.read(path).clear()  # a reader has a list of its own
  assert len(local_files.read(path)) == 2


def test_jsonl_a_json_list_and_parquet_hold_the_same(tmp_path):
  paths = [
    file_with(tmp_path, *map(json.dumps, VERL)),
    file_with(tmp_path, json.dumps(VERL, indent=1), name='list.json'),
    file_with(tmp_path, '\ufeff' + json.dumps(VERL[0]), *map(json.dumps, VERL[1:])),
    parquet(tmp_path, VERL),
  ]
  found = [local_files.read(path) for path in paths]
  assert found[0] == [Row(f'{i}+1', str(i + 1), 'math') for i in range(3)]
  assert all(rows == found[0] for rows in found)


def test_a_row_that_comes_many_times_is_held_once(tmp_path):
  rows = local_files.read(parquet(tmp_path, VERL * 100))
  assert len(rows) == 300 and len({id(row) for row in rows}) == 3


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"problem": "1+2"}', r"line 2: no field 'answer', only \['problem'\]"),
    ('{"answer": "3"}', r"line 2: no field 'problem', only \['answer'\]"),
    ('{"problem": "1+2", "answer": null}', "line 2: field 'answer' holds None"),
    ('{"problem": "1+2", "answer": NaN}', "line 2: field 'answer' holds nan"),
    ('{"problem": "1+2", ', r'line 2: not JSON'),
    ('', r'line 2: not JSON'),
    ('[' * 100_000, r'line 2: not JSON'),
    ('{"problem": "1+2", "answer": ' + '9' * 5000 + '}', r'line 2: not JSON'),
    ('3', r'line 2: 3 is no JSON object'),
    ('["problem", "answer"]', r'line 2: \["problem", "answer"\] is no JSON object'),
    ('null', r'line 2: null is no JSON object'),
  ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path, line, message):
  path = file_with(tmp_path, GOOD, line, GOOD)
  with pytest.raises(ValueError, match=re.escape(path) + ', ' + message):
    local_files.read(path)


def test_a_bad_row_of_a_table_is_named_by_file_row_and_field(tmp_path):
  rows = [*VERL, VERL[0] | {'reward_model': {'ground_truth': None, 'style': 'rule'}}]
  path = parquet(tmp_path, rows)
  message = (
    r", row 4: field 'reward_model\.ground_truth' holds None, which is no answer"
  )
  with pytest.raises(ValueError, match=re.escape(path) + message):
    local_files.read(path)


def test_no_file_and_files_that_are_none_are_named(tmp_path):
  with pytest.raises(ValueError, match=r"no file '/nowhere/x\.jsonl'"):
    local_files.read('/nowhere/x.jsonl')
  for path in (file_with(tmp_path), parquet(tmp_path, VERL[:0])):
    with pytest.raises(ValueError, match=re.escape(path) + ' holds no problem'):
      local_files.read(path)
  path = file_with(tmp_path, GOOD, name='problems.csv')
  with pytest.raises(ValueError, match=r'ends in none of \.jsonl, \.json, \.parquet'):
    local_files.read(path)
  path = file_with(tmp_path, GOOD, name='cut.parquet')
  with pytest.raises(ValueError, match=re.escape(path) + ' is no whole parquet file'):
    local_files.read(path)
  path = file_with(tmp_path, '{"question": "1+1", "solutions": []}')
  message = (
    r", line 1: its row \{'question': '1\+1', 'solutions': \[\]\} is of no schema"
  )
  with pytest.raises(ValueError, match=re.escape(path) + message):
    local_files.read(path)
  (tmp_path / 'latin.jsonl').write_bytes(GOOD.encode() + b'\n\xe9')
  with pytest.raises(ValueError, match=r'latin\.jsonl is not UTF-8'):
    local_files.read(str(tmp_path / 'latin.jsonl'))


SYSTEM = {'role': 'system', 'content': 'Be brief.'}
ASKED = {'role': 'user', 'content': '1+1'}
SOLVED = {'role': 'assistant', 'content': r'It is \boxed{2}.'}
# Schema: its row, what it says, a value that breaks it, the reason.
LAYOUTS = {
  'TRL, text': (
    {'prompt': '1+1', 'solution': r'$\frac{4}{2}$'},
    Row('1+1', r'\frac{4}{2}'),
    {'solution': ''},
    "field 'solution' is empty",
  ),
  'TRL, conversation': (
    {'prompt': [SYSTEM, ASKED], 'solution': r'so $\boxed{2}$'},
    Row('1+1', '2', '', 'Be brief.'),
    {'prompt': [ASKED, SOLVED]},
    "field 'prompt' holds messages by ['user', 'assistant'], not one by the user",
  ),
  'TRL, ground truth': (
    {'prompt': [ASKED], 'ground_truth': '2', 'data_source': 'openai/gsm8k'},
    Row('1+1', '2', 'gsm8k'),
    {'ground_truth': None},
    "field 'ground_truth' holds None, which is no answer",
  ),
  'verl': (
    {
      'data_source': 'openai/gsm8k',
      'prompt': [SYSTEM, ASKED],
      'ability': 'math',
      'reward_model': {'style': 'rule', 'ground_truth': '2'},
      'extra_info': {'split': 'train', 'index': 0},
    },
    Row('1+1', '2', 'gsm8k', 'Be brief.'),
    {'reward_model': {'style': 'rule', 'ground_truth': None}},
    "field 'reward_model.ground_truth' holds None, which is no answer",
  ),
  'open-instruct': (
    {'messages': [SYSTEM, ASKED, SOLVED], 'ground_truth': '2', 'dataset': 'MATH'},
    Row('1+1', '2', 'math', 'Be brief.'),
    {'messages': [SYSTEM, SOLVED]},
    "field 'messages' holds messages by ['system', 'assistant'], not one by the user",
  ),
  'messages': (
    {'messages': [SYSTEM, ASKED, SOLVED]},
    Row('1+1', '2', '', 'Be brief.'),
    {'messages': [ASKED, SOLVED | {'content': 'It is 2.'}]},
    r"field 'messages': 'It is 2.' has no \boxed{}",
  ),
  'messages and answer': (
    {'messages': [ASKED], 'answer': '2'},
    Row('1+1', '2'),
    {'messages': [SYSTEM | {'content': ''}, ASKED]},
    "field 'messages' holds '', which is no system message",
  ),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_a_layout_reads_the_same_in_jsonl_and_parquet(name, tmp_path):
  row, expected, broken, reason = LAYOUTS[name]
  good, bad = [row] * 2, [row, row | broken]
  for write, place in (
    (lambda rows: file_with(tmp_path, *map(json.dumps, rows)), 'line 2'),
    (lambda rows: parquet(tmp_path, rows), 'row 2'),
  ):
    assert local_files.read(write(good)) == [expected] * 2
    path = write(bad)
    with pytest.raises(ValueError, match=re.escape(f'{path}, {place}: {reason}')):
      local_files.read(path)


def test_a_file_of_no_layout_is_refused_with_its_row_and_the_nearest(tmp_path):
  row = {'prompt': '1+1', 'reply': '2'}
  for path, place in (
    (file_with(tmp_path, json.dumps(row)), 'line 1'),
    (parquet(tmp_path, [row]), 'row 1'),
  ):
    with pytest.raises(ValueError) as error:
      local_files.read(path)
    assert str(error.value) == (
      f"{path}, {place}: its row {{'prompt': '1+1', 'reply': '2'}} is of no schema "
      'known here; the nearest are TRL (prompt with answer; lacks answer), verl '
      '(prompt with reward_model.ground_truth; lacks reward_model.ground_truth), slime '
      '(prompt with label; lacks label): name its fields as one of them does'
    )
