"""Runs the training loop, from one state to the next.

The functions below `train_loop` are in the order of its calls. The caller saves, logs
and evaluates.
"""

import functools
from collections.abc import Iterator

import jax
from jax import Array

from bapo_jax import sharding
from bapo_jax.algorithms import replay_buffer
from bapo_jax.data import prompts
from bapo_jax.learner import learner
from bapo_jax.rewards import rewards
from bapo_jax.rollout import decode
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Rollout, Verification, collect_due, empty, rollout
from bapo_jax.runtime import exchange, machine
from bapo_jax.training.config import Config
from bapo_jax.training.state import Metrics, StepKeys, StepRecord, Trainer, TrainState
from bapo_jax.training.step_metrics import describe, live
from bapo_jax.types import SOURCES, Groups, Prompts, concat


def train_loop(
  t: Trainer, s: TrainState
) -> Iterator[tuple[TrainState, Metrics, StepRecord]]:
  """Yields (state, metrics, record) after every learner step, until the run is done."""
  while not finished(t.config, s):
    keys = step_keys(t.config.seed, s.step)
    s = sync_actor_if_due(t, s)
    reevaluated = reevaluate(t, s, hard_prompts(t, s), keys.reevaluate)
    s, fresh, batch, source_P = fill_batch(t, s, reevaluated.groups, keys)
    s = free_actor_if_due(t, s)
    s, record = update(t, s, batch, source_P, keys.update)
    s, moves = insert(t, s, fresh, reevaluated, batch, source_P)
    metrics = describe(t, s, fresh, reevaluated, record)
    s = s.replace(step=s.step + 1)
    yield s, metrics | moves, record


def finished(config: Config, s: TrainState) -> bool:
  """Returns whether the run has reached its last step or its limit on responses."""
  return s.step >= config.steps or s.responses >= config.responses


def step_keys(seed: int, step: int) -> StepKeys:
  """Returns the random keys of a learner step, a function of seed and step."""
  root = jax.random.key(seed)
  # Fresh responses are numbered across the run, so all steps share their key.
  fresh = jax.random.fold_in(root, 2**31 - 2)
  return StepKeys(fresh, *jax.random.split(jax.random.fold_in(root, step), 3))


def sync_actor_if_due(t: Trainer, s: TrainState) -> TrainState:
  """Copies the weights to the actor every `rollout.weight_sync_interval` steps."""
  if s.step % t.config.rollout.weight_sync_interval:
    return s
  s = free_actor(s)  # two actors at once would be the peak of a run's memory
  adapters, actor = t.adapters(s.params), t.actor(s.params)
  return s.replace(actor=actor, actor_adapters=adapters, actor_version=s.step)


def free_actor_if_due(t: Trainer, s: TrainState) -> TrainState:
  """Frees the actor's memory for updates if the next step copies the actor again."""
  due = (s.step + 1) % t.config.rollout.weight_sync_interval == 0
  return free_actor(s) if due else s


def free_actor(s: TrainState) -> TrainState:
  """Deletes the arrays of the actor, even if another variable refers to them."""
  if s.actor is not None:
    for x in jax.tree.leaves(s.actor):
      if isinstance(x, Array):
        x.delete()
    machine.trim()  # returns a CPU's freed memory from the C library to the system
  return s.replace(actor=None)


def hard_prompts(t: Trainer, s: TrainState) -> Prompts:
  """Returns the hard problems that are due, starting with the least recently tried."""
  due = (
    s.step % t.config.buffer.reeval_interval == 0 and t.config.batch.active.reevaluates
  )
  rows = t.config.buffer.reevaluate if due else 0
  id_P = exchange.whole(replay_buffer.draw(s.buffer.hard, rows).id_P)
  return prompts.prompts_by_id(t.problems, id_P)


def reevaluate(t: Trainer, s: TrainState, hard: Prompts, key: Array) -> Rollout:
  """Samples groups of the hard problems with the current weights."""
  P = len(hard.id_P)
  if not P:
    return empty(t.engine)
  found = rollout(
    PartialRollouts(t.engine, P),
    s.actor if s.actor_version == s.step else t.actor(s.params),
    hard,
    key,
    verification=verification(t),
    step=s.step,
    policy_version=s.step,
    first_uid=s.prompt_round * P * t.engine.group_size,
  )
  return recompute(t, s, found, s.step)


def sample_fresh(t: Trainer, s: TrainState, prompt_round: int, key: Array) -> Rollout:
  """Samples groups of the next prompts with the actor, within the token budget."""
  P = t.config.prompts.count
  now = prompts.next_prompts(t.problems, prompt_round, t.config.seed, P)
  found = rollout(
    s.partial or PartialRollouts(t.engine, P),
    s.actor,
    now,
    key,
    verification=verification(t),
    step=s.step,
    policy_version=s.actor_version,
    first_uid=prompt_round * P * t.engine.group_size,
    k=t.config.rollout,
  )
  return recompute(t, s, found, s.actor_version)


