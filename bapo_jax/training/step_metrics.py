"""What a learner step looked like, from its groups, its batch and its updates.

1. `describe` makes one row of metrics: means over the updates, of a largest the largest;
2. `theory` estimates the terms of Batch Adaptation PO's Theorem 3.2, by source.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import diagnostics
from bapo_jax.types import SOURCES, Groups, ReplayBuffer, masked_mean


def consecutive_skips(before: int, updates: list[dict]) -> int:
  """Updates skipped one after the other, up to the last of these; `before` them."""
  for one in updates:
    before = before + 1 if one['learner/skipped'] else 0
  return before


def describe(
  fresh: Groups,
  reevaluated: Groups,
  groups: Groups,
  source_P,
  buffer: ReplayBuffer,
  now,
  updates: list[dict],
  eos,
) -> dict[str, float]:
  """Metrics of one learner step: means over its updates, of a largest the largest."""
  series = {name: np.asarray([float(u[name]) for u in updates]) for name in updates[0]}
  mean = {name: float(series[name].mean()) for name in sorted(series)}
  for name in diagnostics.OF_SOME & set(series):
    there = series[name][~np.isnan(series[name])]
    mean[name] = float(there.mean()) if len(there) else float('nan')
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
  mean['rollout/tokens'] = float(
    fresh.response_mask_PGT.sum() + reevaluated.response_mask_PGT.sum()
  )
  found = _step_metrics(fresh, groups, source_P, buffer, now, jnp.asarray(eos))
  mean |= {name: float(value) for name, value in found.items()}
  return mean | theory(mean, updates[0], diagnostics.spread(groups, source_P))


def theory(mean: dict, first: dict, spread: dict) -> dict[str, float]:
  """The terms of Theorem 3.2 (arXiv:2602.20722), source by source, and their sum.

  gain - 2 K TV(pi, alpha) - 2 TV(pi_t, alpha), each an estimate over sampled tokens:
  pi_t is the policy before the step's first update, so its distance is the one that the
  first minibatch sees; gain and TV(pi, alpha) are means over the step's updates.

  Args:
    mean: the step's metrics; first: those of its first update.
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
def _step_metrics(fresh, groups, source_P, buffer, now, eos):
  length_PG = fresh.response_mask_PGT.sum(2)
  ended_PG = (fresh.response_mask_PGT & jnp.isin(fresh.tokens_PGT, eos)).any(2)
  right_PG = fresh.correct_PG
  there_PG = jnp.broadcast_to(fresh.completed_step_P[:, None] >= 0, right_PG.shape)
  wrong_PG = there_PG & ~right_PG
  age_PGT = jnp.where(fresh.response_mask_PGT, now - fresh.policy_version_PGT, 0)
  rate_P = right_PG.mean(1)
  taught_PGT = groups.response_mask_PGT & (source_P >= 0)[:, None, None]
  metrics = {
    'rollout/seats': (fresh.completed_step_P >= 0).mean(),
    'rollout/reward': masked_mean(fresh.reward_PG, there_PG),
    'rollout/accuracy': masked_mean(right_PG, there_PG),
    'rollout/length': masked_mean(length_PG, there_PG),
    # nan, not 0, where there is none: a mean over steps must not be drawn down.
    'rollout/length_right': jnp.where(right_PG, length_PG, 0).sum() / right_PG.sum(),
    'rollout/length_wrong': jnp.where(wrong_PG, length_PG, 0).sum() / wrong_PG.sum(),
    'rollout/truncated': masked_mean(~ended_PG, there_PG),
    'rollout/age': masked_mean(age_PGT, fresh.response_mask_PGT),
    'rollout/age_max': age_PGT.max(),
    'batch/filled': (source_P >= 0).mean(),
    'batch/learnable': ((rate_P > 0) & (rate_P < 1)).mean(),
    'batch/age': masked_mean(now - groups.policy_version_PGT, taught_PGT),
    'buffer/hard': (buffer.hard.completed_step_P >= 0).sum(),
    'buffer/reusable': (buffer.reusable.completed_step_P >= 0).sum(),
    'buffer/hard_max_correct': buffer.thresholds.hard_max,
    'buffer/reusable_min_correct': buffer.thresholds.reusable_min,
    'buffer/reusable_max_correct': buffer.thresholds.reusable_max,
  }
  for i, source in enumerate(SOURCES):
    mine_PGT = taught_PGT & (source_P == i)[:, None, None]
    age = jnp.where(mine_PGT, now - groups.policy_version_PGT, 0).sum() / mine_PGT.sum()
    metrics |= {f'batch/{source}': (source_P == i).mean(), f'batch/age_{source}': age}
  return metrics
