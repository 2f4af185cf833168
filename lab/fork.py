r"""Continues a run from one of its checkpoints under several rules, and compares them.

  python -m lab.fork runs/x --step=20 --steps=10 --arms=run --arms=clip.rule=fixed
  python -m lab.fork runs/x --step=20 --steps=10 --seeds=4 \
    --arms=run --arms='clip.rule=balanced,clip.target=0.3'
  python -m lab.fork runs/x --bisect='loss/entropy < 0.1'

1. An arm is named by its overrides, separated by commas; `run` is the run unchanged.
   A fork is a workdir with a copy of the checkpoint and the config of an arm.
2. Every fork resumes and trains for the same number of steps. Seed and step determine
   prompts and sampling noise, so the first step of all arms samples equal responses,
   and the arm `run` repeats the steps of the run bit for bit.
3. `measures` reads a fork, and `differences` pairs every arm with the first one: over
   noise seeds if there are several, else over prompts.
4. fork.json, fork.md and fork.html in --to, by default <workdir>/forks/<step>, contain
   the differences. Ctrl-C stops after a step; the same command resumes.

`--bisect` instead prints the first step at which a metric satisfies the inequality, and
the last checkpoint before this step: the place to fork from.
"""

import argparse
import itertools
import math
import operator
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import numpy as np

from bapo_jax.run import charts, experiment, page, step_record
from bapo_jax.runtime import files, html, markdown, metrics
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.tools import compare
from bapo_jax.tools.compare import Difference
from bapo_jax.training import config as config_lib
from bapo_jax.training import evaluate, needs
from bapo_jax.training.config import Config
from lab import experiments

RUN = 'run'  # the arm without overrides
# Sections and knobs in which arms may differ. Prompts, sampling noise and the arrays of
# the checkpoint depend on the others.
FREE = ('advantage', 'clip', 'mask', 'loss', 'learner', 'batch.weights')
FREE += ('rewards.shaping', 'optimizer.lr', 'optimizer.b1', 'optimizer.b2')
FREE += ('optimizer.weight_decay', 'optimizer.max_norm')
TRAINING = (  # metrics of training, as means over the steps of a fork
  'rollout/accuracy', 'rollout/length', 'loss/entropy', 'clip/fraction', 'clip/share',
  'loss/kl', 'loss/ratio_max', 'loss/ess', 'learner/grad_norm',
)  # fmt: skip
BOUND = re.compile(r'\s*([\w/]+)\s*([<>])\s*(\S+)\s*')
EXAMPLE = '--arms=run --arms=clip.rule=fixed'

Measured = dict[str, float]  # problem -> value; with one key '' for a mean
Measures = dict[str, Measured]  # measure -> values


class Fork(NamedTuple):
  """The workdir of one arm with one seed."""

  arm: str
  path: str
  config: Config


class Plan(NamedTuple):
  """Forks of a run, ordered by arm, then by seed."""

  workdir: str
  first: int  # the step of the checkpoint
  last: int
  arms: tuple[str, ...]
  seeds: tuple[int, ...]
  forks: list[Fork]
  to: str  # directory of the forks and of their comparison


class Row(NamedTuple):
  """A measure of the first arm, and the difference of each other arm from it."""

  measure: str
  base: float
  differences: list[Difference | None]  # None: no pair has the measure in both arms


def plan(
  workdir: str, step: int | None, steps: int, arms: Sequence[str], seeds: int, to: str
) -> Plan:
  """Returns the forks of a run.

  Args:
    step: the checkpoint; None for the newest.
    steps: learner steps of every fork.
    arms: overrides separated by commas, or RUN; the others are compared with the first.
    seeds: noise seeds per arm: the seed of the run and the next ones.
    to: directory of the forks; '' for <workdir>/forks/<step>.

  Raises:
    ValueError: there is no such checkpoint, there are fewer than two arms or too many,
      or an arm is invalid.
  """
  stored = workdirs.read_config(workdir)
  run, saved = config_lib.from_json(stored), checkpoint_steps(workdir)
  first = step if step is not None else max(saved, default=0)
  if first not in saved:
    raise ValueError(
      f'--step={first}: {workdir} has no such checkpoint; give one of {saved or "none"}'
      ' (checkpoint.keep sets how many a run keeps)'
    )
  if not 2 <= len(arms) <= charts.COLOURS:
    raise ValueError(
      f'--arms: {len(arms)} given; give 2 to {charts.COLOURS}, such as {EXAMPLE}'
    )
  if steps < 1 or seeds < 1:
    raise ValueError(f'--steps={steps} and --seeds={seeds}: give 1 or more')
  to, last = to or os.path.join(workdir, 'forks', str(first)), first + steps
  names = [re.sub(r'[^\w.=+-]+', '-', arm)[:80] for arm in arms]
  if len(set(names)) < len(names):
    raise ValueError(f'--arms: two arms have the same name: {", ".join(arms)}')
  numbers = tuple(run.seed + i for i in range(seeds))
  forks = []
  for (arm, name), seed in itertools.product(zip(arms, names, strict=True), numbers):
    config = config_of(run, arm, {'seed': seed, 'steps': last})
    forks.append(Fork(arm, os.path.join(to, name, f'seed{seed}'), config))
  experiment.check_code(workdir, forks[0].config)
  return Plan(workdir, first, last, tuple(arms), numbers, forks, to)


