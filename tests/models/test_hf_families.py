"""config.json of Gemma 3, OLMo 2 and 3 and SmolLM3, and of models with windows."""

import dataclasses
import json
import pathlib

import making
import pytest
import transformers
from refusals import sentence_of

from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.transformer import LayerKind

PUBLISHED = {
  path.stem: json.loads(path.read_text())
  for path in (pathlib.Path(__file__).parent / 'published').glob('*.json')
}
SMALL = {  # of every family; a context of 64 tokens
  **making.SIZES,
  'num_hidden_layers': 5,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-6,
}
FULL = LayerKind()
LOCAL = LayerKind(16, 'plain')


def spec(family, **changes):
  return hf_config.spec_of(SMALL | {'model_type': family} | changes, 'float32')


def test_the_published_gemma_3():
  small, large = (
    hf_config.spec_of(PUBLISHED[name], 'bfloat16')
    for name in ('gemma3_270m', 'gemma3_1b')
  )
  # One file lists the types of its layers, the other has a period of 6.
  local = LayerKind(512, 'plain')
  assert small.kinds == 3 * (5 * (local,) + (FULL,))
  assert large.kinds == 4 * (5 * (local,) + (FULL,)) + 2 * (local,)
  assert large == transformer.ModelSpec(
    vocab=262144,
    width=1152,
    layers=26,
    heads=4,
    kv_heads=1,
    head_width=256,
    ffn=6912,
    rope_theta=1e6,
    qkv_bias=False,
    qk_norm='head',
    kinds=large.kinds,
    plain_theta=1e4,
    norms='sandwich',
    norm_offset=True,
    activation='gelu_tanh',
    embed_scale=1152**0.5,
    score_scale=None,  # query_pre_attn_scalar is the head width
    tied=True,
    compute='bfloat16',
  )
  # 268 M and 1.00 B parameters, of which the embedding has 168 M and 302 M.
  assert [round(transformer.count(x) / 1e6) for x in (small, large)] == [268, 1000]
  assert [round(transformer.count(x, 'embed') / 1e6) for x in (small, large)] == [
    168,
    302,
  ]


def test_the_published_olmo():
  two = hf_config.spec_of(PUBLISHED['olmo2_1b'], 'bfloat16')
  three = hf_config.spec_of(PUBLISHED['olmo3_7b'], 'bfloat16')
  for read in (two, three):
    assert (read.norms, read.qk_norm, read.tied) == ('post', 'projection', False)
    assert (read.rope_theta, read.activation, read.embed_scale) == (5e5, 'silu', 1)
  assert (two.kinds, two.rope_type) == ((), 'default')
  # YaRN is of the layers with full attention; windows have the same theta without it.
  assert three.kinds == 8 * (3 * (LayerKind(4096, 'plain'),) + (FULL,))
  assert (three.rope_type, three.plain_theta) == ('yarn', 5e5)
  assert dict(three.rope_knobs)['attention_factor'] == 1.2079441541679836
  assert [round(transformer.count(x) / 1e9, 2) for x in (two, three)] == [1.48, 7.3]


def test_the_published_smollm3():
  read = hf_config.spec_of(PUBLISHED['smollm3_3b'], 'bfloat16')
  assert read.kinds == 9 * (3 * (FULL,) + (LayerKind(0, 'none'),))
  assert (read.rope_theta, read.tied, read.qk_norm) == (5e6, True, '')
  assert round(transformer.count(read) / 1e9, 2) == 3.08
  # A Llama without those layers.
  plain = dataclasses.replace(read, kinds=())
  assert hf_config.config_of(plain)['model_type'] == 'llama'


@pytest.mark.parametrize('name', PUBLISHED)
def test_every_version_of_transformers_spells_the_same_model(name):
  """What transformers 5 writes of a published file, or of ours, reads as that file."""
  config = PUBLISHED[name]
  read = hf_config.spec_of(config, 'bfloat16')
  ours = hf_config.config_of(read)
  assert ours['model_type'] == config['model_type']
  assert hf_config.spec_of(json.loads(json.dumps(ours)), 'bfloat16') == read
  for file in (config, ours):
    theirs = transformers.AutoConfig.for_model(**file).to_dict()
    assert 'rope_parameters' in theirs and 'rope_theta' not in theirs
    assert hf_config.spec_of(json.loads(json.dumps(theirs)), 'bfloat16') == read


@pytest.mark.parametrize(
  'family', ['gemma', 'gemma3_text', 'olmo2', 'olmo3', 'smollm3']
)
def test_defaults_are_those_of_transformers(family):
  """A file without an option reads as the file that transformers writes of it."""
  few = SMALL | {'model_type': family, 'hidden_size': 1024, 'num_attention_heads': 4}
  few |= {'max_position_embeddings': 8192, 'num_hidden_layers': 9}
  few = {name: x for name, x in few.items() if name != 'num_key_value_heads'}
  theirs = transformers.AutoConfig.for_model(**few).to_dict()
  assert hf_config.spec_of(few, 'float32') == hf_config.spec_of(theirs, 'float32')


