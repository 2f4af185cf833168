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

from bapo_jax.algorithms import diagnostics
from bapo_jax.learner.learner import Updated, settled
from bapo_jax.models import experts
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout.rollout import COUNT, Rollout
from bapo_jax.runtime import exchange, metrics
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.training.state import Metrics, StepRecord, Trainer, TrainState
from bapo_jax.training.submission import Sampled
from bapo_jax.types import (
  SOURCES,
  Groups,
  ReplayBuffer,
  concat,
  ended,
  masked_mean,
  response_length,
  trained_on,
)

Update = Mapping[str, Any]  # the metrics of one optimiser update
# Compare the sampler with the learner, so only the first update is meaningful.
OF_FIRST = ('rollout/logp_diff', 'rollout/logp_diff_max')
SUMS = ('learner/tokens', 'learner/tokens_computed')
STAGES = ('advantage', 'clip', 'loss', 'learner')
# Of every run: loss/reference needs a teacher or a penalty.
OF_UPDATES = (
  *OF_FIRST,
  *(n for n in GLOSSARY if n.split('/')[0] in STAGES and n != 'loss/reference'),
)


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
  """Returns a step's metrics: means over its updates, or their maximum or sum.

  `fresh` has all fresh groups of the step, extra rounds included; `s` is the state at
  the end of the step.
  """
  with t.timer('log'):
    step, groups, source_P, updates, reference_PGT = record
    new = concat(*(each.groups for each in fresh))
    learned = live(updates)
    row = of_updates(learned)
    row['learner/skipped'] = float(sum(bool(u['learner/skipped']) for u in learned))
    reevaluated = sampled.reevaluated
    again = sampled.reevaluated.groups
    eos = np.asarray(t.tokenizer.eos)
    of_step, spread = _step_metrics(
      settled(new), again, settled(groups), source_P, s.buffer, step, eos, reference_PGT
    )
    if t.spec.routes:
      of_step |= _of_routes(new, groups, source_P, t.spec)
    of_step, spread = exchange.fetched((of_step, spread))
    row |= {name: float(value) for name, value in of_step.items()}
    row |= theory(row, learned, spread)
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
  if elsewhere := t.sampler.elsewhere():
    row |= _overlap(t, s, sampled, elsewhere.ready)
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


def _overlap(
  t: Trainer, s: TrainState, sampled: Sampled, ready: int
) -> dict[str, float]:
  """Returns the times of sampling, the ready submissions and the bytes sent."""
  begin, end = (x - t.timer.began for x in sampled.span)
  actor = jax.eval_shape(t.actor, s.params)
  ready += sum(queued.ready.done() for queued in s.queue)
  return {
    'overlap/sampling': begin,
    'overlap/sampled': end,
    'overlap/ready': float(ready),
    'overlap/weights_bytes': float(_bytes(actor)),
    'overlap/groups_bytes': float(_bytes(sampled.groups)),
  }


def _bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _reward_parts(fresh: Sequence[Rollout]) -> dict[str, float]:
  """Returns the mean of every named part of the reward over the decided responses."""
  totals = collections.Counter()
  for each in fresh:
    totals.update(each.parts)
  count = totals.pop(COUNT, 0)
  return {f'{metrics.PARTS}{x}': totals[x] / count for x in sorted(totals)}


def of_updates(updates: Sequence[Update]) -> dict[str, float]:
  """Averages over updates with tokens. Without such updates: nan, token counts 0."""
  if not updates:
    return dict.fromkeys(OF_UPDATES, math.nan) | dict.fromkeys(SUMS, 0.0)
  series = {name: np.asarray([float(u[name]) for u in updates]) for name in updates[0]}
  computed = series['learner/tokens_computed'] > 0
  for name in diagnostics.OF_TOKENS if computed.any() else ():
    series[name] = series[name][computed]
  mean = {name: float(series[name].mean()) for name in sorted(series)}
  for name in {*diagnostics.OF_SOME, 'moe/agree'} & set(series):
    present = series[name][~np.isnan(series[name])]
    mean[name] = float(present.mean()) if len(present) else math.nan
  for name in series:
    if name.startswith('loss/ratio_max_'):
      mean[name] = float(np.fmax.reduce(series[name]))  # nan only if all are nan
  mean['loss/ratio_max'] = float(series['loss/ratio_max'].max())
  entropy = series['loss/entropy']
  # A change needs two updates.
  changes = np.diff(entropy) if len(entropy) > 1 else np.full(1, np.nan)
  mean['loss/entropy_change'] = float(changes.mean())
  for name in SUMS:
    mean[name] = float(series[name].sum())
  for name in OF_FIRST:  # at later updates, the weights differ from those that sampled
    mean[name] = float(series[name][0])
  if 'moe/agree' in series:
    mean['moe/agree_first'] = float(series['moe/agree'][0])
  return mean