def config_of(run: Config, arm: str, knobs: experiments.Knobs) -> Config:
  """Returns the config of a fork: the run's with the overrides of an arm, and `knobs`.

  Raises:
    ValueError: an override is invalid, has no effect, or is not in FREE.
  """
  values = run.model_dump()
  # A comma within a value, such as that of a tuple, does not precede `name=`.
  given = [] if arm == RUN else re.split(r',(?=\s*[\w.]+=)', arm)
  found = config_lib.overrides([f'--config.{part.strip()}' for part in given], values)
  for name in found:
    if not any(name == free or name.startswith(f'{free}.') for free in FREE):
      raise ValueError(
        f'--arms={arm}: {name} cannot differ between forks, because prompts, sampling '
        f'noise or the arrays of the checkpoint depend on it; change {", ".join(FREE)}'
      )
  own = {'title': f'{run.title}, fork {arm}', 'responses': math.inf}
  own |= {'checkpoint.keep': 1, 'checkpoint.best': 0, 'checkpoint.final': 'run'}
  config = config_lib.parse(config_lib.merged(values, found | own | dict(knobs)))
  needs.refuse(found, [config])
  return config


def copy(workdir: str, step: int, fork: Fork) -> None:
  """Makes the workdir of a fork: as the run's after `step`, with the fork's config."""
  part = f'{fork.path}.tmp'
  shutil.rmtree(part, ignore_errors=True)
  os.makedirs(os.path.join(part, 'eval'))
  trees = ['warmstart', os.path.join('checkpoints', str(step))]
  # The training resumes after `step`, and then removes the rows of later steps.
  names = ['metrics.jsonl', *(f'eval/{n}.json' for n in {0, step})]
  for name in trees:
    if os.path.isdir(path := os.path.join(workdir, name)):
      shutil.copytree(path, os.path.join(part, name))
  for name in names:
    if os.path.isfile(path := os.path.join(workdir, name)):
      shutil.copy(path, os.path.join(part, name))
  files.write_json(os.path.join(part, 'config.json'), fork.config.model_dump())
  os.replace(part, fork.path)  # a kill leaves a complete fork or none


def train(made: Plan) -> tuple[int, dict[str, int]]:
  """Trains all forks that are not done; returns (status, diverged fork -> step).

  The status is 0, or 128 + signal number if a signal stopped a fork.

  Raises:
    ValueError: a fork cannot be trained, or has another config or more steps.
  """
  diverged = {}
  for number, fork in enumerate(made.forks, 1):
    log(f'Fork {number} of {len(made.forks)}: {fork.path}')
    if not os.path.isdir(fork.path):
      copy(made.workdir, made.first, fork)
    if (newest := max(checkpoint_steps(fork.path), default=0)) > made.last:
      raise ValueError(
        f'{fork.path} has {newest - made.first} steps already; give --steps='
        f'{newest - made.first} or more, or another --to'
      )
    if newest == made.last and os.path.exists(_evaluation(fork.path, newest)):
      experiment.claim(fork.path, fork.config)  # the same config, or a ValueError
      continue
    status = experiment.train(fork.config, fork.path)
    if status == experiment.DIVERGED:
      diverged[fork.path] = max(checkpoint_steps(fork.path))
    elif status:
      return status, diverged
  return 0, diverged


def _evaluation(path: str, step: int) -> str:
  return os.path.join(path, 'eval', f'{step}.json')


def measures(path: str, first: int, last: int) -> Measures:
  """Reads the measures of a fork.

  Returns:
    eval/...: of the responses to each held-out problem after step `last`: accuracy,
    tokens, and -log-probability in nats per token, an estimate of the entropy;
    last/...: of the recorded tokens of step `last`, per training problem with an
    advantage: the share that is cut, and the mean of |log r|;
    TRAINING metrics: means over the steps after `first`.
  """
  found: Measures = {}
  if os.path.exists(_evaluation(path, last)):  # not after a divergence
    found |= _evaluated(evaluate.read_recorded(path, last)['samples'])
  if os.path.exists(os.path.join(path, step_record.FOLDER, f'{last}.jsonl')):
    found |= _recorded(step_record.read(path, last))
  rows = [row for row in metrics.read(path) if first < row['step'] <= last]
  for name in TRAINING:
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    if values:
      found[name] = {'': float(np.mean(values))}
  return found


