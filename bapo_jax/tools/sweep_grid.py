"""Experiments: arms by factors by seeds, and one small result per run.

1. a description, a Python file whose `get_experiment(name)` returns an `Experiment`,
   says what all runs share and by which knobs they differ;
2. `runs` makes the config of each;
3. `outcome` reads from a finished workdir what the tables and figures need, `write`
   stores it as <results>/<run>.json;
4. `read` returns the results of an experiment, and refuses those of another config, or
   of two versions of the code.
"""

import importlib.util
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from bapo_jax.runtime import files, metrics
from bapo_jax.training import config as config_lib
from bapo_jax.training import evaluate
from bapo_jax.training.config import Config

Knobs = Mapping[str, Any]  # dotted name -> value

# Metrics of every step that a result holds.
STEP_METRICS = (
  'rollout/accuracy',
  'rollout/length_right',
  'rollout/length_wrong',
  'rollout/truncated',
  'rollout/responses',
  'batch/learnable',
  'batch/filled',
  'batch/reevaluated',
  'batch/reused',
  'clip/share_start',
  'clip/share',
  'clip/low',
  'clip/high',
  'clip/moved',
  'clip/target_met',
  'clip/fraction',
  'loss/entropy',
  'loss/ratio_max',
  'learner/grad_norm',
  'learner/skipped',
  'learner/updates',
)
WAY_OUT = 'remove it, and the runner makes it again'


class Experiment(NamedTuple):
  """What is compared: every arm at every combination of levels, with every seed."""

  values: dict[str, Any]  # of the config that all runs share, nested
  arms: Mapping[str, Knobs]
  seeds: tuple[int, ...]
  factors: Mapping[str, Mapping[str, Knobs]] = {}  # factor -> level -> knobs


class RunSpec(NamedTuple):
  """One run of an experiment."""

  arm: str
  levels: dict[str, str]  # factor -> level
  seed: int
  config: Config


def load(description: str) -> Experiment:
  """The experiment that a file describes.

  Args:
    description: its path, a colon, and the name of the experiment.

  Raises:
    ValueError: the file cannot be run, or knows no such experiment.
  """
  path, _, name = description.partition(':')
  spec = importlib.util.spec_from_file_location('experiments', path)
  if spec is None or spec.loader is None or not os.path.isfile(path):
    raise ValueError(f'{path} is no Python file; give path/experiments.py:name')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  try:
    experiment = module.get_experiment(name)
  except KeyError as error:
    if error.args != (name,):
      raise  # of the description itself
    there = f'; choose one of {module.NAMES}' if hasattr(module, 'NAMES') else ''
    raise ValueError(f'{path} has no experiment {name!r}{there}') from None
  assert isinstance(experiment, Experiment)
  return experiment


def runs(experiment: Experiment) -> dict[str, RunSpec]:
  """Name -> run; those of one seed together, since they share a warm start.

  Raises:
    ValueError: a config is invalid, or two runs are one and the same.
  """
  factors, made = experiment.factors, {}
  levels = [
    dict(zip(factors, of, strict=True)) for of in itertools.product(*factors.values())
  ]
  for seed, level, arm in itertools.product(experiment.seeds, levels, experiment.arms):
    knobs = {name: value for f in level for name, value in factors[f][level[f]].items()}
    name = '-'.join([arm, *level.values(), f'seed{seed}'])
    values = with_knobs(
      experiment.values, knobs | dict(experiment.arms[arm]) | {'seed': seed}
    )
    try:
      config = config_lib.parse(values | {'title': name})
    except ValueError as error:
      raise ValueError(f'run {name}: {error}') from None
    made[name] = RunSpec(arm, level, seed, config)
  prints = [fingerprint(run.config) for run in made.values()]
  if len(set(prints)) < len(prints):
    twice = next(
      name for name, p in zip(made, prints, strict=True) if prints.count(p) > 1
    )
    raise ValueError(f'run {twice} has the config of another run; arms must differ')
  return made


