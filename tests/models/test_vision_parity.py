"""The vision tower computes what that of transformers computes from the same weights.

Needs torch (`pip install -r requirements-parity.txt`); without it the file is skipped.
"""

import dataclasses

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import tensors as hf_tensors
from bapo_jax.models.vision import grids, tower
from bapo_jax.models.vision import spec as vision_spec

torch = pytest.importorskip(
  'torch', reason='parity needs torch: pip install -r requirements-parity.txt'
)

SIZES = {
  'small': vision_spec.VisionSpec(
    width=32, layers=4, heads=2, ffn=44, out=24, full_layers=(1, 3), image_token=5
  ),
  # Another number of heads, other windows, patches and merged patches.
  'other': vision_spec.VisionSpec(
    width=48,
    layers=3,
    heads=4,
    ffn=60,
    out=16,
    full_layers=(2,),
    image_token=5,
    patch=6,
    window=48,
  ),
}
PATCHES, PICTURES = 160, 3
ROWS = [  # patches along height and width of the pictures of each row
  [(12, 10)],
  [(2, 18), (6, 12)],
  [],
  [(4, 4), (2, 2), (10, 8)],
]


def pixels(v, rows=ROWS):
  """(uint8 [R, Z, E], grid [R, I, 2]) of random pictures."""
  rng = np.random.default_rng(7)
  pixels_RZE = np.zeros((len(rows), PATCHES, v.numbers), np.uint8)
  grid_RI2 = np.zeros((len(rows), PICTURES, 2), np.int32)
  for r, pictures in enumerate(rows):
    n = sum(high * wide for high, wide in pictures)
    pixels_RZE[r, :n] = rng.integers(0, 256, (n, v.numbers))
    grid_RI2[r, : len(pictures)] = np.reshape(pictures, (-1, 2))
  return pixels_RZE, grid_RI2


def theirs_of(pixels_ZE, v):
  """The patches as transformers' processor gives them: normalised, each frame twice."""
  x = pixels_ZE.reshape(-1, 3, 1, v.patch, v.patch).astype(np.float32) / 255
  mean, std = (np.reshape(x, (1, 3, 1, 1, 1)) for x in (v.mean, v.std))
  x = np.broadcast_to((x - mean) / std, (len(x), 3, v.frames, v.patch, v.patch))
  return torch.tensor(x.reshape(len(x), -1), dtype=torch.float32)


def ours_of(state, spec):
  """Our parameters of a state dict."""
  flat = {}
  for name, (shape, _) in transformer.describe(spec).items():
    if not name.startswith('vision/'):
      continue
    count, tail = hf_tensors.split(name, shape)
    order = hf_tensors.file_axes(name, len(tail))
    found = []
    for i in range(count):
      x = state[hf_tensors.NAMES[name].format(i).removeprefix('visual.')].numpy()
      x = x.reshape([tail[axis] for axis in order])
      found.append(x.transpose(np.argsort(order)))
    array = np.stack(found) if len(tail) < len(shape) else found[0]
    flat[name.removeprefix('vision/')] = jnp.asarray(array)
  return transformer.unflatten(flat)


@pytest.fixture(params=SIZES, scope='module')
def pair(request):
  """(torch's tower, our spec, our parameters)."""
  from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

  v = SIZES[request.param]
  torch.manual_seed(0)
  config = theirs.Qwen2_5_VLVisionConfig(
    depth=v.layers,
    hidden_size=v.width,
    num_heads=v.heads,
    intermediate_size=v.ffn,
    out_hidden_size=v.out,
    fullatt_block_indexes=list(v.full_layers),
    window_size=v.window,
    patch_size=v.patch,
  )
  model = theirs.Qwen2_5_VisionTransformerPretrainedModel(config).float().eval()
  # Every bias and every scale must matter, and activations stay near 1.
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.8 * v.width**-0.5 * torch.randn_like(parameter))
  spec = dataclasses.replace(making.SPEC, vision=v)
  return model, spec, ours_of(model.state_dict(), spec)