def _evaluated(samples: Sequence[Mapping]) -> Measures:
  """Returns the means of each held-out problem."""
  found: Measures = {}
  by_problem = itertools.groupby(samples, operator.itemgetter('id'))
  for problem, group in by_problem:
    each = list(group)
    tokens = sum(sample['tokens'] for sample in each)
    values = {
      'eval/accuracy': sum(sample['correct'] for sample in each) / len(each),
      'eval/length': tokens / len(each),
      'eval/nats_per_token': -sum(sample['logp'] for sample in each) / max(tokens, 1),
    }
    for name, value in values.items():
      found.setdefault(name, {})[str(problem)] = value
  return found


def _recorded(groups: Sequence[Mapping]) -> Measures:
  """Returns the means over the recorded tokens of each training problem."""
  found: Measures = {'last/cut': {}, 'last/log_ratio': {}}
  for group in groups:
    computed = [r for r in group['responses'] if r['ratio']]
    ratios = [x for r in computed for x in r['ratio'] if x]  # not 0 or infinite
    if ratios:
      cuts = [cut > 0 for r in computed for cut in r['cut']]
      found['last/cut'][str(group['id'])] = float(np.mean(cuts))
      spread = float(np.mean(np.abs(np.log(ratios))))
      found['last/log_ratio'][str(group['id'])] = spread
  return {name: values for name, values in found.items() if values}


def differences(of_arms: Sequence[Sequence[Measures]]) -> list[Row]:
  """Returns a row per measure of the first arm; `of_arms` has measures [arm][seed].

  With several seeds, pairs the means of the forks of one seed; with one seed, pairs the
  problems that both arms have. A mean by itself has one pair and no interval.
  """
  base, *others = of_arms
  rows = []
  for name in dict.fromkeys(name for found in base for name in found):
    each = [other_difference(base, other, name) for other in others]
    values = [_mean(found[name]) for found in base if name in found]
    rows.append(Row(name, float(np.mean(values)), each))
  return rows


def other_difference(
  base: Sequence[Measures], other: Sequence[Measures], name: str
) -> Difference | None:
  """Returns the mean paired difference of a measure, other minus base, if any."""
  pairs = [
    (x[name], y[name])
    for x, y in zip(base, other, strict=True)
    if name in x and name in y
  ]
  if len(base) > 1:
    values = [_mean(y) - _mean(x) for x, y in pairs]
  else:
    values = [y[key] - x[key] for x, y in pairs for key in x if key in y]
  return Difference(*compare.interval(values), len(values)) if values else None


def _mean(measured: Measured) -> float:
  return float(np.mean(list(measured.values())))


def cell(found: Difference | None) -> str:
  """Formats a difference; without an interval if there is one pair."""
  if found is None:
    return ''
  return str(found) if found.pairs > 1 else f'{found.mean:+.4g}'


def sentence(made: Plan, diverged: Mapping[str, int]) -> str:
  """Returns the text above the table: what is paired, and which forks diverged."""
  pairs = f'the {len(made.seeds)} noise seeds' if len(made.seeds) > 1 else 'the prompts'
  alone = '' if len(made.seeds) > 1 else ', and means over steps have no interval'
  text = (
    f'Steps {made.first + 1} to {made.last} of {made.workdir}, from one checkpoint, '
    f'with the same prompts and sampling noise. Differences from {made.arms[0]}, '
    f'paired over {pairs}: ± is a {100 * compare.LEVEL:.0f} % t interval over n '
    f'pairs{alone}. eval: held-out problems after the last step; last: recorded tokens '
    'of the last step; others: means over the steps.'
  )
  for path, step in diverged.items():
    text += f' {path} diverged at step {step} and has no evaluation.'
  return text


def by_arm(made: Plan, each: list[Any]) -> list[list[Any]]:
  """Divides a list over the forks into a list per arm."""
  count = len(made.seeds)
  return [each[i : i + count] for i in range(0, len(each), count)]


