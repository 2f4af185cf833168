"""Metrics of one learner step, from its groups, its batch and its updates.

1. `describe` makes one row: means over the updates, and the maximum of every maximum;
2. `theory` estimates the terms of Batch Adaptation PO's Theorem 3.2, by source.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import diagnostics
from bapo_jax.types import SOURCES, Groups, ReplayBuffer, masked_mean


def consecutive_skips(before: int, updates: Sequence[Mapping[str, Any]]) -> int:
  """Updates skipped in a row up to the last of these; `before`: up to their first."""
  for update in updates:
    before = before + 1 if update['learner/skipped'] else 0
  return before


def describe(
  fresh: Groups,
  reevaluated: Groups,
  groups: Groups,
  source_P: Array,
  buffer: ReplayBuffer,
  now: int,
  updates: Sequence[Mapping[str, Any]],
  eos: np.ndarray,
) -> dict[str, float]:
  """One row of metrics: means over the updates, and the maximum of every maximum.

  Args:
    fresh, reevaluated: the groups sampled in the step.
    groups, source_P: its batch, and the index into SOURCES of each group or -1.
    buffer: the replay buffer after the step.
    now: the learner step.
    updates: the metrics of each optimiser update; empty where no seat was filled.
    eos: tokens that end a response.
  """
  found = _step_metrics(fresh, groups, source_P, buffer, now, jnp.asarray(eos))
  step: dict[str, float] = {name: float(value) for name, value in found.items()}
  step['rollout/tokens'] = float(
    fresh.response_mask_PGT.sum() + reevaluated.response_mask_PGT.sum()
  )
  if not updates:  # no seat was filled: their metrics do not exist
    return step
  series = {name: np.asarray([float(u[name]) for u in updates]) for name in updates[0]}
  mean = {name: float(series[name].mean()) for name in sorted(series)}
  for name in diagnostics.OF_SOME & set(series):
    present = series[name][~np.isnan(series[name])]
    mean[name] = float(present.mean()) if len(present) else float('nan')
  for name in series:
    if name.startswith('loss/ratio_max'):
      mean[name] = float(np.fmax.reduce(series[name]))  # nan only where all are
  mean['loss/ratio_max'] = float(series['loss/ratio_max'].max())
  entropy = series['loss/entropy']
  # A change takes two updates to see.
  changes = np.diff(entropy) if len(entropy) > 1 else np.full(1, np.nan)
  mean['loss/entropy_change'] = float(changes.mean())
  mean['learner/skipped'] = float(series['learner/skipped'].sum())
  mean['rollout/logp_diff'] = float(updates[0]['rollout/logp_diff'])
  terms = theory(mean, updates[0], diagnostics.spread(groups, source_P))
  return mean | step | terms


def theory(
  mean: Mapping[str, float], first: Mapping[str, Any], spread: Mapping[str, float]
) -> dict[str, float]:
  """The terms of Theorem 3.2 (arXiv:2602.20722), source by source, and their sum.

  gain - 2 K TV(pi, alpha) - 2 TV(pi_t, alpha), each an estimate over sampled tokens:
  pi_t is the policy before the step's first update, so its distance is the one that the
  first minibatch sees; gain and TV(pi, alpha) are means over the step's updates.

  Args:
    mean: the metrics of the step.
    first: the metrics of its first update.
    spread: source -> K, the mean of (1 - sigma) / sigma over its groups.
  """
  terms, bound = {}, 0.0
  for source in SOURCES:
    gain = mean[f'loss/gain_{source}']
    moved = 2 * spread[source] * mean[f'loss/tv_{source}']
    stale = 2 * float(first[f'loss/tv_{source}'])
    terms[f'theory/gain_{source}'] = gain
    terms[f'theory/moved_{source}'] = moved
    terms[f'theory/stale_{source}'] = stale
    bound += float(np.nan_to_num(gain - moved - stale))
  return terms | {'theory/bound': bound}


@jax.jit
def _step_metrics(
  fresh: Groups,
  groups: Groups,
  source_P: Array,
  buffer: ReplayBuffer,
  now: Array,
  eos: Array,
) -> dict[str, Array]:
  length_PG = fresh.response_mask_PGT.sum(2)
  ended_PG = (fresh.response_mask_PGT & jnp.isin(fresh.tokens_PGT, eos)).any(2)
  right_PG = fresh.correct_PG
  filled_PG = jnp.broadcast_to(fresh.completed_step_P[:, None] >= 0, right_PG.shape)
  wrong_PG = filled_PG & ~right_PG
  age_PGT = jnp.where(fresh.response_mask_PGT, now - fresh.policy_version_PGT, 0)
  rate_P = right_PG.mean(1)
  trained_PGT = groups.response_mask_PGT & (source_P >= 0)[:, None, None]
  metrics = {
    'rollout/seats': (fresh.completed_step_P >= 0).mean(),
    'rollout/reward': masked_mean(fresh.reward_PG, filled_PG),
    'rollout/accuracy': masked_mean(right_PG, filled_PG),
    'rollout/length': masked_mean(length_PG, filled_PG),
    # nan, not 0, of none: a mean over steps must not be drawn down.
    'rollout/length_right': jnp.where(right_PG, length_PG, 0).sum() / right_PG.sum(),
    'rollout/length_wrong': jnp.where(wrong_PG, length_PG, 0).sum() / wrong_PG.sum(),
    'rollout/truncated': masked_mean(~ended_PG, filled_PG),
    'rollout/age': masked_mean(age_PGT, fresh.response_mask_PGT),
    'rollout/age_max': age_PGT.max(),
    'batch/filled': (source_P >= 0).mean(),
    'batch/learnable': ((rate_P > 0) & (rate_P < 1)).mean(),
    'batch/age': masked_mean(now - groups.policy_version_PGT, trained_PGT),
    'buffer/hard': (buffer.hard.completed_step_P >= 0).sum(),
    'buffer/reusable': (buffer.reusable.completed_step_P >= 0).sum(),
    'buffer/hard_max_correct': buffer.thresholds.hard_max,
    'buffer/reusable_min_correct': buffer.thresholds.reusable_min,
    'buffer/reusable_max_correct': buffer.thresholds.reusable_max,
  }
  for i, source in enumerate(SOURCES):
    own_PGT = trained_PGT & (source_P == i)[:, None, None]
    age = jnp.where(own_PGT, now - groups.policy_version_PGT, 0).sum() / own_PGT.sum()
    metrics |= {f'batch/{source}': (source_P == i).mean(), f'batch/age_{source}': age}
  return metrics
