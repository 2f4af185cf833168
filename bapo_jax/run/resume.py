"""Converts between checkpoints and states of a run; detects changed inputs."""

import functools

from bapo_jax import sharding
from bapo_jax.rollout import decode
from bapo_jax.runtime import exchange, files, jax_options
from bapo_jax.runtime.lane import at_once
from bapo_jax.runtime.progress import log
from bapo_jax.training import checkpoint, policy
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.training.submission import InFlight, Sampled
from bapo_jax.training.trainer import finished, hard_rows
from bapo_jax.types import Groups, empty_groups

Spent = files.Object  # cost of a run so far, from its checkpoint

SCALARS = (
  'step',
  'actor_version',
  'prompt_round',
  'responses',
  'updates',
  'consecutive_skips',
  'idle_steps',
)


def arrays(t: Trainer, s: TrainState) -> files.Object:
  """Returns the arrays to checkpoint.

  Saves the actor too if the next step decodes with older weights than the learner's,
  without frozen weights and in the layout of the parameters, which fits any mesh. Waits
  for the groups in flight and saves them, because sampling them again would require the
  weights of the last rollout.depth steps.
  """
  saved = {'params': s.params, 'opt': s.opt, 'buffer': s.buffer}
  if t.config.prompts.reads_history:
    saved['history'] = s.history
  # Saved as groups, not as promises to sample: `result` waits here.
  if t.config.rollout.depth:
    saved['queue'] = in_flight(t, s)
  if s.step % t.config.rollout.weight_sync_interval:
    saved['actor'] = s.actor_adapters
    if s.actor_adapters is None:
      actor = t.actor(s.params) if s.actor is None else s.actor  # None: restoring
      weights = decode.params_of(actor, t.spec).items()
      saved['actor'] = {name: w for name, w in weights if name not in (t.base or {})}
  partial = t.sampler.state()
  return saved | ({} if partial is None else {'partial': partial})


def in_flight(t: Trainer, s: TrainState) -> list[tuple[Groups, Groups]]:
  """Returns (fresh, re-evaluated) groups of the queue; empty groups without a queue."""
  if s.queue:
    return [each.ready.result().groups for each in s.queue]
  empty_rows = functools.partial(
    empty_groups,
    group=t.engine.group_size,
    length=t.engine.length,
    steps=t.verifier.steps,
    routes=t.spec.routes,
  )
  empty: list[tuple[Groups, Groups]] = [
    (
      empty_rows(t.config.prompts.count),
      empty_rows(hard_rows(t, s.step + i)),
    )
    for i in range(t.config.rollout.depth)
  ]
  return sharding.split_rows(empty, t.mesh)


def snapshot(t: Trainer, s: TrainState) -> tuple[files.Object, files.Object]:
  """Returns (arrays, meta) of a checkpoint of this state.

  A finished run with checkpoint.final=weights stores no optimiser state, except for
  float32 master weights.
  """
  saved = arrays(t, s)
  # Moments are two thirds of a checkpoint, and only a run that goes on needs them.
  bare = t.config.checkpoint.final == 'weights' and finished(t, s)
  if bare:
    master = getattr(s.opt, 'master', None)
    saved['opt'] = {} if master is None else {'master': master}
  numbers = {name: getattr(s, name) for name in SCALARS}
  queue = [each.ready.result().described() for each in s.queue]
  return saved, {'run': numbers, 'weights_only': bare, 'queue': queue}


def resume(
  checkpoints: checkpoint.CheckpointManager,
  t: Trainer,
  s: TrainState,
  same: bool = True,
) -> tuple[TrainState, Spent]:
  """Restores the newest complete checkpoint; returns the state and the cost so far.

  If `same` is False (the problems changed), the saved buffer, rollouts and history are
  dropped: ids are rows of the problems, so the history would count for others.
  Raises ValueError if all checkpoints are damaged, or the newest has no optimiser state
  or belongs to other frozen weights.
  """
  if (step := checkpoints.latest_step()) is None:
    return s, {'wall_s': 0.0, 'phases': {}, 'peak_rss_bytes': 0}
  restored, meta = checkpoint.restore(
    checkpoints, step, arrays(t, s.replace(step=step))
  )
  log(f'Resuming after step {step}.')
  s = s.replace(**meta['run'])
  _check(t, s, meta)
  actor = restored.pop('actor', None)
  if actor is not None:  # else the next step creates actor and version
    s = s.replace(
      actor=t.sampler.place(t.actor(actor)), actor_adapters=t.adapters(actor)
    )
  partial = restored.pop('partial', None)
  groups = restored.pop('queue', [])
  # Their ids name rows of the old table.
  if not same:
    restored |= {'buffer': s.buffer, 'history': s.history}
    return s.replace(**restored), meta
  if partial:
    t.sampler.restore(partial)
  pairs = zip(groups, meta['queue'], strict=True)
  queue = tuple(_waiting(Sampled.restored(*pair)) for pair in pairs)
  return s.replace(**restored, queue=queue), meta


def _waiting(sampled: Sampled):
  hard_P = exchange.whole(sampled.reevaluated.groups.id_P)
  return InFlight(hard_P, at_once(lambda: sampled))


def _check(t: Trainer, s: TrainState, meta: files.Object):
  """Raises ValueError if a run cannot continue from a checkpoint with this meta."""
  if meta['weights_only'] and not finished(t, s):
    raise ValueError(
      f'the checkpoint of step {s.step} has no optimiser state '
      '(checkpoint.final=weights), so training cannot resume; export the weights '
      '(python -m bapo_jax export) and start in another --workdir with model.path set '
      'to the export'
    )
  drew = meta['generator']
  draws = jax_options.generator()
  if drew != draws:
    raise ValueError(
      f'the random numbers of JAX have changed since step {s.step} ({drew} then, '
      f'{draws} now); restore these options, which environment variables with their '
      'names in capitals set, or start in another --workdir'
    )
  # A checkpoint has no frozen weights: adapters on another base are another policy, and
  # nothing else would notice.
  now = ''.join(map(policy.fingerprint, (t.base, t.teacher)))
  if now and now != meta['base']:
    paths = t.config.model.path or 'the embedded policy', t.config.teacher.path
    raise ValueError(
      f'the frozen weights have changed since step {s.step} (fingerprint '
      f'{meta["base"]} then, {now} now); restore model.path or teacher.path, which are '
      f'{" and ".join(paths)}, or start in another --workdir'
    )


def same_problems(
  checkpoints: checkpoint.CheckpointManager, identity: list[str], changed: str
) -> bool:
  """Returns whether the problems match the latest checkpoint; True without checkpoints.

  `identity` contains the fingerprints of the training and the held-out problems, and
  those of their prompts, which change with the tokenizer and its chat template too.
  Raises ValueError if the problems differ and `changed`, the knob, is 'refuse'.
  """
  step = checkpoints.latest_step()
  if step is None:
    return True
  # The newest checkpoint speaks for the run: `accept` moves it to new problems once.
  before = checkpoint.read_meta(str(checkpoints.directory), step)['problems']
  if before == identity:
    return True
  names = 'training', 'held-out', 'training prompts', 'held-out prompts', 'records'
  others = zip(names, before, identity, strict=False)
  message = '; '.join(f'{name}: {old} then, {new} now' for name, old, new in others)
  if changed == 'refuse':
    raise ValueError(
      f'the problems or their prompts have changed since step {step} (fingerprints: '
      f'{message}); restore the old problems, tokenizer and chat template, start in '
      'another --workdir, or continue with --config.problems.changed=accept'
    )
  log(f'New problems since step {step} ({message}): the replay buffer starts empty.')
  return False
