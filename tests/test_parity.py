"""The same weights say the same thing here and in transformers.

Needs torch (`pip install -r requirements-parity.txt`); without it the file is skipped.
"""

import jax
import numpy as np
import pytest
import transformers

from bapo_jax import logprob, mesh, sampler, weights
from bapo_jax.types import Prompts

torch = pytest.importorskip(
  'torch', reason='parity needs torch: pip install -r requirements-parity.txt'
)

SIZES = {
  'vocab_size': 20,
  'hidden_size': 16,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 24,
  'max_position_embeddings': 64,
  'bos_token_id': None,
  'pad_token_id': 0,
  'eos_token_id': [3, 7],
}
MODELS = {
  'qwen2 tied': ('Qwen2', {'tie_word_embeddings': True}),
  'qwen2 untied': ('Qwen2', {'tie_word_embeddings': False}),
  'qwen3': ('Qwen3', {'head_dim': 8, 'tie_word_embeddings': True}),
  'llama': ('Llama', {'rms_norm_eps': 1e-3, 'tie_word_embeddings': False}),
}
LENGTH_P, NEW = np.asarray([5, 1, 9, 3], np.int32), 8


@pytest.fixture(params=MODELS, scope='module')
def pair(request, tmp_path_factory):
  """(torch's model, our spec, our parameters) of one saved directory."""
  name, changes = MODELS[request.param]
  torch.manual_seed(0)
  config = getattr(transformers, f'{name}Config')(**SIZES | changes)
  theirs = getattr(transformers, f'{name}ForCausalLM')(config).float().eval()
  with torch.no_grad():  # every bias and every scale must matter
    for parameter in theirs.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
  path = str(tmp_path_factory.mktemp('model'))
  theirs.save_pretrained(path)
  spec = weights.spec(path, 'float32')
  return theirs, spec, weights.load(path, spec, mesh.make(data=8))


def batch():
  tokens_PT = np.random.default_rng(0).integers(1, 20, (4, 9), np.int32)
  tokens_PT[np.arange(9) >= LENGTH_P[:, None]] = 0
  return tokens_PT, np.arange(9) < LENGTH_P[:, None]


def test_log_probabilities(pair):
  theirs, spec, params = pair
  tokens_PT, real_PT = batch()
  with torch.no_grad():
    logits_PTV = theirs(
      torch.tensor(tokens_PT, dtype=torch.long), attention_mask=torch.tensor(real_PT)
    ).logits
  logp_PTV = torch.log_softmax(logits_PTV[:, :-1] / 0.7, -1).numpy()
  expected = np.take_along_axis(logp_PTV, tokens_PT[:, 1:, None], -1)[..., 0]
  found, _ = logprob.of_rows(params, tokens_PT, spec, 0.7)
  live = real_PT[:, 1:]
  np.testing.assert_allclose(found[:, 1:][live], expected[live], atol=1e-4)


def test_the_likeliest_text(pair):
  theirs, spec, params = pair
  tokens_PT, _ = batch()
  rows = jax.tree.map(
    np.asarray,
    sampler.generate(
      params,
      Prompts(np.arange(4, dtype=np.int32), tokens_PT, LENGTH_P),
      np.arange(4, dtype=np.uint32),
      jax.random.key(0),
      spec=spec,
      group=1,
      new=NEW,
      temperature=1e-4,
      eos=(3, 7),
      slots=2,
      refill=1,
      chunk=3,
    ),
  )
  for tokens_T, chosen_T, prompt_T, n in zip(
    rows.tokens_BT, rows.chosen_BT, tokens_PT, LENGTH_P, strict=True
  ):
    prompt = torch.tensor(prompt_T[None, :n], dtype=torch.long)
    said = theirs.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      do_sample=False,
      max_new_tokens=NEW,
    )
    assert tokens_T[chosen_T].tolist() == said[0, n:].tolist()
