"""Files of Qwen3-MoE: config.json, tensors per expert or fused, adapters, exports."""

import dataclasses
import json
import math
import pathlib

import jax
import making
import numpy as np
import pytest
from refusals import sentence_of
from safetensors.numpy import save_file

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import safetensors_io
from bapo_jax.models.hf import weights as hf_weights

# Qwen3-30B-A3B, as published.
HERE = pathlib.Path(__file__).parent
PUBLISHED = json.loads((HERE / 'qwen3_30b_a3b.json').read_text())
ABSENT = object()
WINDOWS = {'kinds': 48 * (transformer.LayerKind(4096),)}
SPEC = dataclasses.replace(making.QWEN3, experts=8, active=2, ffn=12, tied=False)
E, F, D = SPEC.experts, SPEC.ffn, SPEC.width
WEIGHTS = 'model.safetensors'
GATE_UP = 'model.layers.{}.mlp.experts.gate_up_proj'
DOWN = 'model.layers.{}.mlp.experts.down_proj'


def spec(**changes):
  options = {k: x for k, x in (PUBLISHED | changes).items() if x is not ABSENT}
  return hf_config.spec_of(options, 'bfloat16')


# ------------------------------------------------------------------------ config.json


def test_the_published_model():
  found = spec()
  assert (found.width, found.layers, found.heads, found.kv_heads) == (2048, 48, 32, 4)
  assert (found.head_width, found.ffn, found.experts, found.active) == (
    128,
    768,
    128,
    8,
  )
  assert found.norm_topk and not (found.qkv_bias or found.tied)
  assert found.qk_norm == 'head'
  assert transformer.count(found) == 30_532_122_624  # as published: 30.5 B
  stored = hf_weights.stored(found)
  assert len([name for name in stored if '.experts.' in name]) == 18_432
  assert stored['model.layers.47.mlp.gate.weight'] == (128, 2048)
  last = 'model.layers.47.mlp.experts.127.'
  assert stored[last + 'up_proj.weight'] == (768, 2048)
  assert stored[last + 'down_proj.weight'] == (2048, 768)


@pytest.mark.parametrize(
  ('changes', 'fields'),
  [
    ({'norm_topk_prob': ABSENT}, {'norm_topk': False}),  # the default of transformers
    ({'num_experts': ABSENT, 'num_local_experts': 64}, {'experts': 64}),
    ({'head_dim': ABSENT}, {'head_width': 64}),  # D / H, unlike a dense Qwen3
    ({'num_key_value_heads': ABSENT}, {}),
    ({'mlp_only_layers': None, 'decoder_sparse_step': ABSENT}, {}),
    ({'router_aux_loss_coef': 1.0, 'output_router_logits': True}, {}),  # of the loss
    ({'num_experts_per_tok': 128}, {'active': 128}),
    ({'attention_bias': True}, {'qkv_bias': True, 'o_bias': True}),
    ({'sliding_window': 4096}, {}),  # off unless use_sliding_window
    # The window is of all layers, whatever max_window_layers is.
    ({'use_sliding_window': True, 'sliding_window': ABSENT}, WINDOWS),
  ],
)
def test_odd_options_are_read_as_transformers_reads_them(changes, fields):
  assert spec(**changes) == dataclasses.replace(spec(), **fields)


@pytest.mark.parametrize(
  ('text', 'changes'),
  [
    ('mlp_only_layers=[0, 3]', {'mlp_only_layers': [0, 3]}),
    (
      'num_experts_per_tok=9 exceeds num_experts=8',
      {
        'num_experts_per_tok': 9,
        'num_experts': 8,
      },
    ),
    ('num_experts=0 ', {'num_experts': 0}),
    ("norm_topk_prob='false'", {'norm_topk_prob': 'false'}),
    ('num_local_experts=64', {'num_local_experts': 64}),
    ('routed_scaling_factor=2.5', {'routed_scaling_factor': 2.5}),
  ],
)
def test_an_unsupported_option_is_named_in_one_sentence(text, changes):
  assert text in sentence_of(spec, **changes)


