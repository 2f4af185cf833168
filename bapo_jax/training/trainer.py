"""The loop: from one run to the next.

1. `Run` is all that changes, `Job` all that does not;
2. `steps` is the loop: a generator that yields the run after every learner step;
3. `describe` says what a step looked like.

Saving, logging and evaluating belong to the caller.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import diagnostics, replay_buffer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.types import SOURCES, Groups, ReplayBuffer, concat, masked_mean


class TrainState(NamedTuple):
  """All of a run's state: save it and everything is saved."""

  step: int  # learner steps done
  params: Any
  opt: Any
  actor: Any  # the weights that speak, up to refresh_every steps old
  actor_born: int  # learner step of those weights
  shelves: ReplayBuffer
  asked: int = 0  # rounds of prompts asked: one a step, and the refills
  responses: int = 0  # sampled so far, those to rechecked problems among them
  skipped: int = 0  # the last updates, one after the other, that were not finite
  flight: RolloutEngine | None = None  # responses in flight, where rollouts are partial


class Trainer(NamedTuple):
  """What a run does, none of which changes: functions with their knobs bound."""

  done: Callable  # run -> is this all?
  ask: Callable  # round -> Prompts
  again: Callable  # ids -> Prompts
  rollout: Callable  # params, prompts, key, asked=, step=, born=, flight= -> Groups
  speak: Callable  # params -> a copy laid out for decoding
  stale: Callable  # step -> is the actor due for a copy?
  recheck: Callable  # step -> number of problems to re-evaluate
  refills: int  # rounds more that a step may ask while seats are empty
  batch_rule: Callable  # fresh, recheck, shelves, now, key -> Groups, source_P
  update: Callable  # params, opt, groups, source_P, key -> params, opt, metrics
  shelve: Callable  # shelves, fresh, recheck, groups, source_P, now -> Shelves, counts
  describe: Callable  # fresh, recheck, groups, source_P, shelves, now, told -> metrics
  keys: Callable  # step -> a key for each purpose
  evaluate: Callable  # params, step -> result, samples
  spec: ModelSpec


def train_loop(job: Trainer, run: TrainState) -> Iterator[tuple[TrainState, dict]]:
  """Yields (run, metrics) after every learner step, until the job is done."""
  while not job.done(run):
    step, params, shelves = run.step, run.params, run.shelves
    fresh_key, recheck_key, fill_key, update_key = job.keys(step)
    actor, born = run.actor, run.actor_born
    if job.stale(step):
      actor, born = job.speak(params), step
    current = actor if born == step else job.speak(params)

    hard = job.again(replay_buffer.draw(shelves.hard, job.recheck(step)).id_P)
    recheck = job.rollout(
      current, hard, recheck_key, asked=run.asked, step=step, born=step
    )
    rounds, when = [], {'step': step, 'born': born, 'flight': run.flight}
    for asked in range(run.asked, run.asked + 1 + job.refills):
      prompts = job.ask(asked)
      rounds.append(job.rollout(actor, prompts, fresh_key, asked=asked, **when))
      fresh = concat(*rounds)
      groups, source_P = job.batch_rule(fresh, recheck, shelves, step, fill_key)
      if (source_P >= 0).all():
        break

    params, opt, told = job.update(params, run.opt, groups, source_P, update_key)
    shelves, moved = job.shelve(shelves, fresh, recheck, groups, source_P, step)
    skipped = consecutive_skips(run.skipped, told)
    responses = run.responses + count(fresh) + count(recheck)
    metrics = job.describe(fresh, recheck, groups, source_P, shelves, step, told)
    metrics |= moved | {'sample/responses': responses, 'sample/rounds': len(rounds)}
    kept = shelves, asked + 1, responses, skipped, run.flight
    run = TrainState(step + 1, params, opt, actor, born, *kept)
    yield run, metrics


def count(groups: Groups) -> int:
  """Responses in the groups that are not empty."""
  return int((groups.born_P >= 0).sum()) * groups.correct_PG.shape[1]


def consecutive_skips(before: int, told: list[dict]) -> int:
  """Updates skipped one after the other, up to the last of these; `before` them."""
  for one in told:
    before = before + 1 if one['learner/skipped'] else 0
  return before


