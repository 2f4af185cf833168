"""A file is whole or as it was, and an error names it."""

import errno
import json
import os

import pytest
from pictured import png

from bapo_jax.runtime import files


def test_a_write_replaces_the_whole_file(tmp_path):
  path = tmp_path / 'new' / 'a.json'
  files.write(path, 'é')
  assert path.read_bytes() == 'é'.encode()
  files.write_json(path, {'x': [1]})
  assert json.loads(path.read_text()) == {'x': [1]}
  with pytest.raises(UnicodeEncodeError):
    files.write(path, 'cannot be encoded: \ud800')
  assert json.loads(path.read_text()) == {'x': [1]}
  assert os.listdir(path.parent) == ['a.json']


def test_a_picture_is_written_once(tmp_path):
  one, two = png(4, 4, 1), png(4, 4, 2)
  names = files.write_pictures(tmp_path, [one, two, one, b'<svg>'])
  assert names[0] == names[2] != names[1]
  assert [(tmp_path / name).read_bytes() for name in names[:3]] == [one, two, one]
  assert [os.path.splitext(name)[1] for name in names[2:]] == ['.png', '.bin']
  assert all(os.path.dirname(name) == 'pictures' for name in names)
  (tmp_path / names[0]).write_bytes(b'held')
  assert files.write_pictures(tmp_path, [one]) == names[:1]
  assert (tmp_path / names[0]).read_bytes() == b'held'
  assert len(os.listdir(tmp_path / 'pictures')) == 3


@pytest.mark.parametrize('content', [None, b'{"a": ', b'[' * 100_000, b'\xff', b'[1]'])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
  path = tmp_path / 'a.json'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=r'a\.json.*download it again'):
    files.read_object(str(path))
  path.write_text('{"a": 1}')
  assert files.read_object(str(path)) == {'a': 1}


@pytest.mark.parametrize(('given', 'named'), [(None, 'a'), ('/its/own', '/its/own')])
def test_an_error_without_a_name_gets_one(given, named):
  with pytest.raises(OSError) as caught, files.naming('a'):
    raise OSError(errno.ENOSPC, 'No space left on device', given)
  assert caught.value.filename == named
