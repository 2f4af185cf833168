"""Layers of several kinds equal a slow decoder that is written from the papers.

The models have windows, three rotations, norms before and after, norms over whole
projections, scaled embeddings and scores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from making import GEMMA3, OLMO3, SMOLLM3, WINDOW

from bapo_jax import sharding
from bapo_jax.models import decoder, layers, logprobs
from bapo_jax.models.transformer import LayerKind
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts

LONG = 150  # several blocks of queries, many windows
SPECS = {'gemma3': GEMMA3, 'olmo3': OLMO3, 'smollm3': SMOLLM3}
of_each = pytest.mark.parametrize('name', SPECS)


# ---------------------------------------------------------------- a decoder in float64


def norm(x, w, spec, axes=-1):
  """x over its root mean square, times w (Gemma: times 1 + w)."""
  size = np.sqrt((x**2).mean(axes, keepdims=True) + spec.norm_eps)
  return x / size * (1 + w if spec.norm_offset else w)


def heads(x_TD, w, name, spec):
  """Queries or keys [T, heads, C], normed but not rotated."""
  out = np.einsum('td,dhc->thc', x_TD, w[name])
  if spec.qkv_bias:
    out += w[f'{name}_bias']
  if spec.qk_norm == 'head':
    out = norm(out, w[f'{name}_norm'], spec)
  if spec.qk_norm == 'projection':
    out = norm(out, w[f'{name}_norm'], spec, (-2, -1))
  return out


def rotated(x_THC, kind, spec):
  """Rotates coordinates i and i + C / 2 of every head as one complex number."""
  if kind.rotation == 'none':
    return x_THC
  half = spec.head_width // 2
  theta = spec.plain_theta if kind.rotation == 'plain' else spec.rope_theta
  angle_Tc = np.arange(len(x_THC))[:, None] * theta ** (-np.arange(half) / half)
  if kind.rotation == 'scaled' and spec.rope_type == 'linear':
    angle_Tc = angle_Tc / dict(spec.rope_knobs)['factor']
  number = x_THC[..., :half] + 1j * x_THC[..., half:]
  number = number * np.exp(1j * angle_Tc)[:, None]
  return np.concatenate([number.real, number.imag], -1)


def attended(q_THC, k_TKC, v_TKC, window, spec):
  """Query by query, head by head, over at most the last `window` columns."""
  scale = spec.score_scale or spec.head_width**-0.5
  out = np.zeros_like(q_THC)
  for t, h in np.ndindex(q_THC.shape[:2]):
    first = max(0, t + 1 - window) if window else 0
    key = h // (spec.heads // spec.kv_heads)
    score = scale * (k_TKC[first : t + 1, key] @ q_THC[t, h])
    weight = np.exp(score - score.max())
    out[t, h] = weight / weight.sum() @ v_TKC[first : t + 1, key]
  return out


def gated(x_TD, w, spec):
  """The feed-forward layer."""
  gate = x_TD @ w['gate']
  if spec.activation == 'silu':
    gate = gate / (1 + np.exp(-gate))
  else:
    cube = gate + 0.044715 * gate**3
    gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * cube))
  return (gate * (x_TD @ w['up'])) @ w['down']


def decoder_oracle(params, tokens_T, spec):
  """Returns the final hidden states [T, D] of one text."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  before, after = spec.norms != 'post', spec.norms != 'pre'
  x = p['embed'][tokens_T] * spec.embed_scale
  for i, kind in enumerate(spec.layer_kinds):
    w = {name: stacked[i] for name, stacked in p['layers'].items()}
    y = norm(x, w['attn_norm'], spec) if before else x
    q, k = (rotated(heads(y, w, name, spec), kind, spec) for name in 'qk')
    v = np.einsum('td,dhc->thc', y, w['v'])
    if spec.qkv_bias:
      v += w['v_bias']
    y = np.einsum('thc,hcd->td', attended(q, k, v, kind.window, spec), w['o'])
    if spec.o_bias:
      y += w['o_bias']
    x = x + (norm(y, w['attn_post_norm'], spec) if after else y)
    y = gated(norm(x, w['mlp_norm'], spec) if before else x, w, spec)
    x = x + (norm(y, w['mlp_post_norm'], spec) if after else y)
  return norm(x, p['final_norm'], spec)


def text(T=LONG, seed=0):
  return np.random.default_rng(seed).integers(0, GEMMA3.vocab, T, np.int32)


@of_each
@pytest.mark.parametrize('T', [WINDOW, WINDOW + 1, LONG])
def test_hidden_states_equal_the_oracle(name, T):
  spec = SPECS[name]
  params = making.params(spec)
  hidden_BTD = jax.jit(layers.forward, static_argnames='spec')(
    params, text(T)[None], spec
  )
  making.close(hidden_BTD[0], decoder_oracle(params, text(T), spec), count=256)


