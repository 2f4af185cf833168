"""Computes the metrics of one learner step from its groups, batch and updates."""

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms.diagnostics import mean_or_nan
from bapo_jax.learner.learner import Updated, settled
from bapo_jax.models import experts
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout.rollout import COUNT, Rollout
from bapo_jax.runtime import exchange, metrics
from bapo_jax.runtime.glossary import OF_UPDATES
from bapo_jax.training.state import Metrics, StepRecord, Trainer, TrainState
from bapo_jax.training.submission import Sampled
from bapo_jax.types import (
  GIVEN,
  SOURCES,
  Groups,
  ReplayBuffer,
  concat,
  ended,
  masked_mean,
  response_length,
)

Update = Mapping[str, Any]  # the metrics of one optimiser update


def live(updates: Sequence[Updated]) -> list[Update]:
  """Returns the metrics of the updates that had a token to learn from."""
  return [u.metrics for u in updates if u.metrics['learner/tokens'] > 0]


def describe(
  t: Trainer,
  s: TrainState,
  fresh: Sequence[Rollout],
  sampled: Sampled,
  record: StepRecord,
) -> Metrics:
  """Returns a step's metrics; those of its updates are reduced as the glossary says.

  `fresh` has all fresh groups of the step, extra rounds included; `s` is the state at
  the end of the step.
  """
  with t.timer('log'):
    step, groups, source_P, updates, reference_PGT = record
    new = concat(*(each.groups for each in fresh))
    row = of_updates(live(updates))
    reevaluated = sampled.reevaluated
    eos = np.asarray(t.tokenizer.eos)
    of_step = _step_metrics(
      settled(new),
      reevaluated.groups,
      settled(groups),
      source_P,
      s.buffer,
      step,
      eos,
      reference_PGT,
      cut_length=t.config.sampler.cut_length,
      given=t.config.rollout.given,
    )
    if t.spec.routes:
      of_step |= _of_routes(new, groups, source_P, t.spec)
    (of_step,) = exchange.fetched([of_step])
    row |= {name: float(value) for name, value in of_step.items()}
    rollouts = [*fresh, reevaluated]
    verdicts = sum(len(each.verdicts) for each in rollouts)
    row['rollout/undecided'] = sum(x.undecided for x in rollouts) / max(verdicts, 1)
    if t.config.rollout.environment:
      row['rollout/turns'] = float(_turns(new.response_mask_PGT))
      row['rollout/environment_failed'] = float(sum(x.failed for x in rollouts))
    row |= _reward_parts(fresh)
    diffs = [each.logp_diff for each in rollouts if each.logp_diff is not None]
    tokens = sum(int(diff.tokens) for diff in diffs)
    if diffs:
      total = sum(float(diff.total) for diff in diffs)
      row['rollout/logp_diff'] = total / tokens if tokens else math.nan
      largest = max(float(diff.largest) for diff in diffs)
      row['rollout/logp_diff_max'] = largest if tokens else math.nan
  if t.sampler.elsewhere():
    begin, end = sampled.span
    row['overlap/sampling'] = begin - t.timer.began
    row['overlap/sampled'] = end - t.timer.began
  row['learner/updates'] = float(s.updates)
  row['learner/idle_steps'] = float(s.idle_steps)
  return row


@functools.partial(jax.jit, static_argnames='spec')
def _of_routes(
  fresh: Groups, groups: Groups, source_P: Array, spec: ModelSpec
) -> dict[str, Array]:
  """Returns the metrics of recorded routes."""
  assert spec.routes
  assert fresh.routes_PGTX is not None
  assert groups.routes_PGTX is not None
  trained_PGT = groups.response_mask_PGT & (source_P >= 0)[:, None, None]
  missing_PGT = groups.routes_PGTX[:, :, :-1, 0] == spec.routes.none
  return {
    # One response of each group is enough, and a fraction of the work.
    'moe/load': experts.load(fresh.routes_PGTX[:, 0], spec),
    'moe/missing': masked_mean(missing_PGT, trained_PGT[:, :, 1:]),
  }


@jax.jit
def _turns(mask_PGT: Array) -> Array:
  """Returns the mean number of turns, runs of sampled tokens, of the responses."""
  begin_PGT = mask_PGT[..., 1:] & ~mask_PGT[..., :-1]
  return masked_mean(begin_PGT.sum(-1), mask_PGT.any(-1))


