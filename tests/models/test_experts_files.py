"""Files of Qwen3-MoE: config.json, tensors per expert or fused, adapters, exports."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest
from runs import saved, tiny
from safetensors.numpy import load_file, save_file

from bapo_jax import sharding
from bapo_jax.models import decoder, lora, quantized, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import safetensors_io
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.run import experiment
from bapo_jax.tools import export
from bapo_jax.training import inputs

# Qwen3-30B-A3B, as published.
PUBLISHED = {
  'architectures': ['Qwen3MoeForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'decoder_sparse_step': 1,
  'head_dim': 128,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'intermediate_size': 6144,
  'max_position_embeddings': 40960,
  'max_window_layers': 48,
  'mlp_only_layers': [],
  'model_type': 'qwen3_moe',
  'moe_intermediate_size': 768,
  'norm_topk_prob': True,
  'num_attention_heads': 32,
  'num_experts': 128,
  'num_experts_per_tok': 8,
  'num_hidden_layers': 48,
  'num_key_value_heads': 4,
  'output_router_logits': False,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000.0,
  'router_aux_loss_coef': 0.001,
  'sliding_window': None,
  'tie_word_embeddings': False,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
ABSENT = object()
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
  assert found.norm_topk and found.qk_norm and not (found.qkv_bias or found.tied)
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
    ({'norm_topk_prob': False}, {'norm_topk': False}),
    ({'num_experts': ABSENT, 'num_local_experts': 64}, {'experts': 64}),
    ({'num_local_experts': 128}, {}),
    ({'head_dim': ABSENT}, {'head_width': 64}),  # D / H, unlike a dense Qwen3
    ({'num_key_value_heads': ABSENT}, {}),
    ({'intermediate_size': ABSENT}, {}),  # unused
    ({'mlp_only_layers': None, 'decoder_sparse_step': ABSENT}, {}),
    ({'router_aux_loss_coef': 1.0, 'output_router_logits': True}, {}),  # of the loss
    ({'num_experts_per_tok': 128}, {'active': 128}),
    ({'attention_bias': True}, {'qkv_bias': True, 'o_bias': True}),
    ({'sliding_window': 4096}, {}),  # off unless use_sliding_window
  ],
)
def test_odd_options_are_read_as_transformers_reads_them(changes, fields):
  assert spec(**changes) == dataclasses.replace(spec(), **fields)


@pytest.mark.parametrize(
  ('text', 'changes'),
  [
    ('mlp_only_layers=[0, 3]', {'mlp_only_layers': [0, 3]}),
    ('decoder_sparse_step=2', {'decoder_sparse_step': 2}),
    (
      'num_experts_per_tok=9 exceeds num_experts=8',
      {
        'num_experts_per_tok': 9,
        'num_experts': 8,
      },
    ),
    ('num_experts=0 ', {'num_experts': 0}),
    ('num_experts=None', {'num_experts': ABSENT}),
    ("num_experts='128'", {'num_experts': '128'}),
    ('num_experts=True', {'num_experts': True}),
    ('num_experts_per_tok=0', {'num_experts_per_tok': 0}),
    ('num_experts_per_tok=2.0', {'num_experts_per_tok': 2.0}),
    ('moe_intermediate_size=None', {'moe_intermediate_size': ABSENT}),
    ('moe_intermediate_size=-768', {'moe_intermediate_size': -768}),
    ("norm_topk_prob='false'", {'norm_topk_prob': 'false'}),
    ('norm_topk_prob=None', {'norm_topk_prob': None}),
    ('num_local_experts=64', {'num_local_experts': 64}),
    ("scoring_func='sigmoid'", {'scoring_func': 'sigmoid'}),
    ('routed_scaling_factor=2.5', {'routed_scaling_factor': 2.5}),
    ("hidden_act='gelu'", {'hidden_act': 'gelu'}),
    # transformers uses the window in all layers, whatever max_window_layers is.
    ('sliding_window=4096', {'use_sliding_window': True, 'sliding_window': 4096}),
    ('sliding_window=4096', {'use_sliding_window': True, 'sliding_window': ABSENT}),
    ('quantization_config', {'quantization_config': {'quant_method': 'fp8'}}),
    ("model_type='qwen2_moe'", {'model_type': 'qwen2_moe'}),
    ('architectures', {'architectures': ['Qwen3MoeForSequenceClassification']}),
  ],
)
def test_an_unsupported_option_is_named_in_one_sentence(text, changes):
  with pytest.raises(ValueError) as error:
    spec(**changes)
  assert text in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('norm_topk', [True, False])
def test_a_written_config_is_read_back(norm_topk):
  read = spec(norm_topk_prob=norm_topk)
  written = json.loads(json.dumps(hf_config.config_of(read)))
  assert hf_config.spec_of(written, 'bfloat16') == read
  # Version 4 knows this name alone, version 5 both.
  assert written['num_experts'] == 128 and written['norm_topk_prob'] == norm_topk
  assert {n: x for n, x in written.items() if PUBLISHED[n] != x} == (
    {} if norm_topk else {'norm_topk_prob': False}
  )


# ---------------------------------------------------------------------------- tensors


@pytest.fixture(scope='module')
def params():
  return oracles.noisy(SPEC, 0)


@pytest.fixture(scope='module')
def tensors(params):
  """Tensors as Hugging Face lays them out, of every layer and expert."""
  flat = jax.tree.map(np.asarray, transformer.flatten(params))
  by_name = {
    'model.embed_tokens.weight': flat['embed'],
    'model.norm.weight': flat['final_norm'],
    'lm_head.weight': flat['head'],
  }
  for i in range(SPEC.layers):
    at = f'model.layers.{i}.'
    w = {name.removeprefix('layers/'): x[i] for name, x in flat.items() if '/' in name}
    by_name[at + 'input_layernorm.weight'] = w['attn_norm']
    by_name[at + 'post_attention_layernorm.weight'] = w['mlp_norm']
    for name in 'qkv':
      by_name[f'{at}self_attn.{name}_proj.weight'] = w[name].reshape(D, -1).T
    by_name[at + 'self_attn.o_proj.weight'] = w['o'].reshape(-1, D).T
    for name in ('q_norm', 'k_norm'):
      by_name[f'{at}self_attn.{name}.weight'] = w[name]
    by_name[at + 'mlp.gate.weight'] = w['router'].T
    for e in range(E):
      for name in ('gate', 'up', 'down'):
        of_expert = w[f'expert_{name}'][e].T
        by_name[f'{at}mlp.experts.{e}.{name}_proj.weight'] = of_expert
  return {name: np.ascontiguousarray(x) for name, x in by_name.items()}


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
  [((1, 1, 1), 300), ((2, 2, 2), 600), ((2, 2, 2), 1 << 20), ((1, 2, 4), 1700)],
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
  files = fused(tensors, layers) if layers else tensors
  save_file(files, tmp_path / WEIGHTS)
  mesh = sharding.make(*shape, devices=jax.devices()[: math.prod(shape)])
  found = hf_weights.load(str(tmp_path), SPEC, mesh)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  layout = sharding.shardings(params, mesh)
  assert jax.tree.map(lambda x: x.sharding, found) == layout
  assert sum(sizes) == sum(x.nbytes for x in tensors.values())


def test_saved_tensors_are_those_of_hugging_face(tmp_path, params, tensors):
  flat = transformer.flatten(params)
  hf_weights.save(str(tmp_path), flat.__getitem__, SPEC)
  after = load_file(tmp_path / WEIGHTS)
  assert set(after) == set(tensors)
  for name, x in tensors.items():
    np.testing.assert_array_equal(after[name], x, name)
  read = hf_weights.reader(str(tmp_path), SPEC)
  for name in ('layers/router', 'layers/expert_down'):
    np.testing.assert_array_equal(read(name), flat[name])


@pytest.mark.parametrize('layers', [(), (0, 1)], ids=['apart', 'fused'])
def test_an_expert_that_is_not_finite_is_named(tmp_path, tensors, layers):
  name = 'model.layers.1.mlp.experts.5.up_proj.weight'
  x = tensors[name].copy()
  x[-1, -1] = np.nan
  broken = tensors | {name: x}
  save_file(fused(broken, layers) if layers else broken, tmp_path / WEIGHTS)
  with pytest.raises(ValueError) as error:
    hf_weights.load(str(tmp_path), SPEC, sharding.make(2, 2, 2))
  assert f'{name} contains NaN' in str(error.value)


def transposed(tensors):
  files = fused(tensors)
  files[GATE_UP.format(1)] = np.ascontiguousarray(
    files[GATE_UP.format(1)].swapaxes(1, 2)
  )
  return files


def without(tensors):
  return {name: x for name, x in tensors.items() if '.1.mlp.experts.7.' not in name}


SHARED = 'model.layers.0.mlp.shared_expert.up_proj.weight'


@pytest.mark.parametrize(
  ('text', 'change'),
  [
    (f'{GATE_UP.format(1)} has the shape (8, 16, 24)', transposed),
    (f'{GATE_UP.format(0)} has the shape', lambda x: fused(x) | x),
    ('3 missing', without),
    (f'1 unknown [{SHARED!r}]', lambda x: x | {SHARED: np.ones((F, D), np.float32)}),
  ],
)
def test_tensors_that_do_not_match_are_refused(tmp_path, tensors, text, change):
  save_file(change(tensors), tmp_path / WEIGHTS)
  with pytest.raises(ValueError) as error:
    hf_weights.check(str(tmp_path), SPEC)
  assert text in str(error.value) and '\n' not in str(error.value)


# ------------------------------------------------------- adapters, actors and exports


def test_default_adapters_are_of_the_attention_alone(tmp_path):
  knobs = LoraConfig(rank=2)
  shapes = lora.shapes(SPEC, knobs.rank, knobs.targets)
  assert set(shapes) == {f'layers/{name}' for name in 'qkvo'}
  arrays = {
    f'{n}/{s}': np.ones(x)
    for n, x2 in shapes.items()
    for s, x in zip('ab', x2, strict=True)
  }
  hf_weights.save_adapters(
    str(tmp_path), arrays.__getitem__, SPEC, knobs, 'hub:a/b', 'float32'
  )
  written = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert written['target_modules'] == ['k_proj', 'o_proj', 'q_proj', 'v_proj']
  assert len(load_file(tmp_path / safetensors_io.ADAPTERS)) == 2 * 4 * SPEC.layers


def test_experts_of_a_narrow_actor_have_a_scale_per_expert_and_output(params):
  spec = dataclasses.replace(SPEC, actor_dtype='int8', compute='bfloat16')
  make = jax.jit(decoder.actor, static_argnums=1)
  actor = make(params, spec)
  back = decoder.params_of(actor, spec)
  for i, w in enumerate(actor['layers']):
    assert w['router'].dtype == jnp.bfloat16
    for name in transformer.EXPERTS:
      whole = params['layers'][name][i]
      q = w[name]
      assert q.values.dtype == jnp.int8 and q.values.shape == whole.shape
      np.testing.assert_allclose(
        q.scale, np.abs(np.asarray(whole)).max(1) / 127, rtol=1e-6
      )
      error = np.abs(np.asarray(q.values, np.float32) * q.scale[:, None] - whole)
      assert (error <= np.asarray(q.scale)[:, None] * 0.5001).all()
      assert isinstance(back['layers'][name], quantized.Quantized)
  jax.tree.map(np.testing.assert_array_equal, actor, make(back, spec))


def test_a_run_is_exported(tmp_path):
  config = tiny(**{'sft.experts': 4, 'sft.active': 2})
  workdir = str(tmp_path / 'work')
  experiment.claim(workdir, config)
  trained = inputs.open_model(config).spec
  params = oracles.noisy(trained, 1)
  saved(workdir, jax.device_put(params, sharding.shardings(params, sharding.make())))
  to = tmp_path / 'out'
  assert export.export(config, workdir, str(to), 'float32', 3000) == 0
  assert len(list(to.glob('*.safetensors'))) > 1
  read = hf_config.read_spec(str(to), config.model.compute)
  # A config.json names no kernels and no replay.
  assert dataclasses.replace(read, **config.model.types) == trained
  found = hf_weights.load(str(to), read, sharding.make())
  jax.tree.map(np.testing.assert_array_equal, found, params)
