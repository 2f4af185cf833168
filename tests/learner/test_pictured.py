"""Packed rows with pictures give what whole rows give."""

import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest
from pictured import SEEING, forward, problems

from bapo_jax import sharding
from bapo_jax.algorithms import clip, loss
from bapo_jax.learner import objective as objective_lib
from bapo_jax.learner import pictured, scoring
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Unit
from bapo_jax.training import sft

PROMPTS, GALLERY = problems()
P, WIDTH = PROMPTS.tokens_PT.shape
G = 4
NEW = 8
TEMPERATURE = 0.8
B = P * G
T = WIDTH + NEW
PARAMS = making.params(SEEING)
PIXELS = GALLERY.of(PROMPTS.id_P)
FROZEN = {'vision': PARAMS['vision']}
LANGUAGE = {name: w for name, w in PARAMS.items() if name != 'vision'}
MESH = sharding.make(devices=jax.devices()[:1])
EMBEDDED = pictured.Embedder(GALLERY, SEEING, MESH, FROZEN)(PROMPTS.id_P)


@jax.jit
def oracle(tokens_BT, temperature, slope_BT):
  """Log-probabilities [B, T] of whole rows, and the gradient of a loss of this slope.

  Column 0 is 0.
  """
  rows = jax.tree.map(lambda x: jnp.repeat(x, B // P, axis=0), PIXELS)

  def of(params):
    hidden_BTD = forward(params, tokens_BT, rows, SEEING)
    logits_BTV = hidden_BTD @ transformer.head(params).T / temperature
    next_BT1 = jnp.roll(tokens_BT, -1, 1)[..., None]
    logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), next_BT1, 2)[..., 0]
    return jnp.pad(logp_BT[:, :-1], ((0, 0), (1, 0)))

  logp_BT, pull = jax.vjp(of, PARAMS)
  return logp_BT, pull(slope_BT)[0]


@functools.cache
def example():
  """A batch of responses of all lengths, a third of them without an advantage."""
  rng = np.random.default_rng(3)
  length_B = np.repeat(PROMPTS.length_P, G)[:, None]
  tokens_BT = np.zeros((B, T), np.int32)
  tokens_BT[:, :WIDTH] = np.repeat(PROMPTS.tokens_PT, G, 0)
  column_T = np.arange(T)[None]
  mask_BT = (column_T >= length_B) & (
    column_T < length_B + rng.integers(1, NEW + 1, (B, 1))
  )
  # A policy may sample the token of a picture: it is a text's there.
  tokens_BT = np.where(mask_BT, rng.integers(1, 24, (B, T)), tokens_BT)
  assert (tokens_BT[mask_BT] == SEEING.vision.image_token).any()
  nothing_BT = np.zeros((B, T), np.float32)
  logp_BT = np.asarray(oracle(tokens_BT, TEMPERATURE, nothing_BT)[0])
  old_BT = logp_BT + 0.4 * rng.standard_normal((B, T))
  adv_B = rng.normal(-0.1, 1, B) * (rng.random(B) < 0.7)
  batch = making.batch(adv_B, mask_BT, old_BT)._replace(
    tokens_BT=tokens_BT.astype(np.int32)
  )
  return jax.tree.map(jnp.asarray, batch), logp_BT


def objective(**knobs):
  rule = clip.Balanced(target=0.45)
  return making.objective(rule, **{'spec': SEEING, 'length': T} | knobs)


def gradient(params, pictures, base=None, mesh=MESH, **knobs):
  batch = example()[0]._replace(pictures=pictures)
  held = params, base
  params, base = jax.device_put(held, sharding.shardings(held, mesh))
  batch = sharding.split_rows(batch, mesh)
  run = jax.jit(functools.partial(objective_lib.gradient, objective=objective(**knobs)))
  return sharding.under(mesh, run)(params, batch, base=base)


