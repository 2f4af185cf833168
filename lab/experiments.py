"""Expands an experiment into runs, and stores one small result per run.

1. `get_experiment(name)` of a Python file returns an `Experiment`: the knobs that all
   runs share, and the knobs in which arms and factors differ.
2. `runs` builds the config of every run: arms x factor levels x seeds.
3. `outcome` extracts the quantities of tables and figures from a finished workdir;
   `write` stores them in <results>/<run>.json.
4. `undone` lists the runs to train, and `read` loads the results of an experiment.
   Both raise an error if results have different versions of the code.
"""

import importlib.util
import itertools
import json
import math
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime import files, metrics
from bapo_jax.training import config as config_lib
from bapo_jax.training import evaluate
from bapo_jax.training.config import Config

Knobs = Mapping[str, Any]  # dotted name -> value
Result = Mapping[str, Any]  # as returned by `outcome`

# Metrics whose value after every step is part of a result.
STEP_METRICS = (
  'rollout/accuracy', 'rollout/length_right', 'rollout/length_wrong',
  'rollout/truncated', 'rollout/responses', 'batch/learnable', 'batch/filled',
  'batch/reevaluated', 'batch/reused', 'clip/share_start', 'clip/share', 'clip/low',
  'clip/high', 'clip/moved', 'clip/target_met', 'clip/no_evidence', 'clip/fraction',
  'loss/entropy', 'loss/ratio_max', 'learner/grad_norm', 'learner/skipped',
  'learner/updates',
)  # fmt: skip
WAY_OUT = 'remove the file and run the experiment again'


def command(main: Callable[[], int]) -> None:
  """Runs a command; exits with its status, or with the message of a ValueError."""
  try:
    sys.exit(main())
  except ValueError as error:
    sys.exit(f'lab: {error}')


class Experiment(NamedTuple):
  """A comparison: every arm at every combination of factor levels with every seed."""

  values: dict[str, Any]  # the config that all runs share, nested
  arms: Mapping[str, Knobs]
  seeds: tuple[int, ...]
  factors: Mapping[str, Mapping[str, Knobs]] = {}  # factor -> level -> knobs


class RunSpec(NamedTuple):
  """One run of an experiment."""

  arm: str
  levels: dict[str, str]  # factor -> level
  seed: int
  config: Config


def run_file(path: str) -> types.ModuleType:
  """Executes a Python file and returns its module.

  Raises:
    ValueError: the path is not a Python file.
  """
  spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
  if spec is None or spec.loader is None or not os.path.isfile(path):
    raise ValueError(f'{path} is not a Python file; give path/experiments.py:name')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def load(description: str) -> Experiment:
  """Returns the experiment that a file describes.

  Args:
    description: `path:name`, where `get_experiment(name)` of that file returns the
      experiment and raises KeyError for an unknown name.

  Raises:
    ValueError: the file cannot be run, or has no experiment of this name.
  """
  path, _, name = description.partition(':')
  module = run_file(path)
  if not hasattr(module, 'get_experiment'):
    raise ValueError(
      f'{path} has no function get_experiment, so it describes no experiment; give a '
      'file that has one, such as configs/countdown.py:cells, or train a single run: '
      f'python -m bapo_jax train --config={description}'
    )
  try:
    return module.get_experiment(name)
  except KeyError as error:
    if error.args != (name,):
      raise  # a mistake in the description itself
    names = f'; choose one of {module.NAMES}' if hasattr(module, 'NAMES') else ''
    raise ValueError(f'{path} has no experiment {name!r}{names}') from None


def runs(experiment: Experiment) -> dict[str, RunSpec]:
  """Returns run name -> run; runs of a seed share warm starts and are adjacent.

  Raises:
    ValueError: a config is invalid, or two runs have the same config.
  """
  factors = experiment.factors
  products = itertools.product(*factors.values())
  combinations = [dict(zip(factors, levels, strict=True)) for levels in products]
  specs: dict[str, RunSpec] = {}
  run_of: dict[str, str] = {}  # fingerprint -> run name
  for seed, levels, arm in itertools.product(
    experiment.seeds, combinations, experiment.arms
  ):
    name = '-'.join([arm, *levels.values(), f'seed{seed}'])
    values = experiment.values
    # Later knobs win: an arm overrides the levels, and nothing overrides the seed.
    for factor, level in levels.items():
      values = config_lib.merged(values, factors[factor][level])
    # A seed has a warm start of its own, made without the user's cache.
    of_run = {'seed': seed, 'sft.seed': seed, 'cache': '', 'title': name}
    values = config_lib.merged(values, {**experiment.arms[arm], **of_run})
    try:
      config = config_lib.parse(values)
    except ValueError as error:
      raise ValueError(f'run {name}: {error}') from None
    twin = run_of.setdefault(fingerprint(config), name)
    if twin != name:
      raise ValueError(f'runs {twin} and {name} have the same config; change an arm')
    specs[name] = RunSpec(arm, levels, seed, config)
  return specs


