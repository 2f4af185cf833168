"""The same weights give the same log-probabilities here and in transformers.

Needs torch (`pip install -r requirements/parity.txt`); without it the file is skipped.
"""

import copy
import dataclasses
import json
import re

import jax
import making
import numpy as np
import pytest
import transformers

from bapo_jax import sharding
from bapo_jax.models import layers, logprobs, transformer
from bapo_jax.models import rope as rope_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.types import Prompts

torch = pytest.importorskip(
  'torch', reason='parity needs torch: pip install -r requirements/parity.txt'
)

SIZES = {
  **making.SIZES,
  'max_position_embeddings': 96,
  'bos_token_id': None,
  'pad_token_id': 0,
  'eos_token_id': [3, 7],
}


def rope(kind, theta, factor, original, **knobs):
  knobs |= {'rope_theta': theta, 'original_max_position_embeddings': original}
  return {'rope_type': kind, 'factor': factor} | knobs


# Contexts so short that a few tokens lie beyond them.
BANDS = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LLAMA3 = rope('llama3', 100.0, 4.0, 16, **BANDS)
YARN = rope('yarn', 100.0, 6.0, 16, beta_fast=4.0)
WINDOW = 16  # the texts have 1, 3, 17 and 40 tokens
LAYERS = {'num_hidden_layers': 5, 'sliding_window': WINDOW}
# model_type -> options. Together they have every bias and norm, a tied head, heads
# wider than D / H, and layers of every kind in periods that do not divide the layers.
MODELS = {
  'qwen2': {'hidden_size': 64, 'tie_word_embeddings': True, 'rope_parameters': YARN},
  'qwen3': {'head_dim': 8, 'tie_word_embeddings': False},
  'llama': {
    'head_dim': 16,
    'rms_norm_eps': 1e-3,
    'rope_parameters': LLAMA3,
    'attention_bias': True,
  },
  'mistral': {'head_dim': 8, 'sliding_window': None},
  'mistral windows': {'head_dim': 8, 'sliding_window': WINDOW},
  'qwen2 windows': LAYERS | {'use_sliding_window': True, 'max_window_layers': 3},
  'smollm3': {
    'num_hidden_layers': 5,
    'no_rope_layer_interval': 3,
    'tie_word_embeddings': True,
  },
  'olmo2': {'num_hidden_layers': 3},
  'olmo3': LAYERS
  | {
    'head_dim': 8,
    'layer_types': [
      *('full_attention', 'sliding_attention', 'sliding_attention'),
      *('sliding_attention', 'full_attention'),
    ],
    'rope_theta': 5e5,
    'rope_scaling': YARN | {'rope_theta': 5e5},
  },
  'gemma': {'head_dim': 8, 'hidden_act': 'gelu'},  # read as gelu_pytorch_tanh
  'gemma3_text': LAYERS
  | {
    'head_dim': 16,
    'query_pre_attn_scalar': 24,
    'sliding_window_pattern': 3,
    'rope_theta': 1e3,
    'rope_local_base_freq': 1e2,
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
  },
}
# Experts, whose weights sum to 1 or do not.
for norm_topk in (True, False):
  MODELS[f'qwen3_moe {norm_topk}'] = {
    'hidden_size': 32,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'num_experts': 8,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 12,
    'norm_topk_prob': norm_topk,
    'use_sliding_window': norm_topk,
    'sliding_window': WINDOW,
  }
# A Mistral without a window is a Llama, and is exported as one without its config.json.
TWINS = {transformers.MistralForCausalLM: transformers.LlamaForCausalLM}
LENGTH_P = np.asarray([17, 1, 40, 3], np.int32)
NEW = 8
T = 40
# Rope of Llama 3.2 and of Qwen2.5, and what no published model has together.
PUBLISHED = {
  'llama3': rope('llama3', 5e5, 32.0, 8192, **BANDS),
  'yarn': rope('yarn', 1e6, 4.0, 32768),
  'two scales': rope(
    'yarn', 150000.0, 40.0, 4096, truncate=False, mscale=0.707, mscale_all_dim=1.0
  ),
  'linear': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 8.0},
}
forward = jax.jit(layers.forward, static_argnames='spec')


