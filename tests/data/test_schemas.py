r"""Every published schema, one row of each, and the errors of a bad row."""

import re

import pytest

from bapo_jax.data import field_values, schemas
from bapo_jax.data.row import Row

USER = [{'role': 'user', 'content': '1+1'}]
TURNS = [{'role': 'system', 'content': 'Be brief.'}, *USER]


def solved(text):
  """A conversation that ends with its solution."""
  return [*USER, {'role': 'assistant', 'content': text}]


ROWS = [  # schema, row, answer, verifier
  (
    'verl',  # Skywork-OR1: the answer is a JSON list in a string
    {
      'data_source': 'train-math-numinamath1.5_olympiads',
      'prompt': USER,
      'ability': 'math',
      'reward_model': {'ground_truth': '["\\\\frac{1}{2}"]', 'style': 'rule'},
      'extra_info': {'index': 3},
    },
    r'\frac{1}{2}',
    'math',
  ),
  (
    'verl',  # DAPO-Math-17k
    {
      'data_source': 'math_dapo',
      'prompt': USER,
      'reward_model': {'ground_truth': '34', 'style': 'rule-lighteval/MATH_v2'},
      'answer': 'not this one',
    },
    '34',
    'math',
  ),
  (
    'verl',
    {
      'data_source': 'countdown',
      'prompt': USER,
      'reward_model': {'ground_truth': {'target': 5, 'numbers': [2, 3]}},
    },
    '{"numbers": [2, 3], "target": 5}',
    'countdown',
  ),
  (
    'open-instruct',
    {'messages': USER, 'ground_truth': '2', 'dataset': 'gsm8k'},
    '2',
    'gsm8k',
  ),
  (
    'open-instruct',
    {'messages': USER, 'ground_truth': ['2'], 'dataset': ['MATH']},
    '2',
    'math',
  ),
  ('slime', {'prompt': USER, 'label': '2'}, '2', ''),
  ('slime', {'prompt': '1+1', 'label': 2}, '2', ''),
  ('problem and answer', {'problem': '1+1', 'answer': 2}, '2', ''),
  ('problem and answer', {'ID': 7, 'Problem': '1+1', 'Answer': 2.0}, '2', ''),
  ('problem and answer', {'question': '1+1', 'final_answer': ['2']}, '2', ''),
  ('problem and answer', {'Question': '1+1', 'Final Answer': '0.5'}, '0.5', ''),
  ('problem and answer', {'problem': '1+1', 'solution': '', 'answer': '2'}, '2', ''),
  (
    'problem and answer',
    {'problem': '1+1', 'solution': r'\boxed{3}, no: \boxed{\frac{4}{2}}.'},
    r'\frac{4}{2}',
    '',
  ),
  (
    'problem and answer',
    {'problem': '1+1', 'solution': r'the set \boxed{\{1, 2\}}'},
    r'\{1, 2\}',
    '',
  ),
  (
    'problem and answer',
    {'problem': '1+1', 'solution': r'\boxed{\left\{ x = 1 \right.}'},
    r'\left\{ x = 1 \right.',
    '',
  ),
  (
    'problem and answer',
    {'problem': '1+1', 'answer': '204', 'data_source': 'AIME_2024'},
    '204',
    'aime',
  ),
  (
    'problem and answer',
    {'question': '1+1', 'answer': 'Two: <<1+1=2>>\n#### 1,002'},
    '1,002',
    'gsm8k',
  ),
  ('problem and answer', {'problem': '1+1', 'answer': '2', 'prompt': '2+2'}, '2', ''),
  ('TRL', {'prompt': USER, 'solution': r'$\frac{4}{2}$'}, r'\frac{4}{2}', ''),
  ('TRL', {'prompt': '1+1', 'solution': ' 2\n'}, '2', ''),
  ('TRL', {'problem': '2', 'prompt': USER, 'answer': '2'}, '2', ''),
  ('TRL', {'prompt': '1+1', 'solution': 2.0}, '2', ''),
  ('TRL', {'prompt': USER, 'solution': r'Two: $\boxed{2}$.', 'id': 7}, '2', ''),
  ('TRL', {'prompt': USER, 'solution': 'Two.\n#### 2'}, '2', 'gsm8k'),
  ('TRL', {'prompt': USER, 'answer': '2', 'solution': 'by counting'}, '2', ''),
  (
    'TRL',  # verl's fields without its object
    {'data_source': 'lighteval/MATH', 'prompt': USER, 'ground_truth': '2'},
    '2',
    'math',
  ),
  ('open-instruct', {'messages': solved('Two.'), 'ground_truth': '2'}, '2', ''),
  ('messages', {'messages': USER, 'answer': '2', 'data_source': 'AIME'}, '2', 'aime'),
  ('messages', {'messages': solved('Two.'), 'solution': '$2$'}, '2', ''),
  ('messages', {'messages': solved(r'So \boxed{3}, no: \boxed{2}')}, '2', ''),
  ('messages', {'messages': solved('Two.\n#### 2')}, '2', 'gsm8k'),
]


