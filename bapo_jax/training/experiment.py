"""One training run as its user sees it, from the first screen to the report.

1. `train` resumes or starts, evaluates, logs, saves, and stops cleanly when asked to;
2. everything the report needs lies in the workdir, so a resumed run reports it all.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time

import jax

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.rewards import rewards
from bapo_jax.runtime import files, metrics
from bapo_jax.runtime.progress import PhaseTimer, log, progress_bar
from bapo_jax.runtime.workdir import log_mesh_change, open_workdir, writable
from bapo_jax.training import checkpoint, report, setup, validate
from bapo_jax.training.trainer import TrainState, train_loop

DIVERGED = 3  # exit status

SHOWN = 6  # responses on the report's page; eval/ has them all


class Stop:
  """Remembers the first SIGINT or SIGTERM; the second one acts at once."""

  def __init__(self):
    self.signal = 0

  def __call__(self, number, frame):
    del frame
    if self.signal:
      raise KeyboardInterrupt
    self.signal = number
    log('Stopping after this step; once more to stop at once.')


@contextlib.contextmanager
def stoppable():
  """Signals become a flag while the loop runs."""
  stop = Stop()
  before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def train(config, workdir: str) -> int:
  """Runs the config in the workdir, resuming what is there; returns an exit status.

  0 when all steps are done, 128 + signal number when a signal ended it earlier,
  DIVERGED when too many updates in a row were not finite.

  A step is saved when it is due, when it was evaluated (where checkpoint.best asks for
  the best of these), and when it is the last one.

  Raises:
    ValueError: in one sentence; also where the workdir can be written no more.
  """
  clock, began = PhaseTimer(), time.perf_counter()
  rules = validate.check(config)
  open_workdir(workdir, config)
  welcome(config, workdir)
  with writable(workdir):
    return go(config, workdir, rules, clock, began)


def go(config, workdir: str, rules: dict, clock: PhaseTimer, began: float) -> int:
  """From the problems to the report; OSErrors name the file that was refused."""
  with clock('load'):
    material = setup.read(config, workdir)
  asked = [prompts.fingerprint(problems) for problems in material[1]]
  judge = setup.judging(config)
  kept = checkpoint.manager(workdir, config.checkpoint.keep, config.checkpoint.best)
  same = recognise(kept, asked, config.problems.changed)
  job, run = setup.start(config, rules, workdir, clock, judge, material)
  run, spent = resume(kept, run, same)
  devices = dict(sharding.make(**config.mesh).shape)
  log_mesh_change(spent.get('mesh'), devices)
  for name, seconds in spent['phases'].items():
    clock.seconds[name] = clock.seconds.get(name, 0.0) + seconds

  def meta():
    return {
      'wall_s': spent['wall_s'] + time.perf_counter() - began,
      'phases': clock.seconds,
      'problems': asked,
      'peak_rss_bytes': max(spent['peak_rss_bytes'], peak_rss()),
      'mesh': devices,
    }

  def save(run: TrainState, accuracy: float | None, last: bool):
    with clock('save'):
      if run.step not in kept.all_steps():
        told = meta() | {'run': scalars(run)}
        checkpoint.save(kept, run.step, arrays(run), told, accuracy)
      if last:
        checkpoint.wait(kept)

  write = metrics.open_writers(
    workdir, run.step or -1, **config.metrics, config=config.to_dict()
  )
  with contextlib.closing(write), checkpoint.closing(kept), contextlib.closing(judge):
    run, status = loop(config, workdir, job, run, write, save, clock, judge)
  if status:
    log(f'Saved. The same command with --workdir={workdir} continues.')
    return status
  with files.naming(os.path.join(workdir, 'report.md')):
    finish(config, workdir, run.step, meta())
  return 0


def loop(
  config,
  workdir,
  job,
  first: TrainState,
  write,
  save,
  clock: PhaseTimer,
  judge: rewards.Verifier,
) -> tuple[TrainState, int]:
  """Steps, each followed by what is due; the last run, and the exit status."""
  run = first

  def evaluate(run: TrainState) -> dict:
    path = os.path.join(workdir, 'eval', f'{run.step}.json')
    with clock('eval'):
      result, samples = job.evaluate(run.params, run.step)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files.write_json(path, {'result': result, 'samples': samples})
    log(
      f'held-out accuracy at step {run.step}: {result["accuracy"]:.3f} ± '
      f'{result["stderr"]:.3f} on {result["n"]} problems'
    )
    return {f'eval/{k}': v for k, v in result.items() if isinstance(v, float)}

  if first.step == 0:
    write(0, evaluate(first))
  with stoppable() as stop, progress_bar(config.steps, 'training', 'step') as progress:
    progress.update(first.step)
    clock.since()
    for run, told in train_loop(job, first):
      done = job.done(run)
      told['sample/undecided'] = judge.undecided()
      scored = done or run.step % config.evaluate.every == 0
      if scored:
        told |= evaluate(run)
      told |= timings(clock.since(), told['sample/tokens'])
      told['learner/updates'] = (
        run.step * config.learner.epochs * config.learner.minibatches
      )
      write(run.step, told)
      log(metrics.line(run.step, config.steps, told))
      progress.set_postfix_str(
        f'{told["sample/tokens_per_s"]:.0f} tokens/s', refresh=False
      )
      progress.update()
      lost = run.skipped >= config.learner.give_up
      last = done or lost or bool(stop.signal)
      ranked = scored and config.checkpoint.best > 0
      if last or ranked or run.step % config.checkpoint.every == 0:
        save(run, told.get('eval/accuracy'), last)
      if lost:
        log(
          f'{run.skipped} updates in a row were skipped: loss or gradient not finite '
          f'(learner.give_up={config.learner.give_up}). The weights are those before '
          'them; see loss/ratio_max and learner/grad_norm in metrics.jsonl.'
        )
        return run, DIVERGED
      if stop.signal and not done:
        return run, 128 + stop.signal
  return run, 0


def timings(seconds: dict, tokens: float) -> dict:
  """time/* of a step; phases without a name of their own are `other`."""
  named = {f'time/{name}': s for name, s in seconds.items()}
  return named | {
    'time/step': sum(seconds.values()),
    'sample/tokens_per_s': tokens / max(seconds.get('sample', 0.0), 1e-9),
  }


def arrays(run: TrainState) -> dict:
  """The part of a run that is arrays."""
  kept = {
    'params': run.params,
    'opt': run.opt,
    'actor': run.actor,
    'shelves': run.shelves,
  }
  return kept if run.flight is None else kept | {'flight': run.flight.state()}


def scalars(run: TrainState) -> dict:
  """The part of a run that is plain numbers."""
  names = ('step', 'actor_born', 'asked', 'responses', 'skipped')
  return {name: getattr(run, name) for name in names}


def resume(kept, run: TrainState, same: bool = True) -> tuple[TrainState, dict]:
  """The newest run in the workdir, or the one given; and what it had cost so far."""
  step = kept.latest_step()
  if step is None:
    return run, {'wall_s': 0.0, 'phases': {}, 'peak_rss_bytes': 0}
  found, meta = checkpoint.restore(kept, step, arrays(run))
  log(f'Resuming after step {step}.')
  flight = found.pop('flight', None)
  if not same:  # their ids would name other problems
    found['shelves'] = run.shelves
  elif flight:
    run.flight.restore(flight)
  # A count that a checkpoint of an earlier version lacks begins anew.
  return run._replace(**found, **meta['run']), meta


def recognise(kept, asked: list[str], changed: str) -> bool:
  """Whether the newest checkpoint is of these problems, or there is none.

  Args:
    asked: fingerprints of the training and the held-out problems.
    changed: what to do where they are others: 'refuse' or 'accept' them.

  Raises:
    ValueError: they are others, and not accepted.
  """
  step = kept.latest_step()
  before = asked if step is None else checkpoint.read_meta(kept, step)['problems']
  if before == asked:
    return True
  names = ('training', 'held-out')
  others = zip(names, before, asked, strict=True)
  told = '; '.join(f'{name}: {old} then, {new} now' for name, old, new in others)
  if changed == 'refuse':
    raise ValueError(
      f'the problems are not those of step {step} (fingerprints, {told}); bring those '
      'back, start in another --workdir, or go on with --config.problems.changed=accept'
    )
  log(
    f'Other problems than at step {step} ({told}): accepted, the shelves are emptied.'
  )
  return False


def welcome(config, workdir: str) -> None:
  """The first screen: what will run."""
  c = config
  devices = jax.devices()
  log(
    f'{c.title}: {c.steps} steps x {c.prompts.count} prompts x {c.sampler.group} '
    f'responses, {c.learner.epochs * c.learner.minibatches} updates a step\n'
    f'  batch rule {c.batch.rule}, advantage rule {c.advantage.rule}, clip rule '
    f'{c.clip.rule}\n'
    f'  {len(devices)} {devices[0].platform} device(s), {os.cpu_count()} CPU cores\n'
    f'  expected: {c.protocol}\n'
    f'  results in {workdir}; Ctrl-C saves, the same command continues'
  )


def peak_rss() -> int:
  """Largest resident size of this process so far, bytes."""
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def finish(config, workdir: str, last: int, spent: dict) -> None:
  """Writes the report of a run that ended at step `last`, from its workdir."""
  evaluations = {}
  for when, step in (('before', 0), ('after', last)):
    with open(os.path.join(workdir, 'eval', f'{step}.json')) as file:
      evaluations[when] = json.load(file)
  report.write(
    workdir,
    title=config.title,
    config_text=json.dumps(config.to_dict(), indent=2),
    config_hash=setup.fingerprint(config.to_dict()),
    eval_before=evaluations['before']['result'],
    eval_after=evaluations['after']['result'],
    samples_before=evaluations['before']['samples'][:SHOWN],
    samples_after=evaluations['after']['samples'][:SHOWN],
    phases=spent['phases'],
    wall_s=spent['wall_s'],
    peak_rss_bytes=spent['peak_rss_bytes'],
    steps=last,
    target=config.clip.balanced.target if config.clip.rule == 'balanced' else None,
  )
  log(f'Report: {os.path.join(workdir, "report.md")}')
