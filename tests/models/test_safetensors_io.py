"""Our reader and writer of safetensors agree with the library's."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from bapo_jax.models.hf import safetensors_io

RNG = np.random.default_rng(0)
KINDS = {'float32': np.float32, 'float16': np.float16, 'bfloat16': jnp.bfloat16}


def random(shape, kind):
  return RNG.standard_normal(shape).astype(KINDS[kind])


@pytest.mark.parametrize('kind', KINDS)
def test_files_are_those_of_the_library(kind, tmp_path):
  shapes = {'z': (6, 2, 3), 'b': (5,), 'none': (0,)}
  arrays = {name: random(shape, kind) for name, shape in shapes.items()}
  path = str(tmp_path / 'model.safetensors')
  safetensors_io.write(path, kind, shapes, arrays.values())
  ours = load_file(path)
  save_file(arrays, path)
  found = safetensors_io.index(str(tmp_path))
  assert set(found) == set(ours) == set(arrays)
  for name, array in arrays.items():
    for x in (ours[name], found[name]):
      assert x.shape == array.shape and x.dtype == array.dtype
    assert ours[name].tobytes() == array.tobytes()
    for start, stop in ((0, len(array)), (2, 4), (3, 3)):
      if stop <= len(array):
        rows = safetensors_io.read(found[name], start, stop)
        assert rows.tobytes() == array[start:stop].tobytes()


def test_columns_of_rows_are_read_alone(tmp_path, monkeypatch):
  x = np.arange(60, dtype=np.float32).reshape(6, 10)
  path = str(tmp_path / 'model.safetensors')
  safetensors_io.write(path, 'float32', {'x': x.shape}, [x])
  asked, preadv = [], safetensors_io.os.preadv
  monkeypatch.setattr(
    safetensors_io.os,
    'preadv',
    lambda file, parts, at: asked.append(len(parts[0])) or preadv(file, parts, at),
  )
  found = safetensors_io.read(safetensors_io.header(path)['x'], 1, 4, (3, 7))
  np.testing.assert_array_equal(found.reshape(3, 4), x[1:4, 3:7])
  assert asked == [16] * 3  # bytes: four numbers of each of three rows


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 20))
def test_files_are_cut_only_where_they_must_be(sizes, limit):
  named = {str(i): size for i, size in enumerate(sizes)}
  parts = list(safetensors_io.shards(named, limit))
  assert [name for part in parts for name in part] == list(named)
  total = [sum(named[name] for name in part) for part in parts]
  for part, size in zip(parts, total, strict=True):
    assert size <= limit or len(part) == 1
  for size, (_, after) in zip(total, itertools.pairwise(parts), strict=False):
    assert size + named[after[0]] > limit


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


def test_a_tensor_in_two_files_is_refused(tmp_path):
  for name in ('a', 'b'):
    save_file({'x': np.ones(2, np.float32)}, tmp_path / f'{name}.safetensors')
  with pytest.raises(ValueError, match=r'a\.safetensors and b\.safetensors'):
    safetensors_io.index(str(tmp_path))
