"""A file is whole or as it was, and an error names it."""

import errno
import json

import pytest

from bapo_jax.runtime import files


def test_a_write_replaces_the_whole_file(tmp_path):
  path = tmp_path / 'a.json'
  files.write(path, 'é')
  assert path.read_bytes() == 'é'.encode()
  files.write_json(path, {'x': [1]})
  assert json.loads(path.read_text()) == {'x': [1]}
  assert [p.name for p in tmp_path.iterdir()] == ['a.json']


def test_what_cannot_be_encoded_leaves_the_old_file(tmp_path):
  path = tmp_path / 'a'
  files.write(path, 'old')
  with pytest.raises(UnicodeEncodeError):
    files.write(path, 'new \ud800')
  assert path.read_text() == 'old'


@pytest.mark.parametrize('content', [None, b'{"a": ', b'[' * 100_000, b'\xff', b'[1]'])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
  path = tmp_path / 'a.json'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=r'a\.json.*download it again'):
    files.read_object(str(path))
  path.write_text('{"a": 1}')
  assert files.read_object(str(path)) == {'a': 1}


def test_an_error_without_a_name_gets_one(tmp_path):
  with pytest.raises(OSError) as caught, files.naming(tmp_path / 'a'):
    raise OSError(errno.ENOSPC, 'No space left on device')
  assert caught.value.filename == str(tmp_path / 'a')
  with pytest.raises(OSError) as caught, files.naming(tmp_path / 'a'):
    raise OSError(errno.ENOSPC, 'No space left on device', '/its/own')
  assert caught.value.filename == '/its/own'