@pytest.mark.parametrize(
  ('family', 'changes', 'wanted'),
  [
    ('gemma3_text', {'sliding_window_pattern': 2}, [LOCAL, FULL, LOCAL, FULL, LOCAL]),
    ('gemma3_text', {'use_sliding_window': False}, 5 * [LOCAL]),  # not its option
    ('gemma3_text', {'max_position_embeddings': 16}, 5 * [LayerKind(0, 'plain')]),
    ('gemma3_text', {'layer_types': 5 * ['full_attention']}, []),
    ('olmo3', {}, [LOCAL, LOCAL, LOCAL, FULL, LOCAL]),
    ('olmo2', {}, []),
    ('smollm3', {'no_rope_layer_interval': 5}, 4 * [FULL] + [LayerKind(0, 'none')]),
    ('smollm3', {'no_rope_layers': [1] * 9}, []),
    ('mistral', {}, 5 * [LayerKind(16)]),
    ('mistral', {'layer_types': 5 * ['full_attention']}, 5 * [LayerKind(16)]),
    ('qwen2', {}, []),
    ('qwen2', {'use_sliding_window': True}, []),  # from layer 28 on
    (
      'qwen2',
      {'use_sliding_window': True, 'max_window_layers': 3},
      3 * [FULL] + 2 * [LayerKind(16)],
    ),
    (
      'qwen3',
      {
        'use_sliding_window': True,
        'layer_types': 2 * ['full_attention', 'sliding_attention'] + ['full_attention'],
      },
      [FULL, LayerKind(16), FULL, LayerKind(16), FULL],
    ),
  ],
)
def test_the_kind_of_every_layer(family, changes, wanted):
  read = spec(family, sliding_window=16, **changes)
  assert read.kinds == tuple(wanted)
  written = json.loads(json.dumps(hf_config.config_of(read)))
  assert hf_config.spec_of(written, 'float32') == read
  theirs = transformers.AutoConfig.for_model(**written).to_dict()
  assert hf_config.spec_of(theirs, 'float32') == read


def test_a_score_scale_that_is_not_of_the_head_width():
  read = spec('gemma3_text', query_pre_attn_scalar=168, head_dim=128)
  assert read.score_scale == 168**-0.5
  assert hf_config.config_of(read)['query_pre_attn_scalar'] == 168
  assert (
    spec('gemma3_text', query_pre_attn_scalar=128, head_dim=128).score_scale is None
  )


def test_rope_scaling_is_of_layers_with_full_attention():
  linear = {'rope_type': 'linear', 'factor': 8.0}
  read = spec('gemma3_text', rope_scaling=linear, rope_local_base_freq=5e3)
  assert (read.rope_type, dict(read.rope_knobs)) == ('linear', {'factor': 8.0})
  assert (read.rope_theta, read.plain_theta) == (1e6, 5e3)
  nested = {'full_attention': linear, 'sliding_attention': {'rope_theta': 5e3}}
  assert spec('gemma3_text', rope_parameters=nested) == read
  # Windows of an OLMo 3 have the theta of the file, as in transformers 4 and vLLM.
  olmo = spec('olmo3', rope_scaling=linear, rope_theta=1e4)
  assert (olmo.rope_theta, olmo.plain_theta) == (1e4, 1e4)
  # Some versions of transformers 5 wrote the scaling without a type of layer.
  flat = linear | {'rope_theta': 1e4}
  assert spec('olmo3', rope_parameters=flat) == olmo


def test_options_that_no_model_type_has_are_refused():
  odd = dataclasses.replace(spec('olmo2'), norm_offset=True)
  assert 'no model_type has the options' in sentence_of(hf_config.config_of, odd)
  two_windows = dataclasses.replace(
    spec('mistral', sliding_window=16, num_hidden_layers=2),
    kinds=(LayerKind(16), LayerKind(8)),
  )
  assert 'no model_type' in sentence_of(hf_config.config_of, two_windows)


GEMMA = 'gemma3_text'
ODD_WINDOWS = {'sliding_attention': {'rope_type': 'linear', 'factor': 2.0}}
REFUSED = [
  ('attn_logit_softcapping=50.0', GEMMA, {'attn_logit_softcapping': 50.0}),
  ('final_logit_softcapping=30.0', GEMMA, {'final_logit_softcapping': 30.0}),
  ('use_bidirectional_attention=True', GEMMA, {'use_bidirectional_attention': True}),
  ("hidden_activation='relu'", GEMMA, {'hidden_activation': 'relu'}),
  ("architectures=['Gemma3TextModel']", GEMMA, {'architectures': ['Gemma3TextModel']}),
  ('query_pre_attn_scalar=0', GEMMA, {'query_pre_attn_scalar': 0}),
  ('sliding_window_pattern=0', GEMMA, {'sliding_window_pattern': 0}),
  ("rope_local_base_freq='1e4'", GEMMA, {'rope_local_base_freq': '1e4'}),
  ("rope_type='linear' of windows", GEMMA, {'rope_parameters': ODD_WINDOWS}),
  ("layer_types=['full_attention']", 'olmo3', {'layer_types': ['full_attention']}),
  ('chunked_attention', GEMMA, {'layer_types': 5 * ['chunked_attention']}),
  ('sliding_window=-1', 'olmo3', {'sliding_window': -1}),
  ('no_rope_layers=[1, 0]', 'smollm3', {'no_rope_layers': [1, 0]}),
  (
    'sliding_window=16 is shorter than max_position_embeddings=64, which is not '
    "supported for model_type='smollm3'",
    'smollm3',
    {'use_sliding_window': True, 'sliding_window': 16},
  ),
  ('a vision tower; gemma-3-270m', 'gemma3', {}),
  ('soft caps', 'gemma2', {}),
  ('attention sinks', 'gpt_oss', {}),
  ('linear attention', 'qwen3_5_text', {}),
  ('heads of two widths', 'gemma4_text', {}),
]


@pytest.mark.parametrize(('name', 'family', 'changes'), REFUSED)
def test_an_option_that_is_not_supported_is_named_with_a_way_out(name, family, changes):
  sentence = sentence_of(spec, family, **changes)
  assert name in sentence
  assert any(way in sentence for way in ('choose', 'correct'))
