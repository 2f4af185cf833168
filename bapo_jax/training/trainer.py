"""Runs the training loop, from one state to the next.

The functions below `train_loop` are in the order of its calls. The caller saves, logs
and evaluates.
"""

import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future

import jax
import numpy as np
from jax import Array
from jax.stages import Lowered

from bapo_jax import sharding
from bapo_jax.algorithms import batch_rules, replay_buffer
from bapo_jax.data import prompts
from bapo_jax.learner import learner
from bapo_jax.rewards import rewards
from bapo_jax.rollout import decode
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Rollout, Verification, collect_due, empty, rollout
from bapo_jax.runtime import exchange, machine
from bapo_jax.runtime.lane import at_once
from bapo_jax.training.config import Config
from bapo_jax.training.state import Metrics, StepKeys, StepRecord, Trainer, TrainState
from bapo_jax.training.step_metrics import describe, live
from bapo_jax.training.submission import Actor, InFlight, Sampled, Submission
from bapo_jax.types import SOURCES, Groups, Prompts, Tree, concat


def train_loop(
  t: Trainer, s: TrainState
) -> Iterator[tuple[TrainState, Metrics, StepRecord]]:
  """Yields (state, metrics, record) after every learner step, until the run is done."""
  while not finished(t.config, s):
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


def finished(config: Config, s: TrainState) -> bool:
  """Returns whether the run has reached its last step or its limit on responses."""
  return s.step >= config.steps or s.responses >= config.responses


@functools.partial(jax.jit, static_argnames='seed')
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
  s = free_actor(t, s)  # two actors at once would be the peak of a run's memory
  adapters, actor = t.adapters(s.params), sent(t, t.actor(s.params))
  return s.replace(actor=actor, actor_adapters=adapters, actor_version=s.step)


def free_actor_if_due(t: Trainer, s: TrainState) -> TrainState:
  """Frees the actor's memory for updates if the next step copies the actor again."""
  due = (s.step + 1) % t.config.rollout.weight_sync_interval == 0
  return free_actor(t, s) if due else s


def free_actor(t: Trainer, s: TrainState) -> TrainState:
  """Deletes the arrays of the actor, even if another variable refers to them.

  On devices that only sample, a queued submission may still need them.
  """
  if s.actor is not None and t.beside is None:
    for x in jax.tree.leaves(s.actor):
      if isinstance(x, Array):
        x.delete()
    machine.trim()  # returns a CPU's freed memory from the C library to the system
  return s.replace(actor=None)


def sent(t: Trainer, actor: Tree) -> Tree:
  """Copies an actor to the devices of this process that only sample, if there are any.

  Other processes receive it with the next submission.
  """
  if t.actor_mesh is t.mesh:
    return actor
  with t.timer('send'):
    layout = sharding.shardings(actor, t.actor_mesh, 'decode')
    return jax.block_until_ready(jax.device_put(actor, layout))


def sample(t: Trainer, s: TrainState) -> tuple[TrainState, Sampled]:
  """Submits the prompts of step s.step + rollout.depth; returns this step's groups.

  The first call of a run also submits the prompts of the steps before, so from then on
  `rollout.depth` later steps are in flight. Which weights sample which prompts depends
  on the step alone, never on time: if mesh.rollout devices sample beside the learner,
  here or in other processes, all numbers are those of sampling at the submission.
  """
  for step in range(s.step + len(s.queue), s.step + t.config.rollout.depth + 1):
    given = submission(t, s, step)
    queue = *s.queue, InFlight(given.hard_P, submit(t, given))
    s = s.replace(queue=queue, prompt_round=s.prompt_round + 1)
  (_, ready), *queue = s.queue
  return s.replace(queue=tuple(queue)), received(t, ready)


def submit(t: Trainer, given: Submission) -> Future[Sampled]:
  """Samples a submission: in other processes, in the lane, or at once."""
  if t.remote:
    with t.timer('send'):
      return t.remote.submit(given)
  work = functools.partial(run_submission, t.beside or t, given)
  return t.lane.submit(work) if t.lane else at_once(work)