@pytest.mark.parametrize(('name', 'row', 'answer', 'verifier'), ROWS)
def test_every_schema_gives_problem_answer_and_verifier(name, row, answer, verifier):
  schema = schemas.detect(row)
  assert schema.name == name
  parsed = schemas.parse(row, schema)
  assert parsed == Row('1+1', answer, verifier)
  # A parquet file is read in these columns only: they must be enough.
  columns = {field: row[field] for field in schema.fields}
  assert schemas.parse(columns, schema) == parsed


@pytest.mark.parametrize('numbers', ['nums', 'numbers'])
def test_a_table_of_countdown_numbers_is_stated_as_a_problem(numbers):
  row = {'target': 46, numbers: [3, 7, 25]}
  schema = schemas.detect(row)
  assert sorted(schema.fields) == sorted(row)
  parsed = schemas.parse(row, schema)
  assert '3, 7, 25' in parsed.problem and '46' in parsed.problem
  assert parsed.answer == '{"numbers": [3, 7, 25], "target": 46}'
  assert parsed.verifier == 'countdown'
  with pytest.raises(ValueError, match='target many are not'):
    schemas.parse(row | {'target': 'many'}, schema)


PLAIN = {'problem': '1+1', 'answer': '2', 'data_source': 'math'}
VERL = {'data_source': '', 'prompt': USER, 'reward_model': {'ground_truth': '2'}}
TRL = {'prompt': '1+1', 'solution': '2'}
CHAT = {'messages': solved(r'\boxed{2}')}
WRONG = [  # first row, other values in another row, part of the error
  (PLAIN, {'problem': None}, "field 'problem' holds None, which is no problem"),
  (PLAIN, {'problem': ' \n'}, r"field 'problem' holds ' \n', which is no problem"),
  (PLAIN, {'problem': 7}, "field 'problem' holds 7, which is no problem"),
  (PLAIN, {'answer': None}, "field 'answer' holds None, which is no answer"),
  (PLAIN, {'answer': True}, "field 'answer' holds True, which is no answer"),
  (PLAIN, {'answer': float('nan')}, "field 'answer' holds nan, which is no answer"),
  (PLAIN, {'answer': ' '}, "field 'answer' is empty"),
  (PLAIN, {'answer': []}, "field 'answer' holds 0 answers, not one"),
  (PLAIN, {'answer': '["2", "3"]'}, "field 'answer' holds 2 answers, not one"),
  (PLAIN, {'answer': {'value': 2}}, "field 'answer' holds {'value': 2}, which is no"),
  (PLAIN, {'data_source': None}, "field 'data_source' holds None, which is no name"),
  (PLAIN, {'data_source': 'train-code-x'}, "names 'train-code-x': answers to code"),
  (VERL, {'prompt': TURNS[:1]}, "field 'prompt' holds messages by ['system'], not one"),
  (
    VERL,
    {'prompt': TURNS[::-1]},
    'not one by the user after at most one by the system',
  ),
  (VERL, {'prompt': [*USER, *USER]}, 'write an exchange into one message by the user'),
  (VERL, {'prompt': solved('2')}, "holds messages by ['user', 'assistant'], not one"),
  (
    VERL,
    {'prompt': [{'role': 'system', 'content': ' '}, *USER]},
    "field 'prompt' holds ' ', which is no system message",
  ),
  (
    VERL,
    {'prompt': [{'role': 'system', 'content': 'a\0'}, *USER]},
    "holds 'a\\x00', with the control character",
  ),
  (VERL, {'prompt': []}, "field 'prompt' holds messages by [], not one by the user"),
  (VERL, {'prompt': ['1+1']}, "field 'prompt': '1+1' is no message of a chat"),
  (
    VERL,
    {'reward_model': None},
    "field 'reward_model.ground_truth': None is no object",
  ),
  (VERL, {'reward_model': {}}, "no field 'ground_truth', only []"),
  (
    {'question': '1+1', 'answer': 'so #### 2'},
    {'answer': '2'},
    "field 'answer': '2' has no #### before an answer",
  ),
  (
    {'problem': '1+1', 'solution': r'\boxed{2}'},
    {'solution': 'two'},
    r"field 'solution': 'two' has no \boxed{}, and there is no field answer",
  ),
  (
    {'problem': '1+1', 'solution': r'\boxed{2}'},
    {'solution': r'\boxed{2'},
    r"field 'solution': its last \boxed{ is never closed",
  ),
  (
    {'problem': '1+1', 'solution': '2'},
    {},
    r"field 'solution': '2' has no \boxed{}, and there is no field answer",
  ),
  (TRL, {'solution': None}, "field 'solution' holds None, which is no answer"),
  (TRL, {'solution': 'so it is\n2'}, 'is more than an answer and has no \\boxed{}'),
  (TRL, {'solution': 'x' * 101}, 'is more than an answer and has no \\boxed{}'),
  (TRL, {'solution': 'so #### 2'}, "'so #### 2' is more than an answer"),
  (TRL, {'solution': '$ $'}, "field 'solution' is empty"),
  (TRL, {'prompt': None}, "field 'prompt' holds None, which is no problem"),
  (CHAT, {'messages': USER}, r"'messages': '' has no \boxed{}"),
  (CHAT, {'messages': solved('so 2')}, r"field 'messages': 'so 2' has no \boxed{}"),
  (CHAT, {'messages': solved(2)}, "field 'messages' holds 2, which is no solution"),
  (CHAT, {'messages': [*solved('2'), *USER]}, "['user', 'assistant', 'user'], not one"),
]