def theory(
  row: Mapping[str, float], updates: Sequence[Update], spread: Mapping[str, float]
) -> dict[str, float]:
  """Estimates the terms of Theorem 3.2 (arXiv:2602.20722) by source, and their sum.

  The sum is of gain - 2 K TV(pi, alpha) - 2 TV(pi_t, alpha) over sources, weighted by
  their shares of the filled seats. It is no bound and may exceed the true gain, because
  total variation is measured per token. gain and TV(pi, alpha) are means over the
  step's updates. pi_t is the policy before the first update; TV(pi_t, alpha) is from
  the first update with a token of the source. `spread` has K, the mean of
  (1 - sigma) / sigma over the groups of a source. K is nan for a source without a group
  of mixed verdicts; the terms of such a source are 0.
  """
  estimates = {}
  estimate = 0.0
  for source in SOURCES:
    seen = (float(update[f'loss/tv_{source}']) for update in updates)
    at_start = next((tv for tv in seen if not math.isnan(tv)), math.nan)
    share = row[f'batch/{source}'] / max(row['batch/filled'], 1e-9)
    nothing = share == 0 or math.isnan(spread[source])
    terms = {
      f'theory/gain_{source}': row[f'loss/gain_{source}'],
      f'theory/moved_{source}': 2 * spread[source] * row[f'loss/tv_{source}'],
      f'theory/stale_{source}': 2 * at_start,
    }
    terms = {name: 0.0 if nothing else share * x for name, x in terms.items()}
    gain, moved, stale = terms.values()
    estimate += gain - moved - stale
    estimates |= terms
  return estimates | {'theory/estimate': estimate}


@jax.jit
def _step_metrics(
  fresh: Groups,
  reevaluated: Groups,
  groups: Groups,
  source_P: Array,
  buffer: ReplayBuffer,
  now: Array,
  eos: Array,
  reference_PGT: Array | None,
) -> tuple[dict[str, Array], dict[str, Array]]:
  length_PG = response_length(fresh.response_mask_PGT)
  ended_PG = ended(fresh.response_mask_PGT, jnp.isin(fresh.tokens_PGT, eos))
  right_PG = fresh.correct_PG
  filled_PG = jnp.broadcast_to(fresh.completed_step_P[:, None] >= 0, right_PG.shape)
  judged_PG = filled_PG if fresh.decided_PG is None else filled_PG & fresh.decided_PG
  wrong_PG = judged_PG & ~right_PG
  age_PGT = jnp.where(fresh.response_mask_PGT, now - fresh.policy_version_PGT, 0)
  rate_P = right_PG.mean(1, where=fresh.decided_PG)
  teaches_PG = groups.teaches_PG & (source_P >= 0)[:, None]
  trained_PGT = groups.response_mask_PGT & teaches_PG[..., None]
  old_PGT = now - groups.policy_version_PGT
  sampled = fresh.response_mask_PGT.sum() + reevaluated.response_mask_PGT.sum()
  metrics = {
    'rollout/tokens': sampled,
    'rollout/seats': (fresh.completed_step_P >= 0).mean(),
    # nan, not 0, without responses: a 0 would lower the mean over steps.
    'rollout/reward': diagnostics.mean_or_nan(fresh.reward_PG, judged_PG),
    'rollout/accuracy': diagnostics.mean_or_nan(right_PG, judged_PG),
    'rollout/length': diagnostics.mean_or_nan(length_PG, filled_PG),
    'rollout/length_right': diagnostics.mean_or_nan(length_PG, right_PG),
    'rollout/length_wrong': diagnostics.mean_or_nan(length_PG, wrong_PG),
    'rollout/truncated': diagnostics.mean_or_nan(~ended_PG, filled_PG),
    'rollout/age': masked_mean(age_PGT, fresh.response_mask_PGT),
    'rollout/age_max': age_PGT.max(),
    'batch/filled': (source_P >= 0).mean(),
    'batch/learnable': ((rate_P > 0) & (rate_P < 1)).mean(),
    'batch/age': masked_mean(old_PGT, trained_PGT),
    'buffer/hard': (buffer.hard.completed_step_P >= 0).sum(),
    'buffer/reusable': (buffer.reusable.completed_step_P >= 0).sum(),
    'buffer/hard_max_correct': buffer.thresholds.hard_max,
    'buffer/reusable_min_correct': buffer.thresholds.reusable_min,
    'buffer/reusable_max_correct': buffer.thresholds.reusable_max,
  }
  if reference_PGT is not None:
    below_PGT = groups.behavior_logp_PGT - reference_PGT
    metrics['teacher/kl'] = masked_mean(below_PGT, trained_PGT)
  for i, source in enumerate(SOURCES):
    own_PGT = trained_PGT & (source_P == i)[:, None, None]
    metrics[f'batch/{source}'] = (source_P == i).mean()
    metrics[f'batch/age_{source}'] = diagnostics.mean_or_nan(old_PGT, own_PGT)
  trained_P = trained_on(groups).any(1)
  return metrics, diagnostics.spread(groups, jnp.where(trained_P, source_P, -1))
