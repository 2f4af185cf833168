"""Pictures of recorded problems are written once, whole, under their digests."""

import os

import pytest
from pictured import png

from bapo_jax.runtime import picture_files


def test_a_picture_is_written_once(tmp_path):
  one, two = png(4, 4, 1), png(4, 4, 2)
  names = picture_files.write(tmp_path, [one, two, one])
  assert names[0] == names[2] != names[1]
  assert [(tmp_path / name).read_bytes() for name in names] == [one, two, one]
  assert all(os.path.dirname(name) == 'pictures' for name in names)
  (tmp_path / names[0]).write_bytes(b'held')
  assert picture_files.write(tmp_path, [one]) == names[:1]
  assert (tmp_path / names[0]).read_bytes() == b'held'
  assert len(os.listdir(tmp_path / 'pictures')) == 2


@pytest.mark.parametrize(
  ('start', 'suffix'),
  [
    (b'\x89PNG\r\n', 'png'),
    (b'\xff\xd8\xff\xe0', 'jpg'),
    (b'RIFF1234WEBP', 'webp'),
    (b'BM12', 'bmp'),
    (b'GIF89a', 'gif'),
    (b'<svg>', 'bin'),
  ],
)
def test_a_name_ends_as_files_of_its_kind_do(start, suffix, tmp_path):
  (name,) = picture_files.write(tmp_path, [start])
  assert name.endswith(f'.{suffix}')