def describe(
  fresh: Groups,
  recheck: Groups,
  groups: Groups,
  source_P,
  shelves: ReplayBuffer,
  now,
  told: list[dict],
  eos,
) -> dict[str, float]:
  """Metrics of one learner step: means over its updates, of a largest the largest."""
  series = {name: np.asarray([float(t[name]) for t in told]) for name in told[0]}
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
  mean['sample/mismatch'] = float(told[0]['sample/mismatch'])
  mean['sample/tokens'] = float(fresh.chosen_PGT.sum() + recheck.chosen_PGT.sum())
  looked = _step_metrics(fresh, groups, source_P, shelves, now, jnp.asarray(eos))
  mean |= {name: float(value) for name, value in looked.items()}
  return mean | theory(mean, told[0], diagnostics.spread(groups, source_P))


def theory(mean: dict, first: dict, spread: dict) -> dict[str, float]:
  """The terms of Theorem 3.2 (arXiv:2602.20722), source by source, and their sum.

  gain - 2 K TV(pi, alpha) - 2 TV(pi_t, alpha), each an estimate over sampled tokens:
  pi_t is the policy before the step's first update, so its distance is the one that the
  first minibatch sees; gain and TV(pi, alpha) are means over the step's updates.

  Args:
    mean: the step's metrics; first: those of its first update.
    spread: source -> K, the mean of (1 - sigma) / sigma over its groups.
  """
  told, bound = {}, 0.0
  for source in SOURCES:
    gain = mean[f'loss/gain_{source}']
    moved = 2 * spread[source] * mean[f'loss/tv_{source}']
    stale = 2 * float(first[f'loss/tv_{source}'])
    told[f'theory/gain_{source}'] = gain
    told[f'theory/moved_{source}'] = moved
    told[f'theory/stale_{source}'] = stale
    bound += float(np.nan_to_num(gain - moved - stale))
  return told | {'theory/bound': bound}


@jax.jit
def _step_metrics(fresh, groups, source_P, shelves, now, eos):
  length_PG = fresh.chosen_PGT.sum(2)
  ended_PG = (fresh.chosen_PGT & jnp.isin(fresh.tokens_PGT, eos)).any(2)
  right_PG = fresh.correct_PG
  there_PG = jnp.broadcast_to(fresh.born_P[:, None] >= 0, right_PG.shape)
  wrong_PG = there_PG & ~right_PG
  age_PGT = jnp.where(fresh.chosen_PGT, now - fresh.born_PGT, 0)
  rate_P = right_PG.mean(1)
  taught_PGT = groups.chosen_PGT & (source_P >= 0)[:, None, None]
  told = {
    'sample/seats': (fresh.born_P >= 0).mean(),
    'sample/reward': masked_mean(fresh.reward_PG, there_PG),
    'sample/accuracy': masked_mean(right_PG, there_PG),
    'sample/length': masked_mean(length_PG, there_PG),
    # nan, not 0, where there is none: a mean over steps must not be drawn down.
    'sample/length_right': jnp.where(right_PG, length_PG, 0).sum() / right_PG.sum(),
    'sample/length_wrong': jnp.where(wrong_PG, length_PG, 0).sum() / wrong_PG.sum(),
    'sample/truncated': masked_mean(~ended_PG, there_PG),
    'sample/age': masked_mean(age_PGT, fresh.chosen_PGT),
    'sample/age_max': age_PGT.max(),
    'batch/kept': (source_P >= 0).mean(),
    'batch/learnable': ((rate_P > 0) & (rate_P < 1)).mean(),
    'batch/age': masked_mean(now - groups.born_PGT, taught_PGT),
    'buffer/hard': (shelves.hard.born_P >= 0).sum(),
    'buffer/good': (shelves.good.born_P >= 0).sum(),
    'buffer/hard_most': shelves.band.hard,
    'buffer/good_least': shelves.band.first,
    'buffer/good_most': shelves.band.last,
  }
  for i, source in enumerate(SOURCES):
    mine_PGT = taught_PGT & (source_P == i)[:, None, None]
    age = jnp.where(mine_PGT, now - groups.born_PGT, 0).sum() / mine_PGT.sum()
    told |= {f'batch/{source}': (source_P == i).mean(), f'batch/age_{source}': age}
  return told
