"""Digests of parts of a file."""

import pytest

from bapo_jax.runtime import digests


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
