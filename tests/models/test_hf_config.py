"""config.json is read in every spelling and written back; no option is ignored."""

import dataclasses
import json

import making
import pytest

from bapo_jax.models import hf_config, transformer

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


def spec(**changes):
  config = {k: v for k, v in (CONFIG | changes).items() if v != 'absent'}
  return hf_config.spec_of(config, 'float32')


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
  assert spec(num_key_value_heads='absent').kv_heads == 4
  assert spec(head_dim=8).head_width == 8
  assert spec(model_type='qwen3').head_width == 128


def test_biases_are_where_each_architecture_has_them():
  def biases(**changes):
    found = spec(**changes)
    return found.qkv_bias, found.o_bias, found.qk_norm

  assert biases() == (False, False, False)
  assert biases(attention_bias=True) == (True, True, False)
  assert biases(model_type='qwen2') == (True, False, False)
  assert biases(model_type='qwen2', attention_bias=False) == (True, False, False)
  assert biases(model_type='qwen3') == (False, False, True)
  assert biases(model_type='qwen3', attention_bias=True) == (True, True, True)


@pytest.mark.parametrize(
  'spelling',
  [
    {'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'llama3', **LLAMA3}},
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
    {'use_sliding_window': True, 'sliding_window': None},
    {'sliding_window': 32, 'max_window_layers': 0},  # not used unless it says so
    {'sliding_window': 32, 'layer_types': ['full_attention'] * 2},
    {'hidden_act': 'silu', 'mlp_bias': False, 'attention_dropout': 0.0},
    {'torch_dtype': 'bfloat16', 'rope_scaling': None},
    {'dtype': 'float16', 'architectures': ['LlamaForCausalLM']},
  ],
)
def test_options_that_change_nothing_are_accepted(changes):
  assert spec(**changes) == spec()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'model_type': 'gemma'},
      "model_type 'gemma' is not supported; choose a model of ['llama', 'qwen2', "
      "'qwen2_5_vl', 'qwen3']",
    ),
    (
      {'architectures': ['LlamaForSequenceClassification']},
      'choose a LlamaForCausalLM',
    ),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported, only 'silu'; choose"),
    ({'mlp_bias': True}, 'mlp_bias=True is not supported, only False'),
    ({'attention_dropout': 0.1}, 'attention_dropout=0.1 is not supported, only 0.0'),
    ({'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4} is not"),
    ({'torch_dtype': 'float8_e4m3fn'}, "dtype 'float8_e4m3fn' is none of float32, "),
    (
      {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
      "rope_type 'dynamic' is none",
    ),
    ({'rope_scaling': {'rope_type': 'linear'}}, "rope_type 'linear' needs factor"),
    (
      {'rope_parameters': {'full_attention': {'rope_type': 'default'}}},
      'rope_parameters for full_attention alone are not supported',
    ),
    (
      {'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.5}},
      'partial_rotary_factor=0.5 is no option',
    ),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not supported'),
    ({'vocab_size': 'absent', 'rms_norm_eps': None}, 'lacks vocab_size, rms_norm_eps'),
    (
      {'use_sliding_window': True, 'sliding_window': 32, 'max_window_layers': 1},
      'sliding_window=32 is used and shorter than max_position_embeddings=64, which is '
      'not supported; for rows of at most 32 tokens set max_position_embeddings to 32',
    ),
    (
      {
        'use_sliding_window': True,
        'sliding_window': 32,
        'layer_types': ['full_attention', 'sliding_attention'],
      },
      'sliding_window=32 is used',
    ),
  ],
  ids=str,
)
def test_an_unsupported_option_is_named(changes, message):
  with pytest.raises(ValueError) as error:
    spec(**changes)
  assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  'changes',
  [
    {'model_type': 'qwen2', 'tie_word_embeddings': True, 'rope_theta': 1e6},
    {'model_type': 'qwen3', 'head_dim': 8},
    {'attention_bias': True},
    {'rope_scaling': {'rope_type': 'llama3', **LLAMA3}},
  ],
)
def test_a_written_config_is_read_back(changes):
  read = spec(**changes)
  written = json.loads(json.dumps(hf_config.config_of(read)))
  assert hf_config.spec_of(written, 'float32') == read


def test_a_mixture_of_architectures_is_refused():
  with pytest.raises(
    ValueError, match='no architecture has qkv_bias=True, o_bias=False'
  ):
    hf_config.config_of(dataclasses.replace(spec(), qkv_bias=True, qk_norm=True))
