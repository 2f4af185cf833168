"""Runs the training loop, from one state to the next.

The functions below `train_loop` are in the order of its calls. The caller saves, logs
and evaluates.
"""

import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax import Array

from bapo_jax import sharding
from bapo_jax.algorithms import replay_buffer
from bapo_jax.data import prompt_rules
from bapo_jax.learner import learner
from bapo_jax.rollout.rollout import Rollout
from bapo_jax.runtime import exchange, machine
from bapo_jax.training.state import Metrics, StepRecord, Trainer, TrainState
from bapo_jax.training.step_metrics import describe, live
from bapo_jax.training.submission import (
  NO_IDS,
  Actor,
  InFlight,
  Round,
  Sampled,
  StepKeys,
  step_keys,
)
from bapo_jax.types import BatchFunction, Groups, ReplayBuffer, concat


def train_loop(
  t: Trainer, s: TrainState
) -> Iterator[tuple[TrainState, Metrics, StepRecord]]:
  """Yields (state, metrics, record) after every learner step, until the run is done."""
  while not finished(t, s):
    keys = step_keys(t.config.seed, s.step)
    s = sync_actor_if_due(t, s)
    s, sampled = sample(t, s)
    s, fresh, batch, source_P = fill_batch(t, s, sampled, keys)
    s = free_actor_if_due(t, s)
    s, record = update(t, s, batch, source_P, keys.update)
    s, moves = insert(t, s, fresh, sampled.reevaluated, batch, source_P)
    metrics = describe(t, s, fresh, sampled, record)
    s = s.replace(step=s.step + 1)
    yield s, metrics | moves, record


def finished(t: Trainer, s: TrainState) -> bool:
  """Returns whether the run has reached its last step or its limit on responses."""
  return s.step >= t.config.steps or s.responses >= t.config.responses


def sync_actor_if_due(t: Trainer, s: TrainState) -> TrainState:
  """Copies the weights to the actor every `rollout.weight_sync_interval` steps.

  Recorded rollouts need no actor.
  """
  if t.config.rollout.records or s.step % t.config.rollout.weight_sync_interval:
    return s
  s = free_actor(t, s)  # two actors at once would be the peak of a run's memory
  actor = t.sampler.place(t.actor(s.params))
  adapters = t.adapters(s.params)
  return s.replace(actor=actor, actor_adapters=adapters, actor_version=s.step)


def free_actor_if_due(t: Trainer, s: TrainState) -> TrainState:
  """Frees the actor's memory for updates if the next step copies the actor again."""
  due = (s.step + 1) % t.config.rollout.weight_sync_interval == 0
  return free_actor(t, s) if due else s


def free_actor(t: Trainer, s: TrainState) -> TrainState:
  """Forgets the actor, and frees its memory unless a submission still needs it."""
  if s.actor is not None and all(queued.ready.done() for queued in s.queue):
    for x in jax.tree.leaves(s.actor):
      x.delete()  # even if another variable refers to it
    machine.trim()  # returns a CPU's freed memory from the C library to the system
  return s.replace(actor=None)


def sample(t: Trainer, s: TrainState) -> tuple[TrainState, Sampled]:
  """Submits the prompts of step s.step + rollout.depth; returns this step's groups.

  The first call of a run also submits the prompts of the steps before, so from then on
  `rollout.depth` later steps are in flight. Which weights sample which prompts depends
  on the step alone, never on time: the results equal those of sampling at submission.
  """
  for step in range(s.step + len(s.queue), s.step + t.config.rollout.depth + 1):
    s, prompts = next_round(t, s, hard_problems(t, s, step))
    actor = actor_of(t, s)
    if len(prompts.hard_P) and actor.version != s.step:
      actor = actor._replace(newest=newest(t, s))
    groups = t.sampler.submit(prompts, actor, step)
    s = s.replace(queue=(*s.queue, InFlight(prompts.hard_P, groups)))
  return s.replace(queue=s.queue[1:]), s.queue[0].ready.result()


def next_round(
  t: Trainer, s: TrainState, hard_P: np.ndarray = NO_IDS
) -> tuple[TrainState, Round]:
  """Chooses the prompts of the next round, which also re-evaluates `hard_P`.

  The rule reads what is known at this point of the program: with a depth, or in an
  extra round, without the verdicts on groups in flight, which the history counts as
  waiting. Recorded rollouts have prompts of their own.
  """
  number = s.prompt_round
  s = s.replace(prompt_round=number + 1)
  if t.config.rollout.records:
    return s, Round(number)
  rule = t.config.prompts
  history = prompt_rules.submitted(s.history, hard_P)
  id_P = prompt_rules.choose(rule, history, (t.config.seed, number))
  if rule.reads_history:
    s = s.replace(history=prompt_rules.submitted(history, id_P))
  return s, Round(number, id_P, hard_P)


def actor_of(t: Trainer, s: TrainState) -> Actor:
  """Returns the weights that sample fresh groups.

  With a depth, `Actor.learners` is None: the learner changes its weights while the
  groups are in flight, and log-probabilities are recomputed with the actor's weights.
  """
  learners = None
  if not t.config.rollout.depth:
    if s.actor_version == s.step:
      learners = t.weights(s.params)
    elif s.actor_adapters is not None:
      learners = t.weights(s.actor_adapters)
  return Actor(s.actor, s.actor_version, learners)


def newest(t: Trainer, s: TrainState) -> Actor:
  """Returns the learner's weights as an actor, if the actor of the state is older."""
  learners = None if t.config.rollout.depth else t.weights(s.params)
  return Actor(t.sampler.place(t.actor(s.params)), s.step, learners)


