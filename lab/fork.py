r"""Continues a run from one of its checkpoints under several rules, and compares them.

  python -m lab.fork runs/x --step=20 --steps=10 --arms=run --arms=clip.rule=fixed
  python -m lab.fork runs/x --step=20 --steps=10 --seeds=4 \
    --arms=run --arms='clip.rule=balanced,clip.target=0.3'

1. An arm is named by its overrides, separated by commas; `run` is the run unchanged.
   A fork is a workdir with a copy of the checkpoint and the config of an arm.
2. Every fork resumes and trains for the same number of steps. Seed and step determine
   prompts and sampling noise, so the first step of all arms samples equal responses,
   and the arm `run` repeats the steps of the run bit for bit.
3. fork.html in --to, by default <workdir>/forks/<step>, compares the forks from the
   checkpoint on: run/comparison.py pairs every arm with the first one, over noise seeds
   if there are several, else over held-out problems. Ctrl-C stops after a step; the
   same command resumes.
"""

import argparse
import itertools
import math
import os
import re
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from bapo_jax.run import comparison, experiment, look
from bapo_jax.run.page import page
from bapo_jax.runtime import files
from bapo_jax.runtime import workdir as workdirs
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.tools import compare
from bapo_jax.training import config as config_lib
from bapo_jax.training import needs
from bapo_jax.training.config import Config
from lab import experiments

RUN = 'run'  # the arm without overrides
# Beginnings of the knobs in which arms may differ. Prompts, sampling noise and the
# arrays of the checkpoint depend on the others.
FREE = (
  'advantage.',
  'clip.',
  'mask.',
  'loss.',
  'learner.',
  'batch.weights.',
  'rewards.shaping.',
  'optimizer.lr',
  'optimizer.b1',
  'optimizer.b2',
  'optimizer.weight_decay',
  'optimizer.max_norm',
)
EXAMPLE = '--arms=run --arms=clip.rule=fixed'


class Fork(NamedTuple):
  """The workdir of one arm with one seed."""

  path: str
  config: Config


class Plan(NamedTuple):
  """Forks of a run, ordered by arm, then by seed."""

  workdir: str
  first: int  # the step of the checkpoint
  last: int
  forks: list[Fork]
  to: str  # directory of the forks and of their comparison


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
  run = config_lib.from_json(workdirs.read_config(workdir))
  saved = checkpoint_steps(workdir)
  first = step if step is not None else max(saved, default=0)
  if first not in saved:
    raise ValueError(
      f'--step={first}: {workdir} has no such checkpoint; give one of {saved or "none"}'
      ' (checkpoint.keep sets how many a run keeps)'
    )
  names = {re.sub(r'[^\w.=+-]+', '-', arm)[:80]: arm for arm in arms}
  if not 2 <= len(names) <= len(look.LIGHT):
    raise ValueError(
      f'--arms: {len(names)} different arms; give 2 to {len(look.LIGHT)}, such as '
      f'{EXAMPLE}'
    )
  to = to or os.path.join(workdir, 'forks', str(first))
  last = first + steps
  forks = []
  for (name, arm), i in itertools.product(names.items(), range(seeds)):
    config = config_of(run, arm, {'seed': run.seed + i, 'steps': last})
    forks.append(Fork(os.path.join(to, name, f'seed{config.seed}'), config))
  if forks[0].config.code != run.code:
    raise ValueError(
      f'{workdir}: custom functions have changed since the run began '
      f'({", ".join(run.code)} then); restore their files'
    )
  return Plan(workdir, first, last, forks, to)


