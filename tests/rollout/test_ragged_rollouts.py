"""A rollout whose decoding reads only live blocks has the text of any other.

On a CPU the TPU's kernel is emulated.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.models import attention, decoder, ragged, transformer
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts

PLAIN = transformer.ModelSpec(
  vocab=64, width=32, layers=2, heads=4, kv_heads=2, head_width=16, ffn=32,
  positions=1024,
)  # fmt: skip
LENGTH_P = np.asarray([1, 40, 17, 64, 3, 0], np.int32)
P, G, WIDTH, NEW = 6, 2, 64, 320  # rows are three blocks of 128 columns
LIMIT_B = np.asarray([320, 1, 320, 130, 64, 320, 2, 320, 250, 30, 0, 0])


def rollout(spec: transformer.ModelSpec, temperature: float):
  """Rows of 12 responses in 4 slots: refilled, paused twice, new weights in between."""
  engine = RolloutEngine(
    spec, max_prompt_tokens=WIDTH, max_new_tokens=NEW, group_size=G, eos=(3,),
    temperature=temperature, max_num_seqs=4, prefill_batch_size=2,
    tokens_per_dispatch=16, cache_segments=3,
  )  # fmt: skip
  key = jax.random.key(0)
  rollouts = PartialRollouts(engine, P)
  rollouts.submit(
    making.prompts(LENGTH_P, WIDTH, spec.vocab, least=4),
    np.arange(P * G, dtype=np.uint32),
    limit_B=LIMIT_B,
  )
  actors = [decoder.actor(making.params(spec, seed), spec) for seed in range(2)]
  rollouts.decode(actors[0], key, max_tokens=150)
  rollouts.refresh(actors[1])
  rollouts.decode(actors[1], key, policy_version=1, max_tokens=40)
  assert rollouts.busy, 'nothing is partial'
  rollouts.decode(actors[1], key, policy_version=1)
  return jax.tree.map(np.asarray, rollouts.rows)


@pytest.mark.parametrize(
  ('temperature', 'windows'), [(0.0, ()), (1.0, ()), (1.0, (70, 0))]
)
def test_text_and_log_probabilities_are_those_of_plain_decoding(
  monkeypatch, temperature, windows
):
  kinds = tuple(map(transformer.LayerKind, windows))
  spec = dataclasses.replace(PLAIN, kinds=kinds)
  twin = dataclasses.replace(spec, positions=1025)  # equal but for its programs
  monkeypatch.setattr(decoder, 'is_ragged', lambda spec: spec == twin)
  monkeypatch.setattr(ragged, 'MOST_COLUMNS', 128)
  calls, attend = [], ragged.attend
  monkeypatch.setattr(ragged, 'attend', lambda *a: calls.append(a) or attend(*a))
  plain = rollout(spec, temperature)
  assert not calls
  found = rollout(twin, temperature)
  assert calls and calls[0][2][0].shape[3] == WIDTH + NEW
  np.testing.assert_array_equal(found.tokens_BT, plain.tokens_BT)
  np.testing.assert_array_equal(found.policy_version_BT, plain.policy_version_BT)
  # Rounding grows with the size of a log-probability: 1.7e-5 at -3.7 on one processor.
  np.testing.assert_allclose(found.logp_BT, plain.logp_BT, rtol=1e-5, atol=1e-5)
  ends = LENGTH_P.repeat(G) + plain.response_mask_BT.sum(1)
  assert ends[LIMIT_B == 1] == [2] and ends.max() > 256  # one block to three
  assert len(np.unique(ends)) > 6


# ----- decoding that reads only live blocks equals decoding that reads the whole cache


S = 8
H = 14
K = 2
C = 32
T = 384
EPS = 2.0**-23  # of float32
LENGTHS = np.asarray([1, 384, 128, 129, 127, 256, 300, 77], np.int32)
BLOCK = {'tpu': 128, 'gpu': 64}
# The kernels of both platforms, emulated on a CPU. The GPU's two programs per slot and
# head merge their results.
KERNELS = {
  'tpu': functools.partial(ragged._tpu, n=BLOCK['tpu'], interpret=True),
  'gpu': functools.partial(ragged._gpu, n=BLOCK['gpu'], span=256, interpret=True),
}


def example(dtype='float32', S=S, K=K, C=C, seed=0):
  """Random queries, (new keys, new values), (keys, values of the cache)."""
  rng = np.random.default_rng(seed)
  shapes = (S, H, C), (S, K, C), (S, K, C), (S, K, C, T), (S, K, T, C)
  q, *arrays = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
  return q, tuple(arrays[:2]), tuple(arrays[2:])


def extended(new, cache, position_S):
  """The cache with the new column of each slot at its position."""
  k_SKCT, v_SKTC = map(np.array, cache)
  for s, position in enumerate(position_S):
    k_SKCT[s, :, :, position] = new[0][s]
    v_SKTC[s, :, position] = new[1][s]
  return k_SKCT, v_SKTC


def plain(q_SHC, new, cache, length_S, window=0):
  position_S = jnp.asarray(length_S) - 1
  segments = [extended(new, cache, position_S)]
  return attention.cached(q_SHC, segments, position_S, window)


def poisoned(k_SKCT, v_SKTC, length_S, n, window=0):
  """The cache with NaN in every block that has no live column of its slot."""
  block_T = np.arange(T) // n
  dead_ST = block_T > (length_S[:, None] - 1) // n
  if window:
    dead_ST |= block_T < np.maximum(length_S[:, None] - window, 0) // n
  k_SKCT = jnp.where(dead_ST[:, None, None], jnp.nan, k_SKCT)
  return k_SKCT, jnp.where(dead_ST[:, None, :, None], jnp.nan, v_SKTC)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  ('C', 'slots', 'done'), [(32, S, False), (128, 5, False), (32, S, True)]
)
@pytest.mark.parametrize('kernel', KERNELS)
def test_the_kernel_equals_the_plain_one_and_reads_no_dead_block(
  kernel, C, slots, done, dtype
):
  # Heads of 128 have another layout of the values; 5 slots are no two equal halves. A
  # slot that is done reads one block, and writes its column.
  q, new, cache = example(dtype, slots, C=C)
  position_S = LENGTHS[:slots] - 1
  length_S = np.ones_like(position_S) if done else position_S + 1
  expected = plain(q, new, cache, position_S + 1)
  run = jax.jit(KERNELS[kernel])
  q_SKGC = q.reshape(slots, K, H // K, C)
  cache = poisoned(*cache, length_S, BLOCK[kernel])
  found, written = run(q_SKGC, new, cache, position_S, length_S)
  assert found.dtype == expected.dtype
  # The weights of bfloat16 are rounded before they are normalised, here, and after.
  limit = 32 * EPS if dtype == 'float32' else 4 * 2.0**-8
  if not done:
    pair = found.reshape(q.shape), expected
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in pair), atol=limit)
  for pair in zip(written, extended(new, cache, position_S), strict=True):
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in pair))


@pytest.mark.parametrize('slots', [S, 5])
@pytest.mark.parametrize('window', [1, 2, 70, 129, T])
@pytest.mark.parametrize('kernel', KERNELS)
def test_a_window_is_read_from_its_first_block_on(kernel, window, slots):
  # Of up to two blocks of 128, or three of 64, that begin at columns of each kind.
  q, new, cache = example(S=slots)
  length_S = LENGTHS[:slots]
  expected = plain(q, new, cache, length_S, window)
  run = jax.jit(functools.partial(KERNELS[kernel], window=window))
  cache = poisoned(*cache, length_S, BLOCK[kernel], window)
  q_SKGC = q.reshape(slots, K, H // K, C)
  mixed_SKGC, written = run(q_SKGC, new, cache, length_S - 1, length_S)
  np.testing.assert_allclose(mixed_SKGC.reshape(q.shape), expected, atol=32 * EPS)
  for pair in zip(written, extended(new, cache, length_S - 1), strict=True):
    np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize('kv_heads', [1, 2])
def test_the_kernel_is_split_over_slots_and_heads(kv_heads):
  # A single key head is read by both devices that share a slot.
  q, new, cache = example(K=kv_heads)
  mesh = sharding.make(data=2, fsdp=2, tensor=2)
  with sharding.current(mesh):
    rows = sharding.over_rows(mesh)
    heads = sharding.over_cache(mesh, kv_heads)
    by_slot = jax.device_put((q, new, LENGTHS - 1, LENGTHS), rows)
    spread = jax.device_put(cache, heads)
    found, written = jax.jit(ragged.attend)(*by_slot[:2], spread, *by_slot[2:])
  assert found.sharding.shard_shape(found.shape) == (S // 4, H // kv_heads, C)
  np.testing.assert_allclose(found, plain(q, new, cache, LENGTHS), atol=32 * EPS)
  for x, y in zip(written, extended(new, cache, LENGTHS - 1), strict=True):
    assert x.sharding.is_equivalent_to(heads, 4)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ('gpu', 'window'),
  [('a100-40', 0), ('h100', 0), ('b200', 0), ('rtx6000', 0), ('rtx4090', 0)]
  + [('h100', 512)],
)
def test_the_gpu_kernel_fits_the_shared_memory(gpu, window, topology):
  # Four slots of a Qwen2.5-7B.
  q, *arrays = (
    jax.ShapeDtypeStruct((4, 4, *shape), jnp.bfloat16)
    for shape in ((7, 128), (128,), (128,), (128, 4096), (4096, 128))
  )
  new = tuple(arrays[:2])
  cache = tuple(arrays[2:])
  slots = jax.ShapeDtypeStruct((4,), jnp.int32)
  mesh = sharding.make(devices=topology(f'{gpu}:1'))
  device = sharding.replicated(mesh)
  run = jax.jit(
    functools.partial(ragged._gpu, window=window),
    in_shardings=device,
    out_shardings=device,
    donate_argnums=2,
  )
  with jax.set_mesh(mesh):
    lowered = run.lower(q, new, cache, slots, slots)
  # The kernel writes the column in place: nothing of the size of the cache is made.
  assert lowered.compile().memory_analysis().temp_size_in_bytes < 2**20
