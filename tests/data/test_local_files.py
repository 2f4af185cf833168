"""Users' files: real files, each format, pictures, and the errors of a bad file."""

import gzip
import json
import os
import pathlib
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
from pictured import png
from refusals import sentence_of

from bapo_jax.data import layouts, local_files
from bapo_jax.data.knobs import Columns
from bapo_jax.data.row import Row

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


def parquet(tmp_path, rows, schema=None):
  path = str(tmp_path / 'problems.parquet')
  pa.parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path)
  return path


def table(tmp_path, **columns):
  """A parquet file with a good row, and these columns."""
  named = {'problem': ['1+1'], 'answer': ['2'], **columns}
  pa.parquet.write_table(pa.table(named), tmp_path / 'table.parquet')
  return str(tmp_path / 'table.parquet')


def read(path):
  """The rows of a file."""
  folder = os.path.dirname(path)
  return layouts.read_rows(local_files.items(path), folder=folder)


def test_jsonl_a_json_list_and_parquet_hold_the_same(tmp_path):
  paths = [
    file_with(tmp_path, *map(json.dumps, VERL)),
    file_with(tmp_path, ' ' + json.dumps(VERL, indent=1), name='list.json'),
    file_with(tmp_path, *map(json.dumps, VERL), name='lines.json'),
    file_with(tmp_path, json.dumps({'v': 1, 'data': VERL}, indent=2), name='data.json'),
    file_with(tmp_path, json.dumps({'data': VERL}), name='line.json'),
    file_with(tmp_path, '\ufeff' + json.dumps(VERL[0]), *map(json.dumps, VERL[1:])),
    parquet(tmp_path, VERL),
  ]
  expected = [Row(f'{i}+1', str(i + 1), 'math') for i in range(3)]
  assert [read(path) for path in paths] == [expected] * len(paths)


def test_answers_of_a_jsonl_file_are_read_as_they_are_written(tmp_path):
  # A table of inferred types would make a time, a float, and an error of these rows.
  answers = ['2024-01-01', 12345678901234567890123, '5', 5, 204.0, 0.5]
  lines = [json.dumps({'problem': 'x', 'answer': answer}) for answer in answers]
  found = [row.answer for row in read(file_with(tmp_path, *lines))]
  assert found == ['2024-01-01', '12345678901234567890123', '5', '5', '204', '0.5']
  path = table(tmp_path, answer=[2.0])
  assert read(path) == [Row('1+1', '2')]


CSV = (
  '\ufeffid,Problem,Final Answer,data_source\r\n1,"1,\n""one"" + 1",007,gsm8k\r\n'
  '\r\n,,,\r\n2,1+2,12345678901234567890123,MATH\r\n'
)
FROM_CSV = [
  Row('1,\n"one" + 1', '007', 'gsm8k'),
  Row('1+2', '12345678901234567890123', 'math'),
]


def test_values_of_a_csv_file_are_text(tmp_path):
  (tmp_path / 'a.csv').write_text(CSV, newline='')
  assert read(str(tmp_path / 'a.csv')) == FROM_CSV


def test_a_compressed_file_is_read_like_the_file(tmp_path):
  listed = json.dumps(VERL, indent=1)
  texts = {'a.csv': CSV, 'a.jsonl': f'\n{GOOD}\n', 'lines.json': GOOD, 'a.json': listed}
  for name, text in texts.items():
    (tmp_path / name).write_text(text, newline='')
    (tmp_path / f'{name}.gz').write_bytes(gzip.compress(text.encode()))
    rows = read(str(tmp_path / name))
    assert read(str(tmp_path / f'{name}.gz')) == rows != []


def test_a_file_is_read_in_order_and_its_blank_lines_are_counted(tmp_path):
  other = '{"answer": 3, "problem": "1+2", "source": "mine"}'
  path = file_with(tmp_path, '', GOOD, ' \t', other, '', ' ')
  assert read(path) == [Row('1+1', '2'), Row('1+2', '3')]

  long = file_with(tmp_path, 'problem,answer', '"1', '+2",', name='long.csv')
  assert "long.csv, line 3: field 'answer'" in sentence_of(read, long)