@pytest.fixture(params=MODELS, scope='module')
def pair(request, tmp_path_factory):
  """(torch's model, our spec, our parameters) of one saved directory."""
  kind, _, _ = request.param.partition(' ')
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS[request.param])
  theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  # Every bias and every scale must matter, and activations stay near 1 at any width.
  size = 1.2 * config.hidden_size**-0.5
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(size * torch.randn_like(parameter))
  path = str(tmp_path_factory.mktemp('model'))
  theirs.save_pretrained(path)
  spec = hf_config.read_spec(path, 'float32')
  return theirs, spec, hf_weights.load(path, spec, sharding.make(data=8))


def batch():
  tokens_PT = np.random.default_rng(0).integers(1, 20, (4, T), np.int32)
  tokens_PT[np.arange(T) >= LENGTH_P[:, None]] = 0
  return tokens_PT, np.arange(T) < LENGTH_P[:, None]


def logits_of(theirs, tokens_BT, real_BT):
  with torch.no_grad():
    return theirs(
      torch.tensor(tokens_BT, dtype=torch.long), attention_mask=torch.tensor(real_BT)
    ).logits


def test_log_probabilities(pair):
  theirs, spec, params = pair
  tokens_PT, real_PT = batch()
  logits_PTV = logits_of(theirs, tokens_PT, real_PT)
  logp_PTV = torch.log_softmax(logits_PTV[:, :-1] / 0.7, -1).numpy()
  expected = np.take_along_axis(logp_PTV, tokens_PT[:, 1:, None], -1)[..., 0]
  found = logprobs.sequence_stats(params, tokens_PT, spec, 0.7).logp_BT
  live = real_PT[:, 1:]
  making.close(found[:, 1:][live], expected[live], count=4096)
  # And of every token of the vocabulary, chosen or not.
  hidden_PTD = forward(params, tokens_PT, spec)
  found_PTV = jax.nn.log_softmax(hidden_PTD @ transformer.head(params).T, -1)
  expected_PTV = torch.log_softmax(logits_PTV, -1).numpy()
  making.close(found_PTV[real_PT], expected_PTV[real_PT], count=4096)


def test_gradients_of_all_parameters(pair, tmp_path):
  """Their gradients are saved as a model, which is read as any other.

  Theirs are computed in float64 where their code allows it. In float32 they are off by
  1.3e-5 of the largest for Gemma 3, ours by 3e-6.
  """
  theirs, spec, params = pair
  theirs = copy.deepcopy(theirs)
  if not spec.experts:  # their products of experts have no float64
    theirs = theirs.double()
  tokens_PT, real_PT = batch()
  weight_PTV = np.random.default_rng(1).normal(size=(*real_PT.shape, spec.vocab))
  weight_PTV = np.float32(weight_PTV * real_PT[..., None])
  logits_PTV = theirs(
    torch.tensor(tokens_PT, dtype=torch.long), attention_mask=torch.tensor(real_PT)
  ).logits
  (torch.log_softmax(logits_PTV, -1) * torch.tensor(weight_PTV)).sum().backward()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.copy_(parameter.grad)
  theirs.float().save_pretrained(tmp_path)
  expected = hf_weights.load(str(tmp_path), spec, sharding.make(data=8))

  def loss(params):
    logits_PTV = layers.forward(params, tokens_PT, spec) @ transformer.head(params).T
    return (jax.nn.log_softmax(logits_PTV) * weight_PTV).sum()

  found = transformer.flatten(jax.jit(jax.grad(loss))(params))
  for name, x in transformer.flatten(expected).items():
    x = np.asarray(x)
    assert np.abs(x).max() > 0.01, name
    np.testing.assert_allclose(
      found[name], x, rtol=0, atol=1e-5 * np.abs(x).max(), err_msg=name
    )


