r"""Every published layout, a row of each, and the errors of a bad row."""

import json
import re

import pytest

from bapo_jax.data import layouts
from bapo_jax.data.row import Row

USER = [{'role': 'user', 'content': '1+1'}]
TURNS = [{'role': 'system', 'content': 'Be brief.'}, *USER]


def solved(text):
  """A conversation that ends with its solution."""
  return [*USER, {'role': 'assistant', 'content': text}]


def verl(source, truth, **others):
  """A row as verl's scripts write it."""
  model = {'ground_truth': truth, 'style': 'rule'}
  return {'data_source': source, 'prompt': USER, 'reward_model': model} | others


PA, OI = 'problem and answer', 'open-instruct'
HALF, CASES = r'\frac{1}{2}', r'\left\{ x = 1 \right.'
COUNTDOWN = '{"numbers": [2, 3], "target": 5}'
ROWS = [  # layout, row, answer, verifier
  # Skywork-OR1, whose answer is a JSON list in a string, and DAPO-Math-17k.
  ('verl', verl('train-math-amc', '["\\\\frac{1}{2}"]', ability='math'), HALF, 'math'),
  ('verl', verl('math_dapo', '34', answer='not this one'), '34', 'math'),
  ('verl', verl('countdown', json.loads(COUNTDOWN)), COUNTDOWN, 'countdown'),
  (OI, {'messages': USER, 'ground_truth': '2', 'dataset': 'gsm8k'}, '2', 'gsm8k'),
  (OI, {'messages': USER, 'ground_truth': ['2'], 'dataset': ['MATH']}, '2', 'math'),
  ('slime', {'prompt': USER, 'label': '2'}, '2', ''),
  ('slime', {'prompt': '1+1', 'label': 2}, '2', ''),
  (PA, {'problem': '1+1', 'answer': 2}, '2', ''),
  (PA, {'ID': 7, 'Problem': '1+1', 'Answer': 2.0}, '2', ''),
  (PA, {'question': '1+1', 'final_answer': ['2']}, '2', ''),
  (PA, {'Question': '1+1', 'Final Answer': '0.5'}, '0.5', ''),
  (PA, {'problem': '1+1', 'solution': '', 'answer': '2'}, '2', ''),
  (PA, {'problem': '1+1', 'solution': r'\boxed{3}: no, \boxed{\frac{1}{2}}'}, HALF, ''),
  (PA, {'problem': '1+1', 'solution': r'the set \boxed{\{1, 2\}}'}, r'\{1, 2\}', ''),
  (PA, {'problem': '1+1', 'solution': rf'\boxed{{{CASES}}}'}, CASES, ''),
  (PA, {'problem': '1+1', 'answer': '204', 'data_source': 'AIME_2024'}, '204', 'aime'),
  (PA, {'question': '1+1', 'answer': 'Two: <<1+1=2>>\n#### 1,002'}, '1,002', 'gsm8k'),
  (PA, {'problem': '1+1', 'answer': '2', 'prompt': '2+2'}, '2', ''),
  ('TRL', {'prompt': USER, 'solution': r'$\frac{4}{2}$'}, r'\frac{4}{2}', ''),
  ('TRL', {'prompt': '1+1', 'solution': ' 2\n'}, '2', ''),
  ('TRL', {'problem': '2', 'prompt': USER, 'answer': '2'}, '2', ''),
  ('TRL', {'prompt': '1+1', 'solution': 2.0}, '2', ''),
  ('TRL', {'prompt': USER, 'solution': r'Two: $\boxed{2}$.', 'id': 7}, '2', ''),
  ('TRL', {'prompt': USER, 'solution': 'Two.\n#### 2'}, '2', 'gsm8k'),
  ('TRL', {'prompt': USER, 'answer': '2', 'solution': 'by counting'}, '2', ''),
  # The fields of verl without its object.
  ('TRL', {'data_source': 'MATH', 'prompt': USER, 'ground_truth': '2'}, '2', 'math'),
  (OI, {'messages': solved('Two.'), 'ground_truth': '2'}, '2', ''),
  ('messages', {'messages': USER, 'answer': '2', 'data_source': 'AIME'}, '2', 'aime'),
  ('messages', {'messages': solved('Two.'), 'solution': '$2$'}, '2', ''),
  ('messages', {'messages': solved(r'So \boxed{3}, no: \boxed{2}')}, '2', ''),
  ('messages', {'messages': solved('Two.\n#### 2')}, '2', 'gsm8k'),
]


@pytest.mark.parametrize(('name', 'row', 'answer', 'verifier'), ROWS)
def test_every_layout_gives_problem_answer_and_verifier(name, row, answer, verifier):
  layout = layouts.detect(row)
  assert layout.name == name
  parsed = layouts.parse(row, layout)
  assert parsed == Row('1+1', answer, verifier)
  # A parquet file is read in these columns only: they must be enough.
  columns = {field: row[field] for field in layout.columns}
  assert layouts.parse(columns, layout) == parsed
  assert all(layouts.known(field) for field in layout.columns)