def test_a_row_that_comes_many_times_is_held_once(tmp_path):
  rows = read(parquet(tmp_path, VERL * 100))
  assert len(rows) == 300 and len({id(row) for row in rows}) == 3


def test_columns_without_a_meaning_are_not_read(tmp_path):
  odd = {
    'when': pa.array([1], pa.timestamp('ns')),
    'long': pa.array([2**62], pa.duration('s')),
    'odd': pa.array([b'\xff']).view(pa.string()),
  }
  assert read(table(tmp_path, **odd)) == [Row('1+1', '2')]


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"problem": "1+2"}', "no field 'answer', only ['problem']"),
    ('{"problem": "1+2", "answer": NaN}', "field 'answer': nan"),
    ('{"problem": "1+2"}{}', 'not JSON (Extra data, column 19)'),
    ('["problem", "answer"]', "['problem', 'answer'] has no named fields"),
  ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path, line, message):
  path = file_with(tmp_path, GOOD, line, GOOD)
  assert f'{path}, line 2: {message}' in sentence_of(read, path)


def test_a_bad_row_of_a_table_is_named_by_file_row_and_field(tmp_path):
  bad = VERL[0] | {'reward_model': {'ground_truth': None, 'style': 'rule'}}
  # Rows are counted on through the batches that a table is read in.
  path = parquet(tmp_path, [*VERL * local_files.BATCH, bad])
  place = f"{path}, row {3 * local_files.BATCH + 1}: field 'reward_model.ground_truth'"
  assert place in sentence_of(read, path)
  listed = file_with(tmp_path, json.dumps([*VERL, bad]), name='list.json')
  assert f'{listed}, row 4: field ' in sentence_of(read, listed)


TWO = b'problem,answer\n1+1,2\n'
BROKEN = {  # file -> its bytes, part of the sentence
  'empty.jsonl': (b'', 'no problem'),
  'cut.json': (b'[{"problem": "1"},\n {"pro', 'line 2: not JSON (Unterminated string'),
  'named.json': (b'{\n  "train": [{}]\n}', 'has no list of rows; write [row, ...]'),
  'latin.jsonl': (GOOD.encode() + b'\n\xe9', "cannot be read ('utf-8' codec"),
  'none.jsonl': (b'{"question": "1", "solutions": []}', 'line 1: fields'),
  'more.csv': (TWO + b'\n1,2,3\n', 'line 4: more or fewer values than the 2 columns'),
  'open.csv': (TWO + b'"1\n2,4\n', 'line 3: not CSV (unexpected end of data)'),
  'cut.jsonl.gz': (
    gzip.compress(GOOD.encode())[:-9],
    'cannot be read (Compressed file',
  ),
  'empty.parquet': (b'', 'cannot be read (Parquet file size'),
  'problems.xlsx': (b'problem,answer', '.jsonl, .json, .csv, .jsonl.gz'),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, name):
  content, message = BROKEN[name]
  (tmp_path / name).write_bytes(content)
  sentence = sentence_of(read, str(tmp_path / name))
  assert sentence.startswith(str(tmp_path / name)) and message in sentence


def test_a_path_that_is_no_file_is_one_sentence(tmp_path):
  (tmp_path / 'folder.jsonl').mkdir()
  os.symlink('/nowhere/b.parquet', tmp_path / 'link.parquet')
  for name in ('absent.jsonl', 'absent.parquet', 'folder.jsonl', 'link.parquet'):
    with pytest.raises(ValueError, match=f'{name} cannot be read'):
      read(str(tmp_path / name))


@pytest.mark.parametrize(
  ('columns', 'message'),
  [
    ({'answer': [b'2']}, "row 1: field 'answer': b'2'"),
    ({'problem': pa.array([b'\xff']).view(pa.string())}, "'utf-8' codec"),
  ],
)
def test_a_table_of_wrong_types_is_one_sentence(tmp_path, columns, message):
  assert message in sentence_of(read, table(tmp_path, **columns))


