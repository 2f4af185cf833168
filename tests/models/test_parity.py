"""The same weights give the same log-probabilities here and in transformers.

Needs torch (`pip install -r requirements-parity.txt`); without it the file is skipped.
"""

import json

import jax
import making
import numpy as np
import oracles
import pytest
import transformers
from flax import traverse_util

from bapo_jax import sharding
from bapo_jax.models import layers, logprobs, transformer
from bapo_jax.models import rope as rope_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.types import Prompts

torch = pytest.importorskip(
  'torch', reason='parity needs torch: pip install -r requirements-parity.txt'
)

SIZES = {
  **making.SIZES,
  'max_position_embeddings': 96,
  'bos_token_id': None,
  'pad_token_id': 0,
  'eos_token_id': [3, 7],
}
# Contexts so short that a few tokens lie beyond them.
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 100.0,
  'factor': 4.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
YARN = {
  'rope_type': 'yarn',
  'rope_theta': 100.0,
  'factor': 6.0,
  'beta_fast': 4.0,
  'original_max_position_embeddings': 16,
}
MODELS = {
  'qwen2 tied': ('Qwen2', {'tie_word_embeddings': True}),
  'qwen2 untied': ('Qwen2', {'tie_word_embeddings': False}),
  'qwen3': ('Qwen3', {'head_dim': 8, 'tie_word_embeddings': True}),
  'llama': ('Llama', {'rms_norm_eps': 1e-3, 'tie_word_embeddings': False}),
  'llama llama3': (
    'Llama',
    {'head_dim': 16, 'rope_parameters': LLAMA3, 'attention_bias': True},
  ),
  'qwen2 yarn': ('Qwen2', {'hidden_size': 64, 'rope_parameters': YARN}),
}
LENGTH_P, NEW = np.asarray([17, 1, 40, 3], np.int32), 8
T = 40
# How rope is scaled in Llama 3.2, and as Qwen's and gpt-oss's models have it.
PUBLISHED = {
  'llama 3.2': {
    'rope_type': 'llama3',
    'rope_theta': 5e5,
    'factor': 32.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  },
  'qwen2.5 long': {
    'rope_type': 'yarn',
    'rope_theta': 1e6,
    'factor': 4.0,
    'original_max_position_embeddings': 32768,
  },
  'not truncated': {
    'rope_type': 'yarn',
    'rope_theta': 150000.0,
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
  },
  'two scales': {
    'rope_type': 'yarn',
    'rope_theta': 1e4,
    'factor': 40.0,
    'mscale': 0.707,
    'mscale_all_dim': 1.0,
    'original_max_position_embeddings': 4096,
  },
  'hot': {
    'rope_type': 'yarn',
    'rope_theta': 1e4,
    'factor': 2.0,
    'attention_factor': 1.25,
    'original_max_position_embeddings': 512,
  },
  'linear': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 8.0},
  'default': {'rope_type': 'default', 'rope_theta': 1e6},
}
forward = jax.jit(layers.forward, static_argnames='spec')


@pytest.fixture(params=MODELS, scope='module')
def pair(request, tmp_path_factory):
  """(torch's model, our spec, our parameters) of one saved directory."""
  name, changes = MODELS[request.param]
  torch.manual_seed(0)
  config = getattr(transformers, f'{name}Config')(**SIZES | changes)
  theirs = getattr(transformers, f'{name}ForCausalLM')(config).float().eval()
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
  oracles.close(found[:, 1:][live], expected[live], 256)
  # And of every token of the vocabulary, chosen or not.
  hidden_PTD = forward(params, tokens_PT, spec)
  found_PTV = jax.nn.log_softmax(hidden_PTD @ transformer.head(params).T, -1)
  expected_PTV = torch.log_softmax(logits_PTV, -1).numpy()
  oracles.close(found_PTV[real_PT], expected_PTV[real_PT], 256)


@pytest.mark.parametrize('rope', PUBLISHED.values(), ids=PUBLISHED)
def test_frequencies_of_published_models(rope, tmp_path):
  from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

  config = transformers.LlamaConfig(
    **SIZES | {'head_dim': 128, 'max_position_embeddings': 131072},
    rope_parameters=dict(rope),
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
  path = tmp_path / 'out'
  path.mkdir()
  flat = traverse_util.flatten_dict(params, sep='/')
  hf_weights.save(str(path), flat.__getitem__, spec, shard_bytes=4000)
  config = hf_config.config_of(spec)
  (path / 'config.json').write_text(json.dumps(config | {'torch_dtype': 'float32'}))
  read = transformers.AutoModelForCausalLM.from_pretrained(path)
  assert type(read) is type(theirs)
  before, after = theirs.state_dict(), read.state_dict()
  assert set(before) == set(after)
  for name, tensor in before.items():
    assert torch.equal(tensor, after[name]), name
  tokens_PT, real_PT = batch()
  assert torch.equal(
    logits_of(theirs, tokens_PT, real_PT), logits_of(read.eval(), tokens_PT, real_PT)
  )


@pytest.mark.parametrize('slots', [1, 2, 4])
def test_greedy_decoding(pair, slots):
  theirs, spec, params = pair
  tokens_PT, _ = batch()
  rows = jax.tree.map(
    np.asarray,
    making.generate(
      params,
      Prompts(np.arange(4, dtype=np.int32), tokens_PT, LENGTH_P),
      np.arange(4, dtype=np.uint32),
      jax.random.key(0),
      spec=spec,
      group_size=1,
      max_new_tokens=NEW,
      temperature=0,
      eos=(3, 7),
      max_num_seqs=slots,
      prefill_batch_size=1,
      tokens_per_dispatch=3,
    ),
  )
  for tokens_T, response_mask_T, prompt_T, n in zip(
    rows.tokens_BT, rows.response_mask_BT, tokens_PT, LENGTH_P, strict=True
  ):
    prompt = torch.tensor(prompt_T[None, :n], dtype=torch.long)
    expected = theirs.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      do_sample=False,
      max_new_tokens=NEW,
    )
    assert tokens_T[response_mask_T].tolist() == expected[0, n:].tolist()
