"""Expands an experiment into runs, and stores one small result per run.

1. `get_experiment(name)` of a Python file returns an `Experiment`: the knobs that all
   runs share, and the knobs in which arms and factors differ.
2. `runs` builds the config of every run: arms x factor levels x seeds.
3. `outcome` extracts the quantities of tables and figures from a finished workdir;
   `write` stores them in <results>/<experiment>/<run>.json.
4. `pack` joins the files of a complete experiment: <results>/<experiment>.jsonl has a
   line per run, and <results>/details.zip the long fields of its runs.
5. `undone` lists the runs to train, and `read` loads the results of an experiment.
   Both raise an error if results have different versions of the code.
"""

import contextlib
import io
import itertools
import json
import math
import os
import pathlib
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax import custom_code
from bapo_jax.run import step_record
from bapo_jax.runtime import digests, files, machine, metrics
from bapo_jax.training import config as config_lib
from bapo_jax.training import evaluate
from bapo_jax.training.config import Config

Knobs = Mapping[str, Any]  # dotted name -> value
Result = Mapping[str, Any]  # as returned by `outcome`

# Metrics whose value after every step is part of a result.
METRICS = """
  rollout/accuracy rollout/length_right rollout/length_wrong rollout/truncated
  rollout/responses batch/learnable batch/filled batch/reevaluated batch/reused
  clip/share_start clip/share clip/low clip/high clip/moved clip/target_met
  clip/no_evidence clip/fraction loss/entropy loss/ratio_max learner/grad_norm
  learner/skipped learner/updates rollout/logp_diff moe/agree moe/agree_first moe/load
"""
STEP_METRICS = METRICS.split()
BOUNDS = {  # field of a result's `updates` -> metric
  'number': 'update/number',
  'low': 'clip/low',
  'high': 'clip/high',
  'choice': 'clip/search_steps',  # the point on the path of the search
  'met': 'clip/target_met',
  'no_evidence': 'clip/no_evidence',
}
DETAILS = (
  'right',
  'steps',
  'updates',
  'versions',
  'sources',
)  # fields of a result in details.zip
WAY_OUT = 'restore it, or give another --results'


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
  # (arm, factor -> level, seed) -> knobs of that run alone; they win over all others.
  of_run: Callable[[str, Mapping[str, str], int], Knobs] = lambda arm, levels, seed: {}
  block: int = 1  # seeds that take turns, so that the last arm can read the first one


class RunSpec(NamedTuple):
  """One run of an experiment."""

  arm: str
  levels: dict[str, str]  # factor -> level
  seed: int
  config: Config
  knobs: Knobs  # in which the run differs from the shared config


def run_file(path: str) -> types.SimpleNamespace:
  """Executes a Python file and returns its names.

  Raises:
    ValueError: the path is not a Python file.
  """
  if not path.endswith('.py') or not os.path.isfile(path):
    raise ValueError(f'{path} is not a Python file; give path/experiments.py:name')
  return types.SimpleNamespace(**runpy.run_path(path))


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


def labels(experiment: Experiment) -> dict[str, tuple[str, dict[str, str], int]]:
  """Returns run name -> (arm, factor -> level, seed); blocks of seeds are adjacent."""
  factors = experiment.factors
  products = itertools.product(*factors.values())
  combinations = [dict(zip(factors, levels, strict=True)) for levels in products]
  named = {}
  for i in range(0, len(experiment.seeds), experiment.block):
    seeds = experiment.seeds[i : i + experiment.block]
    for label in itertools.product(combinations, experiment.arms, seeds):
      levels, arm, seed = label
      named[run_name(arm, levels, seed)] = arm, levels, seed
  return named


