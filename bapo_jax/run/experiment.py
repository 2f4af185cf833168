"""Carries out a training run, from the summary at its start to the report.

1. `train` resolves the config and opens the workdir; `_load` reads the problems;
2. `_train` builds the trainer and resumes; in processes that only sample, `_serve`
   obeys those that train;
3. `Run` drives the training loop: evaluates, writes metrics, logs and saves;
4. the report is written from files of the workdir, so it includes all earlier steps.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future

import jax
from jax.stages import Lowered

from bapo_jax import custom_code
from bapo_jax.autosetup import check, derive, knob_lists
from bapo_jax.data import conversation, prompts
from bapo_jax.models import transformer
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rewards.score import Sample
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.run import page, report, step_record
from bapo_jax.run.resume import Spent, resume, same_problems, snapshot
from bapo_jax.runtime import (
  ahead,
  cache,
  exchange,
  files,
  hosts,
  jax_options,
  machine,
  metrics,
)
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.ahead import Call
from bapo_jax.runtime.lane import Lane, at_once
from bapo_jax.runtime.progress import PhaseTimer, log, progress_bar
from bapo_jax.runtime.signals import Stop, explained, stoppable
from bapo_jax.training import budget, build, checkpoint, evaluate, policy
from bapo_jax.training.build import Material
from bapo_jax.training.config import Config
from bapo_jax.training.remote_sampler import ending, serve
from bapo_jax.training.resolve import Resolved, processes_of
from bapo_jax.training.state import Metrics, StepRecord, Trainer, TrainState
from bapo_jax.training.submission import evaluation_key
from bapo_jax.training.trainer import finished, train_loop
from bapo_jax.types import Tree

DIVERGED = 3  # exit status
TINY = 10**6  # parameters of a model whose updates are short


def train(config: Config, workdir: str) -> int:
  """Trains in the workdir, or resumes its run; returns an exit status.

  0: all steps are done. 128 + signal number: a signal ended the run earlier. DIVERGED:
  the first update, or too many updates in a row, were not finite.

  Raises:
    ValueError: the config cannot run here; the workdir cannot be written, is in use
      by another process, belongs to another run, or has only damaged checkpoints.
  """
  timer = PhaseTimer()
  r = derive.prepare(config, workdir)
  # Before anything is written: a run that cannot fit leaves no folder behind.
  budget.check(r.budget, budget.capacity(r.mesh))
  # All processes wait here for the slowest, so that none compiles what another will
  # find in the cache.
  with hosts.together():
    cache.share_programs(r.config.cache)
  if transformer.count(r.spec) < TINY:
    # Between small updates the C library would return pages and fault them in again.
    machine.hold_freed_memory()
  early = explained(lambda: saved_so_far(workdir))
  with workdirs.locked(workdir), workdirs.writable(workdir), early:
    with hosts.together():
      if hosts.is_first():
        claim(workdir, r.config, r.user)
    workdirs.check_shared(workdir)
    material, identity = _load(r, workdir, timer)
    # From here on collectives span one side alone: those that sample must never wait
    # for a collective of those that train.
    hosts.divide(processes_of(r.own_mesh))
    if r.rollout_only:
      return _serve(r, material)
    return _train(r, material, identity, workdir, timer)


def claim(workdir: str, config: Config, user: Config | None = None) -> None:
  """Writes the config to a new workdir, or compares it with the config of its run.

  `user` is the config that the user wrote, if the program has decided knobs of it.

  Sections that do not affect the results may differ on resuming. So may the mesh, which
  affects only rounding, and with problems.changed='accept' the section `problems`. If
  the run has already passed the last step of this config, the stored config keeps its
  own `steps` and `responses`.

  Raises:
    ValueError: the workdir cannot be written, or belongs to a run with another config.
  """
  user = user or config
  problems = 'problems' if config.problems.changed == 'accept' else 'problems.changed'
  free = (
    'title',
    'steps',
    'responses',
    'cache',
    'mesh',
    problems,
    'metrics',
    'checkpoint',
    'evaluate',
  )
  given = user.model_dump()
  values = derive.filled(user, config).model_dump()
  step = checkpoint.choose(workdir)
  # `resume` reports a damaged checkpoint.
  with contextlib.suppress(OSError, ValueError):
    done = checkpoint.read_meta(checkpoint.home(workdir), step)['run'] if step else {}
    if done and (config.steps <= done['step'] or config.responses <= done['responses']):
      before = workdirs.read_config(workdir)
      for name in ('steps', 'responses'):
        values[name] = max(getattr(config, name), before[name])
        given[name] = values[name]
  decided = {knob: operator.attrgetter(knob)(config) for knob in user.undecided}
  found = {'config': values, 'decided': decided, 'code': config.code}
  workdirs.open_workdir(workdir, given, found, free)


def _load(r: Resolved, workdir: str, timer: PhaseTimer) -> tuple[Material, list[str]]:
  """Reads the problems and prints the first screen.

  Returns the problems and their fingerprints, see `same_problems`.
  """
  with timer('load'), hosts.first_ahead():  # the first process generates data sets
    material = build.tabulate(r)
  digests = prompts.fingerprint, prompts.prompt_fingerprint
  both = material.training, material.held_out
  # Digests of contents, not of paths: a file may move, and must not change.
  identity = [digest(problems) for digest in digests for problems in both]
  if material.record:
    identity.append(material.record.digest)
  if len(hosts.side()) > 1:  # each read its own copy of the files
    model = hf_directory.identity(r.config.model.path and r.model.directory)
    inputs = {'problems (fingerprints)': identity, 'model': model}
    hosts.same_everywhere(inputs | jax_options.generator())
  log(derive.screen(r.config, r.derived))
  log(first_screen(r, material, workdir))
  return material, identity


def _serve(r: Resolved, material: Material) -> int:
  """Samples for the processes that train until they end; returns the exit status."""
  with contextlib.closing(build.make_verifier(r.config)) as verifier:
    try_custom(verifier, material)
    sampler = build.rollout_sampler(r, material, verifier)
    with stoppable() as stop:
      return serve(sampler, build.links(r), stop)


def _train(
  r: Resolved, material: Material, identity: list[str], workdir: str, timer: PhaseTimer
) -> int:
  """Trains and writes the report; an OSError names the file."""
  with contextlib.ExitStack() as stack:
    if r.remote:
      stack.enter_context(ending(build.links(r)))
    verifier = stack.enter_context(contextlib.closing(build.make_verifier(r.config)))
    try_custom(verifier, material)
    knobs = r.config.checkpoint
    settings = evaluate.settings(r.config.evaluate, material.held_out)
    checkpoints = checkpoint.manager(workdir, knobs.keep, knobs.best, settings)
    stack.enter_context(checkpoint.closing(checkpoints))
    same = same_problems(checkpoints, identity, r.config.problems.changed)
    begun = checkpoints.latest_step() is not None
    # The embedded policy has imitated solutions to these prompts.
    if r.config.model.path and not begun and hosts.is_first():
      log(check.short(r, material, workdir))
    # Only a start from scratch has time to hide: a resumed run finds its programs in
    # the cache.
    early = None
    if not begun and r.rollout_mesh is None and len(hosts.side()) == 1:
      # Beside the loading. Several processes would not compile in one order.
      lane = Lane()
      stack.callback(lane.close)
      # For weights that are not loaded yet.
      like, params, opt = build.abstract_trainer(r, material, verifier, timer)
      early = lane.submit(lambda: ahead.compile_all(programs(like, params, opt)))
    t, s = build.build(r, material, verifier, timer)
    # With the first weights, before `resume` replaces them.
    if begun:
      evaluate_again_if_lost(t, workdir, s)
    stack.callback(t.sampler.close)
    s, spent = resume(checkpoints, t, s, same)
    run = Run(t, workdir, checkpoints, identity, spent)
    run.start(s, early)
    with stoppable() as stop:
      s, status = run.loop(s, stop)
      # Other processes that sample are told the reason, so that they end with it too.
      t.sampler.close(status)
      if status:
        log(f'Saved. Run the same command with --workdir={workdir} to resume.')
      elif hosts.is_first():
        stop.current = 'the report'
        run.report(s)
  return status


def saved_so_far(workdir: str) -> str:
  """Returns the message for a run that a signal ends before or after its steps."""
  what = 'no step is saved yet'
  if steps := workdirs.checkpoint_steps(workdir):
    what = f'step {max(steps)} is saved'
  return f'Stopped: {what}; run the same command with --workdir={workdir} to go on.'


def try_custom(verifier: Verifier, material: Material) -> None:
  """Calls custom reward functions and environments on a response, before compiling.

  Logs that they leave it undecided. Raises ValueError if they fail there: they would
  probably fail everywhere.
  """
  if verifier.environment is not None:
    try_custom(verifier.environment, material)
  if not verifier.custom:
    return
  # The first problem stands for all: a function that misreads the rows fails here, in a
  # second, and not after the programs are compiled.
  row = material.problems.rows[0]
  trial = row.answer or 'a trial response'
  chat = conversation.messages(row.problem, [trial], 'user', row.history)
  sample = Sample(
    response=trial,
    answer=row.answer,
    prompt=row.problem,
    tokens=(1, 2, 3),
    row=row.fields,
    messages=chat,
    ends=(1, 2, len(trial)),
  )
  result = verifier.submit([sample]).one(0)
  rule = f'{verifier.k.named}={verifier.k.rule}'
  if result.failure:
    raise ValueError(
      f'{rule} fails on a trial response to the first problem: {result.failure}; it is '
      'called as f(sample): sample.response, .answer, .prompt, .tokens and .row, a '
      'dict (docs/guide/library.md)'
    )
  if isinstance(result, Verdict) and result.abstains:
    log(
      f'{rule} leaves a trial response to the first problem undecided: {result.reason}'
    )


def first_screen(r: Resolved, material: Material, workdir: str) -> str:
  """Returns the summary that a run prints at its start."""
  c = r.config
  spec = r.spec
  backend = r.tokenizer.backend
  devices = jax.devices()
  sizes = budget.sizes_of(c, spec)
  room = budget.limit(r.mesh)
  memory = budget.sentence(sizes, r.schedule, r.budget.update, room)
  frozen = ''
  count = len(hosts.side())
  routed = f', {spec.active} of {spec.experts} experts per token' * bool(spec.experts)
  windows = [kind.window for kind in spec.kinds if kind.window]
  local = ''
  if windows:
    local = (
      f'; {len(windows)} of {spec.layers} layers read the last {windows[0]} tokens'
    )
  if few := sizes.adapters:
    frozen = f', frozen; adapters of rank {c.lora.rank} train {few:,}'
  elif tower := sizes.frozen:
    frozen = f', {tower:,} of them, the vision tower, frozen'
  saved = r.budget.checkpoint
  total = sum(saved.values())
  unit, scale = ('GiB', 2**30) if total >= 2**30 else ('MiB', 2**20)
  parts = ', '.join(f'{name} {size / scale:.3g}' for name, size in saved.items())
  kept = c.checkpoint.keep + c.checkpoint.best
  right = ''
  if custom_code.is_path(c.rewards.rule.split(',')[0]):
    right = f'; right from a reward of {c.rewards.right_from:g}, left out if undecided'
  return (
    f'{c.title}: {c.steps} steps x {c.prompts.count} prompts x {c.sampler.group_size} '
    f'responses, {c.updates_per_step} updates per step\n'
    f'  model      {c.model.path or "embedded policy"}, {transformer.count(spec):,} '
    f'parameters ({c.model.dtype}){routed}{frozen}; products in {c.model.compute}'
    f'{local}\n'
    f'  tokenizer  {backend.name_or_path}, {len(backend)} tokens, '
    f'template {c.tokenizer.template!r:.60}\n'
    f'  training   {c.rollout.records or c.problems.source}, '
    f'{len(material.training.id_N)} problems\n'
    f'  held out   {c.problems.test_source}, {len(material.held_out.id_N)} problems\n'
    f'  verifier   {c.rewards.rule}{right}\n'
    f'{knob_lists.lines(r.user, c)}\n'
    f'  devices    {len(devices)} {devices[0].platform}, {os.cpu_count()} CPU cores'
    f'{f", {count} processes" if count > 1 else ""}'
    f'{f"; the last {c.mesh.rollout} only sample" if c.mesh.rollout else ""}\n'
    f'  memory     {derive.wrapped(memory, " " * (knob_lists.LABEL + 2)).lstrip()}\n'
    f'  disk       {total / scale:.3g} {unit} per checkpoint ({parts}); '
    f'{kept} at most: {kept * total / scale:.3g} {unit}\n'
    f'  cache      {cache.described(c.cache)}\n'
    f'  results    {workdir}; Ctrl-C saves once training has begun, '
    'the same command resumes'
  )


@dataclasses.dataclass
class Run:
  """Drives the training loop: evaluates, writes metrics, logs and saves checkpoints."""

  t: Trainer
  workdir: str
  checkpoints: checkpoint.CheckpointManager
  identity: list[str]  # fingerprints of problems and of prompts, see same_problems
  spent: Spent  # cost before this start, from the newest checkpoint
  busy: float = 0.0  # seconds for which other devices had sampled at the last step
  idled: bool = False  # whether a step of this start had nothing to learn

  def __post_init__(self):
    frozen = self.t.base, self.t.teacher
    self.base = ''.join(map(policy.fingerprint, frozen))
    # The report of a resumed run counts the time of all its starts.
    self.t.timer.seconds.update(self.spent['phases'])  # adds

  def cost(self) -> Spent:
    """Returns the meta of a checkpoint: cost so far, mesh and fingerprints."""
    return {
      'wall_s': self.spent['wall_s'] + time.perf_counter() - self.t.timer.began,
      'phases': self.t.timer.seconds,
      'problems': self.identity,
      'base': self.base,
      'peak_rss_bytes': max(self.spent['peak_rss_bytes'], machine.peak_rss()),
      'mesh': dict(self.t.mesh.shape),
      'generator': jax_options.generator(),
    }

  def start(self, s: TrainState, early: Future[list[Lowered]] | None) -> None:
    """Compiles the programs; of a finished run, repeats only a missing evaluation.

    Logs which rows of metrics and which evaluations are lost.
    """
    if s.step:
      steps = {row['step'] for row in metrics.read(self.workdir)}
      if lost := [n for n in range(s.step + 1) if n not in steps]:
        log(
          f'{self.workdir}/metrics.jsonl lacks {len(lost)} of the steps 0 to '
          f'{s.step} (first {lost[0]}, last {lost[-1]}). The report omits these steps.'
        )
    mesh = dict(self.t.mesh.shape)
    before = self.spent.get('mesh', mesh)
    if before != mesh:
      log(
        f'The run resumes on another mesh ({before} before, {mesh} now): sums are '
        'rounded differently, so it equals an uninterrupted run only up to rounding.'
      )
    if finished(self.t, s):
      log(completed(self.t.config, s))
      evaluate_again_if_lost(self.t, self.workdir, s)
    else:
      self.t = compiled(self.t, s, early)

  def loop(self, first: TrainState, stop: Stop) -> tuple[TrainState, int]:
    """Trains until the end, a signal or a divergence; returns (state, exit status)."""
    config = self.t.config
    s = first
    knobs = config.metrics.model_dump() | {'config': config.model_dump()}
    after = s.step or -1
    with (
      metrics.writing(self.workdir, after, **knobs) as write,
      metrics.writing(self.workdir, after, metrics.UPDATES) as write_update,
    ):
      # A resumed run has this row already.
      if s.step == 0:
        row, message = self.evaluate(s)
        write(0, row)
        log(message)
      if finished(self.t, s):
        return s, 0
      log(metrics.legend())
      bar = progress_bar(config.steps, 'training', 'step', initial=s.step)
      with bar as progress:
        self.t.timer.since()
        for s, row, record in train_loop(self.t, first):
          self.report_step(s, row, write)
          for update in record.updates:
            of_update = {x: update.metrics[x] for x in metrics.OF_UPDATE}
            write_update(s.step, of_update | {'update/number': update.number})
          speed = f'{row["rollout/tokens_per_s"]:.0f} tokens/s'
          progress.set_postfix_str(speed, refresh=False)
          progress.update()
          skips = s.consecutive_skips
          limit = config.learner.max_consecutive_skips
          diverged = skips >= limit or s.updates == 0 < skips
          done = finished(self.t, s)
          # A signal or a divergence in one process stops all processes.
          elsewhere = self.t.sampler.elsewhere()
          # Read once per step: two processes that read at different times would
          # disagree about the last step.
          signal = stop.signal or (elsewhere.signal if elsewhere else 0)
          stopped, diverged = exchange.agree([signal, diverged])
          last = done or bool(diverged or stopped)
          # After the agreement: all processes save this step, or none does.
          self.save_if_due(s, row, record, last=last)
          if diverged:
            log(divergence(s, limit))
            return s, DIVERGED
          if stopped and not done:
            return s, 128 + stopped
    return s, 0

  def report(self, s: TrainState) -> None:
    """Writes the report of the finished run; an OSError names the file."""
    # From files, because another start of the run may have written the first of them.
    evaluations = (evaluate.read_recorded(self.workdir, i) for i in (0, s.step))
    before, after = (evaluation['result'] for evaluation in evaluations)
    path = os.path.join(self.workdir, 'report.html')
    with files.naming(path):
      text = report.write(self.workdir, before, after, self.cost(), s.step)
      page.write(self.workdir)
    log(f'{text}\nReport: {path}')

  def report_step(self, s: TrainState, row: Metrics, write: metrics.Write) -> None:
    """Evaluates if due, writes the row of metrics and logs its line."""
    config = self.t.config
    message = ''
    if finished(self.t, s) or s.step % config.evaluate.every == 0:
      results, message = self.evaluate(s)
      row |= results
    seconds = self.t.timer.since()
    row |= {f'time/{name}': x for name, x in seconds.items()}
    row['time/step'] = sum(seconds.values())
    sampling = seconds.get('sample', 0.0)
    if elsewhere := self.t.sampler.elsewhere():
      busy = elsewhere.busy - self.busy
      self.busy = elsewhere.busy
      row['overlap/sampler_idle'] = 1 - busy / row['time/step']
      row['overlap/learner_idle'] = seconds.get('wait', 0.0) / row['time/step']
      sampling = row['overlap/sampled'] - row['overlap/sampling']
    row['rollout/tokens_per_s'] = row['rollout/tokens'] / max(sampling, 1e-9)
    write(s.step, row)
    log(metrics.line(s.step, config.steps, row))
    if message:
      log(message)
    # The first idle step of this start, and every long series; process 0 has the rows.
    if s.idle_steps == report.IDLE or (s.idle_steps and not self.idled):
      self.idled = True
      if hosts.is_first():
        log(report.idle_sentence(metrics.read(self.workdir), latest=True))

  def evaluate(self, s: TrainState) -> tuple[Metrics, str]:
    """Evaluates the state; returns its metrics and a message for the console."""
    result = record_evaluation(self.t, self.workdir, s)
    row = {}
    texts = []
    for of_set, values in {'': result, **result.get('sets', {})}.items():
      prefix = f'eval/{of_set}/' if of_set else 'eval/'
      floats = {k: v for k, v in values.items() if isinstance(v, float)}
      # A row lacks what is unknown because no response was decided.
      row |= {f'{prefix}{k}': v for k, v in floats.items() if not math.isnan(v)}
      for name, part in values['parts'].items():
        row[f'{prefix}{metrics.PARTS}{name}'] = part['mean']
        row[f'{prefix}{metrics.PARTS}{name}_stderr'] = part['stderr']
      text = f'{values["accuracy"]:.3f} ± {values["stderr"]:.3f} on {values["n"]}'
      texts.append(f'{of_set} {text} problems'.lstrip())
    rewards = evaluate.rewards_of(result).items()
    texts += (f'{name} {mean:.3f} ± {error:.3f}' for name, (mean, error) in rewards)
    message = f'held-out accuracy at step {s.step}: {", ".join(texts)}'
    if result['undecided']:
      message += (
        f'. {result["undecided"]:.1%} of the responses could not be verified and are '
        f'left out; the most frequent reason: {result["undecided_because"]}'
      )
    return row, message

  def save_if_due(
    self, s: TrainState, row: Metrics, record: StepRecord, *, last: bool
  ) -> None:
    """Saves at the end, and if checkpoint.every or checkpoint.best asks for it."""
    config = self.t.config.checkpoint
    ranked = 'eval/accuracy' in row and config.best > 0
    if not (last or ranked or s.step % config.every == 0):
      return
    with self.t.timer('save'):
      if s.step not in self.checkpoints.all_steps():
        arrays, meta = snapshot(self.t, s)
        step_record.write(self.t, self.workdir, record)
        checkpoint.save(
          self.checkpoints,
          s.step,
          arrays,
          meta | self.cost(),
          accuracy=row.get('eval/accuracy'),
          settings=row.get(metrics.SETTINGS),
        )
      if last:
        checkpoint.wait(self.checkpoints)


def divergence(s: TrainState, limit: int) -> str:
  """Returns the message for a run that ends after non-finite updates."""
  if s.updates == 0:
    return (
      'The first update of the run is not finite: the loss or the gradient overflows. '
      'Check the weights (model.path, model.dtype), the precision (model.compute), '
      'rollout/logp_diff_max and loss/ratio_max in metrics.jsonl, and the scale of '
      'loss.kl and rewards.'
    )
  return (
    f'{s.consecutive_skips} updates in a row were skipped because the loss or the '
    f'gradient was not finite (learner.max_consecutive_skips={limit}). The saved '
    'weights are from before these updates. To find the cause, see loss/ratio_max and '
    'learner/grad_norm in metrics.jsonl.'
  )


def completed(config: Config, s: TrainState) -> str:
  """Returns the message for a run that has nothing left to train."""
  limit = f'steps={config.steps}'
  more = f'--config.steps={s.step + 1} or more'
  if s.step < config.steps:
    limit = f'responses={config.responses:g}'
    more = 'a larger --config.responses'
  return (
    f'The run is finished: {s.step} steps are done, and {limit}. '
    f'To train on, give {more}.'
  )


def compiled(
  t: Trainer, s: TrainState, early: Future[list[Lowered]] | None = None
) -> Trainer:
  """Returns the trainer with the programs of its steps compiled.

  `early` has the `programs` that are being compiled already, or is None.
  """
  log('Compiling the sampler and the train step.')
  with t.timer('compile'):
    early = early or at_once(lambda: ahead.compile_all(programs(t, s.params, s.opt)))
    train_step, *others = early.result()
    machine.trim()  # frees memory for the first updates
  step = functools.partial(train_step.compile(), base=t.base)
  return dataclasses.replace(t, train_step=step, compiled=others)


def programs(t: Trainer, params: Tree, opt: Tree) -> Iterator[Call]:
  """Yields the large programs of all steps, beginning with the train step."""
  yield build.train_program(t, params, opt)
  yield decode.sync_program(t.weights(params), t.spec, t.mesh)
  if t.pictures is not None:
    yield from t.pictures.programs()
  yield from evaluation_engine(t).programs(
    decode.abstract_actor(t.spec, t.mesh), places=len(t.held_out.id_N), refreshed=False
  )
  yield from build.reference_program(t)
  # With a depth, the actor's weights score the responses.
  depth = t.config.rollout.depth
  yield from t.sampler.programs(None if depth else t.weights(params))


def record_evaluation(t: Trainer, workdir: str, s: TrainState) -> files.Object:
  """Evaluates the state, writes eval/<step>.json and returns the result."""
  with t.timer('eval'):
    result, samples = evaluation(t, s.params, s.step)
  result['settings'] = evaluate.settings(t.config.evaluate, t.held_out)
  if hosts.is_first():
    evaluate.record(workdir, s.step, result, samples, t.held_out)
  return result


def evaluate_again_if_lost(t: Trainer, workdir: str, s: TrainState) -> None:
  """Evaluates the state again if eval/<step>.json, which the report needs, is missing.

  The same weights, prompts and noise give the same responses.
  """
  lost = False
  if hosts.is_first():
    try:
      evaluate.read_recorded(workdir, s.step)
    except ValueError as error:
      log(f'{error}. Evaluating step {s.step} again.')
      lost = True
  if any(exchange.agree([lost])):
    record_evaluation(t, workdir, s)


def evaluation(
  t: Trainer, params: Tree, step: int
) -> tuple[files.Object, list[files.Object]]:
  """Evaluates on the held-out problems as training does; returns (result, samples)."""
  key = evaluation_key(t.config.seed)
  return evaluate.evaluate(
    t.actor(params),
    t.held_out,
    t.tokenizer,
    key,
    engine=evaluation_engine(t),
    verifier=t.verifier,
    step=step,
    ks=t.config.evaluate.k,
  )


def evaluation_engine(t: Trainer) -> RolloutEngine:
  """Returns the sampler of evaluations."""
  knobs = t.config.evaluate
  sampling = knobs.sampling.model_dump() | {'group_size': knobs.group_size}
  return dataclasses.replace(t.engine, gallery=t.held_out_gallery, **sampling)