# ---------------------------------------------------------------------------- tensors


@pytest.fixture(scope='module')
def params():
  return making.params(SPEC)


@pytest.fixture(scope='module')
def tensors(params):
  """Tensors as Hugging Face lays them out: projections [out, in], experts apart."""
  by_name = {}
  for parameter, array in transformer.flatten(params).items():
    head, _, tail = parameter.rpartition('/')
    for i, x in enumerate(np.asarray(array) if head else [np.asarray(array)]):
      if tail in 'qkv':
        x = x.reshape(x.shape[0], -1)
      if tail == 'o':
        x = x.reshape(-1, x.shape[-1])
      if tail in ('q', 'k', 'v', 'o', 'router'):
        x = x.T
      # An expert's index is the second of its name.
      for e, w in enumerate(x.swapaxes(1, 2) if 'expert' in tail else [x]):
        name = hf_weights.NAMES[parameter].format(i, e)
        by_name[name] = np.ascontiguousarray(w)
  return by_name


def fused(tensors, layers=(0, 1)):
  """The same tensors; experts of these layers are joined: [E, 2F, D], [E, D, F]."""
  rest = dict(tensors)
  for i in layers:

    def pop(name, i=i):
      at = f'model.layers.{i}.mlp.experts.'
      return np.stack([rest.pop(f'{at}{e}.{name}_proj.weight') for e in range(E)])

    rest[GATE_UP.format(i)] = np.concatenate([pop('gate'), pop('up')], 1)
    rest[DOWN.format(i)] = pop('down')
  assert rest[GATE_UP.format(0)].shape == (E, 2 * F, D)
  return rest


@pytest.mark.parametrize('layers', [(), (0,)], ids=['apart', 'one layer fused'])
@pytest.mark.parametrize(
  ('shape', 'block'),
  [((1, 1, 1), 300), ((2, 2, 2), 1), ((2, 2, 2), 1 << 20), ((1, 2, 4), 1700)],
)
def test_any_devices_read_each_byte_once(
  tmp_path, monkeypatch, params, tensors, shape, block, layers
):
  read = safetensors_io.read
  sizes = []

  def counting(*where):
    rows = read(*where)
    sizes.append(rows.nbytes)
    return rows

  monkeypatch.setattr(safetensors_io, 'read', counting)
  monkeypatch.setattr(hf_weights, 'BLOCK', block)
  save_file(fused(tensors, layers) if layers else tensors, tmp_path / WEIGHTS)
  mesh = sharding.make(*shape, devices=jax.devices()[: math.prod(shape)])
  found = hf_weights.load(str(tmp_path), SPEC, mesh)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  layout = sharding.shardings(params, mesh)
  assert jax.tree.map(lambda x: x.sharding, found) == layout
  assert sum(sizes) == sum(x.nbytes for x in tensors.values())


def transposed(tensors):
  files = fused(tensors)
  files[GATE_UP.format(1)] = np.ascontiguousarray(
    files[GATE_UP.format(1)].swapaxes(1, 2)
  )
  return files


SHARED = 'model.layers.0.mlp.shared_expert.up_proj.weight'


@pytest.mark.parametrize(
  ('text', 'change'),
  [
    (f'{GATE_UP.format(1)} has the shape (8, 16, 24)', transposed),
    (f'{GATE_UP.format(0)} has the shape', lambda x: fused(x) | x),
    (f'1 unknown [{SHARED!r}]', lambda x: x | {SHARED: np.ones((F, D), np.float32)}),
  ],
)
def test_tensors_that_do_not_match_are_refused(tmp_path, tensors, text, change):
  save_file(change(tensors), tmp_path / WEIGHTS)
  assert text in sentence_of(hf_weights.check, str(tmp_path), SPEC)
