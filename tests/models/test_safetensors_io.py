"""Our reader and writer of safetensors agree with the library's."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
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
  # Columns of rows: numbers 1 to 3 of the 6 in each of two rows.
  part = safetensors_io.read(found['z'], 2, 4, (1, 4)).reshape(2, 3)
  assert part.tobytes() == arrays['z'].reshape(6, 6)[2:4, 1:4].tobytes()


def test_files_are_cut_only_where_they_must_be():
  # At most 10 bytes in a file, or one tensor.
  sizes = {'a': 4, 'b': 6, 'c': 1, 'd': 12, 'e': 9, 'f': 1, 'g': 0}
  parts = list(safetensors_io.shards(sizes, 10))
  assert parts == [['a', 'b'], ['c'], ['d'], ['e', 'f', 'g']]


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