OTHERS = {
  'a removed window': {
    'kinds': (GEMMA3.kinds[0], LayerKind(0, 'plain'), *GEMMA3.kinds[2:])
  },
  'a shorter window': {
    'kinds': tuple(k._replace(window=k.window and WINDOW - 1) for k in GEMMA3.kinds)
  },
  'one rotation': {'kinds': tuple(k._replace(rotation='scaled') for k in GEMMA3.kinds)},
  'kinds in another order': {'kinds': GEMMA3.kinds[::-1]},
  'another theta': {'plain_theta': 20_000.0},
  'no norm after': {'norms': 'pre'},
  'no offset': {'norm_offset': False},
  'silu': {'activation': 'silu'},
  'plain embeddings': {'embed_scale': 1.0},
  'plain scores': {'score_scale': None},
}
TURNED = (LayerKind(),) * 3


@pytest.mark.parametrize(
  ('name', 'changed'),
  [
    *(('gemma3', changed) for changed in OTHERS.values()),
    ('olmo3', {'qk_norm': ''}),
    ('olmo3', {'o_bias': False}),
    ('smollm3', {'kinds': TURNED}),
  ],
  ids=[*OTHERS, 'no norm of projections', 'no bias', 'a rotation turned on'],
)
def test_the_text_needs_every_option(name, changed):
  # Of the oracle, which compiles nothing: what another option gives is far away.
  spec = SPECS[name]
  params = making.params(spec)
  right, wrong = (
    decoder_oracle(params, text(3 * WINDOW), x)
    for x in (spec, dataclasses.replace(spec, **changed))
  )
  assert np.abs(right - wrong).max() > 1e-3 * np.abs(right).max()


# ------------------------------------------------- gradients, packed rows and a mesh