def config_of(run: Config, arm: str, knobs: experiments.Knobs) -> Config:
  """Returns the config of a fork: the run's with the overrides of an arm, and `knobs`.

  Raises:
    ValueError: an override is invalid, has no effect, or is not in FREE.
  """
  values = run.model_dump()
  # A comma within a value, such as that of a tuple, does not precede `name=`.
  parts = [] if arm == RUN else re.split(r',(?=\s*[\w.]+=)', arm)
  changes = config_lib.overrides([f'--config.{part.strip()}' for part in parts], values)
  for name in changes:
    if not name.startswith(FREE):
      raise ValueError(
        f'--arms={arm}: {name} cannot differ between forks, because prompts, sampling '
        f'noise or the arrays of the checkpoint depend on it; change {", ".join(FREE)}'
      )
  common = {'title': f'{run.title}, fork {arm}', 'responses': math.inf, **knobs}
  common |= {'checkpoint.keep': 1, 'checkpoint.best': 0, 'checkpoint.final': 'run'}
  config = config_lib.parse(config_lib.merged(values, changes | common))
  needs.refuse(changes, [config])
  return config


def copy(workdir: str, step: int, fork: Fork) -> None:
  """Makes the workdir of a fork: as the run's after `step`, with the fork's config."""
  part = f'{fork.path}.tmp'
  shutil.rmtree(part, ignore_errors=True)
  os.makedirs(os.path.join(part, 'eval'))
  # The training resumes after `step`, and then removes the rows of later steps.
  parts = (f'checkpoints/{step}', 'eval/0.json', f'eval/{step}.json')
  for name in ('metrics.jsonl', *parts):
    path = os.path.join(workdir, name)
    copied = os.path.join(part, name)
    if os.path.isdir(path):
      shutil.copytree(path, copied)
    elif os.path.exists(path):
      shutil.copy(path, copied)
  files.write_json(os.path.join(part, 'config.json'), fork.config.model_dump())
  os.replace(part, fork.path)  # a kill leaves a complete fork or none


def train(plan: Plan) -> int:
  """Trains all forks that are not done; returns 0, or 128 + the number of a signal.

  Raises:
    ValueError: a fork cannot be trained, or has another config or more steps.
  """
  for number, fork in enumerate(plan.forks, 1):
    log(f'Fork {number} of {len(plan.forks)}: {fork.path}')
    if not os.path.isdir(fork.path):
      copy(plan.workdir, plan.first, fork)
    newest = max(checkpoint_steps(fork.path), default=0)
    if newest > plan.last:
      raise ValueError(
        f'{fork.path} has {newest - plan.first} steps already; give --steps='
        f'{newest - plan.first} or more, or another --to'
      )
    if newest == plan.last and os.path.exists(f'{fork.path}/eval/{newest}.json'):
      experiment.claim(fork.path, fork.config)  # the same config, or a ValueError
      continue
    status = experiment.train(fork.config, fork.path)
    if status == experiment.DIVERGED:
      log(f'{fork.path} diverged and has no evaluation.')
    elif status:
      return status
  return 0


def write(plan: Plan) -> str:
  """Writes the comparison of the forks to fork.html; returns their differences."""
  runs = [
    run._replace(
      rows=[row for row in run.rows if row['step'] >= plan.first], start=plan.first
    )
    for run in compare.read([fork.path for fork in plan.forks])
  ]
  files.write(os.path.join(plan.to, 'fork.html'), page(runs))
  return '\n'.join(comparison.results(comparison.grouped(runs)))


def main(argv: Sequence[str] | None = None) -> int:
  """Forks a run and compares the forks.

  Returns:
    0, or 128 + signal number after a signal.

  Raises:
    ValueError: see `plan` and `train`.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('workdir', help='directory of a run')
  parser.add_argument('--step', type=int, help='checkpoint; by default the newest')
  parser.add_argument('--steps', type=int, default=10, help='learner steps of a fork')
  parser.add_argument('--seeds', type=int, default=1, help='noise seeds per arm')
  parser.add_argument('--to', default='', help='directory of the forks')
  parser.add_argument(
    '--arms',
    action='append',
    default=[],
    help=f'repeated: KNOB=VALUE,KNOB=VALUE or {RUN}; the first arm is the base',
  )
  args = parser.parse_args(argv)
  forks = plan(args.workdir, args.step, args.steps, args.arms, args.seeds, args.to)
  status = train(forks)
  if status:
    log('Stopped: run the same command to resume the forks.')
    return status
  log(f'{write(forks)}\nThe forks are compared in {forks.to}/fork.html')
  return 0


if __name__ == '__main__':
  experiments.command(main)
