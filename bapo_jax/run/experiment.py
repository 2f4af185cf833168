"""One training run as its user sees it, from the first screen to the report.

1. `train` resumes or starts, evaluates, logs, saves, and stops cleanly when asked to;
2. everything the report needs lies in the workdir, so a resumed run reports it all.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable
from typing import Any

import jax

from bapo_jax.autosetup import check
from bapo_jax.data import prompts
from bapo_jax.models import hf_directory
from bapo_jax.run import report, step_record
from bapo_jax.run.resume import Spent, resume, same_problems, snapshot
from bapo_jax.run.welcome import welcome
from bapo_jax.runtime import exchange, files, hosts, machine, metrics
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.progress import PhaseTimer, log, progress_bar
from bapo_jax.runtime.signals import stoppable
from bapo_jax.training import checkpoint, evaluate, setup, step_metrics, weights
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.training.state import Metrics, Trainer, TrainState
from bapo_jax.training.trainer import finished, train_loop
from bapo_jax.types import Tree

DIVERGED = 3  # exit status

SHOWN = 6  # responses on the report's page; eval/ has them all


def train(config: Config, workdir: str) -> int:
  """Runs the config in the workdir, resuming what is there; returns an exit status.

  0 when all steps are done, 128 + signal number when a signal ended it earlier,
  DIVERGED when the first update, or too many in a row, were not finite.

  Raises:
    ValueError: in one sentence; also where the workdir can no longer be written, is in
      use by another process, or holds no whole checkpoint.
  """
  timer, began = PhaseTimer(), time.perf_counter()
  with hosts.first_ahead():  # it downloads
    setup.check_available(config)
  setup.make_mesh(config)
  if not config.model.path:  # beside the work on a real model clearing pages is little
    machine.hold_freed_memory()
  with workdirs.locked(workdir), workdirs.writable(workdir):
    with hosts.together():
      if hosts.is_first():
        claim(workdir, config)
    workdirs.check_shared(workdir)
    return _run(config, workdir, timer, began)


def claim(workdir: str, config: Config) -> None:
  """Opens the workdir for this config.

  Sections that leave the results as they are may change between the parts of a run, and
  so may the mesh, on which sums round differently; with other problems, their names.

  Raises:
    ValueError: it cannot be written, or holds a run with another config.
  """
  free = ('title', 'steps', 'responses', 'cells', 'metrics', 'checkpoint', 'evaluate')
  accepted = ('problems',) if config.problems.changed == 'accept' else ()
  free = (*free, 'mesh', 'derived', 'problems.changed', *accepted)
  workdirs.open_workdir(workdir, config_lib.plain(config), free)


def _run(config: Config, workdir: str, timer: PhaseTimer, began: float) -> int:
  """From the problems to the report; OSErrors name the file that was refused."""
  with timer('load'), hosts.first_ahead():  # it makes data sets
    material = setup.read(config, workdir)
  identity = [prompts.fingerprint(p) for p in (material.problems, material.held_out)]
  model = hf_directory.identity(config.model.path)
  hosts.same_everywhere({'problems (fingerprints)': identity, 'model': model})
  welcome(config, workdir, material)
  verifier = setup.make_verifier(config)
  stored = config.checkpoint
  checkpoints = checkpoint.manager(workdir, stored.keep, stored.best)
  same = same_problems(checkpoints, identity, config.problems.changed)
  if config.model.path and checkpoints.latest_step() is None and hosts.is_first():
    log(check.short(config, material, workdir))
  t, s = setup.start(config, workdir, timer, verifier, material)
  if checkpoints.latest_step() is not None:
    record_again(t, workdir, s)
  s, spent = resume(checkpoints, t, s, same)
  if s.step and hosts.is_first():
    metrics.report_lost(workdir, s.step)
  workdirs.log_mesh_change(spent.get('mesh'), dict(t.mesh.shape))
  for name, seconds in spent['phases'].items():
    timer.seconds[name] = timer.seconds.get(name, 0.0) + seconds
  if finished(config, s):
    record_again(t, workdir, s)
  else:
    t = compiled(t, s)
  base = weights.fingerprint(t.base)

  def cost() -> Spent:
    return {
      'wall_s': spent['wall_s'] + time.perf_counter() - began,
      'phases': timer.seconds,
      'problems': identity,
      'base': base,
      'peak_rss_bytes': max(spent['peak_rss_bytes'], machine.peak_rss()),
      'mesh': dict(t.mesh.shape),
    }

  values = config_lib.plain(config)
  write = metrics.open_writers(
    workdir, s.step or -1, **config.metrics.model_dump(), config=values
  )
  run = Run(t, workdir, checkpoints, write, cost)
  with (
    contextlib.closing(write),
    checkpoint.closing(checkpoints),
    contextlib.closing(verifier),
  ):
    s, status = run.loop(s)
  if status:
    log(f'Saved. The same command with --workdir={workdir} continues.')
    return status
  if not hosts.is_first():
    return 0
  with files.naming(os.path.join(workdir, 'report.md')):
    finish(config, workdir, s.step, cost())
  return 0


def compiled(t: Trainer, s: TrainState) -> Trainer:
  """The trainer, its sampler and its train step compiled."""
  log('Compiling the sampler and the train step.')
  began = time.perf_counter()
  with t.timer('compile'):
    places = t.config.places if s.partial else t.config.prompts.count
    key = jax.random.key(t.config.seed)
    actor = t.actor(s.params) if s.actor is None else s.actor
    t.engine.warm_up(actor, key, places=places, refreshed=s.partial is not None)
    del actor
    machine.trim()  # or the first updates would come on top of it
    train_step = setup.compile_train_step(t, s)
    machine.trim()
  log(f'Compiled in {time.perf_counter() - began:.0f} s.')
  return dataclasses.replace(t, train_step=train_step)


class Run:
  """The caller of the loop: evaluates, writes, logs and saves what is due."""

  def __init__(
    self,
    t: Trainer,
    workdir: str,
    checkpoints: checkpoint.CheckpointManager,
    write: metrics.Writers,
    cost: Callable[[], Spent],
  ):
    self.t, self.workdir, self.checkpoints = t, workdir, checkpoints
    self.write, self.cost = write, cost

  def loop(self, first: TrainState) -> tuple[TrainState, int]:
    """Steps, each followed by what is due; the last state, and the exit status."""
    config, s = self.t.config, first
    if first.step == 0:
      row, message = self.evaluate(first)
      self.write(0, row)
      log(message)
    log(metrics.legend())
    with (
      stoppable() as stop,
      progress_bar(config.steps, 'training', 'step', initial=first.step) as progress,
    ):
      self.t.timer.since()
      for s, row in train_loop(self.t, first):
        self.report_step(s, row)
        progress.set_postfix_str(
          f'{row["rollout/tokens_per_s"]:.0f} tokens/s', refresh=False
        )
        progress.update()
        lost = s.updates == 0 < s.consecutive_skips  # none of the run was applied
        diverged = lost or s.consecutive_skips >= config.learner.max_consecutive_skips
        done = finished(config, s)
        stopped, diverged = exchange.agree([stop.signal, diverged])
        self.save_if_due(s, row, last=done or bool(diverged or stopped))
        if diverged:
          self.log_divergence(s)
          return s, DIVERGED
        if stopped and not done:
          return s, 128 + stopped
    return s, 0

  def report_step(self, s: TrainState, row: Metrics) -> None:
    """Evaluates where it is due, writes the row, logs its line."""
    config, message = self.t.config, ''
    if finished(config, s) or s.step % config.evaluate.every == 0:
      results, message = self.evaluate(s)
      row |= results
    row |= step_metrics.timings(self.t.timer.since(), row['rollout/tokens'])
    self.write(s.step, row)
    log(metrics.line(s.step, config.steps, row))
    if message:
      log(message)
    # A longer row of them is one and the same; process 0 has the metrics.
    if s.idle_steps == report.IDLE and hosts.is_first():
      log(report.idle_sentence(metrics.read(self.workdir)[-report.IDLE :]))

  def log_divergence(self, s: TrainState) -> None:
    """Why the run ends."""
    if s.updates == 0:
      return log(
        f'The first update of the run is not finite, nor is any other of its '
        f'{s.consecutive_skips}: loss or gradient overflow, and nothing was learned. '
        'Look at the weights (model.path, model.dtype), at the precision '
        '(model.compute), at rollout/logp_diff_max (sampler and learner disagree) and '
        'at loss/ratio_max in metrics.jsonl, and at the scale of loss.kl and rewards.'
      )
    limit = self.t.config.learner.max_consecutive_skips
    log(
      f'{s.consecutive_skips} updates in a row were skipped: loss or gradient not '
      f'finite (learner.max_consecutive_skips={limit}). The weights are those before '
      'them; see loss/ratio_max and learner/grad_norm in metrics.jsonl.'
    )

  def evaluate(self, s: TrainState) -> tuple[Metrics, str]:
    """(metrics, message) of an evaluation; eval/<step>.json holds all of it."""
    result = record_evaluation(self.t, self.workdir, s)
    row = {f'eval/{k}': v for k, v in result.items() if isinstance(v, float)}
    return row, (
      f'held-out accuracy at step {s.step}: {result["accuracy"]:.3f} ± '
      f'{result["stderr"]:.3f} on {result["n"]} problems'
    )

  def save_if_due(self, s: TrainState, row: Metrics, *, last: bool) -> None:
    """Saves at its interval, after an evaluation that may rank, and at the end."""
    config = self.t.config.checkpoint
    ranked = 'eval/accuracy' in row and config.best > 0
    if not (last or ranked or s.step % config.every == 0):
      return
    with self.t.timer('save'):
      if s.step not in self.checkpoints.all_steps():
        arrays, meta = snapshot(self.t, s)
        accuracy = row.get('eval/accuracy')
        meta |= self.cost()
        step_record.write(self.t, self.workdir)
        checkpoint.save(self.checkpoints, s.step, arrays, meta, accuracy)
      if last:
        checkpoint.wait(self.checkpoints)


def record_evaluation(t: Trainer, workdir: str, s: TrainState) -> dict[str, Any]:
  """Evaluates the state and writes eval/<step>.json; returns the result."""
  with t.timer('eval'):
    result, samples = evaluation(t, s.params, s.step)
  if hosts.is_first():
    evaluate.record(workdir, s.step, result, samples, t.held_out)
  return result


def record_again(t: Trainer, workdir: str, s: TrainState) -> None:
  """Evaluates the state again where eval/<step>.json, which the report needs, is not.

  The same weights, prompts and noise give the same responses: nothing is lost.
  """
  lost = False
  if hosts.is_first():
    try:
      evaluate.read_recorded(workdir, s.step)
    except ValueError as error:
      log(f'{error}. Step {s.step} is evaluated again.')
      lost = True
  if any(exchange.agree([lost])):
    record_evaluation(t, workdir, s)


def evaluation(
  t: Trainer, params: Tree, step: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """(result, samples) on the held-out problems, through the door of training."""
  knobs = t.config.evaluate
  return evaluate.evaluate(
    t.actor(params),
    t.held_out,
    t.tokenizer,
    jax.random.fold_in(jax.random.key(t.config.seed), 2**31 - 1),
    engine=dataclasses.replace(
      t.engine,
      group_size=knobs.group_size,
      gallery=t.held_out_gallery,
      **knobs.sampling.model_dump(),
    ),
    verifier=t.verifier,
    step=step,
    ks=knobs.k,
  )


def finish(config: Config, workdir: str, last: int, spent: Spent) -> None:
  """Writes the report of a run that ended at step `last`, from its workdir."""
  before, after = (evaluate.read_recorded(workdir, step) for step in (0, last))
  values = config_lib.plain(config)
  report.write(
    workdir,
    title=config.title,
    config_text=json.dumps(values, indent=2),
    config_hash=config_lib.fingerprint(values),
    eval_before=before['result'],
    eval_after=after['result'],
    samples_before=before['samples'][:SHOWN],
    samples_after=after['samples'][:SHOWN],
    phases=spent['phases'],
    wall_s=spent['wall_s'],
    peak_rss_bytes=spent['peak_rss_bytes'],
    steps=last,
    target=config.clip.balanced.target if config.clip.rule == 'balanced' else None,
  )
  log(f'Report: {os.path.join(workdir, "report.md")}')
