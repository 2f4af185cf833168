"""config.json is read in every spelling and written back; no option is ignored."""

import dataclasses
import json
import math
import pathlib

import making
import numpy as np
import pytest
import transformers
from refusals import sentence_of

from bapo_jax.models import rope, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory

CONFIG = {
  **making.SIZES,
  'model_type': 'llama',
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-6,
}
LLAMA3 = {
  'factor': 32.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
# Qwen2.5-VL-3B-Instruct, as published.
HERE = pathlib.Path(__file__).parent
PUBLISHED = json.loads((HERE / 'qwen2_5_vl_3b.json').read_text())
PIXELS = {
  'image_mean': [0.5, 0.4, 0.3],
  'image_std': [0.2, 0.25, 0.3],
  'max_pixels': 12845056,
  'merge_size': 2,
  'min_pixels': 3136,
  'patch_size': 14,
}


def spec(**changes):
  return hf_config.spec_of(CONFIG | changes, 'float32')


def vision(pixels=PIXELS, tower=None, **changes):
  """The spec of the published model with some options changed."""
  tower = {'vision_config': PUBLISHED['vision_config'] | (tower or {})}
  return hf_config.spec_of(PUBLISHED | tower | changes, 'bfloat16', pixels)


def test_defaults_are_those_of_transformers():
  assert spec() == transformer.ModelSpec(
    vocab=20,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=4,
    ffn=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    positions=64,
    tied=False,
    qkv_bias=False,
    compute='float32',
  )
  assert spec(num_key_value_heads=None).kv_heads == 4
  assert spec(head_dim=8).head_width == 8
  assert spec(model_type='qwen3').head_width == 128


@pytest.mark.parametrize(
  'spelling',
  [
    {'rope_theta': 5e5, 'rope_scaling': {'type': 'llama3', **LLAMA3}},
    {'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5, **LLAMA3}},
    # transformers 4 wrote both for the readers of both names.
    {'rope_theta': 5e5, 'rope_scaling': {'type': 'x', 'rope_type': 'llama3', **LLAMA3}},
  ],
)
def test_every_spelling_of_rope_is_one(spelling):
  found = spec(**spelling)
  assert (found.rope_theta, found.rope_type) == (5e5, 'llama3')
  assert dict(found.rope_knobs) == LLAMA3
  hash(found)  # a static argument of jit


def test_the_original_context_is_found_in_every_place():
  yarn = {'type': 'yarn', 'factor': 4.0}
  name = 'original_max_position_embeddings'
  assert dict(spec(rope_scaling=yarn).rope_knobs)[name] == 64
  assert dict(spec(rope_scaling=yarn | {name: 16}).rope_knobs)[name] == 16
  assert dict(spec(rope_scaling=yarn | {name: 16}, **{name: 32}).rope_knobs)[name] == 32


@pytest.mark.parametrize(
  'changes',
  [
    {'use_sliding_window': False, 'sliding_window': 32},
    {'use_sliding_window': True, 'sliding_window': 64},  # as long as any row
    {'use_sliding_window': True, 'sliding_window': 32, 'max_window_layers': 2},
    {'sliding_window': 32, 'max_window_layers': 0},  # off unless it is switched on
    {'sliding_window': 32, 'layer_types': ['full_attention'] * 2},
    {'rope_scaling': None, 'unknown': [1], 'architectures': ['LlamaForCausalLM']},
  ],
)
def test_options_that_change_nothing_are_accepted(changes):
  assert spec(**changes) == spec()


@pytest.mark.parametrize(
  'read',
  [
    spec(model_type='qwen2', tie_word_embeddings=True, rope_theta=1e6),
    spec(model_type='qwen3', head_dim=8),
    spec(attention_bias=True),
    spec(rope_scaling={'rope_type': 'llama3', **LLAMA3}),
    vision(),
    vision(tie_word_embeddings=False),
  ],
)
def test_a_written_config_is_read_back(read):
  written = json.loads(json.dumps(hf_config.config_of(read)))
  pixels = hf_config.preprocessor_of(read.vision) if read.vision else None
  assert hf_config.spec_of(written, read.compute, pixels) == read


def test_the_published_vision_model():
  found = vision()
  v = found.vision
  assert (found.mrope, found.rope_theta) == ((16, 24, 24), 1e6)
  assert found.rope_type == 'default' and found.tied and found.qkv_bias
  assert (v.full_layers, v.window, v.image_token) == ((7, 15, 23, 31), 112, 151655)
  assert (v.mean, v.std) == ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
  # 3.75 B parameters, 0.67 B of them the tower's.
  total = transformer.count(found)
  tower = total - transformer.count(dataclasses.replace(found, vision=None))
  assert (round(total / 1e9, 2), round(tower / 1e9, 2)) == (3.75, 0.67)


def test_defaults_of_the_vision_model_are_those_of_transformers():
  config = transformers.Qwen2_5_VLConfig()
  theirs = config.vision_config.to_dict()
  ours = dict(hf_config.SIZES.values())
  assert ours == {name: theirs[name] for name in ours}
  assert list(theirs['fullatt_block_indexes']) == list(hf_config.FULL_LAYERS)
  assert config.image_token_id == hf_config.IMAGE_TOKEN
  # A model of the default sizes may name none of them.
  none = {'vision_config': None, 'image_token_id': None, 'rope_theta': None}
  found = vision(**none, hidden_size=3584, num_attention_heads=28)
  assert found.rope_theta == 1e6
  assert (found.vision.out, found.vision.full_layers) == (3584, (7, 15, 23, 31))
  # transformers ignores defaults that a shallower tower does not have.
  shallow = vision(tower={'depth': 10, 'fullatt_block_indexes': None}).vision
  assert shallow.full_layers == (7,)


def test_limits_of_pixels_in_every_spelling():
  limits = {'size': {'shortest_edge': 784, 'longest_edge': 7840}}
  # null is no value; of two spellings the older one counts.
  v = vision(pixels=limits | {'min_pixels': None, 'max_pixels': 3136}).vision
  assert (v.least_pixels, v.most_pixels) == (784, 3136)


def test_what_transformers_writes_of_pixels_is_supported():
  from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

  written = module.Qwen2VLImageProcessorPil(min_pixels=784).to_dict()
  assert {*hf_config.ONLY_PIXELS, *hf_config.REPEATED.values()} <= set(written)
  v = vision(pixels=json.loads(json.dumps(written, default=dict))).vision
  assert (v.least_pixels, v.most_pixels) == (784, 28 * 28 * 1280)


def test_a_processor_of_transformers_5_counts_before_a_preprocessor(tmp_path):
  def write(name, content):
    (tmp_path / name).write_text(json.dumps(content))

  def limits():
    v = hf_config.read_spec(str(tmp_path), 'bfloat16').vision
    return v.least_pixels, v.most_pixels

  write('config.json', PUBLISHED)
  assert hf_config.read_spec(str(tmp_path), 'bfloat16') == vision(pixels={})
  write('preprocessor_config.json', PIXELS)
  assert hf_config.read_spec(str(tmp_path), 'bfloat16') == vision()
  size = {'shortest_edge': 784, 'longest_edge': 7840}
  write('processor_config.json', {'image_processor': {'size': size}})
  assert limits() == (784, 7840)
  # Processes of one run compare it.
  assert 'processor_config.json' in hf_directory.identity(str(tmp_path))
  # A processor whose parts have files of their own.
  write('processor_config.json', {'processor_class': 'Qwen2_5_VLProcessor'})
  assert limits() == (3136, 12845056)


MISTRAL = {'model_type': 'mistral', 'architectures': ['MistralForCausalLM']}


def test_a_mistral_without_a_window_is_a_llama():
  assert spec(**MISTRAL, sliding_window=None) == spec()
  assert spec(**MISTRAL, sliding_window=64) == spec(), 'as long as any row'
  # Defaults of transformers: a window of 4096, and 8 heads of keys.
  absent = CONFIG | MISTRAL | {'num_attention_heads': 16, 'head_dim': 4}
  del absent['num_key_value_heads']
  assert hf_config.spec_of(absent, 'float32').kv_heads == 8
  assert transformers.MistralConfig().sliding_window == 4096
  assert transformers.MistralConfig().num_key_value_heads == 8


LISTS = {'short_factor': [1.0, 1.0], 'long_factor': [2.0, 2.0]}
WINDOW = {'use_sliding_window': True, 'sliding_window': 32}
REFUSED = [
  ("model_type='gpt2' is not supported: it is unknown", {'model_type': 'gpt2'}),
  ('architectures', {'architectures': ['LlamaForSequenceClassification']}),
  ("hidden_act='gelu'", {'hidden_act': 'gelu'}),
  ('quantization_config', {'quantization_config': {'bits': 4}}),
  ('full_attention', {'rope_parameters': {'full_attention': {'rope_type': 'default'}}}),
  ("hidden_size='16'", {'hidden_size': '16'}),
  ("rope_type='longrope'", {'rope_scaling': {'type': 'longrope', **LISTS}}),
  ('sliding_window=32', WINDOW | {'max_window_layers': 1}),
  ('sliding_window=32', WINDOW | {'layer_types': ['full', 'sliding_attention']}),
]
REFUSED_VISION = [
  ('mrope_section=[16, 24, 23]', {'rope_scaling': {'mrope_section': [16, 24, 23]}}),
  ("hidden_act='gelu' in vision_config", {'tower': {'hidden_act': 'gelu'}}),
  ("rope_type='yarn'", {'tower': {'rope_parameters': {'rope_type': 'yarn'}}}),
  ('rescale_factor=1', {'pixels': {'rescale_factor': 1}}),
  ('patch_size=16', {'pixels': {'patch_size': 16}}),
]


@pytest.mark.parametrize('theta', [0, math.nan, '1e4'])
def test_a_rope_theta_that_is_no_positive_number_is_refused(theta):
  """In every place that a file may have it, also the tower's."""
  for make, changes in (
    (spec, {'rope_theta': theta}),
    (spec, {'rope_theta': 1e4, 'rope_parameters': {'rope_theta': theta}}),
    (spec, {'rope_scaling': {'type': 'linear', 'factor': 2.0, 'rope_theta': theta}}),
    (vision, {'rope_theta': theta}),
    (vision, {'tower': {'rope_parameters': {'rope_theta': theta}}}),
  ):
    assert 'rope_theta=' in sentence_of(make, **changes)


@pytest.mark.parametrize(
  ('make', 'name', 'changes'),
  [(spec, *case) for case in REFUSED] + [(vision, *case) for case in REFUSED_VISION],
  ids=lambda value: getattr(value, '__name__', str(value)),
)
def test_an_unsupported_option_is_named(make, name, changes):
  assert name in sentence_of(make, **changes)


# --------------- rotary frequencies by hand; every rule of transformers: test_parity.py


LONG = {
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 100,
}


def table(width, theta, rule='default', **knobs):
  return rope.table(width, theta, rule, tuple(knobs.items()))


def test_default_and_linear_by_hand():
  # Width 4, theta 100: pairs 0 and 1 turn by 100^0 = 1 and 100^(-1/2) = 0.1 per token.
  found, factor = table(4, 100.0)
  np.testing.assert_allclose(found, [1, 0.1], rtol=1e-7)
  assert found.dtype == np.float32 and factor == 1
  np.testing.assert_allclose(table(4, 100.0, 'linear', factor=4.0)[0], [0.25, 0.025])


def test_llama3_by_hand():
  # Width 8, theta 1e4: 1, 0.1, 0.01, 0.001. In 100 tokens they turn 15.9, 1.59, 0.159
  # and 0.0159 times. More than 4: unchanged; fewer than 1: / 8; 1.59 lies
  # (1.59 - 1) / 3 = 0.19718 of the way: 0.1 * 0.19718 + 0.0125 * 0.80282 = 0.029754.
  found, factor = table(8, 1e4, 'llama3', **LONG)
  np.testing.assert_allclose(found, [1, 0.0297535, 0.00125, 0.000125], rtol=1e-5)
  assert factor == 1
