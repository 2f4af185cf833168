"""Our reader and writer of safetensors agree with the library's."""

import itertools
import json
import os
import re
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from bapo_jax.models import safetensors_io

RNG = np.random.default_rng(0)
KINDS = {
  'float32': np.float32,
  'float16': np.float16,
  'bfloat16': jnp.bfloat16,
}


def random(shape, kind):
  return RNG.standard_normal(shape).astype(KINDS[kind])


@pytest.mark.parametrize('kind', KINDS)
def test_files_of_the_library_are_read_by_rows(kind, tmp_path):
  arrays = {'a': random((6, 2, 3), kind), 'b': random((5,), kind)}
  save_file(arrays, tmp_path / 'model.safetensors')
  found = safetensors_io.index(str(tmp_path))
  assert set(found) == set(arrays)
  for name, array in arrays.items():
    assert found[name].shape == array.shape and found[name].dtype == array.dtype
    for a, b in ((0, 5), (2, 4), (4, 5), (3, 3)):
      rows = safetensors_io.read(found[name], a, b)
      assert rows.tobytes() == array[a:b].tobytes()


@pytest.mark.parametrize('kind', KINDS)
def test_the_library_reads_our_files(kind, tmp_path):
  arrays = {'z': random((3, 4), kind), 'a': random((7,), kind), 'none': random(0, kind)}
  path = str(tmp_path / 'model.safetensors')
  safetensors_io.write(
    path, kind, {n: x.shape for n, x in arrays.items()}, arrays.values()
  )
  found = load_file(path)
  assert set(found) == set(arrays)
  for name, array in arrays.items():
    assert found[name].dtype == array.dtype and found[name].shape == array.shape
    assert found[name].tobytes() == array.tobytes()


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 20))
def test_files_are_cut_only_where_they_must_be(sizes, limit):
  named = {str(i): size for i, size in enumerate(sizes)}
  parts = list(safetensors_io.shards(named, limit))
  assert [name for part in parts for name in part] == list(named)
  total = [sum(named[name] for name in part) for part in parts]
  for part, size in zip(parts, total, strict=True):
    assert size <= limit or len(part) == 1
  for size, after in itertools.pairwise(parts):
    assert sum(named[name] for name in size) + named[after[0]] > limit


def test_an_index_lists_the_files_of_the_model(tmp_path):
  for name in (
    'model-1.safetensors',
    'model-2.safetensors',
    'consolidated.safetensors',
  ):
    save_file({name: np.ones(2, np.float32)}, tmp_path / name)
  assert len(safetensors_io.files(str(tmp_path))) == 3
  listed = {'x': 'model-1.safetensors', 'y': 'model-2.safetensors'}
  (tmp_path / safetensors_io.INDEX).write_text(json.dumps({'weight_map': listed}))
  assert safetensors_io.files(str(tmp_path)) == sorted(listed.values())
  assert set(safetensors_io.index(str(tmp_path))) == set(listed.values())
  (tmp_path / safetensors_io.INDEX).unlink()
  save_file({'one': np.ones(2, np.float32)}, tmp_path / safetensors_io.ONE_FILE)
  assert safetensors_io.files(str(tmp_path)) == [safetensors_io.ONE_FILE]


def test_a_file_that_is_cut_short_or_quantised_is_named(tmp_path):
  path = tmp_path / 'model.safetensors'
  save_file({'a': np.ones((8, 8), np.float32)}, path)
  whole = path.read_bytes()
  for size in (4, 20, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=f'is cut short: {size} bytes; fetch it again'):
      safetensors_io.index(str(tmp_path))
  path.write_bytes(whole.replace(b'[8,8]', b'[8,7]'))
  with pytest.raises(ValueError, match='a is damaged'):
    safetensors_io.index(str(tmp_path))
  save_file({'a': np.ones((8, 8), np.int8)}, path)
  with pytest.raises(ValueError, match='a is I8, and only F32, F16, BF16 are read'):
    safetensors_io.index(str(tmp_path))


def rewritten(path, change):
  """Changes the header of a file; its data stay."""
  raw = path.read_bytes()
  length = int.from_bytes(raw[:8], 'little')
  text = json.dumps(change(json.loads(raw[8 : 8 + length]))).encode()
  path.write_bytes(len(text).to_bytes(8, 'little') + text + raw[8 + length :])


@pytest.mark.parametrize(
  ('offsets', 'message'),
  [
    ([0, 16], 'b begins at byte 0 of the data, not at 16'),  # all of a
    ([8, 24], 'b begins at byte 8 of the data, not at 16'),  # half of a
    ([20, 36], 'b begins at byte 20 of the data, not at 16'),  # a hole
    ([-16, 0], 'b is damaged'),
    ([32, 16], 'b is damaged'),
    ([16, 30], 'b is damaged'),
  ],
)
def test_tensors_stand_one_after_the_other(offsets, message, tmp_path):
  path = tmp_path / 'model.safetensors'
  arrays = {'a': np.ones(4, np.float32), 'b': np.ones(4, np.float32)}
  save_file(arrays, path)
  rewritten(path, lambda h: h | {'b': h['b'] | {'data_offsets': offsets}})
  with pytest.raises(Exception):  # noqa: B017  the library's own, of whatever kind
    load_file(path)
  with pytest.raises(ValueError, match=re.escape(message)):
    safetensors_io.index(str(tmp_path))


def test_a_long_header_is_not_read(tmp_path):
  path = tmp_path / 'model.safetensors'
  path.write_bytes((8 * 10**9).to_bytes(8, 'little'))
  os.truncate(path, 9 * 10**9)  # sparse
  tracemalloc.start()
  with pytest.raises(
    ValueError, match='a header of 8000000000 bytes, and at most 1000'
  ):
    safetensors_io.index(str(tmp_path))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 10**6


def test_a_tensor_stands_in_one_file(tmp_path):
  for name in ('a', 'b'):
    save_file({'x': np.ones(2, np.float32)}, tmp_path / f'{name}.safetensors')
  with pytest.raises(ValueError, match=r'x stands in a\.safetensors and in b\.safete'):
    safetensors_io.index(str(tmp_path))


@pytest.mark.parametrize('kind', KINDS)
def test_finite_is_numpys_isfinite(kind):
  # Every number of sixteen bits; the same numbers as float32.
  bits = np.arange(1 << 16, dtype=np.uint16)
  small = bits.view(jnp.dtype('float16' if kind == 'float16' else 'bfloat16'))
  array = small.astype(KINDS[kind])
  expected = np.isfinite(array.astype(np.float32))
  assert 0 < expected.sum() < len(expected)
  found = [safetensors_io.finite(array[i : i + 1]) for i in range(0, 1 << 16, 37)]
  assert found == expected[::37].tolist()
  assert safetensors_io.finite(array[expected]) and not safetensors_io.finite(array)
