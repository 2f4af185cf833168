"""Sampler and learner in bfloat16: ratios of two programs, and of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax.algorithms import advantage, clip
from bapo_jax.learner import learner, scoring
from bapo_jax.types import Groups

P = 8
G = 8
T = 24
SPEC = dataclasses.replace(making.SPEC, compute='bfloat16')


@pytest.fixture(scope='module')
def params():
  return making.params(SPEC)


@pytest.fixture(scope='module')
def sampled(params) -> Groups:
  """Groups that these weights sampled, as learner step 5."""
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  right = np.random.default_rng(0).integers(1, G, P)
  return making.sampled(half, SPEC, P, G, T, right)


score = functools.partial(scoring.score, rows=P * G, spec=SPEC, temperature=1.0)


def first_update(params, groups: Groups) -> dict:
  """Metrics of GSPO with the paper's bounds (arXiv:2507.18071, section 5.1)."""
  rule = clip.Fixed(low=0.9997, high=1.0004)
  knobs = {'spec': SPEC, 'temperature': 1.0, 'aggregate': 'sequence'}
  objective = making.objective(rule, 'sequence', **knobs)
  tx = making.adamw(lr=1e-3)
  batch = learner.flatten(
    groups, jnp.zeros(P, jnp.int32), advantage.GroupRelative(), version=5
  )
  step = jax.jit(functools.partial(learner.learn, tx=tx, objective=objective))
  return {k: float(v) for k, v in step(params, tx.init(params), batch)[2].items()}


def test_gspo_in_bfloat16_starts_at_ratio_one_where_the_learner_recomputes(
  params, sampled
):
  ours, diff = jax.jit(functools.partial(scoring.recompute, score=score))(
    params, sampled, 5
  )
  before, after = (first_update(params, groups) for groups in (sampled, ours))
  print(f'cut {before["clip/fraction"]:.3f} and {after["clip/fraction"]:.3f}')
  assert before['clip/fraction'] > 0.2
  assert after['clip/fraction'] < 0.01 and after['rollout/logp_diff_max'] < 1e-4
  # Both ways of measuring the difference agree on a batch of one minibatch.
  assert int(diff.tokens) == sampled.response_mask_PGT.sum()
  mean = float(diff.total) / int(diff.tokens)
  assert before['rollout/logp_diff'] == pytest.approx(mean, rel=1e-3)
  assert before['rollout/logp_diff_max'] == pytest.approx(float(diff.largest), rel=1e-3)


def test_tokens_of_other_weights_are_left_alone(params, sampled):
  half_T = jnp.arange(T) < T // 2
  version_PGT = jnp.broadcast_to(jnp.where(half_T, 4, 5), (P, G, T))
  groups = sampled._replace(policy_version_PGT=version_PGT)
  new, diff = scoring.recompute(params, groups, 5, score=score)
  own_PGT = np.asarray(groups.response_mask_PGT & (version_PGT == 5))
  assert int(diff.tokens) == own_PGT.sum() > 0
  old_PGT, new_PGT = (np.asarray(g.behavior_logp_PGT) for g in (groups, new))
  np.testing.assert_array_equal(new_PGT[~own_PGT], old_PGT[~own_PGT])
  np.testing.assert_array_equal(new_PGT[own_PGT], score(params, groups)[own_PGT])
  assert (new_PGT != old_PGT)[own_PGT].mean() > 0.2


@pytest.mark.parametrize('rows', [3, 100])
def test_rows_are_scored_a_few_at_a_time_whatever_divides(params, sampled, rows):
  small = jax.tree.map(lambda x: x[:2], sampled)
  knobs = dict(spec=making.SPEC, temperature=1.0)
  found = scoring.score(params, small, rows=rows, **knobs)
  whole = scoring.score(params, small, rows=2 * G, **knobs)
  # Of logits that add up the widths of two layers.
  making.close(found, whole, count=1024)
