"""Problems with pictures are read as published, or refused with row and reason."""

import io
import json
import os

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest

from bapo_jax.data import local_files, pictured_files
from bapo_jax.data.row import Row


def png(height=20, width=30, seed=0):
  pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()


PICTURE = pa.struct([('bytes', pa.binary()), ('path', pa.string())])


def geometry3k(path, rows):
  """A parquet file with the columns and types of Geometry3K."""
  schema = pa.schema(
    [('images', pa.list_(PICTURE)), ('problem', pa.string()), ('answer', pa.string())]
  )
  table = pa.Table.from_pylist(rows, schema=schema)
  pa.parquet.write_table(table, path)
  return str(path)


def row(*pictures, problem='<image>Find $x$.', answer='3'):
  held = [{'bytes': each, 'path': None} for each in pictures]
  return {'images': held, 'problem': problem, 'answer': answer}


def test_geometry3k(tmp_path):
  one, two = png(seed=1), png(seed=2)
  path = geometry3k(
    tmp_path / 'train.parquet',
    [row(one), row(one, two, problem='<image><image>Compare.', answer='7')],
  )
  assert pictured_files.read(path) == [
    (Row('<image>Find $x$.', '3'), (one,)),
    (Row('<image><image>Compare.', '7'), (one, two)),
  ]


def test_paths_are_relative_to_the_file(tmp_path):
  (tmp_path / 'pictures').mkdir()
  (tmp_path / 'pictures' / 'a.png').write_bytes(png(seed=3))
  outside = tmp_path / 'b.png'
  outside.write_bytes(png(seed=4))
  lines = [
    {'problem': '<image>Q', 'answer': '1', 'images': ['pictures/a.png']},
    {'problem': 'Q <image>', 'answer': '2', 'images': [str(outside)]},
    {'problem': 'Q', 'answer': '3', 'images': []},
    {'problem': 'Q', 'answer': '4', 'images': None},
    {'problem': 'Q', 'answer': '5'},
  ]
  path = tmp_path / 'train.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  found = pictured_files.read(str(path))
  assert [each.row.answer for each in found] == list('12345')
  assert [each.pictures for each in found] == [
    (png(seed=3),),
    (png(seed=4),),
    (),
    (),
    (),
  ]


def test_one_picture_without_a_list(tmp_path):
  (tmp_path / 'a.png').write_bytes(png())
  path = tmp_path / 'train.jsonl'
  line = {'question': '<image>Q', 'answer': 4, 'image': 'a.png'}
  path.write_text(json.dumps(line))
  assert pictured_files.read(str(path)) == [(Row('<image>Q', '4'), (png(),))]


def test_each_row_says_whether_it_has_pictures(tmp_path):
  (tmp_path / 'a.png').write_bytes(png())
  lines = [
    {'problem': '1+1', 'answer': '2'},
    {'problem': '<image>Q', 'answer': '3', 'images': ['a.png']},
    {'problem': 'Q<image>', 'answer': '4', 'images': [], 'Image': 'a.png'},
    {'problem': '1+2', 'answer': '3', 'image': ''},
  ]
  path = tmp_path / 'train.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  found = pictured_files.read(str(path))
  assert [each.pictures for each in found] == [(), (png(),), (png(),), ()]


def test_a_table_with_paths(tmp_path):
  (tmp_path / 'a.png').write_bytes(png())
  one = row(png()) | {'images': [{'bytes': None, 'path': 'a.png'}]}
  path = geometry3k(tmp_path / 'train.parquet', [one])
  assert pictured_files.read(path)[0].pictures == (png(),)


def test_problems_without_pictures(tmp_path):
  path = tmp_path / 'train.jsonl'
  path.write_text(json.dumps({'problem': '1+1', 'answer': '2'}))
  assert pictured_files.read(str(path)) == [(Row('1+1', '2'), ())]


def test_answers_are_checked(tmp_path):
  def check(row):
    if row.answer == '8':
      raise ValueError('no answer')

  path = geometry3k(tmp_path / 'a.parquet', [row(png()), row(png(), answer='8')])
  with pytest.raises(ValueError) as error:
    pictured_files.read(path, check)
  assert str(error.value) == f'{path}, row 2: no answer'


