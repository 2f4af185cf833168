"""The files of Qwen2.5-VL are read as published; no option is ignored."""

import copy
import dataclasses
import json

import pytest
import transformers

from bapo_jax.models import hf_directory, hf_vision, hf_weights, transformer

# Qwen2.5-VL-3B-Instruct, as published.
PUBLISHED = {
  'architectures': ['Qwen2_5_VLForConditionalGeneration'],
  'attention_dropout': 0.0,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'image_token_id': 151655,
  'intermediate_size': 11008,
  'max_position_embeddings': 128000,
  'max_window_layers': 70,
  'model_type': 'qwen2_5_vl',
  'num_attention_heads': 16,
  'num_hidden_layers': 36,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_scaling': {'mrope_section': [16, 24, 24], 'type': 'mrope'},
  'rope_theta': 1000000.0,
  'sliding_window': 32768,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'use_sliding_window': False,
  'vision_config': {
    'depth': 32,
    'fullatt_block_indexes': [7, 15, 23, 31],
    'hidden_act': 'silu',
    'hidden_size': 1280,
    'in_chans': 3,
    'intermediate_size': 3420,
    'num_heads': 16,
    'out_hidden_size': 2048,
    'patch_size': 14,
    'spatial_merge_size': 2,
    'spatial_patch_size': 14,
    'temporal_patch_size': 2,
    'tokens_per_second': 2,
    'window_size': 112,
  },
  'vocab_size': 151936,
}
PIXELS = {
  'image_mean': [0.5, 0.4, 0.3],
  'image_std': [0.2, 0.25, 0.3],
  'max_pixels': 12845056,
  'merge_size': 2,
  'min_pixels': 3136,
  'patch_size': 14,
}


def spec(pixels=None, vision=None, **changes):
  config = copy.deepcopy(PUBLISHED) | changes
  config['vision_config'] |= vision or {}
  config['vision_config'] = {
    k: v for k, v in config['vision_config'].items() if v != 'absent'
  }
  config = {k: v for k, v in config.items() if v != 'absent'}
  return hf_vision.spec_of(config, 'bfloat16', PIXELS if pixels is None else pixels)


def test_the_published_3b():
  found = spec()
  v = found.vision
  assert (found.width, found.layers, found.heads, found.kv_heads) == (2048, 36, 16, 2)
  assert (found.mrope, found.rope_theta, found.rope_type) == (
    (16, 24, 24),
    1e6,
    'default',
  )
  assert found.tied and found.qkv_bias
  assert (v.width, v.layers, v.heads, v.ffn, v.out) == (1280, 32, 16, 3420, 2048)
  assert (v.full_layers, v.window, v.image_token) == ((7, 15, 23, 31), 112, 151655)
  assert (v.mean, v.std) == ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
  assert (v.least_pixels, v.most_pixels) == (3136, 12845056)
  # 3.75 B parameters, 0.67 B of them the tower's.
  whole = transformer.count(found)
  tower = whole - transformer.count(dataclasses.replace(found, vision=None))
  assert round(whole / 1e9, 2) == 3.75
  assert round(tower / 1e9, 2) == 0.67


def test_the_spelling_of_transformers_5():
  text = {k: v for k, v in PUBLISHED.items() if k not in ('vision_config',)}
  rope = {'rope_type': 'default', 'rope_theta': 1e6, 'mrope_section': [16, 24, 24]}
  nested = {
    'model_type': 'qwen2_5_vl',
    'architectures': PUBLISHED['architectures'],
    'image_token_id': 151655,
    'tie_word_embeddings': True,
    'text_config': {k: v for k, v in text.items() if not k.startswith('rope_')}
    | {'rope_parameters': rope, 'model_type': 'qwen2_5_vl_text'},
    'vision_config': PUBLISHED['vision_config'] | {'in_channels': 3},
  }
  assert hf_vision.spec_of(nested, 'bfloat16', PIXELS) == spec()


