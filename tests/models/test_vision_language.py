"""Texts with pictures: the same weights give the same here and in transformers.

Needs torch (`pip install -r requirements/parity.txt`); without it the file is skipped.
"""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import making
import numpy as np
import pictured
import PIL.Image
import pytest
import transformers
from pictured import png, reader
from runs import tiny

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.data.gallery import Capacity, Gallery
from bapo_jax.data.row import Row
from bapo_jax.models import decoder, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.vision import sequence
from bapo_jax.tools import export
from bapo_jax.training.inputs import Model
from bapo_jax.types import Pictures

torch = pytest.importorskip(
  'torch', reason='parity needs torch: pip install -r requirements/parity.txt'
)

IMAGE = 5
START = 6
END = 7
ROPE = {'rope_type': 'default', 'rope_theta': 100.0, 'mrope_section': [2, 3, 1]}
TEXT = {
  'vocab_size': 40,
  'hidden_size': 48,
  'intermediate_size': 40,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 96,
  'rms_norm_eps': 1e-6,
  'rope_parameters': ROPE,
  'bos_token_id': None,
  'eos_token_id': 3,
  'pad_token_id': 0,
}
TOWER = {
  'depth': 3,
  'hidden_size': 32,
  'intermediate_size': 36,
  'out_hidden_size': 48,
  'num_heads': 2,
  'fullatt_block_indexes': [1],
  'patch_size': 6,
  'window_size': 24,
}
GRIDS = [[(4, 6)], [(8, 2), (4, 4)], [], [(2, 2), (2, 8), (6, 6)]]
PATCHES = 64
PICTURES = 3
NEW = 4
T = 48


@pytest.fixture(scope='module')
def trio(tmp_path_factory):
  """(torch's model, our spec, our parameters, the directory) of one saved model."""
  torch.manual_seed(0)
  config = transformers.Qwen2_5_VLConfig(
    text_config=TEXT,
    vision_config=TOWER,
    image_token_id=IMAGE,
    video_token_id=39,
    vision_start_token_id=START,
    vision_end_token_id=END,
    tie_word_embeddings=False,
  )
  theirs = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
  # Every bias and every scale must matter, and activations stay near 1 at any width.
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(1.2 * 48**-0.5 * torch.randn_like(parameter))
  path = str(tmp_path_factory.mktemp('model'))
  theirs.save_pretrained(path)
  spec = hf_config.read_spec(path, 'float32')
  params = hf_weights.load(path, spec, sharding.make(data=2, fsdp=2, tensor=2))
  # Off the mesh: what is computed below is computed on one device.
  return theirs, spec, jax.tree.map(jnp.asarray, jax.device_get(params)), path