PICTURES = pa.list_(pa.struct([('bytes', pa.binary()), ('path', pa.string())]))
GEOMETRY3K = pa.schema(
  [('images', PICTURES), ('problem', pa.string()), ('answer', pa.string())]
)


def pictured(*pictures, problem='<image>Find $x$.', answer='3'):
  """A row of Geometry3K; a text is the path of a picture."""
  values = [
    {'bytes': None, 'path': x} if isinstance(x, str) else {'bytes': x, 'path': None}
    for x in pictures
  ]
  return {'images': values, 'problem': problem, 'answer': answer}


def test_geometry3k(tmp_path):
  (tmp_path / 'a.png').write_bytes(png(20, 30, 3))
  rows = [
    pictured(png(20, 30, 1)),
    pictured(png(20, 30, 1), 'a.png', problem='<image> <image>', answer='7'),
    pictured(problem='1+1'),
  ]
  found = read(parquet(tmp_path, rows, schema=GEOMETRY3K))
  assert found == [
    Row('<image>Find $x$.', '3', pictures=(png(20, 30, 1),)),
    Row('<image> <image>', '7', pictures=(png(20, 30, 1), png(20, 30, 3))),
    Row('1+1', '3'),
  ]
  assert found[0].pictures[0] is found[1].pictures[0]  # equal files are held once


@pytest.mark.parametrize(
  ('pictures', 'message'),
  [
    ([png(20, 30)[:200]], 'picture 1: the picture cannot be decoded'),
    ([png(20, 30), b''], 'picture 2: a file that starts with'),
    (['a\0b'], 'picture 1: embedded null byte'),
    (['nowhere.png'], 'nowhere.png'),
  ],
)
def test_a_broken_picture_is_named_by_row_and_number(tmp_path, pictures, message):
  rows = [pictured(png(20, 30)), pictured(*pictures)]
  path = parquet(tmp_path, rows, schema=GEOMETRY3K)
  sentence = sentence_of(read, path)
  assert sentence.startswith(f"{path}, row 2: field 'images', picture ")
  assert message in sentence


# ------------------ every published layout, a row of each, and the errors of a bad row


USER = [{'role': 'user', 'content': '1+1'}]
TURNS = [{'role': 'system', 'content': 'Be brief.'}, *USER]


def rows_of(name):
  """The cases of tests/layouts/, in the form in which data sets are published."""
  text = (pathlib.Path(__file__).parents[1] / 'layouts' / name).read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize('case', rows_of('rows.jsonl'))
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
  assert 'target=many' in sentence_of(layouts.parse, row | {'target': 'many'}, layout)


PLAIN = {'problem': '1+1', 'answer': '2', 'data_source': 'math'}


@pytest.mark.parametrize('case', rows_of('wrong.jsonl'))
def test_a_bad_value_is_named_with_its_field(case):
  layout = layouts.detect(case['first'])
  assert case['message'] in sentence_of(
    layouts.parse, case['first'] | case['other'], layout
  )


def test_a_worked_solution_below_bare_answers_is_not_the_answer():
  layout = layouts.detect(PLAIN)
  parsed = layouts.parse(PLAIN | {'answer': 'Two: <<1+1=2>>\n#### 2'}, layout)
  assert parsed == Row('1+1', '2', 'math')  # as the row names its data set
  unnamed = {'problem': '1+1', 'answer': 'so #### 2'}
  parsed = layouts.parse(unnamed, layouts.detect({'problem': '1', 'answer': '2'}))
  assert parsed == Row('1+1', '2', 'gsm8k')


def test_a_picture_among_content_parts_is_a_placeholder():
  # As the API of OpenAI has it.
  content = [
    {'type': 'text', 'text': 'Find '},
    {'type': 'image', 'text': None},
    {'type': 'text', 'text': '.'},
  ]
  row = {
    'messages': [{'role': 'user', 'content': content}],
    'answer': '2',
    'images': ['a.png'],
  }
  assert layouts.parse(row, layouts.detect(row)).problem == 'Find <image>.'


