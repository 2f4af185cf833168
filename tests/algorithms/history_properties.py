"""The properties of a history, each a function (scene, history) that asserts it:

- the batch has its seats; groups are whole, as their source has them
- problems and groups are unique in a batch
- only groups of both verdicts teach, and only those with an advantage
- re-evaluated groups were hard, and are of this step and its weights
- reused groups are those stored, and those sampled
- reused groups are reusable or were promoted without a seat, 1 to max_off_policy_steps
  steps old, reused max_reuse times at most
- no token is older than max_off_policy_steps + v - 1 steps
- no seat is empty that a candidate could have
- the batch is one that the lists allow
- the buffer equals the lists, within its capacity
- the thresholds equal the fractions
- the counts equal those of the lists, and no problem is lost: in = out + resident
"""

import collections

import making
import numpy as np
from histories import FRESH, REEVALUATED, REUSED, T, has_advantage

from bapo_jax import types


def groups_are_whole(scene, history):
  for step in history:
    types.agree(**step.groups._asdict(), source_P=step.source_P)
    assert step.groups.tokens_PGT.shape == (scene.P, scene.G, T)
    found = (step.fresh, step.reevaluated, step.before.reusable)
    for seat in step.seats():
      rows = found[step.source_P[seat]]
      assert any(
        making.same_row(step.groups, seat, rows, row) for row in range(len(rows.id_P))
      )


def problems_and_groups_are_unique(scene, history):
  for step in history:
    ids = step.groups.id_P[step.seats()].tolist()
    assert len(set(ids)) == len(ids)
    payloads = [step.groups.behavior_logp_PGT[seat].tobytes() for seat in step.seats()]
    assert len(set(payloads)) == len(payloads)


def only_groups_of_both_verdicts_teach(scene, history):
  for step in history:
    k = step.groups.correct_PG[step.seats()].sum(1)
    assert ((k > 0) & (k < scene.G)).all()
    assert all(has_advantage(step.groups, seat) for seat in step.seats())


def reevaluated_groups_were_hard_and_are_of_this_step(scene, history):
  for step in history:
    hard = set(step.before.hard.id_P[step.before.hard.completed_step_P >= 0].tolist())
    hard_k, _ = history[step.now - 1].lists.thresholds if step.now else (set(), 0)
    for seat in step.seats(REEVALUATED):
      assert int(step.groups.id_P[seat]) in hard
      assert int(step.groups.correct_PG[seat].sum()) not in hard_k
      mask_GT = step.groups.response_mask_PGT[seat]
      assert (step.groups.policy_version_PGT[seat][mask_GT] == step.now).all()
      assert step.groups.completed_step_P[seat] == step.now


def reused_groups_are_those_stored_and_sampled(scene, history):
  for step in history:
    for seat in step.seats(REUSED):
      i, completed = step.groups.id_P[seat], step.groups.completed_step_P[seat]
      reusable = step.before.reusable
      (stored,) = np.flatnonzero(
        (reusable.id_P == i) & (reusable.completed_step_P == completed)
      )
      assert making.same_row(step.groups, seat, reusable, stored)
      then = history[completed]
      assert any(
        making.same_row(step.groups, seat, rows, row)
        for rows in (then.fresh, then.reevaluated)
        for row in np.flatnonzero(rows.id_P == i)
      )


def reused_groups_are_reusable_and_neither_old_nor_used_up(scene, history):
  used = collections.Counter()
  for step in history:
    for seat in step.seats(REUSED):
      _, reusable_k = history[step.now - 1].lists.thresholds
      i = int(step.groups.id_P[seat])
      completed = int(step.groups.completed_step_P[seat])
      first = history[completed]
      # Promoted, and in no batch of that step: its first use is not a second one.
      waited = i in first.reevaluated.id_P and i not in first.groups.id_P[first.seats()]
      k = int(step.groups.correct_PG[seat].sum())
      assert k in reusable_k or (waited and not used[i, completed])
      assert 1 <= step.now - completed <= scene.max_off_policy_steps
      used[i, completed] += 1
      assert used[i, completed] <= scene.max_reuse + waited


def no_token_is_older_than_its_group_and_the_actors_lag(scene, history):
  for step in history:
    teach_PGT = step.groups.response_mask_PGT & (step.source_P >= 0)[:, None, None]
    lag_n = step.now - step.groups.policy_version_PGT[teach_PGT]
    assert (lag_n >= 0).all()
    assert (lag_n <= scene.max_off_policy_steps + scene.v - 1).all()


def no_seat_is_empty_that_could_be_filled(scene, history):
  for step in history:
    assert len(step.seats()) == min(scene.P, sum(map(len, step.tiers)))


def the_batch_is_allowed(scene, history):
  for step in history:
    source_P = step.source_P[step.seats()]
    assert (np.diff(source_P) >= 0).all() and (
      step.source_P[len(source_P) :] == -1
    ).all()
    sure = [(FRESH, t) for t in step.tiers[0]]
    sure += [(REEVALUATED, t) for t in step.tiers[1]]
    for seat, (source, t) in zip(step.seats(), sure, strict=False):
      assert step.source_P[seat] == source
      assert making.same_row(step.groups, seat, *t.row)
    drawn = [int(i) for i in step.groups.id_P[step.seats(REUSED)]]
    assert set(drawn) <= {t.problem for t in step.tiers[2]}


def the_buffer_equals_the_lists(scene, history):
  for step in history:
    hard, reusable = step.after.hard, step.after.reusable
    assert hard.id_P.shape == reusable.id_P.shape == (scene.capacity,)
    live = np.flatnonzero(hard.completed_step_P >= 0)
    stored = [(int(hard.id_P[row]), int(hard.completed_step_P[row])) for row in live]
    assert stored == step.lists.hard and len(stored) <= scene.capacity
    rows = np.flatnonzero(reusable.completed_step_P >= 0)
    used = [int(step.after.usage_count_P[row]) for row in rows]
    assert used == [used for _, used in step.lists.reusable]
    for row, (t, _) in zip(rows, step.lists.reusable, strict=True):
      assert making.same_row(reusable, row, *t.row)


def the_thresholds_equal_the_fractions(scene, history):
  for step in history:
    hard_k, reusable_k = step.lists.thresholds
    hard, first, last = map(int, step.after.thresholds)
    assert hard_k == set(range(hard + 1))
    assert reusable_k == set(range(first, last + 1))
    assert step.after.num_correct == step.lists.num_correct
    assert step.after.num_responses == step.lists.num_responses


def the_counts_equal_the_lists_and_no_problem_is_lost(scene, history):
  total = collections.Counter()
  for step in history:
    for name in ('entered', 'graduated', 'promoted', 'progressed', 'evicted'):
      assert step.counts[f'buffer/{name}'] == step.expected[name], name
      total[name] += int(step.counts[f'buffer/{name}'])
    left = sum(n for name, n in total.items() if name != 'entered')
    assert total['entered'] == left + (step.after.hard.completed_step_P >= 0).sum()


PROPERTIES = (
  groups_are_whole,
  problems_and_groups_are_unique,
  only_groups_of_both_verdicts_teach,
  reevaluated_groups_were_hard_and_are_of_this_step,
  reused_groups_are_those_stored_and_sampled,
  reused_groups_are_reusable_and_neither_old_nor_used_up,
  no_token_is_older_than_its_group_and_the_actors_lag,
  no_seat_is_empty_that_could_be_filled,
  the_batch_is_allowed,
  the_buffer_equals_the_lists,
  the_thresholds_equal_the_fractions,
  the_counts_equal_the_lists_and_no_problem_is_lost,
)