def test_an_embedding_scale_is_rounded_before_it_is_applied():
  """sqrt(1152) = 33.94 is 34 in bfloat16; a product in float32 would differ."""
  from transformers.models.gemma3 import modeling_gemma3

  theirs = modeling_gemma3.Gemma3TextScaledWordEmbedding(20, 1152, 0, 1152**0.5)
  weight_VD = np.random.default_rng(0).normal(size=(20, 1152)).astype(np.float32)
  theirs.weight.data = torch.tensor(weight_VD)
  spec = transformer.ModelSpec(20, 1152, 1, 1, 1, 8, 8, embed_scale=1152**0.5)
  tokens_BT = np.arange(20, dtype=np.int32).reshape(2, 10)
  for compute in ('float32', 'bfloat16'):
    theirs = theirs.to(getattr(torch, compute))
    expected_BTD = theirs(torch.tensor(tokens_BT)).detach().float().numpy()
    of_type = dataclasses.replace(spec, compute=compute)
    for embed in (layers.embed, layers.embed_rows):
      found_BTD = embed({'embed': weight_VD}, tokens_BT, of_type)
      assert found_BTD.dtype == compute
      np.testing.assert_array_equal(np.float32(found_BTD), expected_BTD)


@pytest.mark.parametrize('name', PUBLISHED)
def test_frequencies_of_published_models(name, tmp_path):
  from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

  config = transformers.LlamaConfig(
    **SIZES | {'head_dim': 128, 'max_position_embeddings': 131072},
    rope_parameters=dict(PUBLISHED[name]),
  )
  theirs = LlamaRotaryEmbedding(config)
  config.save_pretrained(tmp_path)
  spec = hf_config.read_spec(str(tmp_path), 'float32')
  found, factor = rope_lib.table(
    spec.head_width, spec.rope_theta, spec.rope_type, spec.rope_knobs
  )
  # Theirs are computed in float32: a few units in the last place.
  np.testing.assert_allclose(found, theirs.inv_freq.numpy(), rtol=2e-6)
  assert factor == pytest.approx(theirs.attention_scaling)


def test_an_exported_model_is_their_model(pair, tmp_path):
  theirs, spec, params = pair
  flat = transformer.flatten(params)
  hf_weights.save(str(tmp_path), flat.__getitem__, spec, shard_bytes=4000)
  config = hf_config.config_of(spec)
  config |= {'torch_dtype': 'float32', 'pad_token_id': 0}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
  twin = type(theirs) if spec.kinds else TWINS.get(type(theirs), type(theirs))
  assert type(read) is twin
  tokens_PT, real_PT = batch()
  assert torch.equal(
    logits_of(theirs, tokens_PT, real_PT), logits_of(read.eval(), tokens_PT, real_PT)
  )


def test_a_pickle_is_refused_and_the_command_converts_it(tmp_path):
  config = transformers.LlamaConfig(**SIZES)
  theirs = transformers.LlamaForCausalLM(config)
  config.save_pretrained(tmp_path)
  torch.save(theirs.state_dict(), tmp_path / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r'only in pytorch_model\.bin') as error:
    hf_directory.missing(str(tmp_path))
  code = re.search('`python -c "(.*)"`', str(error.value))[1]
  exec(code, {})
  assert hf_directory.missing(str(tmp_path)) == ['tokenizer.json']
  hf_weights.check(str(tmp_path), hf_config.read_spec(str(tmp_path), 'float32'))


def test_greedy_decoding(pair):
  theirs, spec, params = pair
  tokens_PT, _ = batch()
  rows = making.generate(
    params,
    Prompts(np.arange(4, dtype=np.int32), tokens_PT, LENGTH_P),
    np.arange(4, dtype=np.uint32),
    jax.random.key(0),
    spec=spec,
    group_size=1,
    max_new_tokens=NEW,
    temperature=0,
    eos=(3, 7),
    max_num_seqs=2,
    prefill_batch_size=1,
    tokens_per_dispatch=3,
  )
  rows = jax.tree.map(np.asarray, rows)
  for p, n in enumerate(LENGTH_P):
    prompt = torch.tensor(tokens_PT[p : p + 1, :n], dtype=torch.long)
    ones = torch.ones_like(prompt)
    expected = theirs.generate(
      prompt, attention_mask=ones, do_sample=False, max_new_tokens=NEW
    )
    found_T = rows.tokens_BT[p, rows.response_mask_BT[p]]
    assert found_T.tolist() == expected[0, n:].tolist()