def test_defaults():
  found = spec(
    pixels={},
    rope_theta='absent',
    vision={'window_size': 'absent', 'patch_size': 'absent', 'in_chans': 'absent'},
  )
  assert found.rope_theta == 1e6
  assert (found.vision.window, found.vision.patch) == (112, 14)
  assert found.vision.mean[0] == 0.48145466
  limits = {'size': {'shortest_edge': 784, 'longest_edge': 7840}}
  v = spec(pixels=limits).vision
  assert (v.least_pixels, v.most_pixels) == (784, 7840)
  # No value is none; of both spellings the older one counts.
  v = spec(pixels=limits | {'min_pixels': None, 'max_pixels': 3136}).vision
  assert (v.least_pixels, v.most_pixels) == (784, 3136)


def test_what_transformers_writes_of_pixels_is_supported():
  from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

  written = module.Qwen2VLImageProcessorPil(min_pixels=784).to_dict()
  assert {*hf_vision.ONLY_PIXELS, *hf_vision.REPEATED} <= set(written)
  v = spec(pixels=json.loads(json.dumps(written, default=dict))).vision
  assert (v.least_pixels, v.most_pixels) == (784, 28 * 28 * 1280)


def test_the_defaults_are_those_of_transformers():
  config = transformers.Qwen2_5_VLConfig()
  theirs = config.vision_config.to_dict()
  ours = {names[0]: value for names, value in hf_vision.SIZES.values()}
  assert ours == {name: theirs[name] for name in ours}
  assert list(theirs['fullatt_block_indexes']) == list(hf_vision.FULL_LAYERS)
  assert config.image_token_id == hf_vision.IMAGE_TOKEN
  # A model of the default sizes may name none of them.
  found = spec(
    vision=dict.fromkeys(PUBLISHED['vision_config'], 'absent'),
    image_token_id='absent',
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
  )
  v = found.vision
  assert (v.width, v.layers, v.heads, v.ffn, v.out) == (3584, 32, 16, 3420, 3584)
  assert (v.full_layers, v.image_token) == ((7, 15, 23, 31), 151655)
  # Of layers that a shallower tower does not have, transformers runs none.
  shallow = spec(vision={'depth': 10, 'fullatt_block_indexes': 'absent'}).vision
  assert shallow.full_layers == (7,)


@pytest.mark.parametrize('changes', [{}, {'tie_word_embeddings': False}])
def test_what_is_written_is_read(changes):
  found = spec(**changes)
  config, pixels = hf_vision.config_of(found), hf_vision.preprocessor_of(found.vision)
  assert hf_vision.spec_of(config, 'bfloat16', pixels) == found


def test_a_directory_is_read_with_its_preprocessor(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(PUBLISHED))
  assert hf_weights.spec(str(tmp_path), 'bfloat16') == spec(pixels={})
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(PIXELS))
  assert hf_weights.spec(str(tmp_path), 'bfloat16') == spec()
  (tmp_path / 'preprocessor_config.json').write_text('{"image_std": [0, 1, 1]}')
  with pytest.raises(ValueError) as error:
    hf_weights.spec(str(tmp_path), 'bfloat16')
  assert str(error.value).startswith(f'{tmp_path}: image_std holds 0')