@functools.cache
def wanted():
  """(loss, gradient) of whole rows, one by one."""
  batch, logp_BT = example()
  o = objective()
  scale_B = loss.row_scale(batch.loss_mask_BT, o.loss_rule.aggregate, o.length)

  def of(logp_BT):
    return o.loss(logp_BT, batch, scale_B, o.search(logp_BT, batch, scale_B))[0]

  value, slope_BT = jax.value_and_grad(of)(jnp.asarray(logp_BT))
  return value, oracle(batch.tokens_BT, TEMPERATURE, slope_BT)[1]


def close(found, expected):
  making.close_trees(found, expected, count=B * T * SEEING.width * SEEING.layers)


def test_log_probabilities_are_those_of_whole_rows():
  batch, logp_BT = example()
  for pictures in (PIXELS, EMBEDDED):
    found_BT = scoring.packed_logprobs(
      PARAMS,
      batch.tokens_BT,
      batch.loss_mask_BT,
      micro_batches=3,
      spec=SEEING,
      temperature=TEMPERATURE,
      pictures=pictures,
    )
    wanted_BT = np.where(batch.loss_mask_BT, logp_BT, 0)
    making.close(found_BT, wanted_BT, count=T * SEEING.width)


STORED = {'grad_accum_steps': 3, 'schedule': Schedule(bounds_pass='stored')}


# On eight devices the bounds are found first, in two micro-batches.
@pytest.mark.parametrize(
  ('trained', 'devices', 'knobs'),
  [
    (False, 1, {}),
    (True, 1, STORED),
    (True, 1, {'unit': Unit(G, NEW)}),
    (False, 1, {'unit': Unit(2, NEW)} | STORED),
    (False, 8, {'grad_accum_steps': 2}),
    (True, 8, {'grad_accum_steps': 2}),
  ],
)
def test_the_gradient_is_that_of_whole_rows(trained, devices, knobs):
  expected, grads = wanted()
  mesh = sharding.make(2, 2, 2) if devices == 8 else MESH
  if trained:
    value, found, _ = gradient(PARAMS, PIXELS, mesh=mesh, **knobs)
    assert set(found) == set(PARAMS)
  else:
    frozen = jax.device_put(FROZEN, sharding.shardings(FROZEN, mesh))
    embedded = pictured.Embedder(GALLERY, SEEING, mesh, frozen)(PROMPTS.id_P)
    value, found, _ = gradient(LANGUAGE, embedded, FROZEN, mesh, **knobs)
    assert set(found) == set(LANGUAGE)
  making.close(value, expected, count=B * T, terms=1)
  assert all(np.abs(x).max() > 1e-4 for x in jax.tree.leaves(grads['vision']['layers']))
  close(found, {name: grads[name] for name in found})


def test_a_frozen_tower_embeds_each_picture_once():
  again = pictured.Embedder(GALLERY, SEEING, MESH, FROZEN)(
    np.asarray([3, -1, *[0] * 9])
  )
  assert again.merged_PMD.shape[0] == 11 and not again.grid_PI2[1].any()
  for row, p in ((0, 3), (2, 0), (10, 0)):
    making.close(again.merged_PMD[row], EMBEDDED.merged_PMD[p], count=1024)


def test_the_warm_start_trains_the_tower():
  batch, _ = example()
  weight_BT = batch.loss_mask_BT.astype(jnp.float32)
  rows = jax.tree.map(lambda x: np.repeat(x, G, axis=0), PIXELS)
  tx = optax.sgd(1.0)
  before = jax.tree.map(jnp.copy, PARAMS)
  rows_of = batch.tokens_BT, weight_BT, rows
  knobs = {'tx': tx, 'spec': SEEING, 'schedule': Schedule('none')}
  after, _, value = sft.imitate(before, tx.init(before), *rows_of, **knobs)

  slope_BT = -weight_BT / weight_BT.sum()
  logp_BT, grads = oracle(batch.tokens_BT, 1.0, slope_BT)
  making.close(value, (logp_BT * slope_BT).sum(), count=B * T, terms=1)
  moved = jax.tree.map(jnp.subtract, PARAMS, after)
  close(moved, grads)