@pytest.mark.parametrize('numbers', ['nums', 'numbers'])
def test_a_table_of_countdown_numbers_is_stated_as_a_problem(numbers):
  row = {'target': 46, numbers: [3, 7, 25]}
  layout = layouts.detect(row)
  assert sorted(layout.columns) == sorted(row)
  parsed = layouts.parse(row, layout)
  assert '3, 7, 25' in parsed.problem and '46' in parsed.problem
  assert parsed.answer == '{"numbers": [3, 7, 25], "target": 46}'
  assert parsed.verifier == 'countdown'
  with pytest.raises(ValueError, match='target=many'):
    layouts.parse(row | {'target': 'many'}, layout)


PLAIN = {'problem': '1+1', 'answer': '2', 'data_source': 'math'}
VERL = verl('', '2')
TRL = {'prompt': '1+1', 'solution': '2'}
CHAT = {'messages': solved(r'\boxed{2}')}
HASHES = {'question': '1+1', 'answer': 'so #### 2'}
BOXED = {'problem': '1+1', 'solution': r'\boxed{2}'}
UNBOXED = {'problem': '1+1', 'solution': '2'}  # a solution is worked out
EMPTY_SYSTEM = [{'role': 'system', 'content': ' '}, *USER]
WRONG = [  # first row, other values in another row, parts of the error
  (PLAIN, {'problem': None}, "'problem': None"),
  (PLAIN, {'problem': ' \n'}, r"'problem': ' \n'"),
  (PLAIN, {'problem': '1\0'}, r"'problem': '1\x00' contains"),
  (PLAIN, {'problem': '1\ud800'}, r"'problem': '1\ud800' contains"),
  (PLAIN, {'answer': None}, "'answer': None"),
  (PLAIN, {'answer': True}, "'answer': True"),
  (PLAIN, {'answer': float('nan')}, "'answer': nan"),
  (PLAIN, {'answer': 1e300}, "'answer': the float 1e+300"),
  (PLAIN, {'answer': ' '}, "'answer' is empty"),
  (PLAIN, {'answer': []}, "'answer' has 0 answers"),
  (PLAIN, {'answer': '["2", "3"]'}, "'answer' has 2 answers"),
  (PLAIN, {'answer': {'value': 2}}, "'answer': {'value': 2}"),
  (PLAIN, {'answer': '\frac12'}, r"'answer': '\x0crac12' contains"),  # a lost backslash
  (PLAIN, {'data_source': None}, "'data_source': None"),
  (PLAIN, {'data_source': 'train-code-x'}, "'data_source': no verifier for the code"),
  (VERL, {'prompt': TURNS[:1]}, "'prompt' has messages with the roles ['system']"),
  (VERL, {'prompt': solved('2')}, "'prompt' has messages with the roles ['user', 'a"),
  (VERL, {'prompt': EMPTY_SYSTEM}, "'prompt': ' ' is not a system message"),
  (VERL, {'prompt': ['1+1']}, "'prompt': '1+1' is not a chat message"),
  (VERL, {'reward_model': None}, "'reward_model.ground_truth': None"),
  (VERL, {'reward_model': {}}, "no field 'ground_truth', only []"),
  (HASHES, {'answer': '2'}, "'answer': '2' has no ####"),
  (UNBOXED, {}, r"'solution': '2' has no \boxed{}"),
  (BOXED, {'solution': r'\boxed{2'}, r"'solution': its last \boxed{ is not closed"),
  (TRL, {'solution': 'so it is\n2'}, 'is not a bare answer'),
  (TRL, {'solution': 'x' * 101}, 'is not a bare answer'),
  (TRL, {'solution': 'so #### 2'}, "'so #### 2' is not a bare answer"),
  (TRL, {'solution': '$ $'}, "'solution' is empty"),
  (CHAT, {'messages': solved('so 2')}, r"'messages': 'so 2' has no \boxed{}"),
  (CHAT, {'messages': solved(2)}, "'messages': 2 is not a solution"),
  (CHAT, {'messages': [*solved('2'), *USER]}, "['user', 'assistant', 'user']"),
]


@pytest.mark.parametrize(('first', 'other', 'message'), WRONG)
def test_a_bad_value_is_named_with_its_field(first, other, message):
  layout = layouts.detect(first)
  with pytest.raises(ValueError, match=re.escape(message)):
    layouts.parse(first | other, layout)


@pytest.mark.parametrize('field', ['prompt', 'problem', 'question', 'messages'])
def test_a_system_message_belongs_to_its_problem(field):
  row = {field: TURNS, 'ground_truth': '2'}
  parsed = layouts.parse(row, layouts.detect(row))
  assert parsed == Row('1+1', '2', '', 'Be brief.')


def test_a_field_in_two_spellings_is_refused():
  with pytest.raises(ValueError, match="'Answer' and 'answer'"):
    layouts.detect(PLAIN | {'Answer': '3'})


def test_fields_of_no_layout_and_long_values_are_shown_short():
  with pytest.raises(ValueError, match=r"\['anwser', 'question'\] match no layout"):
    layouts.detect({'question': '1+1', 'anwser': '2'})
  with pytest.raises(ValueError, match='match no layout') as error:
    layouts.detect({f'{i}' + 'x' * 1000: i for i in range(99)})
  assert len(str(error.value)) < 1000
  with pytest.raises(ValueError, match="'prompt': ") as error:
    layouts.parse(VERL | {'prompt': ['a\n' * 99] * 2}, layouts.detect(VERL))
  assert len(str(error.value)) < 150 and '\n' not in str(error.value)
