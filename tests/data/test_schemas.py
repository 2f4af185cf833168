r"""Every published schema, one row of each, and the errors of a bad row."""

import re

import pytest

from bapo_jax.data import schemas
from bapo_jax.data.row import Row

USER = [{'role': 'user', 'content': '1+1'}]
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
TURNS = [{'role': 'system', 'content': 'Be brief.'}, *USER]
VERL = {'data_source': '', 'prompt': USER, 'reward_model': {'ground_truth': '2'}}
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
  (VERL, {'prompt': TURNS}, "field 'prompt' holds messages by ['system', 'user'], not"),
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
]


@pytest.mark.parametrize(('first', 'other', 'message'), WRONG)
def test_a_bad_value_is_named_with_its_field(first, other, message):
  schema = schemas.detect(first)
  schemas.parse(first, schema)
  with pytest.raises(ValueError, match=re.escape(message)):
    schemas.parse(first | other, schema)


@pytest.mark.parametrize(
  'row', [{}, {'text': '1+1'}, {'problem': '1+1'}, {'answer': '2'}, {'prompt': '1+1'}]
)
def test_fields_of_no_schema_are_listed(row):
  with pytest.raises(
    ValueError, match=re.escape(f'its fields {sorted(row)} are of no')
  ):
    schemas.detect(row)


def test_a_long_value_is_shown_short_and_on_one_line():
  with pytest.raises(ValueError) as error:
    schemas.parse({'problem': '1', 'answer': ['a\n' * 99] * 2}, schemas.detect(PLAIN))
  assert len(str(error.value)) < 100 and '\n' not in str(error.value)
