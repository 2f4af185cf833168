"""The exact expected update agrees with finite differences and with sampling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.algorithms import clip, loss, masks
from lab import microscope
from lab.microscope import GRPO, PROMPTS, Rule, Tables
from tests import making


@functools.cache
def task():
  return microscope.enumerate_task()


@functools.cache
def weights():
  """(weights of a while ago, current weights): far enough apart for bounds to cut."""
  kept = microscope.train(microscope.warm_start(task(), 150), task(), 24, lr=4e-3)
  return kept[8], kept[-1]


@pytest.fixture(scope='module', autouse=True)
def trained():
  """Trains the weights before the first test, whose limit does not count them."""
  weights()


def tables(stale=True):
  old, new = weights()
  logp_NT = microscope.table(new, task())
  return Tables(logp_NT, microscope.table(old, task()) if stale else logp_NT)


def moved(params, direction, by):
  return jax.tree.map(lambda x, d: x + by * d, params, direction)


def directions(count, seed=0):
  """Random directions of length 1."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    v = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), weights()[1])
    size = microscope.dot(v, v) ** 0.5
    yield jax.tree.map(lambda x, size=size: (x / size).astype(jnp.float32), v)


def test_the_task_by_hand():
  found = task()
  assert len(found.right_N) == 4 * 8**4
  right = np.asarray(found.right_N).reshape(4, -1).sum(1)
  np.testing.assert_array_equal(right, 8 * np.asarray([1, 2, 3, 4]) ** 3)
  row = int(np.flatnonzero(np.asarray(found.right_N))[0])
  np.testing.assert_array_equal(found.tokens_NT[row], [0, 0, 1, 2, 3])


def test_probabilities_of_all_responses_sum_to_one():
  found = tables()
  seen_N = np.asarray(found.seen(task()), np.float64)
  np.testing.assert_allclose(seen_N.reshape(PROMPTS, -1).sum(1), 1, rtol=1e-4)


@pytest.mark.parametrize('name', ['accuracy', 'entropy'])
def test_gradients_agree_with_finite_differences(name):
  params, value = weights()[1], getattr(microscope, name)
  make = {
    'accuracy': microscope.true_gradient,
    'entropy': microscope.entropy_gradient,
  }[name]
  slope = make(params, task())
  # Along the gradient itself, where rounding of float32 matters least, and at random.
  size = microscope.dot(slope, slope) ** 0.5
  own = jax.tree.map(lambda x: x / size, slope)
  for direction in (own, *directions(2)):
    step = 0.02
    up, down = (
      value(microscope.table(moved(params, direction, by), task()), task())
      for by in (step, -step)
    )
    found = float(up - down) / (2 * step)
    assert found == pytest.approx(microscope.dot(slope, direction), abs=0.02 * size)


def test_on_policy_grpo_follows_the_gradient_of_its_own_objective():
  """The update is sum over prompts of (a_right - a_wrong) grad J_q, exactly."""
  found = tables(stale=False)
  update = microscope.gradient(
    weights()[1], task(), microscope.expected(GRPO, task(), found)
  )
  seen_N, right = found.seen(task()), np.asarray(task().right_N)
  rate_Q = np.where(right, np.asarray(seen_N), 0).reshape(PROMPTS, -1).sum(1)
  gap_Q = []
  for rate in rate_Q:  # over the number of right responses in the whole group
    total = 0.0
    for k in range(1, 8):
      p = k / 8
      a_right, a_wrong = (1 - p) / (p * (1 - p)) ** 0.5, -p / (p * (1 - p)) ** 0.5
      ways = np.prod([(8 - i) / (i + 1) for i in range(k)])
      chance = ways * rate**k * (1 - rate) ** (8 - k)
      # Of these responses a share p is right: rate E[A | right] sums to p A_right.
      total += chance * p * a_right / rate - chance * (1 - p) * a_wrong / (1 - rate)
    gap_Q.append(total)
  weight_N = np.asarray(gap_Q)[np.asarray(task().prompt_N)] * right
  mask_NT = np.asarray(task().mask_NT)
  weight_NT = jnp.asarray(
    np.asarray(seen_N)[:, None] * weight_N[:, None] * mask_NT / PROMPTS / 4, jnp.float32
  )
  wanted = microscope.gradient(weights()[1], task(), weight_NT)
  gap = jax.tree.map(jnp.subtract, update, wanted)
  size = microscope.dot(wanted, wanted) ** 0.5
  assert microscope.dot(gap, gap) ** 0.5 < 1e-5 * max(1, size) + 2e-5 * size


RULES = {
  'GRPO': GRPO,
  'unclipped': Rule(clip=clip.unclipped),
  'IcePop': Rule(making.bound(loss.tis, cap=5.0), clip.unclipped, masks.icepop),
  'GSPO': Rule(loss.sequence, making.bound(clip.fixed, low=0.97, high=1.04)),
  'SAPO': Rule(loss.sapo, clip.unclipped),
}


@pytest.mark.parametrize(
  ('name', 'minibatches', 'allowed'),
  [
    ('GRPO', 2000, 4),  # of six gaps, one in 2600 draws is beyond 4
    *(pytest.param(x, 20_000, 3, marks=pytest.mark.nightly) for x in RULES),
  ],
)
def test_sampling_agrees_with_the_exact_update(name, minibatches, allowed):
  """Means over minibatches lie within so many standard errors of it."""
  rule, found, params = RULES[name], tables(), weights()[1]
  chosen = list(directions(6))
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *chosen)

  def along(weight_NT):
    update = microscope.gradient(params, task(), weight_NT)
    return np.asarray([microscope.dot(update, v) for v in chosen])

  exact_V = along(microscope.expected(rule, task(), found))
  drawn = microscope.sampled(rule, task(), found, params, stacked, 16, minibatches)
  error_V = drawn.along_MV.std(0, ddof=1) / len(drawn.along_MV) ** 0.5
  gap_V = (drawn.along_MV.mean(0) - exact_V) / error_V
  assert np.abs(gap_V).max() < allowed, gap_V
  # The table of mean weights gives the same means.
  np.testing.assert_allclose(
    along(drawn.weight_NT), drawn.along_MV.mean(0), rtol=1e-3, atol=1e-5
  )


def test_the_length_of_an_update_is_that_of_its_gradient():
  """One minibatch: its token weights give the update whose square is reported."""
  found, params = tables(), weights()[1]
  direction = jax.tree.map(lambda x: x[None], next(directions(1)))
  drawn = microscope.sampled(GRPO, task(), found, params, direction, 4096, 1, seed=3)
  update = microscope.gradient(params, task(), drawn.weight_NT)
  assert drawn.square_M == pytest.approx(microscope.dot(update, update), rel=1e-4)


def test_bounds_of_the_minibatch_have_no_exact_update():
  rule = Rule(clip=clip.balanced, whole_batch=True)
  with pytest.raises(ValueError, match='use sampled'):
    microscope.expected(rule, task(), tables())
