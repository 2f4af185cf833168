"""From a checkpoint to the state of a run, and what may not have changed since."""

from typing import Any

from bapo_jax.rollout import decode
from bapo_jax.runtime.progress import log
from bapo_jax.training import checkpoint
from bapo_jax.training.state import Trainer, TrainState

Spent = dict[str, Any]  # what a run has cost so far, as its checkpoints say

SCALARS = (
  'step',
  'actor_version',
  'prompt_round',
  'responses',
  'updates',
  'consecutive_skips',
  'idle_steps',
)


def arrays(t: Trainer, s: TrainState) -> dict[str, Any]:
  """The part of a state that is arrays.

  The actor is laid out as the parameters are: its own layout depends on the mesh, and
  another one may resume.
  """
  actor = decode.params_of(s.actor, t.spec, t.mesh)
  found = {'params': s.params, 'opt': s.opt, 'actor': actor, 'buffer': s.buffer}
  return found if s.partial is None else found | {'partial': s.partial.state()}


def scalars(s: TrainState) -> dict[str, int]:
  """The part of a state that is plain numbers."""
  return {name: getattr(s, name) for name in SCALARS}


def resume(
  checkpoints: checkpoint.CheckpointManager,
  t: Trainer,
  s: TrainState,
  same: bool = True,
) -> tuple[TrainState, Spent]:
  """Newest whole checkpoint (or the state given), and what the run has cost so far.

  Args:
    same: the checkpoint is of the same problems; else its buffer and its partial
      rollouts name other ones, and are left out.

  Raises:
    ValueError: there are checkpoints, and none is whole.
  """
  newest = checkpoint.restore_newest(checkpoints, arrays(t, s))
  if newest is None:
    return s, {'wall_s': 0.0, 'phases': {}, 'peak_rss_bytes': 0}
  step, found, meta = newest
  log(f'Resuming after step {step}.')
  partial = found.pop('partial', None)
  found['actor'] = decode.sync_actor(found['actor'], t.spec, t.mesh)
  if not same:
    found['buffer'] = s.buffer
  elif partial and s.partial is not None:
    s.partial.restore(partial)
  return s.replace(**found, **meta['run']), meta


def same_problems(
  checkpoints: checkpoint.CheckpointManager, identity: list[str], changed: str
) -> bool:
  """Whether the latest checkpoint is of these problems, or there is none.

  Args:
    identity: fingerprints of the training and the held-out problems.
    changed: what to do where they are others: 'refuse' or 'accept' them.

  Raises:
    ValueError: they are others, and not accepted.
  """
  step = checkpoints.latest_step()
  if step is None:
    return True
  before = checkpoint.read_meta(checkpoints, step)['problems']
  if before == identity:
    return True
  names = ('training', 'held-out')
  others = zip(names, before, identity, strict=True)
  message = '; '.join(f'{name}: {old} then, {new} now' for name, old, new in others)
  if changed == 'refuse':
    raise ValueError(
      f'the problems are not those of step {step} (fingerprints, {message}); bring '
      'those back, start in another --workdir, or go on with '
      '--config.problems.changed=accept'
    )
  log(f'Other problems than at step {step} ({message}): accepted, the buffer is empty.')
  return False
