"""A file is whole or as it was, and an error names it."""

import errno
import json
import os

import pytest
from pictured import png

from bapo_jax.runtime import digests, files


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


# --- digests of parts of a file -------------------------------------------------------


@pytest.mark.parametrize('size', [1, 100, 5000, 256 * 2**10])
def test_of_a_short_file_every_byte_counts(tmp_path, size):
  path = tmp_path / 'file'
  content = bytes(i * 31 % 251 for i in range(size))
  path.write_bytes(content)
  whole = digests.sampled(str(path))
  assert whole[0] == size
  for at in {0, size // 3, size // 2, size - 1}:
    changed = bytearray(content)
    changed[at] ^= 1
    path.write_bytes(changed)
    assert digests.sampled(str(path)) != whole, at


def test_of_a_long_file_64_blocks_from_end_to_end_are_read(tmp_path):
  path = tmp_path / 'file'
  with open(path, 'wb') as file:
    file.truncate(10**8)  # no block of it is on the disk
  before = digests.sampled(str(path))
  for at, seen in ((0, True), (10**8 - 1, True), (10**6, False)):
    with open(path, 'r+b') as file:
      file.seek(at)
      file.write(b'\1')
    assert (digests.sampled(str(path)) != before) == seen, at
    before = digests.sampled(str(path))
