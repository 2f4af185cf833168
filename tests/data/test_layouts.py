r"""Every published layout, a row of each, and the errors of a bad row."""

import json
import pathlib
import re

import pytest

from bapo_jax.data import layouts
from bapo_jax.data.row import Row

USER = [{'role': 'user', 'content': '1+1'}]
TURNS = [{'role': 'system', 'content': 'Be brief.'}, *USER]


def parts(*texts, **others):
  """A user's message of content parts, as the API of OpenAI has it."""
  found = [{'type': 'text', 'text': text} | others for text in texts]
  return {'role': 'user', 'content': found}


def table(name):
  """The cases of tests/layouts/, in the form in which data sets are published."""
  text = (pathlib.Path(__file__).parents[1] / 'layouts' / name).read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize('case', table('rows.jsonl'))
def test_every_layout_gives_problem_answer_and_verifier(case):
  row = case['row']
  layout = layouts.detect(row)
  assert layout.name == case['layout']
  parsed = layouts.parse(row, layout)
  assert parsed == Row('1+1', case['answer'], case['verifier'])
  # A parquet file is read in the known columns only: they must be enough.
  columns = {field: x for field, x in row.items() if layouts.known(field)}
  assert layouts.parse(columns, layout) == parsed


@pytest.mark.parametrize('numbers', ['nums', 'numbers'])
def test_a_table_of_countdown_numbers_is_stated_as_a_problem(numbers):
  row = {'target': 46, numbers: [3, 7, 25]}
  layout = layouts.detect(row)
  parsed = layouts.parse(row, layout)
  assert '3, 7, 25' in parsed.problem and '46' in parsed.problem
  assert parsed.answer == '{"numbers": [3, 7, 25], "target": 46}'
  assert parsed.verifier == 'countdown'
  with pytest.raises(ValueError, match='target=many'):
    layouts.parse(row | {'target': 'many'}, layout)


PLAIN = {'problem': '1+1', 'answer': '2', 'data_source': 'math'}


@pytest.mark.parametrize('case', table('wrong.jsonl'))
def test_a_bad_value_is_named_with_its_field(case):
  layout = layouts.detect(case['first'])
  with pytest.raises(ValueError, match=re.escape(case['message'])):
    layouts.parse(case['first'] | case['other'], layout)


def test_a_worked_solution_below_bare_answers_is_not_the_answer():
  layout = layouts.detect(PLAIN)
  parsed = layouts.parse(PLAIN | {'answer': 'Two: <<1+1=2>>\n#### 2'}, layout)
  assert parsed == Row('1+1', '2', 'math')  # as the row names its data set
  unnamed = {'problem': '1+1', 'answer': 'so #### 2'}
  parsed = layouts.parse(unnamed, layouts.detect({'problem': '1', 'answer': '2'}))
  assert parsed == Row('1+1', '2', 'gsm8k')


def test_a_picture_among_content_parts_is_a_placeholder():
  shown = {'type': 'image', 'text': None}
  turn = parts('Find ', '.')
  turn['content'].insert(1, shown)
  row = {'messages': [turn], 'answer': '2', 'images': ['a.png']}
  assert layouts.parse(row, layouts.detect(row)).problem == 'Find <image>.'


@pytest.mark.parametrize('field', ['prompt', 'problem', 'question', 'messages'])
def test_a_system_message_belongs_to_its_problem(field):
  row = {field: TURNS, 'ground_truth': '2'}
  parsed = layouts.parse(row, layouts.detect(row))
  assert parsed == Row('1+1', '2', '', 'Be brief.')


def test_fields_of_no_layout_and_long_values_are_shown_short():
  with pytest.raises(ValueError, match=r"\['anwser', 'question'\] match no layout"):
    layouts.detect({'question': '1+1', 'anwser': '2'})
  for row in ({f'{i}' + 'x' * 1000: i for i in range(99)}, {'problem': 'a\n' * 999}):
    with pytest.raises(ValueError, match='match no layout') as error:
      layouts.detect(row)
    assert len(str(error.value)) < 1000 and '\n' not in str(error.value)