PRODUCTS = 2 * LONG * GEMMA3.width  # summed in a gradient
# Where the second text of a row begins; the last has a token more than a window.
STARTS = np.asarray([LONG // 3, LONG - WINDOW - 1])


def packed():
  """Returns (tokens, positions, segments), [2, LONG]: rows of two texts."""
  column = np.arange(LONG)[None]
  second = column >= STARTS[:, None]
  position = column - second * STARTS[:, None]
  return np.stack([text(seed=0), text(seed=1)]), position, second.astype(np.int32)


def total(params, weight_BTD, spec, remat):
  """A weighted sum of the hidden states of packed rows, and these."""
  tokens_BT, position_BT, segment_BT = map(jnp.asarray, packed())
  x_BTD = layers.embed_rows(params, tokens_BT, spec)
  turns = layers.rotations(position_BT, spec)
  schedule = layers.Schedule(remat)
  hidden_BTD, _ = layers.through(
    params, x_BTD, turns, spec, segment_BT, schedule=schedule
  )
  return (hidden_BTD * weight_BTD).sum(), hidden_BTD


@functools.cache
def gradients(name, remat, mesh=None):
  """Returns (hidden_BTD, gradient) of packed rows; weights split over the mesh."""
  spec = SPECS[name]
  params = making.params(spec)
  weight_BTD = np.random.default_rng(5).standard_normal((2, LONG, spec.width))
  if mesh is not None:
    params = jax.device_put(params, sharding.shardings(params, mesh))
  run = jax.value_and_grad(
    functools.partial(total, spec=spec, remat=remat), has_aux=True
  )
  step = sharding.under(mesh, jax.jit(run))
  (_, hidden_BTD), gradient = step(params, jnp.float32(weight_BTD))
  return jax.tree.map(np.asarray, (hidden_BTD, gradient))


def alone(params, spec):
  """Returns the oracle's hidden states of the packed texts, one text at a time."""
  rows = zip(packed()[0], STARTS, strict=True)
  halves = [
    decoder_oracle(params, part, spec)
    for row, start in rows
    for part in (row[:start], row[start:])
  ]
  return np.concatenate(halves).reshape(2, LONG, spec.width)


@of_each
def test_packed_texts_are_those_alone_and_the_gradient_is_the_slope(name):
  spec = SPECS[name]
  params = making.params(spec)
  hidden_BTD, gradient = gradients(name, 'full')
  making.close(hidden_BTD, alone(params, spec), count=256)
  # The slope in a random direction of all weights, by central differences in float64.
  rng = np.random.default_rng(9)
  direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
  step = 1e-5
  ahead, behind = (
    jax.tree.map(lambda x, d, s=s: np.asarray(x, np.float64) + s * d, params, direction)
    for s in (step, -step)
  )
  weight_BTD = np.random.default_rng(5).standard_normal(hidden_BTD.shape)
  slope = ((alone(ahead, spec) - alone(behind, spec)) * weight_BTD).sum() / (2 * step)
  terms = jax.tree.map(lambda g, d: (g * d).ravel(), gradient, direction)
  terms = np.concatenate(jax.tree.leaves(terms))
  # Terms have both signs: the sum is about as large as their norm.
  assert abs(terms.sum() - slope) < 1e-4 * np.linalg.norm(terms)


@pytest.mark.parametrize('remat', ['dots', 'none'])
def test_what_is_saved_does_not_change_a_gradient(remat):
  hidden_BTD, gradient = gradients('gemma3', remat)
  wanted_BTD, wanted = gradients('gemma3', 'full')
  making.close(hidden_BTD, wanted_BTD, count=1)
  making.close_trees(gradient, wanted, count=PRODUCTS)


@pytest.mark.parametrize('name', ['gemma3', 'olmo3'])
def test_eight_devices_give_the_gradient_of_one(name):
  # The mean of a norm over a projection is over the heads of four devices.
  hidden_BTD, gradient = gradients(name, 'full', sharding.make(1, 2, 4))
  wanted_BTD, wanted = gradients(name, 'full')
  making.close(hidden_BTD, wanted_BTD, count=256)
  making.close_trees(gradient, wanted, count=PRODUCTS)


# ------------------------------------------------------------------------- the sampler


LENGTH_P = np.asarray([3, 9, 5, 1], np.int32)  # of prompts: shorter, longer, equal
P, G, WIDTH, NEW = 4, 2, 9, 24
UID_B = np.arange(P * G, dtype=np.uint32)
KEY = jax.random.key(3)
KNOBS = {
  'group_size': G,
  'max_new_tokens': NEW,
  'temperature': 1.0,
  'eos': (1,),
  'max_num_seqs': 4,
  'prefill_batch_size': 2,
  'tokens_per_dispatch': 8,
  'cache_segments': 3,
}


@functools.cache
def sampled(name):
  spec = SPECS[name]
  prompts = making.prompts(LENGTH_P, WIDTH, spec.vocab, least=2)
  params = making.params(spec)
  rows = making.generate(params, prompts, UID_B, KEY, spec=spec, **KNOBS)
  return jax.tree.map(np.asarray, rows)


@of_each
def test_the_learner_gives_sampled_tokens_their_log_probabilities(name):
  rows = sampled(name)
  score = jax.jit(logprobs.sequence_stats, static_argnums=(2, 3))
  spec = SPECS[name]
  logp_BT = score(making.params(spec), rows.tokens_BT, spec, 1.0).logp_BT
  mask_BT = rows.response_mask_BT
  assert mask_BT.sum(1).max() > 3 * WINDOW
  np.testing.assert_allclose(logp_BT[mask_BT], rows.logp_BT[mask_BT], atol=1e-5)


@pytest.mark.parametrize('shape', [(4, 1, 1), (2, 2, 2)])
def test_a_mesh_samples_the_same_text(shape):
  # Joined weights on the first mesh; on the second the heads of a norm are apart.
  spec = OLMO3
  mesh = sharding.make(*shape, jax.devices()[: np.prod(shape)])
  params = jax.device_put(
    making.params(spec), sharding.shardings(making.params(spec), mesh, 'decode')
  )
  prompts = making.prompts(LENGTH_P, WIDTH, spec.vocab, least=2)
  rows = making.generate(params, prompts, UID_B, KEY, spec=spec, mesh=mesh, **KNOBS)
  wanted = sampled('olmo3')
  np.testing.assert_array_equal(rows.tokens_BT, wanted.tokens_BT)
  np.testing.assert_allclose(rows.logp_BT, wanted.logp_BT, atol=1e-5)


def test_pauses_and_a_cache_that_is_read_again_leave_the_text():
  spec = GEMMA3
  # Enough slots, and one segment of the cache: a pause changes no sum.
  wide = {'max_num_seqs': 8, 'prefill_batch_size': 8, 'cache_segments': 1}
  engine = RolloutEngine(spec, max_prompt_tokens=WIDTH, **KNOBS | wide)
  actor = decoder.actor(making.params(spec), spec)
  paused = PartialRollouts(engine, P)
  paused.submit(making.prompts(LENGTH_P, WIDTH, spec.vocab, least=2), UID_B)
  paused.decode(actor, KEY, max_tokens=NEW // 2)
  assert paused.unfinished
  read_again = PartialRollouts(engine, P)
  read_again.restore(jax.tree.map(np.asarray, paused.state()))
  read_again.refresh(actor)
  unpaused = PartialRollouts(engine, P)
  unpaused.submit(making.prompts(LENGTH_P, WIDTH, spec.vocab, least=2), UID_B)
  for rollouts in (paused, read_again, unpaused):
    rollouts.decode(actor, KEY)
  for x, y in zip(paused.rows, unpaused.rows, strict=True):
    np.testing.assert_array_equal(x, y)
  wanted = sampled('gemma3')
  np.testing.assert_array_equal(read_again.rows.tokens_BT, wanted.tokens_BT)
  np.testing.assert_allclose(read_again.rows.logp_BT, wanted.logp_BT, atol=1e-5)