def test_a_processor_of_transformers_5_counts_before_a_preprocessor(tmp_path):
  def read():
    v = hf_weights.spec(str(tmp_path), 'bfloat16').vision
    return v.least_pixels, v.most_pixels

  (tmp_path / 'config.json').write_text(json.dumps(PUBLISHED))
  limits = {'size': {'shortest_edge': 784, 'longest_edge': 7840}}
  whole = tmp_path / 'processor_config.json'
  whole.write_text(json.dumps({'image_processor': limits}))
  assert read() == (784, 7840)
  # Processes of one run compare it.
  assert 'processor_config.json' in hf_directory.identity(str(tmp_path))
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(PIXELS))
  assert read() == (784, 7840)
  # Of a processor whose parts have files of their own.
  whole.write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
  assert read() == (3136, 12845056)
  whole.write_text('{"image_processor": [1]}')
  with pytest.raises(ValueError, match=r'in its processor_config\.json: an object'):
    read()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'qwen2_vl'}, "model_type 'qwen2_vl' with architectures"),
    ({'architectures': ['Other']}, "architectures ['Other'] is not supported here"),
    ({'image_token_id': 'a'}, "image_token_id='a': an integer from 1"),
    ({'rope_scaling': None}, 'mrope_section=None: three integers are wanted'),
    (
      {'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 23]}},
      'mrope_section=[16, 24, 23] does not add up to 64',
    ),
    (
      {'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24, 0]}},
      'mrope_section=[16, 24, 24, 0]: three integers are wanted',
    ),
    ({'rope_scaling': [1]}, 'rope_scaling=[1] in its config.json: an object is wanted'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
    ({'vision': {'hidden_act': 'gelu'}}, "hidden_act='gelu' of its vision_config"),
    ({'vision': {'in_chans': 1}}, 'in_chans=1 of its vision_config'),
    ({'vision': {'depth': '32'}}, "depth='32': an integer from 1 to 1000000"),
    ({'vision': {'num_heads': 0}}, 'num_heads=0: an integer from 1'),
    ({'vision': {'num_heads': 7}}, 'hidden_size=1280 over num_heads=7'),
    ({'vision': {'out_hidden_size': 99}}, 'out_hidden_size=99 of its vision_config'),
    ({'vision': {'fullatt_block_indexes': 7}}, 'fullatt_block_indexes=7: a list'),
    ({'vision': {'fullatt_block_indexes': [32]}}, 'names layer 32 of 32 layers'),
    ({'vision': {'window_size': 20}}, 'window_size=20 holds no merged patch'),
    (
      {'vision': {'rope_parameters': {'rope_type': 'yarn'}}},
      "rope_type 'yarn' of its vision_config",
    ),
    ({'pixels': {'image_mean': [0.5]}}, 'image_mean=[0.5]: three numbers'),
    ({'pixels': {'image_std': [0.1, 0, 0.1]}}, 'image_std holds 0'),
    ({'pixels': {'image_std': [0.1, 'a', 1]}}, "image_std='a': a number from 0 on"),
    ({'pixels': {'max_pixels': -3}}, 'max_pixels=-3: an integer from 1'),
    (
      {'pixels': {'size': {'shortest_edge': 9}}},
      "size={'shortest_edge': 9} of its preprocessor lacks longest_edge, a number of",
    ),
    (
      {'pixels': {'size': {'shortest_edge': 0, 'longest_edge': 9}}},
      'shortest_edge=0: an integer from 1',
    ),
    (
      {'pixels': {'do_resize': False}},
      'do_resize=False of its preprocessor is not supported, only True; correct it',
    ),
    ({'pixels': {'do_rescale': False}}, 'do_rescale=False of its preprocessor'),
    ({'pixels': {'do_normalize': False}}, 'do_normalize=False of its preprocessor'),
    (
      {'pixels': {'rescale_factor': 1}},
      'rescale_factor=1 of its preprocessor is not supported, only 0.00392156862745098',
    ),
    ({'pixels': {'resample': 2}}, 'resample=2 of its preprocessor is not supported'),
    (
      {'pixels': {'patch_size': 16}},
      'patch_size=16 of its preprocessor is not supported, only 14 as in its config',
    ),
    ({'pixels': {'merge_size': 1}}, 'merge_size=1 of its preprocessor is not'),
    ({'pixels': {'temporal_patch_size': 1}}, 'temporal_patch_size=1 of its'),
  ],
)
def test_what_is_not_supported_is_named(changes, message):
  with pytest.raises(ValueError) as error:
    spec(**changes)
  assert message in str(error.value)
  assert '\n' not in str(error.value)