def with_knobs(values: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
  """Nested values with these knobs."""
  changed = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
  for name, value in knobs.items():
    head, _, rest = name.partition('.')
    changed[head] = with_knobs(changed.get(head, {}), {rest: value}) if rest else value
  return changed


def fingerprint(config: Config) -> str:
  """Twelve digits that change with any knob but the title."""
  return config_lib.fingerprint(config_lib.plain(config) | {'title': ''})


def outcome(
  run: RunSpec, workdir: str, commit: str, versions: Mapping[str, str], diverged: bool
) -> dict[str, Any]:
  """The result of a run that is over, as JSON values.

  An object of
    arm, levels, seed; config: fingerprint; commit, versions: that it was made with;
    diverged: its updates were not finite, and it ended early; planned: its steps;
    evaluations: (step, accuracy, standard error, responses sampled) of each;
    right: step -> right responses to each held-out problem, of the first and the last
    evaluation; group_size: of how many;
    steps: metric -> its value after every step, five digits, null where not finite;
    seconds: of training, the warm start left out.
  """
  rows = metrics.read(workdir)
  trained = [row for row in rows if row['step'] > 0]
  evaluations = [
    [
      row['step'],
      row['eval/accuracy'],
      row['eval/stderr'],
      row.get('rollout/responses', 0),
    ]
    for row in rows
    if 'eval/accuracy' in row
  ]
  size = run.config.evaluate.group_size
  return {
    'arm': run.arm,
    'levels': run.levels,
    'seed': run.seed,
    'config': fingerprint(run.config),
    'commit': commit,
    'versions': dict(versions),
    'diverged': diverged,
    'planned': run.config.steps,
    'evaluations': [[_short(x) for x in e] for e in evaluations],
    'right': {str(s): _right(workdir, s, size) for s in _ends(evaluations)},
    'group_size': size,
    'steps': {
      name: [_short(row.get(name, math.nan)) for row in trained]
      for name in STEP_METRICS
    },
    'seconds': _short(sum(row.get('time/step', 0.0) for row in trained)),
  }


def _ends(evaluations: list[list[float]]) -> list[int]:
  """The steps of the first and the last evaluation."""
  return sorted({int(evaluations[0][0]), int(evaluations[-1][0])})


def _right(workdir: str, step: int, group_size: int) -> list[int]:
  """Right responses to each held-out problem."""
  samples = evaluate.read_recorded(workdir, step)['samples']
  verdicts = [bool(sample['correct']) for sample in samples]
  starts = range(0, len(verdicts), group_size)
  return [sum(verdicts[start : start + group_size]) for start in starts]


def _short(value: float) -> float | None:
  """Five digits; null is JSON's only word for what is not finite."""
  return float(f'{value:.5g}') if math.isfinite(value) else None


def write(results: str, name: str, result: Mapping[str, Any]) -> None:
  """Stores the result of a run."""
  os.makedirs(results, exist_ok=True)
  text = json.dumps(result, separators=(',', ':'), allow_nan=False)
  files.write(path_of(results, name), text + '\n')


def path_of(results: str, name: str) -> str:
  """The file of a run's result."""
  return os.path.join(results, f'{name}.json')


def is_done(results: str, name: str, run: RunSpec, versions: Mapping[str, str]) -> bool:
  """Whether the result of this very run is there.

  Raises:
    ValueError: a result is there, of another config or another version of the code.
  """
  path = path_of(results, name)
  if not os.path.exists(path):
    return False
  found = files.read_json(path, WAY_OUT)
  if found.get('config') != fingerprint(run.config):
    raise ValueError(f'{path} is of another config than the description; {WAY_OUT}')
  if found.get('versions') != dict(versions):
    raise ValueError(
      f'{path} was made by other code or packages, at commit {found.get("commit")}; '
      'go on there, or remove the results of that commit'
    )
  return True


def borrow(
  results: str, undone: Mapping[str, RunSpec], versions: Mapping[str, str]
) -> set[str]:
  """Writes the results that another experiment beside this one has; returns which.

  What is one config at one version of the code is one run, whatever experiment and arm
  name it; it is trained once.

  Args:
    results: folder of this experiment's results, in one folder with all others'.
    undone: name -> run, of those whose results are not there.
  """
  made = {}
  for path in sorted(pathlib.Path(results).parent.glob('*/*.json')):
    found = files.read_json(str(path), WAY_OUT)
    if isinstance(found, dict) and found.get('versions') == dict(versions):
      made[found.get('config')] = found
  borrowed = set()
  for name, run in undone.items():
    if (found := made.get(fingerprint(run.config))) is not None:
      identity = {'arm': run.arm, 'levels': run.levels, 'seed': run.seed}
      write(results, name, found | identity)
      borrowed.add(name)
  return borrowed


def read(experiment: Experiment, results: str) -> dict[str, dict[str, Any]]:
  """Run -> result, of the runs that are done; made by one version of the code.

  Raises:
    ValueError: a result is of another seed, arm or level than its name says, or two are
      of different versions.
  """
  found = {}
  for name, run in runs(experiment).items():
    path = path_of(results, name)
    if not os.path.exists(path):
      continue
    result = files.read_json(path, WAY_OUT)
    identity = result['arm'], result['levels'], result['seed']
    if identity != (run.arm, run.levels, run.seed):
      raise ValueError(f'{path} is the result of another run; {WAY_OUT}')
    first = next(iter(found.values()), result)
    if result['versions'] != first['versions']:
      raise ValueError(
        f'{path} was made by other code or packages (commit {result["commit"][:12]}) '
        f'than the results before it (commit {first["commit"][:12]})'
      )
    found[name] = result
  return found