def fingerprint(config: Config) -> str:
  """Returns twelve digits that change with any knob except the title."""
  return config_lib.fingerprint(config.model_dump() | {'title': ''})


def outcome(
  run: RunSpec, workdir: str, commit: str, versions: Mapping[str, str], diverged: bool
) -> dict[str, Any]:
  """Returns the result of a finished run as JSON values.

  `diverged` is whether non-finite updates ended the run before its `planned` steps.
  `evaluations` are [step, accuracy, standard error, responses sampled]. `right` is step
  -> number of right responses, of `group_size`, to each held-out problem, for the first
  and the last evaluation. `steps` is metric -> values after every step, five digits,
  null if not finite. `seconds` exclude the warm start.
  """
  rows = metrics.read(workdir)
  trained = [row for row in rows if row['step'] > 0]
  columns = ('step', 'eval/accuracy', 'eval/stderr', 'rollout/responses')
  evaluated = [row for row in rows if 'eval/accuracy' in row]
  evaluations = [[_short(row.get(name, 0.0)) for name in columns] for row in evaluated]
  size = run.config.evaluate.group_size
  right = {}
  for step in sorted({int(evaluated[i]['step']) for i in (0, -1)}):
    samples = evaluate.read_recorded(workdir, step)['samples']
    verdicts = [bool(sample['correct']) for sample in samples]
    right[str(step)] = np.reshape(verdicts, (-1, size)).sum(1).tolist()
  return {
    'arm': run.arm,
    'levels': run.levels,
    'seed': run.seed,
    'config': fingerprint(run.config),
    'commit': commit,
    'versions': dict(versions),
    'diverged': diverged,
    'planned': run.config.steps,
    'evaluations': evaluations,
    'right': right,
    'group_size': size,
    'steps': {
      name: [_short(row.get(name, math.nan)) for row in trained]
      for name in STEP_METRICS
    },
    'seconds': _short(sum(row.get('time/step', 0.0) for row in trained)),
  }


def _short(value: float) -> float | None:
  """Rounds to five digits; None, JSON's null, for a value that is not finite."""
  return float(f'{value:.5g}') if math.isfinite(value) else None


def write(results: str, name: str, result: Result) -> None:
  """Stores the result of a run."""
  os.makedirs(results, exist_ok=True)
  text = json.dumps(result, separators=(',', ':'), allow_nan=False)
  files.write(f'{results}/{name}.json', text + '\n')


def undone(
  results: str, specs: Mapping[str, RunSpec], versions: Mapping[str, str]
) -> dict[str, RunSpec]:
  """Returns the runs without a result, after copying results of other experiments.

  Runs with equal configs and versions of the code are trained once, even if the names
  of their experiments and arms differ.

  Args:
    results: folder of this experiment's results, beside those of other experiments.

  Raises:
    ValueError: a stored result has another config or another version of the code.
  """
  by_config = {}
  for path in sorted(pathlib.Path(results).parent.glob('*/*.json')):
    stored = files.read_json(path, WAY_OUT)
    if isinstance(stored, dict) and stored.get('versions') == dict(versions):
      by_config[stored.get('config')] = stored
  missing = {}
  for name, run in specs.items():
    path, config = f'{results}/{name}.json', fingerprint(run.config)
    if not os.path.exists(path):
      if config not in by_config:
        missing[name] = run
        continue
      identity = {'arm': run.arm, 'levels': run.levels, 'seed': run.seed}
      write(results, name, by_config[config] | identity)
    stored = files.read_json(path, WAY_OUT)
    if stored.get('config') != config:
      raise ValueError(f'{path} has another config than the experiment; {WAY_OUT}')
    if stored.get('versions') != dict(versions):
      raise ValueError(
        f'{path} is of other code or packages, at commit {stored.get("commit")}; '
        'continue at this commit, or remove its results'
      )
  return missing


def read(experiment: Experiment, results: str) -> dict[str, Result]:
  """Reads run name -> result of the finished runs.

  Raises:
    ValueError: a result does not match the run of its file name, or two results are of
      different versions of the code.
  """
  stored: dict[str, Result] = {}
  for name, run in runs(experiment).items():
    path = f'{results}/{name}.json'
    if not os.path.exists(path):
      continue
    result = files.read_json(path, WAY_OUT)
    identity = result['arm'], result['levels'], result['seed']
    if identity != (run.arm, run.levels, run.seed):
      raise ValueError(f'{path} is the result of another run; {WAY_OUT}')
    earlier = next(iter(stored.values()), result)
    if result['versions'] != earlier['versions']:
      raise ValueError(
        f'{path} (commit {result["commit"][:12]}) is of other code or packages '
        f'than commit {earlier["commit"][:12]}; remove the results of one commit'
      )
    stored[name] = result
  return stored
