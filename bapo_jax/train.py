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

from bapo_jax import buffer, diagnostics
from bapo_jax.flight import Flight
from bapo_jax.model import ModelSpec
from bapo_jax.types import SOURCES, Groups, Shelves, concat, masked_mean


class Run(NamedTuple):
  """All of a run's state: save it and everything is saved."""

  step: int  # learner steps done
  params: Any
  opt: Any
  actor: Any  # the weights that speak, up to refresh_every steps old
  actor_born: int  # learner step of those weights
  shelves: Shelves
  asked: int = 0  # rounds of prompts asked so far
  responses: int = 0  # sampled so far, those to rechecked problems among them
  flight: Flight | None = None  # responses in flight, where rollouts are partial


class Job(NamedTuple):
  """What a run does, none of which changes: functions with their knobs bound."""

  done: Callable  # run -> is this all?
  ask: Callable  # round -> Prompts
  again: Callable  # ids -> Prompts
  rollout: Callable  # params, prompts, key, asked=, step=, born=, flight= -> Groups
  speak: Callable  # params -> a copy laid out for decoding
  stale: Callable  # step -> is the actor due for a copy?
  recheck: Callable  # step -> number of problems to re-evaluate
  batch_rule: Callable  # fresh, recheck, good, now, key -> Groups, source_P
  update: Callable  # params, opt, groups, source_P, key -> params, opt, metrics
  shelve: Callable  # shelves, tried, now -> Shelves
  describe: Callable  # fresh, recheck, groups, source_P, shelves, now, told -> metrics
  keys: Callable  # step -> a key for each purpose
  evaluate: Callable  # params, step -> result, samples
  spec: ModelSpec


def steps(job: Job, run: Run) -> Iterator[tuple[Run, dict]]:
  """Yields (run, metrics) after every learner step, until the job is done."""
  while not job.done(run):
    step, params, opt, actor, actor_born, shelves, asked, responses, flight = run
    fresh_key, recheck_key, fill_key, update_key = job.keys(step)
    if job.stale(step):
      actor, actor_born = job.speak(params), step
    fresh = job.rollout(
      actor,
      job.ask(asked),
      fresh_key,
      asked=asked,
      step=step,
      born=actor_born,
      flight=flight,
    )
    hard = buffer.draw(shelves.hard, job.recheck(step))
    current = actor if actor_born == step else job.speak(params)
    recheck = job.rollout(
      current, job.again(hard.id_P), recheck_key, asked=asked, step=step, born=step
    )
    groups, source_P = job.batch_rule(fresh, recheck, shelves.good, step, fill_key)
    params, opt, told = job.update(params, opt, groups, source_P, update_key)
    shelves = job.shelve(shelves, concat(fresh, recheck), step)
    responses += count(fresh) + count(recheck)
    metrics = job.describe(fresh, recheck, groups, source_P, shelves, step, told)
    run = Run(
      step + 1,
      params,
      opt,
      actor,
      actor_born,
      shelves,
      asked + 1,
      responses,
      flight,
    )
    yield run, metrics | {'sample/responses': float(responses)}


def count(groups: Groups) -> int:
  """Responses in the groups that are not empty."""
  return int((groups.born_P >= 0).sum()) * groups.correct_PG.shape[1]


def describe(
  fresh: Groups,
  recheck: Groups,
  groups: Groups,
  source_P,
  shelves: Shelves,
  now,
  told: list[dict],
  eos,
) -> dict[str, float]:
  """Metrics of one learner step: means over its updates, `ratio_max` the largest."""
  series = {name: np.asarray([float(t[name]) for t in told]) for name in told[0]}
  mean = {name: float(series[name].mean()) for name in sorted(series)}
  for name in diagnostics.OF_SOME & set(series):
    there = series[name][~np.isnan(series[name])]
    mean[name] = float(there.mean()) if len(there) else float('nan')
  mean['loss/ratio_max'] = float(series['loss/ratio_max'].max())
  entropy = series['loss/entropy']
  # A change takes two updates to see.
  changes = np.diff(entropy) if len(entropy) > 1 else np.full(1, np.nan)
  mean['loss/entropy_change'] = float(changes.mean())
  mean['sample/mismatch'] = float(told[0]['sample/mismatch'])
  mean['sample/tokens'] = float(fresh.chosen_PGT.sum() + recheck.chosen_PGT.sum())
  looked = _look(fresh, groups, source_P, shelves, now, jnp.asarray(eos))
  return mean | {name: float(value) for name, value in looked.items()}


@jax.jit
def _look(fresh, groups, source_P, shelves, now, eos):
  length_PG = fresh.chosen_PGT.sum(2)
  ended_PG = (fresh.chosen_PGT & jnp.isin(fresh.tokens_PGT, eos)).any(2)
  right_PG = fresh.correct_PG
  there_PG = jnp.broadcast_to(fresh.born_P[:, None] >= 0, right_PG.shape)
  wrong_PG = there_PG & ~right_PG
  age_PGT = jnp.where(fresh.chosen_PGT, now - fresh.born_PGT, 0)
  rate_P = right_PG.mean(1)
  taught_PGT = groups.chosen_PGT & (source_P >= 0)[:, None, None]
  return {
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
    'batch/rechecked': (source_P == SOURCES.index('rechecked')).mean(),
    'batch/reused': (source_P == SOURCES.index('reused')).mean(),
    'buffer/hard': (shelves.hard.born_P >= 0).sum(),
    'buffer/good': (shelves.good.born_P >= 0).sum(),
  }