CUT = png()[:200]
BROKEN = {  # a row after a whole one -> its error
  'cut short': (row(CUT), "field 'images', picture 1: the picture cannot be decoded ("),
  'the second one': (
    row(png(), b'', problem='<image> <image>'),
    "field 'images', picture 2: an empty file is no picture in PNG",
  ),
  'text': (row(b'hello'), "picture 1: a file that begins with b'hello' is no picture"),
  'a strip': (row(png(1, 201)), 'one side is more than 200 times the other'),
  'no place': (row(png(), problem='Find x'), '0 <image> for 1 picture;'),
  'a place too many': (
    row(png(), problem='<image><image>'),
    '2 <image> for 1 picture;',
  ),
  'no picture': (row(), '1 <image> for 0 pictures;'),
  'neither bytes nor path': (row(None), 'picture 1: None is no picture: its bytes or'),
  'no such file': (
    row(None) | {'images': [{'bytes': None, 'path': 'nowhere.png'}]},
    "nowhere.png' cannot be read (No such file or directory); put the picture there",
  ),
  'a folder': (
    row(None) | {'images': [{'bytes': None, 'path': '.'}]},
    'is no regular file',
  ),
  'too many': (
    row(*[b''] * 65, problem='<image>' * 65),
    "field 'images' holds 65 pictures, more than 64; take the row out",
  ),
  'no answer': (row(png(), answer=None), "field 'answer' holds None"),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_row_is_refused_in_one_sentence(tmp_path, name):
  broken, message = BROKEN[name]
  path = geometry3k(tmp_path / 'train.parquet', [row(png()), broken])
  with pytest.raises(ValueError) as error:
    pictured_files.read(path)
  text = str(error.value)
  assert text.startswith(f'{path}, row 2: ')
  assert message in text
  assert '\n' not in text


@pytest.mark.parametrize(
  ('images', 'message'),
  [
    ([3], 'picture 1: 3 is no picture: its bytes or its path are wanted'),
    ([''], "picture 1: '' is no picture: its bytes or its path are wanted"),
    (['a\0b'], 'is no picture: its bytes or its path are wanted'),
    ({'a': 1}, "picture 1: {'a': 1} is no picture: its bytes or its path are wanted"),
    (['x' * 5000], 'cannot be read (File name too long); put the picture there'),
    (['pipe'], 'is no regular file'),
  ],
)
def test_a_broken_line_is_refused_in_one_sentence(tmp_path, images, message):
  os.mkfifo(tmp_path / 'pipe')
  line = {'problem': '<image>Q', 'answer': '1', 'images': images}
  path = tmp_path / 'train.jsonl'
  path.write_text(json.dumps(line))
  with pytest.raises(ValueError) as error:
    pictured_files.read(str(path))
  assert str(error.value).startswith(f'{path}, line 1: ')
  assert message in str(error.value)
  assert len(str(error.value)) < 500


def test_a_policy_of_texts_is_not_given_problems_with_pictures(tmp_path):
  path = geometry3k(tmp_path / 'train.parquet', [row(png())])
  with pytest.raises(ValueError) as error:
    local_files.read(path)
  assert str(error.value) == (
    f"{path}, row 1: field 'images' holds pictures, which the policy does not see; "
    'take the field out, and the problems that need it, or choose a policy that sees: '
    'for the embedded one --config.model.tower.layers=2'
  )
  # Whatever the first row has.
  path = geometry3k(tmp_path / 'b.parquet', [row(problem='Find $x$.'), row(png())])
  with pytest.raises(ValueError, match="row 2: field 'images' holds pictures"):
    local_files.read(path)
  lines = [{'problem': '1+1', 'answer': '2'}]
  lines += [{'problem': '<image>Q', 'answer': '3', 'Image': 'a.png'}]
  (tmp_path / 'c.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  with pytest.raises(ValueError, match="line 2: field 'Image' holds pictures"):
    local_files.read(str(tmp_path / 'c.jsonl'))
  # A column of none is none.
  path = geometry3k(tmp_path / 'texts.parquet', [row(problem='Find $x$.')])
  assert local_files.read(path) == [Row('Find $x$.', '3')]


def test_a_file_that_is_not_there(tmp_path):
  with pytest.raises(ValueError, match=r"no file '.*a\.parquet'"):
    pictured_files.read(str(tmp_path / 'a.parquet'))