def runs(experiment: Experiment) -> dict[str, RunSpec]:
  """Returns run name -> run, in the order of `labels`.

  Raises:
    ValueError: a config is invalid, or two runs have the same config.
  """
  specs: dict[str, RunSpec] = {}
  run_of: dict[str, str] = {}  # fingerprint -> run name
  for name, (arm, levels, seed) in labels(experiment).items():
    # Later knobs win: an arm overrides the levels, a run the arm, the seed all.
    knobs: dict[str, Any] = {}
    for factor, level in levels.items():
      knobs |= experiment.factors[factor][level]
    knobs |= {**experiment.arms[arm], **experiment.of_run(arm, levels, seed)}
    # A seed has a policy of its own.
    of_seed = {'seed': seed, 'sft.seed': seed, 'title': name}
    try:
      config = config_lib.parse(config_lib.merged(experiment.values, knobs | of_seed))
    except ValueError as error:
      raise ValueError(f'run {name}: {error}') from None
    twin = run_of.setdefault(fingerprint(config), name)
    if twin != name:
      raise ValueError(f'runs {twin} and {name} have the same config; change an arm')
    specs[name] = RunSpec(arm, levels, seed, config, knobs)
  return specs


def run_name(arm: str, levels: Mapping[str, str], seed: int) -> str:
  """Returns the name of a run."""
  return '-'.join([arm, *levels.values(), f'seed{seed}'])


def fingerprint(config: Config) -> str:
  """Returns twelve digits that change with any knob except the title."""
  values = config.model_dump() | {'title': '', 'code': config.code}
  return digests.fingerprint(values)


def outcome(
  run: RunSpec, workdir: str, commit: str, versions: Mapping[str, str], diverged: bool
) -> dict[str, Any]:
  """Returns the result of a finished run as JSON values.

  `diverged` is whether non-finite updates ended the run before its `planned` steps.
  `evaluations` are [step, accuracy, standard error, responses sampled]. `right` is step
  -> number of right responses, of `group_size`, to each held-out problem, for the first
  and the last evaluation. `steps` is metric -> values after every step, five digits,
  null if not finite. `updates` has the columns of BOUNDS, a value per update.
  `seconds` exclude the warm start.
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
    'updates': _updates(metrics.read(workdir, metrics.UPDATES)),
    'overrides': dict(run.knobs),
    'sources': sources(run.config),
    'processor': machine.processor(),
    'seconds': _short(sum(row.get('time/step', 0.0) for row in trained)),
  }


def sources(config: Config) -> dict[str, str]:
  """Returns the file -> text of every custom function that a config names."""
  digests = ', '.join(config.code.values()).split(', ')
  named = {digest.rpartition(' ')[0] for digest in digests} - {''}
  return {
    path: pathlib.Path(path).read_text(encoding='utf-8')
    for path in named
    if not custom_code.is_registered(path)
  }


def _updates(rows: Sequence[metrics.Row]) -> dict[str, Any]:
  """Returns the bounds and the search of each update: BOUNDS -> values.

  A bound that is not finite, of a rule without one, is None.
  """
  columns = {x: [row[metric] for row in rows] for x, metric in BOUNDS.items()}
  return {
    x: [*map(step_record.exact if x in ('low', 'high') else int, values)]
    for x, values in columns.items()
  }


def _short(value: float) -> float | None:
  """Rounds to five digits; None, JSON's null, for a value that is not finite."""
  return float(f'{value:.5g}') if math.isfinite(value) else None


def write(results: str, name: str, result: Result) -> None:
  """Stores the result of a run; `results` is the folder of its experiment."""
  files.write(f'{results}/{name}.json', _line(result))


def _line(value: Mapping[str, Any]) -> str:
  return json.dumps(value, separators=(',', ':'), allow_nan=False) + '\n'


def pack(results: str) -> None:
  """Replaces the files of an experiment's runs by lines of two files; see `read_runs`.

  The lines are ordered by run name, so that equal results give equal files.
  """
  lines = ''
  details = ''
  for name, result in sorted(read_runs(results).items()):
    long = {field: x for field, x in result.items() if field in DETAILS}
    short = {field: x for field, x in result.items() if field not in DETAILS}
    lines += _line({'run': name} | short)
    details += _line({'run': name} | long)
  path = pathlib.Path(results)
  texts = _unzip(path.parent) | {f'{path.name}.jsonl': details}
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, 'w') as archive:
    for name, text in sorted(texts.items()):
      # Without the time of writing, equal results give equal files.
      archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_LZMA)
  # The lines need the archive, and the runs' files are removed when both are complete.
  files.write(path.parent / 'details.zip', buffer.getvalue())
  files.write(f'{results}.jsonl', lines)
  for file in path.glob('*.json'):
    file.unlink()
  with contextlib.suppress(OSError):  # without the folder, or with other files in it
    path.rmdir()