ODD = {'id': 7, 'Query text': '1+1', 'a.b': '2', 'kind': 'gsm8k', 'scan': 'a.png'}
NAMED = {'problem': 'query_text', 'answer': 'a.b', 'verifier': 'kind'}


def test_the_user_names_the_columns(tmp_path):
  columns = Columns(**NAMED, pictures='scan')
  (tmp_path / 'a.png').write_bytes(png(20, 30))
  expected = [Row('1+1', '2', 'gsm8k', pictures=(png(20, 30),))] * 2
  for path in (
    file_with(tmp_path, *[json.dumps(ODD)] * 2),
    parquet(tmp_path, [ODD] * 2),
  ):
    items = local_files.items(path, lambda name: layouts.known(name, columns))
    assert layouts.read_rows(items, columns, folder=str(tmp_path)) == expected
  # A name counts before the layout, and the others are those of the layout.
  row = {'question': '1+1', 'answer': '3', 'gold': '2', 'data_source': 'MATH'}
  layout = layouts.detect(row, Columns(answer='gold'))
  assert layouts.parse(row, layout) == Row('1+1', '2', 'math')
  layout = layouts.detect(row, Columns(verifier='gold'))
  assert layouts.parse(row | {'gold': 'aime'}, layout) == Row('1+1', '3', 'aime')


@pytest.mark.parametrize('case', rows_of('rows.jsonl'))
def test_a_named_column_takes_the_place_of_every_other(case):
  row = case['row'] | {'text': '7+1', 'gold': 8, 'target': 9, 'nums': [1, 2]}
  layout = layouts.detect(row, Columns(problem='text', answer='gold'))
  assert layouts.parse(row, layout)[:2] == ('7+1', '8')


@pytest.mark.parametrize(
  ('value', 'verifier'),
  [
    (2, ''),
    ('It is \\boxed{2}.', ''),
    ('Two.\n#### 2', 'gsm8k'),
    ({'target': '2'}, ''),
  ],
)
def test_a_named_column_has_an_answer_in_any_format(value, verifier):
  row = {'q': USER, 'x': value}
  columns = Columns(problem='q', answer='x.target' if isinstance(value, dict) else 'x')
  parsed = layouts.parse(row, layouts.detect(row, columns))
  assert parsed == Row('1+1', '2', verifier)


def test_a_column_that_does_not_exist_is_refused_with_those_that_do():
  message = "problems.columns.answer='targte' is no column; give one of ['q', 'target']"
  assert message in sentence_of(
    layouts.detect, {'q': '1+1', 'target': '2'}, Columns(problem='q', answer='targte')
  )


@pytest.mark.parametrize(
  ('row', 'reason', 'problem', 'answer'),
  [
    (
      {'id': 7, 'the text': '1+1=?', 'target': '2', 'n': 3},
      "fields ['id', 'n', 'target', 'the text'] match no layout",
      "'the text'",
      'target',
    ),
    (
      {'question': '1', 'id': 'x' * 9, 'gold': 2},
      'match no layout',
      'question',
      'gold',
    ),
    (
      {'problem': '1+1', 'question': '1+2', 'answer': '2'},
      "'problem' and 'question' differ, and each may be the problem",
      'problem',
      'answer',
    ),
    (
      {'question': '1+1', 'answer': '2', 'Final Answer': '3'},
      "'Final Answer' and 'answer' differ, and each may be the answer",
      'question',
      "'Final Answer'",
    ),
  ],
)
def test_a_doubtful_layout_is_a_question_with_its_answer(row, reason, problem, answer):
  sentence = sentence_of(layouts.detect, row)
  assert reason in sentence
  flags = re.findall(r"--config\.problems\.columns\.(\w+)=('[^']*'|\S+)", sentence)
  assert flags == [('problem', problem), ('answer', answer)]
  columns = {knob: text.strip("'") for knob, text in flags}
  layouts.detect(row, Columns(**columns))  # the question is answered
  same = {name: '1' for name in row}
  assert reason.endswith('layout') or layouts.detect(
    same
  )  # no doubt about equal values