def rows(v):
  """(tokens [B, T], length_B, pictures) of texts with random pictures."""
  rng = np.random.default_rng(1)
  B = len(GRIDS)
  E = v.numbers
  tokens_BT = np.zeros((B, T), np.int32)
  pixels_BZE = np.zeros((B, PATCHES, E), np.uint8)
  grid_BI2 = np.zeros((B, PICTURES, 2), np.int32)
  length_B = []
  for b, pictures in enumerate(GRIDS):
    row = rng.integers(8, 30, 3 + 2 * b).tolist()
    z = 0
    for i, (high, wide) in enumerate(pictures):
      n = high * wide
      pixels_BZE[b, z : z + n] = rng.integers(0, 256, (n, E))
      grid_BI2[b, i] = (high, wide)
      z = z + n
      row += [START, *[IMAGE] * (n // v.merge**2), END]
      row += rng.integers(8, 30, i + 1).tolist()
    tokens_BT[b, : len(row)] = row
    length_B.append(len(row))
  return (
    tokens_BT,
    np.asarray(length_B),
    Pictures(pixels_BZE, grid_BI2, np.ones((B, 8), bool)),
  )


def inputs(tokens_T, pictures, b, v):
  """What their model is given for one row."""
  pictures_b = [(high, wide) for high, wide in pictures.grid_PI2[b] if high]
  n = sum(high * wide for high, wide in pictures_b)
  tokens = torch.tensor(np.asarray(tokens_T)[None], dtype=torch.long)
  given = {'input_ids': tokens, 'attention_mask': torch.ones_like(tokens)}
  if not n:
    return given
  x = pictures.pixels_PZE[b, :n].reshape(n, 3, 1, v.patch, v.patch) / np.float32(255)
  mean, std = (np.reshape(x, (1, 3, 1, 1, 1)) for x in (v.mean, v.std))
  x = np.broadcast_to((x - mean) / std, (n, 3, v.frames, v.patch, v.patch))
  return given | {
    'pixel_values': torch.tensor(x.reshape(n, -1), dtype=torch.float32),
    'image_grid_thw': torch.tensor([[1, high, wide] for high, wide in pictures_b]),
    'mm_token_type_ids': (tokens == IMAGE).int(),
  }


def texts(v):
  """Yields (b, length, what their model is given) of each row."""
  tokens_BT, length_B, pictures = rows(v)
  for b, n in enumerate(length_B):
    yield b, n, inputs(tokens_BT[b, :n], pictures, b, v)


def logits_of(theirs, given):
  theirs.model.rope_deltas = None
  with torch.no_grad():
    return theirs(**given).logits[0]


forward = jax.jit(pictured.forward, static_argnames='spec')


def test_log_probabilities(trio):
  theirs, spec, params, _ = trio
  tokens_BT, length_B, pictures = rows(spec.vision)
  hidden_BTD = forward(params, tokens_BT, pictures, spec)
  found_BTV = jax.nn.log_softmax(hidden_BTD @ transformer.head(params).T, -1)
  for b, n, given in texts(spec.vision):
    wanted = torch.log_softmax(logits_of(theirs, given), -1).numpy()
    making.close(found_BTV[b, :n], wanted, count=4096)
  # The pictures matter.
  blank = pictures._replace(pixels_PZE=np.zeros_like(pictures.pixels_PZE))
  unseen_BTD = forward(params, tokens_BT, blank, spec)
  for b, n in enumerate(length_B):
    off = np.abs(hidden_BTD[b, n - 1] - unseen_BTD[b, n - 1]).max()
    assert off > 0.01 if GRIDS[b] else off == 0, b


def test_positions_are_those_of_transformers(trio):
  theirs, spec, _, _ = trio
  v = spec.vision
  tokens_BT, length_B, pictures = rows(v)
  place = jax.jit(sequence.place, static_argnums=2)
  at, shift_B = place(tokens_BT, pictures.grid_PI2, v)
  for b, n, given in texts(v):
    if not GRIDS[b]:
      assert (at.parts_BT3[b] == np.arange(T)[:, None]).all()
      assert shift_B[b] == 0
      continue
    wanted, delta = theirs.model.get_rope_index(
      given['input_ids'], given['mm_token_type_ids'], given['image_grid_thw']
    )
    np.testing.assert_array_equal(at.parts_BT3[b, :n].T, wanted[:, 0].numpy())
    assert shift_B[b] == delta.item()
    # After the prompt come texts.
    after_t3 = at.parts_BT3[b, n:]
    assert (after_t3 == (np.arange(n, T) + delta.item())[:, None]).all()
  # A sampled image token is text.
  sampled_BT = np.where(np.arange(T) < length_B[:, None], tokens_BT, IMAGE)
  found = place(sampled_BT, pictures.grid_PI2, v)
  jax.tree.map(np.testing.assert_array_equal, found, (at, shift_B))


def test_greedy_decoding(trio):
  theirs, spec, params, _ = trio
  tokens_BT, length_B, pictures = rows(spec.vision)
  row_B = np.arange(len(length_B))
  head_DV = transformer.head(params).T
  actor = decoder.actor(params, spec)
  prefilled, shift_B = jax.jit(sequence.prefill, static_argnames='spec')(
    actor, tokens_BT, pictures, spec
  )
  cache = decoder.empty_cache(spec, len(row_B), [T + NEW])
  cache = decoder.store(cache, prefilled.cache, row_B, row_B)
  decode = jax.jit(decoder.decode, static_argnames='spec')
  # Starts from the last token of each prompt.
  grown_BT = np.pad(tokens_BT, ((0, 0), (0, NEW)))
  hidden = []
  for t in range(NEW):
    position_B = length_B - 1 + t
    hidden_BD, cache, *_ = decode(
      actor, grown_BT[row_B, position_B], position_B, cache, spec, shift_B
    )
    grown_BT[row_B, position_B + 1] = np.asarray(hidden_BD @ head_DV).argmax(-1)
    hidden.append(hidden_BD)
  # The cache gives the hidden states of whole rows.
  whole_BTD = forward(params, grown_BT, pictures, spec)
  for t, hidden_BD in enumerate(hidden):
    making.close(hidden_BD, whole_BTD[row_B, length_B - 1 + t], count=1024)
  for b, n, given in texts(spec.vision):
    theirs.model.rope_deltas = None
    # Without an end token, since our loop has none.
    wanted = theirs.generate(
      **given, do_sample=False, max_new_tokens=NEW, eos_token_id=-1
    )
    assert grown_BT[b, n : n + NEW].tolist() == wanted[0, n:].tolist(), b


def test_pictures_are_cut_as_by_their_processor(trio):
  from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

  theirs, spec, params, _ = trio
  v = dataclasses.replace(spec.vision, least_pixels=24**2, most_pixels=84**2)
  files = png(40, 60, seed=1), png(90, 25, seed=2)
  rows = [Row('Find <image> and <image>', '7', pictures=files)]
  (prompt,) = prompts.encode(reader(), rows, v)
  held = Gallery(rows, v, Capacity(2 * PATCHES, PICTURES, 20)).of([0])
  tokens_1T = np.asarray([prompt.tokens], np.int32)
  hidden_1TD = forward(params, tokens_1T, Pictures(*held), spec)
  logp_TV = jax.nn.log_softmax(hidden_1TD[0] @ transformer.head(params).T, -1)

  processor = module.Qwen2VLImageProcessorPil(
    patch_size=v.patch,
    size={'shortest_edge': v.least_pixels, 'longest_edge': v.most_pixels},
  )
  seen = processor([PIL.Image.open(io.BytesIO(data)) for data in files])
  given = {
    'input_ids': torch.tensor(tokens_1T, dtype=torch.long),
    'mm_token_type_ids': torch.tensor(tokens_1T == IMAGE).int(),
    'pixel_values': torch.tensor(np.asarray(seen['pixel_values'])),
    'image_grid_thw': torch.tensor(np.asarray(seen['image_grid_thw'])),
  }
  wanted = torch.log_softmax(logits_of(theirs, given), -1).numpy()
  making.close(logp_TV, wanted, count=4096)


def test_what_is_exported_is_what_was_read(trio, tmp_path):
  theirs, spec, params, _ = trio
  # Limits that are not the defaults.
  vision = dataclasses.replace(spec.vision, least_pixels=28 * 28)
  spec = dataclasses.replace(spec, vision=vision)
  flat = transformer.flatten(params)
  hf_weights.save(str(tmp_path), flat.__getitem__, spec, shard_bytes=20_000)
  source = tmp_path / 'source'
  source.mkdir()
  (source / 'config.json').write_text(json.dumps(hf_config.config_of(spec)))
  model = Model(str(source), reader(), spec)
  export.write_configs(str(tmp_path), tiny(), model, 'float32')
  assert hf_config.read_spec(str(tmp_path), 'float32') == spec
  loaded = hf_weights.load(str(tmp_path), spec, sharding.make(data=8))
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  read = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
  for _, _, given in texts(spec.vision):
    assert torch.equal(logits_of(theirs, given), logits_of(read.eval(), given))


def test_names_of_transformers_modules_are_read(trio, tmp_path):
  from safetensors.numpy import load_file, save_file

  _, spec, params, path = trio
  tensors = load_file(f'{path}/model.safetensors')
  longer = {'model': 'model.language_model', 'visual': 'model.visual'}
  renamed = {}
  for name, x in tensors.items():
    head, _, tail = name.partition('.')
    renamed[f'{longer.get(head, head)}.{tail}'] = x
  save_file(renamed, tmp_path / 'model.safetensors')
  found = hf_weights.load(str(tmp_path), spec, sharding.make(data=8))
  jax.tree.map(np.testing.assert_array_equal, found, params)