@pytest.mark.parametrize(('first', 'other', 'message'), WRONG)
def test_a_bad_value_is_named_with_its_field(first, other, message):
  schema = schemas.detect(first)
  if other:
    schemas.parse(first, schema)
  with pytest.raises(ValueError, match=re.escape(message)):
    schemas.parse(first | other, schema)


@pytest.mark.parametrize('field', ['prompt', 'problem', 'question', 'messages'])
def test_a_system_message_stands_beside_its_problem(field):
  row = {field: TURNS, 'ground_truth': '2'}
  parsed = schemas.parse(row, schemas.detect(row))
  assert parsed == Row('1+1', '2', '', 'Be brief.')


NEAREST = [  # row, the three schemas, of the first: fields, and what it lacks
  ({}, 'problem and answer, TRL, messages', 'problem with answer; lacks problem and'),
  ({'x': '1+1'}, 'problem and answer, TRL, messages', 'problem with answer; lacks pro'),
  (
    {'problem': '1+1'},
    'problem and answer, TRL, messages',
    'problem with answer; lacks a',
  ),
  ({'prompt': '1+1'}, 'TRL, verl, slime', 'prompt with answer; lacks answer'),
  (
    {'question': '1+1', 'anwser': '2'},
    'problem and answer, TRL, messages',
    'question with answer; lacks answer',
  ),
  ({'messages': USER}, 'messages, open-instruct, problem and answer', 'messages with'),
  (
    {'prompt': USER, 'reward_model': '2'},
    'verl, TRL, slime',
    'prompt with reward_model.ground_truth; of another type',
  ),
]


@pytest.mark.parametrize(('row', 'nearest', 'fields'), NEAREST)
def test_a_row_of_no_schema_is_shown_with_the_nearest_ones(row, nearest, fields):
  with pytest.raises(ValueError) as error:
    schemas.detect(row)
  start, end = str(error.value).split('; the nearest are ')
  assert start == f'its row {field_values.shown_row(row)} is of no schema known here'
  assert re.sub(r' \(.*?\)', '', end.split(':')[0]) == nearest
  first = nearest.split(',')[0]
  assert end.startswith(f'{first} ({fields}')


def test_a_row_is_shown_by_its_values():
  with pytest.raises(ValueError, match=re.escape("its row {'a': 1, 'b': 'two'} is of")):
    schemas.detect({'b': 'two', 'a': 1})


def test_a_row_of_many_long_fields_is_shown_short():
  row = {f'{i}' + 'x' * 10**6: 'y' * 10**6 for i in range(99)}
  with pytest.raises(ValueError, match='is of no schema') as error:
    schemas.detect(row)
  assert len(str(error.value)) < 700


def test_a_long_value_is_shown_short_and_on_one_line():
  with pytest.raises(ValueError) as error:
    schemas.parse({'problem': '1', 'answer': ['a\n' * 99] * 2}, schemas.detect(PLAIN))
  assert len(str(error.value)) < 100 and '\n' not in str(error.value)