def expected(model, pixels_ZE, pictures, v):
  """(hidden states in our order, embeddings) of the pictures of one row."""
  from transformers.vision_utils import get_vision_window_index

  grid = torch.tensor([[1, high, wide] for high, wide in pictures])
  with torch.no_grad():
    found = model(theirs_of(pixels_ZE, v), grid_thw=grid)
  index, _ = get_vision_window_index(grid, v.merge, v.window, v.patch)
  hidden = found.last_hidden_state.reshape(-1, v.merge**2, v.width)
  hidden = hidden[torch.argsort(index)].reshape(-1, v.width)
  return hidden.numpy(), found.pooler_output.numpy()


def test_hidden_states_and_embeddings(pair):
  model, spec, params = pair
  v = spec.vision
  pixels_RZE, grid_RI2 = pixels(v)
  hidden_RZD, _ = jax.jit(tower.hidden, static_argnames='spec')(
    params, pixels_RZE, grid_RI2, spec
  )
  merged_RMD = jax.jit(tower.forward, static_argnames='spec')(
    params, pixels_RZE, grid_RI2, spec
  )
  for r, pictures in enumerate(ROWS):
    n = sum(high * wide for high, wide in pictures)
    assert not np.asarray(merged_RMD[r, n // v.merge**2 :]).any()
    if not n:
      continue
    hidden, merged = expected(model, pixels_RZE[r, :n], pictures, v)
    assert np.abs(hidden).max() > 1
    oracles.close(hidden_RZD[r, :n], hidden, 256)
    oracles.close(merged_RMD[r, : n // v.merge**2], merged, 256)


def test_each_picture_is_read_by_itself(pair):
  # Beside others and alone, and with just as many windows as it has.
  _, spec, params = pair
  v = spec.vision
  run = jax.jit(tower.forward, static_argnames=('spec', 'windows'))
  pixels_RZE, grid_RI2 = pixels(v)
  whole_RMD = run(params, pixels_RZE, grid_RI2, spec)
  start = 0
  for high, wide in ROWS[3]:
    n = high * wide
    alone_1MD = run(
      params,
      pixels_RZE[3:4, start : start + n],
      np.asarray([[[high, wide]]], np.int32),
      spec,
      windows=grids.count_windows([(high, wide)], v),
    )
    first = start // v.merge**2
    oracles.close(whole_RMD[3, first : first + n // v.merge**2], alone_1MD[0], 128)
    start += n


def test_empty_patches_change_nothing(pair):
  _, spec, params = pair
  run = jax.jit(tower.forward, static_argnames='spec')
  pixels_RZE, grid_RI2 = pixels(spec.vision)
  filled_RZE = pixels_RZE.copy()
  for r, pictures in enumerate(ROWS):
    filled_RZE[r, sum(high * wide for high, wide in pictures) :] = 200
  np.testing.assert_array_equal(
    run(params, filled_RZE, grid_RI2, spec), run(params, pixels_RZE, grid_RI2, spec)
  )


def test_a_mesh_computes_the_same(pair):
  _, spec, params = pair
  pixels_RZE, grid_RI2 = pixels(spec.vision)
  alone = jax.jit(tower.forward, static_argnames='spec')(
    params, pixels_RZE, grid_RI2, spec
  )
  mesh = sharding.make(data=2, fsdp=2, tensor=2)
  tree = {'vision': params}
  placed = jax.device_put(tree, sharding.shardings(tree, mesh))
  rows = sharding.split_rows((pixels_RZE, grid_RI2), mesh)
  run = sharding.under(mesh, jax.jit(tower.forward, static_argnames='spec'))
  found = run(placed['vision'], *rows, spec)
  oracles.close(found, alone, 128)


def test_the_gradient_is_finite_and_reaches_every_parameter(pair):
  _, spec, params = pair
  pixels_RZE, grid_RI2 = pixels(spec.vision)

  def total(params):
    return (tower.forward(params, pixels_RZE, grid_RI2, spec) ** 2).sum()

  for path, x in jax.tree.leaves_with_path(jax.jit(jax.grad(total))(params)):
    assert np.isfinite(x).all(), sharding.path_name(path)
    assert np.abs(x).max() > 0, sharding.path_name(path)


def test_a_model_without_a_tower_is_refused():
  with pytest.raises(ValueError, match='no vision tower'):
    tower.vision_of(making.SPEC)