@pytest.mark.parametrize('field', ['prompt', 'problem', 'question', 'messages'])
def test_earlier_turns_belong_to_their_problem(field):
  earlier = [*TURNS, {'role': 'assistant', 'content': [{'type': 'text', 'text': '2'}]}]
  row = {field: [*earlier, {'role': 'user', 'content': 'Sure?'}], 'answer': '2'}
  parsed = layouts.parse(row, layouts.detect(row))
  history = (('user', '1+1'), ('assistant', '2'))
  assert parsed == Row('Sure?', '2', '', 'Be brief.', history=history)
  assert parsed.texts == ['Be brief.', '1+1', '2', 'Sure?']


def test_the_solution_of_a_conversation_is_no_earlier_turn():
  said = [*TURNS, {'role': 'assistant', 'content': 'Two.'}, *USER]
  row = {'messages': [*said, {'role': 'assistant', 'content': '\\boxed{2}'}]}
  parsed = layouts.parse(row, layouts.detect(row))
  history = (('user', '1+1'), ('assistant', 'Two.'))
  assert parsed == Row('1+1', '2', '', 'Be brief.', history=history)


def test_fields_of_no_layout_are_shown_short():
  sentence = sentence_of(layouts.detect, {f'{i}' + 'x' * 1000: i for i in range(99)})
  assert 'match no layout' in sentence and len(sentence) < 1000


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('a.jsonl', '{"problem": "1+1", "answer": "2", "answer": "3"}'),
    ('a.jsonl', '{"problem": "1+1", "answer": "2", "x": {"answer": 1, "answer": 2}}'),
    ('a.json', '[{"problem": "1+1", "answer": "2", "answer": "3"}]'),
    ('a.csv', 'problem,answer,answer\n1+1,2,3'),
  ],
)
def test_a_field_that_occurs_twice_is_refused(tmp_path, name, text):
  # Only the last of its values would be read.
  path = file_with(tmp_path, text, name=name)
  sentence = sentence_of(read, path)
  assert sentence.startswith(path)
  assert "the field 'answer' occurs twice; keep one" in sentence


def test_a_column_that_occurs_twice_is_refused(tmp_path):
  names = ['problem', 'answer', 'answer']
  twice = pa.table([pa.array([x]) for x in ('1+1', '2', '3')], names=names)
  pa.parquet.write_table(twice, tmp_path / 'twice.parquet')
  assert "twice.parquet: the field 'answer' occurs twice" in sentence_of(
    read, str(tmp_path / 'twice.parquet')
  )
  # Columns without a name have no meaning.
  spare = file_with(tmp_path, 'problem,answer,,', '1+1,2,,', name='spare.csv')
  assert read(spare) == [Row('1+1', '2')]


@pytest.mark.parametrize('number', ['9007199254740992.0', '9007199254740993.0', '1e22'])
def test_a_number_that_may_be_another_is_no_answer(tmp_path, number):
  # 2^53 + 1 is 2^53 as a float; an integer has all its digits.
  line = '{"problem": "x", "answer": %s}'
  assert 'give a string, an exact number' in sentence_of(
    read, file_with(tmp_path, line % number)
  )
  exact = file_with(tmp_path, line % '9007199254740993', line % '9007199254740991.0')
  assert [row.answer for row in read(exact)] == ['9007199254740993', '9007199254740991']


@pytest.mark.parametrize('answer', ['', ' ', [' '], 'so it is #### '])
def test_an_empty_answer_is_called_empty(tmp_path, answer):
  path = file_with(tmp_path, json.dumps({'problem': 'x', 'answer': answer}))
  assert 'answer but empty; give the answer' in sentence_of(read, path)