def write(made: Plan, diverged: Mapping[str, int]) -> str:
  """Writes fork.json, fork.md and fork.html; returns the text of fork.md."""
  each = [measures(fork.path, made.first, made.last) for fork in made.forks]
  of_arms = by_arm(made, each)
  rows, text = differences(of_arms), sentence(made, diverged)
  header = ['measure', *made.arms]
  cells = [[r.measure, f'{r.base:.4g}', *map(cell, r.differences)] for r in rows]
  align = 'l' + 'r' * len(made.arms)
  stored = {
    'run': made.workdir,
    'step': made.first,
    'steps': made.last - made.first,
    'arms': made.arms,
    'seeds': made.seeds,
    'diverged': diverged,
    # arm -> a mean per seed
    'means': {
      r.measure: {
        arm: [_mean(x[r.measure]) if r.measure in x else None for x in of_seeds]
        for arm, of_seeds in zip(made.arms, of_arms, strict=True)
      }
      for r in rows
    },
    'differences': {r.measure: _plain(made.arms[1:], r.differences) for r in rows},
  }
  files.write_json(os.path.join(made.to, 'fork.json'), stored)
  title = f'Forks of {made.workdir} at step {made.first}'
  parts = [f'# {title}', text, markdown.table(cells, header, align)]
  files.write(os.path.join(made.to, 'fork.md'), '\n\n'.join(parts) + '\n')
  table = html.table(cells, header, align)
  body = [html.element('h1', title), html.element('p', text), table, *curves(made)]
  files.write(os.path.join(made.to, 'fork.html'), page.document(title, body))
  return '\n\n'.join(parts)


def _plain(arms: Sequence[str], found: Sequence[Difference | None]) -> dict:
  """Returns arm -> difference as JSON, without an interval if there is one pair."""
  plain = {}
  for arm, x in zip(arms, found, strict=True):
    if x is not None:
      half = x.half if math.isfinite(x.half) else None
      plain[arm] = {'mean': x.mean, 'half': half, 'pairs': x.pairs}
  return plain


def curves(made: Plan) -> Iterator[Element]:
  """Yields the parts of the comparison page of the forks, from the checkpoint on."""
  runs = compare.read([fork.path for fork in made.forks])
  runs = [
    run._replace(rows=[row for row in run.rows if row['step'] >= made.first])
    for run in runs
  ]
  pairs = zip(made.arms, by_arm(made, runs), strict=True)
  groups = [compare.Group(arm, of_seeds) for arm, of_seeds in pairs]
  yield from itertools.islice(compare.build(groups), 1, None)  # without its heading


def bisect(workdir: str, bound: str) -> str:
  """Returns a sentence on the first step whose metric satisfies an inequality.

  Args:
    bound: such as 'loss/entropy < 0.1'.

  Raises:
    ValueError: the inequality or its metric is unknown, or no step satisfies it.
  """
  match = BOUND.fullmatch(bound)
  try:
    name, sign, limit = match.groups() if match else ('', '', '')
    value = float(limit)
  except ValueError:
    name, sign, value = '', '', 0.0
  if name not in GLOSSARY:
    raise ValueError(
      f"--bisect={bound}: give a metric, < or >, and a number, such as 'loss/entropy < "
      "0.1'; bapo_jax/runtime/glossary.py lists the metrics"
    )
  beyond = operator.lt if sign == '<' else operator.gt
  rows = [row for row in metrics.read(workdir) if name in row]
  broken = next((row for row in rows if beyond(row[name], value)), None)
  if broken is None:
    raise ValueError(f'--bisect={bound}: no step of {workdir}, {len(rows)} with {name}')
  step, found = int(broken['step']), f'{broken[name]:.4g}'
  before = [n for n in checkpoint_steps(workdir) if n < step]
  text = f'{name} {sign} {value:g} first at step {step} ({found}); '
  if not before:
    return f'{text}no checkpoint before it is kept (checkpoint.keep, checkpoint.every)'
  ask = f'--step={before[-1]} --steps={step - before[-1]}'
  return f'{text}fork before it: python -m lab.fork {workdir} {ask} {EXAMPLE}'


def main(argv: Sequence[str] | None = None) -> int:
  """Forks a run, or finds the step to fork at.

  Returns:
    0, or 128 + signal number after a signal.

  Raises:
    ValueError: see `plan`, `train` and `bisect`.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('workdir', help='directory of a run')
  parser.add_argument('--step', type=int, help='checkpoint; by default the newest')
  parser.add_argument('--steps', type=int, default=10, help='learner steps of a fork')
  parser.add_argument('--seeds', type=int, default=1, help='noise seeds per arm')
  parser.add_argument('--to', default='', help='directory of the forks')
  parser.add_argument('--bisect', help="such as 'loss/entropy < 0.1'; trains nothing")
  parser.add_argument(
    '--arms',
    action='append',
    default=[],
    help=f'repeated: KNOB=VALUE,KNOB=VALUE or {RUN}; the first arm is the base',
  )
  args = parser.parse_args(argv)
  if args.bisect is not None:
    log(bisect(args.workdir, args.bisect))
    return 0
  asked = args.step, args.steps, args.arms, args.seeds, args.to
  made = plan(args.workdir, *asked)
  status, diverged = train(made)
  if status:
    log('Stopped: run the same command to resume the forks.')
    return status
  log(write(made, diverged))
  log(f'Written to {made.to}: fork.json, fork.md and fork.html with curves')
  return 0


if __name__ == '__main__':
  experiments.command(main)
