"""Responses that share the cells of their prompt: the gradient of whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest

from bapo_jax import sharding
from bapo_jax.algorithms import clip, loss, masks
from bapo_jax.learner import objective as objective_lib
from bapo_jax.learner import scoring
from bapo_jax.models import attention, logprobs, packing
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Unit

LOSSES = loss.LossRule.rules.at_defaults()
SPEC = dataclasses.replace(making.QWEN2, vocab=24, head_width=8)
GROUPS, G = 8, 4
B = GROUPS * G
MOST_PROMPT, MOST_RESPONSE = 9, 21
T = MOST_PROMPT + MOST_RESPONSE
PRODUCTS = B * T * SPEC.width * SPEC.layers  # summed in a gradient
CLIPS = {
  'cispo': clip.Fixed(low=0.0, high=1.3),
  'gmpo': clip.Fixed(low=0.7, high=1.5),
  'aspo': clip.Dcpo(),
  'sequence': clip.Balanced(target=0.6, low=(0.8, 0.98), high=(1.02, 1.5)),
  **dict.fromkeys(('tis', 'sapo', 'vespo'), clip.Unclipped()),
}


def rows():
  """(tokens_BT, wanted_BT): groups of equal prompts, with odd ends.

  Group 0 has a prompt of one token, group 1 the longest; in group 2 all responses
  begin alike with two tokens that are no targets; group 3 has responses of one token.
  """
  rng = np.random.default_rng(3)
  tokens_PGT = rng.integers(1, 24, (GROUPS, G, T)).astype(np.int32)
  prompt_P = rng.integers(2, MOST_PROMPT, GROUPS)
  prompt_P[:2] = 1, MOST_PROMPT
  alike_P = prompt_P + 2 * (np.arange(GROUPS) == 2)
  for group, n in enumerate(alike_P):
    tokens_PGT[group, :, :n] = tokens_PGT[group, 0, :n]
  length_PG = rng.integers(3, MOST_RESPONSE + 1, (GROUPS, G))
  length_PG[1], length_PG[3] = MOST_RESPONSE, 1
  column_T = np.arange(T)
  wanted_PGT = (column_T >= alike_P[:, None, None]) & (
    column_T < (prompt_P[:, None] + length_PG)[..., None]
  )
  return tokens_PGT.reshape(B, T), wanted_PGT.reshape(B, T)


@functools.cache
def example():
  """(params, batch): the `rows`, some without an advantage, a seat empty."""
  params = making.params(SPEC)
  rng = np.random.default_rng(4)
  tokens_BT, mask_BT = rows()
  stats = jax.jit(logprobs.sequence_stats, static_argnums=(2, 3))
  logp_BT = stats(params, jnp.asarray(tokens_BT), SPEC, 0.8).logp_BT
  old_BT, prox_BT = (logp_BT + 0.4 * rng.standard_normal((B, T)) for _ in range(2))
  adv_B = rng.normal(-0.1, 1, B) * (rng.random(B) < 0.7)
  source_B = np.repeat(np.where(np.arange(GROUPS) == 5, -1, np.arange(GROUPS) % 3), G)
  mask_BT &= (source_B >= 0)[:, None]
  batch = making.batch(adv_B, mask_BT, old_BT, prox_BT, source_B)
  return params, jax.tree.map(jnp.asarray, batch._replace(tokens_BT=tokens_BT))


def objective(loss_rule, **knobs):
  rule = CLIPS.get(loss_rule, clip.Balanced(target=0.45))
  return making.objective(rule, loss_rule, **{'spec': SPEC, 'length': T} | knobs)


@functools.cache
def gradient(loss_rule, mesh=None, **knobs):
  params, batch = example()
  chosen = objective(loss_rule, **knobs)
  run = functools.partial(objective_lib.gradient, objective=chosen)
  if mesh is not None:
    params = jax.device_put(params, sharding.shardings(params, mesh))
    batch = jax.device_put(batch, sharding.over_rows(mesh))
  return sharding.under(mesh, jax.jit(run))(params, batch)


def check(loss_rule, unit, mesh=None, grad_accum_steps=1, **knobs):
  """Value, gradient, bounds and statistics are those of all rows, padded."""
  wanted_value, wanted, (stats, bounds) = gradient(loss_rule, pack=False, **knobs)
  value, found, (found_stats, found_bounds) = gradient(
    loss_rule, mesh, unit=unit, grad_accum_steps=grad_accum_steps, **knobs
  )
  making.close(value, wanted_value, count=B * T, terms=1)
  making.close_trees(found, wanted, count=PRODUCTS)
  assert float(optax.tree.norm(wanted)) > 1e-3
  for name, bound in bounds._asdict().items():
    np.testing.assert_array_equal(getattr(found_bounds, name), bound, err_msg=name)
  computed_BT = objective(loss_rule, **knobs).computed(example()[1]).loss_mask_BT
  for name, x_BT in zip(stats._fields[:3], stats[:3], strict=True):
    wanted_BT = np.where(computed_BT, x_BT, 0)
    making.close(getattr(found_stats, name), wanted_BT, count=PRODUCTS)


WHOLE, HALF = Unit(G, MOST_RESPONSE), Unit(G // 2, MOST_RESPONSE)


@pytest.mark.parametrize('loss_rule', list(LOSSES))
def test_every_rule(loss_rule):
  check(loss_rule, WHOLE)


@pytest.mark.parametrize(
  'knobs',
  [
    {'unit': HALF},
    {'unit': HALF, 'grad_accum_steps': 3},
    {'unit': WHOLE, 'grad_accum_steps': 3, 'kl': 0.3},
    {'unit': WHOLE, 'entropy': 0.3},
    {'unit': WHOLE, 'aggregate': 'sequence', 'mask_rule': masks.M2po()},
    {
      'unit': HALF,
      'grad_accum_steps': 3,
      'schedule': Schedule('dots', bounds_pass='stored'),
    },
  ],
)
def test_every_way_to_compute(knobs):
  check('clipped', **knobs)


def test_eight_devices():
  check('clipped', WHOLE, sharding.make(2, 2, 2))


def test_a_unit_has_its_prompt_once():
  tokens_BT, wanted_BT = map(jnp.asarray, rows())
  packed = packing.pack(tokens_BT, wanted_BT, 1, width=200, unit=WHOLE)
  alone = packing.pack(tokens_BT, wanted_BT, 1, width=200)
  filled, before = (int((x.cells(0).row_RT >= 0).sum()) for x in (packed, alone))
  # By hand: of n responses, n - 1 do not repeat the prompt but for its last token.
  first_B = np.argmax(wanted_BT, 1).reshape(GROUPS, G)[:, 0]
  assert before - filled == ((first_B - 1) * (G - 1)).sum() > 0
  assert packed.shape.width < alone.shape.width * G


def test_full_units_fit_the_bins():
  tokens_BT = jnp.ones((B, T), jnp.int32)
  column_T = jnp.arange(T)
  wanted_BT = jnp.broadcast_to(column_T >= MOST_PROMPT, (B, T))
  # Whatever differs, the prompt is shared up to its last token.
  tokens_BT = jnp.where(wanted_BT, jnp.arange(B)[:, None] + 2, tokens_BT)
  packed = packing.pack(tokens_BT, wanted_BT, 1, unit=WHOLE)
  cells = packed.cells(0)
  used_R = (cells.row_RT >= 0).sum(1)
  assert packed.shape == (1, GROUPS, T + (G - 1) * MOST_RESPONSE)
  assert (used_R == MOST_PROMPT - 1 + G * MOST_RESPONSE).all()
  assert cells.wanted_RT.sum() == wanted_BT.sum()
  said_RT = jnp.where(cells.wanted_RT, cells.target_RT, 0)
  np.testing.assert_array_equal(
    packed.unpack(said_RT, 0), jnp.where(wanted_BT, tokens_BT, 0)
  )


def test_scores_are_those_of_whole_rows():
  params, _ = example()
  tokens_BT, wanted_BT = map(jnp.asarray, rows())
  stats = jax.jit(logprobs.sequence_stats, static_argnums=(2, 3))
  wanted = jnp.where(wanted_BT, stats(params, tokens_BT, SPEC, 0.8).logp_BT, 0)
  score = jax.jit(
    functools.partial(
      scoring.packed_logprobs,
      micro_batches=3,
      spec=SPEC,
      temperature=0.8,
      unit=WHOLE,
    )
  )
  making.close(score(params, tokens_BT, wanted_BT), wanted, count=PRODUCTS)


def test_attention_in_float64_by_loops():
  tokens_BT, wanted_BT = map(jnp.asarray, rows())
  packed = packing.pack(tokens_BT, wanted_BT, 1, width=200, unit=WHOLE)
  cells = packed.cells(0)
  R, W = cells.tokens_RT.shape
  rng = np.random.default_rng(0)
  q, k, v = (rng.standard_normal((R, W, n, 8)).astype('f') for n in (2, 1, 1))
  found = attention.blockwise(q, k, v, cells.row_RT, cells.shared)
  cell_BT = np.asarray(packed._cell_BT())
  for row in range(B):
    at = cell_BT[row][: int(packed.length_B[row])]
    bin_, column = np.divmod(at, W)
    assert (bin_ == bin_[0]).all()
    keys, values = (np.float64(x[bin_[0], column, 0]) for x in (k, v))
    for t, c in enumerate(column):
      for head in range(2):
        score = keys[: t + 1] @ np.float64(q[bin_[0], c, head]) / 8**0.5
        weight = np.exp(score - score.max())
        mixed = weight @ values[: t + 1] / weight.sum()
        np.testing.assert_allclose(found[bin_[0], c, head], mixed, atol=1e-5)


@pytest.mark.parametrize(
  ('prompt', 'response', 'rows', 'shards', 'best'),
  [
    (1, 30, 64, 1, 1),  # nothing is repeated but the last token of the prompt
    (32, 30, 64, 1, 1),  # pairs of rows would take .94 of the time by count
    (200, 4, 64, 1, 8),  # the prompt is nearly all
    (200, 4, 8, 8, 1),  # seven of eight devices would have no bin
    (8, 4096, 64, 1, 1),  # attention over other responses costs more than the prompt
  ],
)
def test_a_unit_is_as_large_as_it_is_worth(prompt, response, rows, shards, best):
  unit, share = packing.fastest_unit(
    SPEC, rows, prompt + response, 1, shards, group_size=8, response=response
  )
  assert unit == Unit(best, response)
  assert (share == 1) if best == 1 else (share < 0.5)