def hard_problems(t: Trainer, s: TrainState, step: int) -> np.ndarray:
  """Returns ids of the hard problems due at `step`, least recently tried first.

  A problem that is in flight is not drawn again. An empty seat has id -1.
  """
  rows = hard_rows(t, step)
  if not rows:
    return NO_IDS
  in_flight = [i for each in s.queue for i in each.hard_P]
  id_P = exchange.whole(replay_buffer.draw(s.buffer.hard, rows + len(in_flight)).id_P)
  id_P = id_P[(id_P < 0) | ~np.isin(id_P, in_flight)][:rows]
  return np.pad(id_P, (0, rows - len(id_P)), constant_values=-1)


def hard_rows(t: Trainer, step: int) -> int:
  """Returns the seats for hard problems at `step`; 0 if none are due."""
  k = t.config.buffer
  due = step % k.reeval_interval == 0 and t.config.batch.reevaluates
  return min(k.reevaluate, k.capacity) if due else 0


@functools.partial(jax.jit, static_argnames=('rule', 'seats'))
def select(
  rule: BatchFunction,
  fresh: Groups,
  reevaluated: Groups,
  buffer: ReplayBuffer,
  now: int | Array,
  key: Array,
  seats: int,
) -> tuple[Groups, Array]:
  """Applies a batch rule, as one program."""
  return rule(fresh, reevaluated, buffer, now, key, seats)


def fill_batch(
  t: Trainer, s: TrainState, sampled: Sampled, keys: StepKeys
) -> tuple[TrainState, list[Rollout], Groups, Array]:
  """Samples more rounds of prompts until the batch is full or the rounds are spent.

  Returns due groups in this step even if no seat is left for them: one step later they
  would be older than rollout.max_off_policy_steps allows.
  Returns (state, fresh rollouts, groups of the batch, their source_P).
  """
  rounds = [sampled.fresh]
  extra = t.config.batch.extra_rounds
  end = s.prompt_round + extra
  while True:
    with t.timer('batch'):
      fresh = concat(*(each.groups for each in rounds))
      reevaluated = sampled.reevaluated.groups
      filled = select(
        t.config.batch,
        fresh,
        reevaluated,
        s.buffer,
        s.step,
        keys.batch,
        t.config.seats,
      )
      filled = sharding.split_rows(filled, t.mesh)
      batch, source_P = jax.block_until_ready(filled)
    if not (exchange.whole(source_P) >= 0).all() and s.prompt_round < end:
      s, prompts = next_round(t, s)
      more = t.sampler.submit(prompts, actor_of(t, s), s.step)
      rounds.append(more.result().fresh)
    elif extra and (due := t.sampler.remaining(actor_of(t, s), s.step)):
      rounds.append(due)
    else:
      return s, rounds, batch, source_P


def update(
  t: Trainer, s: TrainState, batch: Groups, source_P: Array, key: Array
) -> tuple[TrainState, StepRecord]:
  """Runs all optimiser updates of the step."""
  reference_PGT = t.referred(batch)
  rules = learner.Rules(
    train_step=t.train_step,
    epochs=t.config.learner.epochs,
    minibatches=t.config.learner.minibatches,
    proximal=t.proximal,
    unsampled=t.config.unsampled,
    place=lambda batch: sharding.split_rows(batch, t.mesh),
    **t.config.credit,
  )
  with t.timer('update'):
    params, opt, updates = jax.block_until_ready(
      learner.update(
        s.params,
        s.opt,
        batch,
        source_P,
        key,
        rules,
        pictures=t.seen(batch),
        version=s.step,
        number=s.step * t.config.updates_per_step,
        reference_PGT=reference_PGT,
      )
    )
  learned = live(updates)
  skips = s.consecutive_skips
  for metrics in learned:
    skips = skips + 1 if metrics['learner/skipped'] else 0
  # nan without a token with an advantage, for instance if all rewards are equal.
  idle = all(math.isnan(metrics['advantage/positive']) for metrics in learned)
  s = s.replace(
    params=params,
    opt=opt,
    updates=s.updates + sum(not metrics['learner/skipped'] for metrics in learned),
    consecutive_skips=skips,
    idle_steps=s.idle_steps + 1 if idle else 0,
  )
  return s, StepRecord(s.step, batch, source_P, updates, reference_PGT)


def insert(
  t: Trainer,
  s: TrainState,
  fresh: list[Rollout],
  reevaluated: Rollout,
  batch: Groups,
  source_P: Array,
) -> tuple[TrainState, Metrics]:
  """Stores the step's groups in history and replay buffer; returns (state, metrics)."""
  groups = concat(*(each.groups for each in fresh))
  both = groups, reevaluated.groups
  filled = sum(int((exchange.whole(x.completed_step_P) >= 0).sum()) for x in both)
  s = s.replace(responses=s.responses + filled * t.engine.group_size)
  rounds = float(sum(each.submits for each in fresh))
  metrics = {'rollout/responses': float(s.responses), 'rollout/rounds': rounds}
  if t.config.prompts.reads_history:
    history = s.history
    for each in both:
      history = prompt_rules.completed(history, each, s.step)
    s = s.replace(history=history)
  if not t.config.batch.uses_buffer:
    return s, metrics
  with t.timer('insert'):
    insert = sharding.under(t.mesh, replay_buffer.insert)
    buffer, moves = insert(
      s.buffer,
      groups,
      reevaluated.groups,
      batch,
      source_P,
      s.step,
      thresholds=t.config.buffer.thresholds,
      max_off_policy_steps=t.config.buffer.max_off_policy_steps,
      max_reuse=t.config.buffer.max_reuse,
      hard_order=t.config.buffer.hard_order,
    )
    buffer = jax.block_until_ready(buffer)
    (moves,) = exchange.fetched([moves])
  return s.replace(buffer=buffer), metrics | {k: float(n) for k, n in moves.items()}