def received(t: Trainer, ready: Future[Sampled]) -> Sampled:
  """Waits for groups, and copies them to the learner's devices if these are others."""
  if t.beside is None:
    return ready.result()
  with t.timer('wait'):
    sampled = ready.result()
  with t.timer('receive'):
    groups = sampled.fresh.groups, sampled.reevaluated.groups
    layout = sharding.layout_of_rows(groups, t.mesh)
    fresh, reevaluated = jax.block_until_ready(jax.device_put(groups, layout))
  return sampled._replace(
    fresh=sampled.fresh._replace(groups=fresh),
    reevaluated=sampled.reevaluated._replace(groups=reevaluated),
  )


def submission(t: Trainer, s: TrainState, step: int) -> Submission:
  """Returns what sampling for `step` needs: prompts, and the weights of this state."""
  hard = hard_prompts(t, s, step)
  given = Submission(step, s.prompt_round, actor_of(t, s), s.partial_here, hard)
  stale = s.actor_version != s.step and len(hard.id_P)
  return given._replace(newest=newest(t, s)) if stale else given


def run_submission(t: Trainer, given: Submission) -> Sampled:
  """Samples the groups of a submission, those of hard problems first."""
  began, keys = time.perf_counter(), step_keys(t.config.seed, given.step)
  reevaluated = reevaluate(t, given, keys.reevaluate)
  fresh = sample_fresh(t, given, keys.fresh)
  return Sampled(fresh, reevaluated, (began, time.perf_counter()))


def sampler_programs(t: Trainer, actor: Tree) -> Iterator[Lowered]:
  """Lowers the programs that sample."""
  partial = t.config.rollout.max_off_policy_steps > 0
  places = t.config.places if partial else t.config.prompts.count
  return t.engine.programs(actor, places=places, refreshed=partial)


def actor_of(t: Trainer, s: TrainState) -> Actor:
  """Returns the weights that sample fresh groups.

  With a depth, `Actor.learners` is None: the learner changes its weights while the
  groups are in flight, and recomputed log-probabilities are those of the actor.
  """
  learners = None
  if t.recompute is not None and not t.config.rollout.depth:
    if s.actor_version == s.step:
      learners = t.weights(s.params)
    elif s.actor_adapters is not None:
      learners = t.weights(s.actor_adapters)
  return Actor(s.actor, s.actor_version, learners)


def newest(t: Trainer, s: TrainState) -> Actor:
  """Returns the learner's weights as an actor, if the actor of the state is older."""
  ahead = t.recompute is None or t.config.rollout.depth
  learners = None if ahead else t.weights(s.params)
  return Actor(sent(t, t.actor(s.params)), s.step, learners)


def hard_prompts(t: Trainer, s: TrainState, step: int) -> Prompts:
  """Returns the hard problems due at `step`, starting with the least recently tried.

  A problem that is in flight is not drawn again.
  """
  rows = hard_rows(t.config, step)
  if not rows:
    return prompts.prompts_by_id(t.problems, np.zeros(0, np.int32))
  in_flight = [i for each in s.queue for i in each.hard_P]
  id_P = exchange.whole(replay_buffer.draw(s.buffer.hard, rows + len(in_flight)).id_P)
  id_P = id_P[(id_P < 0) | ~np.isin(id_P, in_flight)][:rows]
  id_P = np.pad(id_P, (0, rows - len(id_P)), constant_values=-1)
  return prompts.prompts_by_id(t.problems, id_P)


def hard_rows(config: Config, step: int) -> int:
  """Returns the seats for hard problems at `step`; 0 if none are due."""
  k = config.buffer
  due = step % k.reeval_interval == 0 and config.batch.reevaluates
  return min(k.reevaluate, k.capacity) if due else 0


def reevaluate(t: Trainer, given: Submission, key: Array) -> Rollout:
  """Samples groups of the hard problems with the newest weights of the submission."""
  if given.hard is None or not len(given.hard.id_P):
    return empty(t.engine)
  P, actor = len(given.hard.id_P), given.newest or given.actor
  found = rollout(
    PartialRollouts(t.engine, P),
    actor.weights,
    given.hard,
    key,
    verification=verification(t),
    step=given.step,
    policy_version=actor.version,
    first_uid=given.prompt_round * P * t.engine.group_size,
  )
  return recompute(t, found, actor)


