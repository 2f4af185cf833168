"""The record of a response."""

import dataclasses

import hypothesis
import jax
import making
import numpy as np
import pytest
import three_problems
from hypothesis import strategies as st
from three_problems import (
  ENGINE,
  GROUP,
  NEW,
  PARAMS,
  SPEC,
  WIDTH,
)

from bapo_jax import types
from bapo_jax.models import decoder
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.rollout import rollout, shapes
from bapo_jax.rollout.partial_rollouts import PartialRollouts


def sample(ids, verifier=None, params=PARAMS, **given) -> rollout.Rollout:
  """A rollout of the problems with these ids; odd responses are right."""
  actor = decoder.actor(params, SPEC)
  return three_problems.sample(
    ids, verifier or making.OddVerifier(), actor=actor, **given
  )


def arrays(groups):
  """Returns the arrays of groups, without those of a run with step rewards."""
  return {name: x for name, x in groups._asdict().items() if x is not None}


@pytest.fixture(scope='module')
def sampled():
  """Problem 2, an empty seat, problem 0; sampled at step 9 with weights of step 8."""
  return sample([2, -1, 0], step=9, policy_version=8)


def test_an_empty_seat_is_wrong_whatever_the_rule_makes_of_no_text():
  class Generous(making.OddVerifier):
    def verdict(self, text):
      return Verdict(True, 'always right', text)

  found = sample([2, -1], step=1, policy_version=0, verifier=Generous())
  rights = [verdict.right for verdict in found.verdicts]
  assert rights == [True] * GROUP + [False] * GROUP
  assert not np.asarray(found.groups.correct_PG[1]).any()


def test_no_prompts_are_a_record_of_no_rows():
  found = sample([], step=9, policy_version=8)
  assert types.agree(**arrays(found.groups)) == {'P': 0, 'G': GROUP, 'T': WIDTH + NEW}
  assert found.texts == found.verdicts == []


def carried(steps, max_num_seqs, **knobs):
  """Groups of each step under weights that change, and the rollouts at the end."""
  engine = dataclasses.replace(ENGINE, max_num_seqs=max_num_seqs)
  rollouts = PartialRollouts(engine, 2 * (knobs['max_off_policy_steps'] + 1))
  groups = []
  for step in range(steps):
    now = sample(
      [step % 3, (step + 1) % 3],
      params=making.drifted(PARAMS, step),
      step=step,
      policy_version=step,
      rollouts=rollouts,
      first_uid=step * 2 * GROUP,
      **knobs,
    )
    groups.append(jax.tree.map(np.asarray, now.groups))
  return groups, rollouts


@hypothesis.given(
  st.integers(1, NEW),
  st.integers(1, 3),
  st.sampled_from([4, 16]),
  st.sampled_from(['refresh', 'keep']),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_no_token_is_older_than_its_bound(budget, max_age, slots, cache):
  steps = 6
  knobs = {'max_tokens_per_step': float(budget), 'max_off_policy_steps': max_age}
  carried_groups, rollouts = carried(steps, slots, cache=cache, **knobs)
  returned = []
  for step, groups in enumerate(carried_groups):
    assert groups.id_P.shape == (2,)
    filled_P = groups.completed_step_P >= 0
    np.testing.assert_array_equal(filled_P, groups.id_P >= 0)
    assert (groups.completed_step_P[filled_P] == step).all()
    np.testing.assert_array_equal(
      groups.policy_version_PGT >= 0, groups.response_mask_PGT
    )
    age_PGT = np.where(groups.response_mask_PGT, step - groups.policy_version_PGT, 0)
    assert age_PGT.min() >= 0 and age_PGT.max() <= max_age
    # Within a response versions do not fall.
    for p, g in np.argwhere(groups.response_mask_PGT.any(2)):
      version_t = groups.policy_version_PGT[p, g][groups.response_mask_PGT[p, g]]
      assert (np.diff(version_t) >= 0).all()
    returned += groups.id_P[filled_P].tolist()
  # Every problem that was submitted was returned once, or is unfinished still.
  open_W = rollouts.submitted_W >= 0
  submitted = [(step + i) % 3 for step in range(steps) for i in range(2)]
  assert sorted(returned + rollouts.id_W[open_W].tolist()) == sorted(submitted)
  assert (steps - 1 - rollouts.submitted_W[open_W] < max_age).all()


def test_slow_verdicts_are_requested_while_others_are_decoded(sampled):
  verifier = making.OddVerifier(early=True)
  found = sample([2, -1, 0], step=9, policy_version=8, verifier=verifier)
  counts = [len(texts) for _, texts in verifier.submitted]
  assert counts[0] < sum(counts) == 2 * GROUP  # each response once, no empty seat
  pairs = [pair for call in verifier.submitted for pair in zip(*call, strict=True)]
  answers = ['7'] * GROUP + [''] * GROUP + ['2'] * GROUP
  own = list(zip(answers, sampled.texts, strict=True))
  assert sorted(pairs) == sorted(pair for pair in own if pair[0])
  for a, b in zip(found.groups, sampled.groups, strict=True):
    np.testing.assert_array_equal(a, b)
  assert found.verdicts == sampled.verdicts


class Formatted(making.OddVerifier):
  """Finds an answer in responses of an odd number of characters."""

  def verdict(self, text):
    return super().verdict(text)._replace(formatted=len(text) % 2 == 1)


def test_the_rewards_are_shaped_by_what_the_verifier_has_found(sampled):
  shaped = []

  def shape(groups, formatted_B):
    shaped.append(formatted_B.tolist())
    return groups._replace(reward_PG=groups.reward_PG + 1)

  at = dict(step=9, policy_version=8, verifier=Formatted(), shape=shape)
  found = sample([2, -1, 0], **at)
  assert shaped == [[len(text) % 2 == 1 for text in sampled.texts]]
  np.testing.assert_array_equal(found.groups.reward_PG, sampled.groups.reward_PG + 1)


# --- widths of prefills and segments of the cache -------------------------------------


@pytest.mark.parametrize(
  ('length', 'parts', 'expected'),
  [
    (10, 3, [4, 4, 2]),
    (10, 20, [1] * 10),
    (9217, 8, [1280] * 7 + [257]),  # whole tiles, but for the end
  ],
)
def test_segments_are_about_equal_and_fill_the_row(length, parts, expected):
  assert shapes.segment_sizes(length, parts) == expected
  assert sum(expected) == length