def recompute(t: Trainer, s: TrainState, found: Rollout, version: int) -> Rollout:
  """Replaces the sampler's log-probabilities by the learner's, if so configured.

  Must run in the step that sampled: one step later, the weights of learner step
  `version`, which sampled the responses, may no longer exist.
  """
  if t.recompute is None:
    return found
  if version == s.step:
    weights = t.weights(s.params)
  elif s.actor_adapters is not None:
    weights = t.weights(s.actor_adapters)
  else:
    weights = decode.params_of(s.actor, t.spec, t.mesh)
  with t.timer('score'):
    groups, diff = jax.block_until_ready(
      t.recompute(weights, found.groups, version, t.seen(found.groups))
    )
  return found._replace(groups=groups, logp_diff=diff)


def remaining_due(t: Trainer, s: TrainState) -> Rollout | None:
  """Returns the remaining groups that would be too old in the next step, or None."""
  oldest = t.config.rollout.max_off_policy_steps
  if s.partial is None or not s.partial.due(s.step - oldest).any():
    return None
  found = collect_due(
    s.partial,
    t.config.prompts.count,
    max_off_policy_steps=oldest,
    verification=verification(t),
    step=s.step,
  )
  return recompute(t, s, found, s.actor_version)


def verification(t: Trainer) -> Verification:
  """Returns how the run's responses are verified and rewarded."""
  shape = functools.partial(
    rewards.shaped,
    eos=t.tokenizer.eos,
    rule=t.config.rewards.rule,
    rules=t.problems.verifier,
    longest=t.config.sampler.max_new_tokens,
    k=t.config.rewards.shaping,
  )
  return Verification(t.problems, t.tokenizer, t.verifier, t.timer, shape)


def fill_batch(
  t: Trainer, s: TrainState, reevaluated: Groups, keys: StepKeys
) -> tuple[TrainState, list[Rollout], Groups, Array]:
  """Samples rounds of prompts until the batch is full or the rounds are spent.

  Returns due groups in this step even if no seat is left for them: one step later they
  would be older than rollout.max_off_policy_steps allows.
  Returns (state, fresh rollouts, groups of the batch, their source_P).
  """
  rounds = [sample_fresh(t, s, s.prompt_round, keys.fresh)]
  next_round = s.prompt_round + 1
  last = s.prompt_round + t.config.batch.extra_rounds
  while True:
    with t.timer('batch'):
      fresh = concat(*(each.groups for each in rounds))
      given = fresh, reevaluated, s.buffer, s.step, keys.batch, t.config.seats
      filled = sharding.split_rows(t.rules.batch(*given), t.mesh)
      batch, source_P = jax.block_until_ready(filled)
    if not (source_P >= 0).all() and next_round <= last:
      rounds.append(sample_fresh(t, s, next_round, keys.fresh))
      next_round += 1
    elif due := remaining_due(t, s):
      rounds.append(due)
    else:
      return s.replace(prompt_round=next_round), rounds, batch, source_P


def update(
  t: Trainer, s: TrainState, batch: Groups, source_P: Array, key: Array
) -> tuple[TrainState, StepRecord]:
  """Runs all optimiser updates of the step."""
  weights = t.config.batch.weights
  with t.timer('update'):
    params, opt, updates = jax.block_until_ready(
      learner.update(
        s.params,
        s.opt,
        batch,
        source_P,
        key,
        train_step=t.train_step,
        advantage_rule=t.rules.advantage,
        epochs=t.config.learner.epochs,
        minibatches=t.config.learner.minibatches,
        proximal=t.proximal,
        pictures=t.seen(batch),
        weights=tuple(getattr(weights, source) for source in SOURCES),
        place=lambda batch: sharding.split_rows(batch, t.mesh),
        version=s.step,
      )
    )
  learned, skips = live(updates), s.consecutive_skips
  for metrics in learned:
    skips = skips + 1 if metrics['learner/skipped'] else 0
  # If the rewards of every group are equal, every advantage is 0.
  reward_PG = exchange.whole(batch.reward_PG)
  taught_P = (reward_PG.max(1) > reward_PG.min(1)) & (exchange.whole(source_P) >= 0)
  s = s.replace(
    params=params,
    opt=opt,
    updates=s.updates + sum(not metrics['learner/skipped'] for metrics in learned),
    consecutive_skips=skips,
    idle_steps=0 if taught_P.any() else s.idle_steps + 1,
  )
  return s, StepRecord(s.step, batch, source_P, updates)


def insert(
  t: Trainer,
  s: TrainState,
  fresh: list[Rollout],
  reevaluated: Rollout,
  batch: Groups,
  source_P: Array,
) -> tuple[TrainState, Metrics]:
  """Stores the step's groups in the replay buffer; returns (state, metrics)."""
  groups = concat(*(each.groups for each in fresh))
  both = groups, reevaluated.groups
  filled = sum(int((x.completed_step_P >= 0).sum()) for x in both)
  s = s.replace(responses=s.responses + filled * t.engine.group_size)
  rounds = float(sum(each.submits for each in fresh))
  metrics = {'rollout/responses': float(s.responses), 'rollout/rounds': rounds}
  if not t.config.batch.active.uses_buffer:
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
      thresholds=t.rules.thresholds,
      max_off_policy_steps=t.config.buffer.max_off_policy_steps,
      max_reuse=t.config.buffer.max_reuse,
      hard_order=t.config.buffer.hard_order,
    )
    buffer = jax.block_until_ready(buffer)
  return s.replace(buffer=buffer), metrics | {k: float(n) for k, n in moves.items()}
