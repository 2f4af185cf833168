"""The decoder is causal, and every way of running it gives the same hidden states."""

import dataclasses

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from making import GEMMA3, OLMO3, QWEN2, QWEN3, SMOLLM3

from bapo_jax import sharding
from bapo_jax.models import decoder, layers, transformer
from bapo_jax.models.vision import sequence

LLAMA = dataclasses.replace(QWEN2, qkv_bias=False, tied=False, kv_heads=1)
YARN = dataclasses.replace(
  QWEN2,
  head_width=8,
  o_bias=True,
  rope_type='yarn',
  rope_knobs=(('factor', 4.0), ('original_max_position_embeddings', 8)),
)
T = 10
KEY = jax.random.key(0)

forward = jax.jit(layers.forward, static_argnames='spec')


def tokens():
  return np.random.default_rng(0).integers(0, QWEN2.vocab, (3, T), np.int32)


@pytest.mark.parametrize(
  ('spec', 'prompt'),
  [(QWEN2, 0), (QWEN3, 4), (YARN, 4), (GEMMA3, 6), (OLMO3, 3), (SMOLLM3, 0)],
)
def test_decoding_step_by_step_equals_one_forward_pass(spec, prompt):
  params = making.params(spec)
  tokens_BT = tokens()

  @jax.jit
  def step_by_step(actor, tokens_BT):
    cache = decoder.empty_cache(spec, 3, [5, T - 5])
    if prompt:
      prefilled, _ = sequence.prefill(actor, tokens_BT[:, :prompt], None, spec)
      each = jnp.arange(3)
      cache = decoder.store(cache, prefilled.cache, each, each)
    # As in the sampler, the prompt's last token is read once more.
    first = max(prompt - 1, 0)

    def step(cache, t):
      hidden_BD, cache, _ = decoder.decode(
        actor, tokens_BT[:, t], jnp.full(3, t), cache, spec
      )
      return cache, hidden_BD

    return jax.lax.scan(step, cache, jnp.arange(first, T))[1], first

  hidden_TBD, first = step_by_step(decoder.actor(params, spec), tokens_BT)
  whole_BTD = forward(params, tokens_BT, spec)
  making.close(np.moveaxis(hidden_TBD, 0, 1), whole_BTD[:, int(first) :], count=256)


def test_count_by_hand():
  # Embedding 20 * 16 = 320; a layer: q 16*16 = 256, k and v 16*8 = 128 each, o 256,
  # biases 16 + 8 + 8 = 32, gate, up and down 16*32 = 512 each, two norms 32: 2368;
  # two layers 4736; the final norm 16.
  assert transformer.count(QWEN2) == 320 + 2 * 2368 + 16 == 5072
  assert transformer.count(dataclasses.replace(QWEN2, tied=False)) == 5072 + 320
  for spec in (QWEN2, QWEN3, LLAMA, YARN, GEMMA3, OLMO3):
    made = jax.eval_shape(lambda key, spec=spec: transformer.init(spec, key), KEY)
    assert made == transformer.abstract(spec)


@pytest.mark.parametrize('spec', [QWEN3, YARN, GEMMA3], ids=['qwen3', 'yarn', 'gemma3'])
def test_the_actors_weights_give_the_learners_hidden_states(spec):
  spec = dataclasses.replace(spec, compute='bfloat16')
  params = making.params(spec)
  cast = transformer.cast(params, spec.compute)
  kinds = {sharding.path_name(p): x.dtype for p, x in jax.tree.leaves_with_path(cast)}
  for name, kind in kinds.items():
    assert kind == (jnp.float32 if name.endswith('norm') else jnp.bfloat16), name
  learner, actor = (forward(tree, tokens(), spec) for tree in (params, cast))
  assert np.array_equal(learner, actor)
