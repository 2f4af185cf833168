"""The exact expected update agrees with finite differences and with sampling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats

from bapo_jax.algorithms import clip, loss, masks
from lab import microscope
from lab.microscope import GRPO, PROMPTS, Rule, Tables

# Its weights take a minute and a half of processor time, and only a page has them.
pytestmark = pytest.mark.nightly


@functools.cache
def task():
  return microscope.enumerate_task()


@functools.cache
def weights():
  """(weights of a while ago, current weights): far enough apart for bounds to cut."""
  kept = microscope.train(microscope.warm_start(task(), 150), task(), 24, lr=4e-3)
  return kept[8], kept[-1]


@functools.cache
def slopes():
  return microscope.slopes(weights()[1], task())


@pytest.fixture(scope='module', autouse=True)
def trained():
  """Trains the weights before the first test, whose limit does not count them."""
  jax.block_until_ready(slopes())


def tables():
  old, new = (microscope.table(x, task()) for x in weights())
  return Tables(new, old)


def moved(params, direction, by):
  flat_P, unflatten = ravel_pytree(params)
  return unflatten(flat_P + by * direction)


def directions(count, seed=0):
  """Random directions of length 1."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    v_P = rng.normal(size=slopes().shape[1])
    yield jnp.asarray(v_P / np.linalg.norm(v_P), jnp.float32)


def test_the_task_by_hand():
  found = task()
  assert len(found.right_N) == 4 * 8**4
  right = np.asarray(found.right_N).reshape(4, -1).sum(1)
  np.testing.assert_array_equal(right, 8 * np.asarray([1, 2, 3, 4]) ** 3)
  row = int(np.flatnonzero(np.asarray(found.right_N))[0])
  np.testing.assert_array_equal(found.tokens_NT[row], [0, 0, 1, 2, 3])


def test_the_gradient_agrees_with_finite_differences():
  params, value = weights()[1], microscope.accuracy
  slope = microscope.true_gradient(slopes(), microscope.table(params, task()), task())
  # Along the gradient itself, where rounding of float32 matters least, and at random.
  size = microscope.dot(slope, slope) ** 0.5
  for direction in (slope / size, *directions(2)):
    step = 0.02
    up, down = (
      value(microscope.table(moved(params, direction, by), task()), task())
      for by in (step, -step)
    )
    found = float(up - down) / (2 * step)
    assert found == pytest.approx(microscope.dot(slope, direction), abs=0.02 * size)


def expected(rule, task, tables):
  """The expected weight of each token [N, T]: a sum over verdicts of the others.

  The advantage of a response depends on how many of the others in its group of 8 are
  right, which is binomial.
  """
  rate_Q = microscope.rates(task, tables)[:, None]
  chance_QG = stats.binom.pmf(np.arange(8), 7, rate_Q)
  index_N, total_NT = jnp.arange(len(task.right_N)), 0.0
  for k in range(8):
    others = [1.0] * k + [0.0] * (7 - k)
    right, wrong = rule.advantage(jnp.asarray([[1.0, *others], [0.0, *others]]))[:, 0]
    adv_N = jnp.where(task.right_N, right, wrong)
    batch = microscope.batch_of(task, tables, index_N, adv_N)
    weight_NT = jax.jit(microscope.weights_of, static_argnums=0)(
      rule, tables.logp_NT, batch
    )
    chance_N = jnp.asarray(chance_QG, jnp.float32)[task.prompt_N, k]
    total_NT += chance_N[:, None] * weight_NT
  return tables.seen(task)[:, None] * total_NT / PROMPTS


RULES = {
  'GRPO': GRPO,
  'unclipped': Rule(clip=clip.Unclipped()),
  'IcePop': Rule(loss.Tis(cap=5.0), clip.Unclipped(), masks.IcePop()),
  'GSPO': Rule(loss.SequenceRatio(), clip.Fixed(low=0.97, high=1.04)),
  'SAPO': Rule(loss.Sapo(), clip.Unclipped()),
}


@pytest.mark.parametrize(
  ('name', 'minibatches'), [('GRPO', 500), *((name, 20_000) for name in RULES)]
)
def test_sampling_agrees_with_the_exact_update(name, minibatches):
  """Means over minibatches lie within four standard errors of it.

  Of 36 gaps, one is beyond 4 in one of 440 draws, and beyond 3 in one of 11. A gap of
  3.3 was chance: with 80,000 other minibatches it was .3, and the largest of six .8.
  """
  rule, found, chosen = RULES[name], tables(), jnp.stack([*directions(6)])

  def along(weight_NT):
    return np.asarray(chosen @ microscope.gradient(slopes(), task(), weight_NT))

  exact_V = along(expected(rule, task(), found))
  (drawn,) = microscope.sampled(
    [rule], task(), found, slopes(), chosen, 16, minibatches
  )
  error_V = drawn.along_MV.std(0, ddof=1) / len(drawn.along_MV) ** 0.5
  gap_V = (drawn.along_MV.mean(0) - exact_V) / error_V
  assert np.abs(gap_V).max() < 4, gap_V
  # The table of mean weights gives the same means.
  np.testing.assert_allclose(
    along(drawn.weight_NT), drawn.along_MV.mean(0), rtol=1e-3, atol=1e-5
  )