def measure(results: str, seeds: Iterable[int], run: Callable[[int], Result]) -> None:
  """Stores `run` of every seed that has no result, and packs them."""
  stored = read_runs(results)
  for seed in seeds:
    if str(seed) not in stored:
      write(results, str(seed), run(seed))
  pack(results)


def _unzip(folder: pathlib.Path) -> dict[str, str]:
  """Returns file name -> text of details.zip; empty without this file."""
  path = folder / 'details.zip'
  if not path.exists():
    return {}
  with zipfile.ZipFile(path) as archive:
    return {name: archive.read(name).decode() for name in archive.namelist()}


def read_runs(results: str) -> dict[str, dict[str, Any]]:
  """Reads run name -> result: the packed runs of an experiment and those under way.

  Raises:
    ValueError: a file is damaged.
  """
  path = pathlib.Path(results)
  table = path.parent / f'{path.name}.jsonl'
  stored: dict[str, dict[str, Any]] = {}
  if table.exists():
    rows = _by_run(table.read_text(encoding='utf-8'))
    details = _by_run(_unzip(path.parent).get(table.name, ''))
    if [*rows] != [*details]:
      raise ValueError(f'{table} and details.zip have different runs; restore both')
    stored = {name: row | details[name] for name, row in rows.items()}
  for file in sorted(path.glob('*.json')):
    stored[file.stem] = files.read_json(file, WAY_OUT)
  return stored


def _by_run(lines: str) -> dict[str, dict[str, Any]]:
  rows = map(json.loads, lines.splitlines())
  return {row.pop('run'): row for row in rows}


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
  folder = pathlib.Path(results).parent
  names = {x.stem for x in folder.glob('*') if x.suffix in ('', '.jsonl')}
  by_config = {
    result.get('config'): result
    for name in sorted(names)
    for result in read_runs(f'{folder}/{name}').values()
    if result.get('versions') == dict(versions)
  }
  stored = read_runs(results)
  missing = {}
  for name, run in specs.items():
    config = fingerprint(run.config)
    if name in stored:
      result = stored[name]
      if result['config'] != config:
        raise ValueError(f'{results}: {name} has another config; {WAY_OUT}')
      if result['versions'] != dict(versions):
        raise ValueError(
          f'{results}: {name} is of other code or packages, at commit '
          f'{result["commit"]}; continue at this commit, or give another --results'
        )
    elif config in by_config:
      identity = {'arm': run.arm, 'levels': run.levels, 'seed': run.seed}
      identity['overrides'] = dict(run.knobs)
      write(results, name, by_config[config] | identity)
    else:
      missing[name] = run
  return missing


def commits(results: Iterable[Result]) -> str:
  """Returns the commits that results name, for a page."""
  return ', '.join(dict.fromkeys(f'`{result["commit"][:12]}`' for result in results))


def read(experiment: Experiment, results: str) -> dict[str, Result]:
  """Reads run name -> result of the finished runs.

  Raises:
    ValueError: a result does not match the run of its file name, or two results are of
      different versions of the code.
  """
  stored = read_runs(results)
  matching: dict[str, Result] = {}
  for name, label in labels(experiment).items():
    if name not in stored:
      continue
    result = stored[name]
    if (result['arm'], result['levels'], result['seed']) != label:
      raise ValueError(f'{results}: {name} is the result of another run; {WAY_OUT}')
    earlier = next(iter(matching.values()), result)
    if result['versions'] != earlier['versions']:
      raise ValueError(
        f'{results}: {name} (commit {result["commit"][:12]}) is of other code or '
        f'packages than commit {earlier["commit"][:12]}; give --results with '
        'those of one commit'
      )
    matching[name] = result
  return matching