def _reward_parts(fresh: Sequence[Rollout]) -> dict[str, float]:
  """Returns the mean of every named part of the reward over the decided responses."""
  totals = collections.Counter()
  for each in fresh:
    totals.update(each.parts)
  count = totals.pop(COUNT, 0)
  return {f'{metrics.PARTS}{x}': totals[x] / count for x in sorted(totals)}


def of_updates(updates: Sequence[Update]) -> dict[str, float]:
  """Reduces the values of each metric to one, as the glossary says."""
  row = {}
  for name, metric in OF_UPDATES.items():
    of = metric.of or name
    if metric.optional and not any(of in update for update in updates):
      continue
    row[name] = float(metric.reduce(np.asarray([float(u[of]) for u in updates])))
  return row


@functools.partial(jax.jit, static_argnames=('cut_length', 'given'))
def _step_metrics(
  fresh: Groups,
  reevaluated: Groups,
  groups: Groups,
  source_P: Array,
  buffer: ReplayBuffer,
  now: Array,
  eos: Array,
  reference_PGT: Array | None,
  cut_length: int | None = None,
  given: int = 0,
) -> dict[str, Array]:
  length_PG = response_length(fresh.response_mask_PGT)
  is_end_PGT = jnp.isin(fresh.tokens_PGT, eos)
  ended_PG = ended(fresh.response_mask_PGT, is_end_PGT, cut_length)
  # Metrics of rollouts describe the policy, not given responses.
  sampled_PGT = fresh.response_mask_PGT & (fresh.policy_version_PGT != GIVEN)
  sampled_PG = ~(fresh.policy_version_PGT == GIVEN).any(2)
  right_PG = fresh.correct_PG & sampled_PG
  filled_PG = (fresh.completed_step_P[:, None] >= 0) & sampled_PG
  judged_PG = filled_PG if fresh.decided_PG is None else filled_PG & fresh.decided_PG
  wrong_PG = judged_PG & ~right_PG
  age_PGT = jnp.where(sampled_PGT, now - fresh.policy_version_PGT, 0)
  rate_P = fresh.correct_PG.mean(1, where=fresh.decided_PG)
  teaches_PG = groups.teaches_PG & (source_P >= 0)[:, None]
  trained_PGT = groups.response_mask_PGT & teaches_PG[..., None]
  trained_PGT &= groups.policy_version_PGT != GIVEN
  old_PGT = now - groups.policy_version_PGT
  sampled = sampled_PGT.sum() + reevaluated.response_mask_PGT.sum()
  metrics = {
    'rollout/tokens': sampled,
    # nan, not 0, without responses: a 0 would lower the mean over steps.
    'rollout/reward': mean_or_nan(fresh.reward_PG, judged_PG),
    'rollout/accuracy': mean_or_nan(right_PG, judged_PG),
    'rollout/length': mean_or_nan(length_PG, filled_PG),
    'rollout/length_right': mean_or_nan(length_PG, right_PG),
    'rollout/length_wrong': mean_or_nan(length_PG, wrong_PG),
    'rollout/truncated': mean_or_nan(~ended_PG, filled_PG),
    'rollout/age': masked_mean(age_PGT, sampled_PGT),
    'rollout/age_max': age_PGT.max(),
    'batch/filled': (source_P >= 0).mean(),
    'batch/learnable': ((rate_P > 0) & (rate_P < 1)).mean(),
    'batch/age': masked_mean(old_PGT, trained_PGT),
    'buffer/hard': (buffer.hard.completed_step_P >= 0).sum(),
    'buffer/reusable': (buffer.reusable.completed_step_P >= 0).sum(),
  }
  if given:
    seats = given * (fresh.completed_step_P >= 0).sum()
    metrics['given/filled'] = (~sampled_PG).sum() / seats
  if reference_PGT is not None:
    below_PGT = groups.behavior_logp_PGT - reference_PGT
    metrics['teacher/kl'] = masked_mean(below_PGT, trained_PGT)
  for i, source in enumerate(SOURCES):
    own_PGT = trained_PGT & (source_P == i)[:, None, None]
    metrics[f'batch/{source}'] = (source_P == i).mean()
    metrics[f'batch/age_{source}'] = mean_or_nan(old_PGT, own_PGT)
  return metrics