def sample_fresh(t: Trainer, given: Submission, key: Array) -> Rollout:
  """Samples groups of the next prompts with the actor, within the token budget."""
  P = t.config.prompts.count
  now = prompts.next_prompts(t.problems, given.prompt_round, t.config.seed, P)
  found = rollout(
    given.partial or PartialRollouts(t.engine, P),
    given.actor.weights,
    now,
    key,
    verification=verification(t),
    step=given.step,
    policy_version=given.actor.version,
    first_uid=given.prompt_round * P * t.engine.group_size,
    k=t.config.rollout,
  )
  return recompute(t, found, given.actor)


def recompute(t: Trainer, found: Rollout, actor: Actor) -> Rollout:
  """Replaces the sampler's log-probabilities by the learner's, if so configured.

  Must run right after sampling: one step later, the learner's weights of step
  `actor.version` may no longer exist.
  """
  if t.recompute is None:
    return found
  weights = actor.learners
  if weights is None:
    weights = decode.params_of(actor.weights, t.spec, t.mesh)
  with t.timer('score'), sharding.current(t.mesh):
    groups, diff = jax.block_until_ready(
      t.recompute(weights, found.groups, actor.version, t.seen(found.groups))
    )
  return found._replace(groups=groups, logp_diff=diff)


def remaining_due(t: Trainer, s: TrainState) -> Rollout | None:
  """Returns the remaining groups that would be too old in the next step, or None.

  Only extra rounds leave such groups, and they need rollouts of the current step.
  """
  oldest = t.config.rollout.max_off_policy_steps
  if s.partial_here is None or not t.config.batch.extra_rounds:
    return None
  if not s.partial_here.due(s.step - oldest).any():
    return None
  found = collect_due(
    s.partial_here,
    t.config.prompts.count,
    max_off_policy_steps=oldest,
    verification=verification(t),
    step=s.step,
  )
  return recompute(t, found, actor_of(t, s))


def verification(t: Trainer) -> Verification:
  """Returns how the run's responses are verified and rewarded."""
  shape = functools.partial(
    rewards.shaped,
    eos=t.tokenizer.eos,
    rule=t.config.rewards.rule,
    rules=t.problems.verifier,
    longest=t.config.sampler.max_new_tokens,
    shaping=t.config.rewards.shaping,
  )
  return Verification(t.problems, t.tokenizer, t.verifier, t.timer, shape)


def fill_batch(
  t: Trainer, s: TrainState, sampled: Sampled, keys: StepKeys
) -> tuple[TrainState, list[Rollout], Groups, Array]:
  """Samples more rounds of prompts until the batch is full or the rounds are spent.

  Returns due groups in this step even if no seat is left for them: one step later they
  would be older than rollout.max_off_policy_steps allows.
  Returns (state, fresh rollouts, groups of the batch, their source_P).
  """
  rounds, next_round = [sampled.fresh], s.prompt_round
  last = next_round + t.config.batch.extra_rounds - 1
  while True:
    with t.timer('batch'):
      fresh = concat(*(each.groups for each in rounds))
      reevaluated = sampled.reevaluated.groups
      given = fresh, reevaluated, s.buffer, s.step, keys.batch, t.config.seats
      filled = batch_rules.select(t.config.batch, *given)
      filled = sharding.split_rows(filled, t.mesh)
      batch, source_P = jax.block_until_ready(filled)
    if not (exchange.whole(source_P) >= 0).all() and next_round <= last:
      more = Submission(s.step, next_round, actor_of(t, s), s.partial_here)
      rounds.append(sample_fresh(t, more, keys.fresh))
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
        advantage_rule=t.config.advantage,
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
  filled = sum(int((exchange.whole(x.completed_step_P) >= 0).sum()) for x in both)
  s = s.replace(responses=s.responses + filled * t.engine.group_size)
  rounds = float(sum(each.submits for each in fresh))
  metrics = {'rollout/responses': float(s.responses), 'rollout/rounds': rounds}
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
