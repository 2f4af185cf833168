"""Compares runs by their final metrics, with intervals.

1. Runs whose configs differ only in seeds and in NUISANCE form a group;
2. `final` is the value of a metric at the end of a run;
3. `differences` compares the final metrics of each group with those of the first group,
   seed by seed, which removes the variation that a seed causes in both. Single
   runs are compared problem by problem, with the last evaluation of each;
4. `results` says in words which groups lead in held-out accuracy.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from bapo_jax.run.panels import METRICS
from bapo_jax.run.run_files import RunFiles
from bapo_jax.run.series import ERRORS, fifths, mean, of_sets, series
from bapo_jax.training.evaluate import mean_and_error, plus_minus

# Knobs that may differ within a group, beside the seeds: they change no result.
NUISANCE = ('title', 'cache', 'metrics', 'checkpoint')
LEVEL = 0.95  # of the intervals
SEED = '0123456789-_.'  # at the end of the name of a run
Values = dict[Any, float]  # seeds, or a held-out problem -> value


class Group(NamedTuple):
  """Runs of one config with different seeds."""

  label: str
  runs: list[RunFiles]


def seeds_of(run: RunFiles) -> tuple[Any, ...]:
  """Returns the values of all knobs that are a seed, such as seed and sft.seed."""
  return tuple(value for name, value in sorted(run.knobs.items()) if is_seed(name))


def settings_of(run: RunFiles) -> tuple[Any, ...]:
  """Returns the knobs that change what the results of an evaluation mean."""
  names = 'evaluate.group_size', 'evaluate.sampling'
  return tuple(x for name, x in sorted(run.knobs.items()) if name.startswith(names))


def is_seed(name: str) -> bool:
  """Returns whether a knob is a seed."""
  return name.split('.')[-1] == 'seed'


def nuisance(name: str) -> bool:
  """Returns whether runs of a group may differ in a knob."""
  return is_seed(name) or name.split('.')[0] in NUISANCE


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
  """Groups the runs of one config, in order.

  A run with the seeds of an earlier run of its config is a group of its own: the two
  are not independent.
  """
  groups = defaultdict[Any, list[RunFiles]](list)
  repeats = Counter()
  for run in runs:
    plain = [item for item in sorted(run.knobs.items()) if not nuisance(item[0])]
    config = repr(plain)
    repeat = config, seeds_of(run)
    groups[config, repeats[repeat]].append(run)
    repeats[repeat] += 1
  names = [[run.name for run in members] for members in groups.values()]
  labels = [label(members) for members in names]
  if len(set(labels)) < len(labels):
    labels = [', '.join(members) for members in names]
  return [Group(*pair) for pair in zip(labels, groups.values(), strict=True)]


def label(names: Sequence[str]) -> str:
  """Returns the directory and the beginning that the names share, else all names."""
  if len(names) == 1:
    return names[0]
  prefix = os.path.commonprefix(names)  # noqa: RUF071 (of characters)
  directory, name = os.path.split(prefix)
  return os.path.join(directory, name.rstrip(SEED)).rstrip('/') or ', '.join(names)


def interval(values: ArrayLike, level: float = LEVEL) -> tuple[float, float]:
  """Returns (mean, half the length of the t interval of the mean); nan for one value.

  The interval covers the mean of a normal distribution in `level` of all cases.
  """
  middle, error = mean_and_error(values)
  return middle, float(special.stdtrit(np.size(values) - 1, (1 + level) / 2)) * error


def final(run: RunFiles, name: str) -> float:
  """Returns the last evaluation or count, or the mean over the last fifth of steps."""
  if is_state(name):
    _, values = series(run.rows, name)
    return float(values[-1]) if len(values) else math.nan
  return mean(fifths(run.rows)[1], name)


def is_state(name: str) -> bool:
  """Returns whether a metric's last value describes a run better than a mean."""
  return name.startswith('eval/') or name == 'rollout/responses'


def cell(group: Group, name: str) -> str:
  """Formats the final value of a metric with its interval or error; '' without one."""
  values = [*by_seed(group, name).values()]
  if not values:
    return ''
  middle, half = interval(values)
  # One run has no spread between seeds, but an evaluation knows its error over
  # problems.
  errors = ERRORS | of_sets([[name]])
  if len(group.runs) == 1 and name in errors:
    half = final(group.runs[0], errors[name])
  few = f' (n={len(values)})' if len(values) < len(group.runs) else ''
  return plus_minus(middle, half) + few


def by_seed(group: Group, name: str) -> Values:
  """Returns seeds -> final value of a metric; those of evaluations with their settings.

  So values of different settings are never paired.
  """
  evaluated = name.startswith('eval/')
  values = {
    seeds_of(run) + settings_of(run) * evaluated: final(run, name) for run in group.runs
  }
  return {key: value for key, value in values.items() if math.isfinite(value)}


def by_problem(run: RunFiles) -> dict[str, Values]:
  """Returns metric -> held-out problem -> mean over the responses that have it.

  A problem is named with the settings of the evaluation, see `by_seed`.
  """
  # By text and id: two data sets may number their problems alike.
  problems = defaultdict(list)
  for sample in run.after['samples'] if run.after else ():
    problems[sample['id'], sample['problem'], settings_of(run)].append(sample)
  means = defaultdict(dict)
  for problem, samples in problems.items():
    fields = {'eval/accuracy': 'correct', 'eval/length': 'tokens'}
    if 'set' in samples[0]:
      fields[f'eval/{samples[0]["set"]}/accuracy'] = 'correct'
    for name, field in fields.items():
      # An undecided response is neither right nor wrong.
      known = [x[field] for x in samples if x[field] is not None]
      if known:
        means[name][problem] = sum(known) / len(known)
  return means


def paired(base: Values, other: Values) -> list[float]:
  """Returns other - base for each common key: a seed, or a held-out problem."""
  return [other[key] - base[key] for key in base if key in other]


def _finals(groups: Sequence[Group], names: Sequence[str]):
  """Returns what is paired, and for each group metric -> key -> final value.

  The keys are seeds, or held-out problems if every group is a single run.
  """
  # Without seeds to pair, problems are the next largest common source of variation.
  if all(len(group.runs) == 1 for group in groups):
    return 'held-out problem', [by_problem(group.runs[0]) for group in groups]
  return 'seed', [{name: by_seed(group, name) for name in names} for group in groups]


def results(groups: Sequence[Group]) -> Iterator[str]:
  """Yields a sentence per group after the first: which leads in held-out accuracy.

  Skips a group with fewer than two seeds or held-out problems of the first.
  """
  unit, (base, *others) = _finals(groups, ['eval/accuracy'])
  for group, other in zip(groups[1:], others, strict=True):
    pairs = paired(base.get('eval/accuracy', {}), other.get('eval/accuracy', {}))
    # A single pair has no interval, and a bare difference would read like a result.
    if len(pairs) > 1:
      middle, half = interval(pairs)
      yield (
        f'{group.label} '
        f'{"leads" if middle > 0 else "trails" if middle < 0 else "equals"} '
        f'{groups[0].label} in held-out accuracy: {plus_minus(middle, half, "+")}, the '
        f'mean difference and its {100 * LEVEL:.0f} % t interval, paired over '
        f'{len(pairs)} {unit}s{"" if unit == "seed" else " of one run each"}. The '
        'interval '
        f'{"excludes 0" if abs(middle) > half else "includes 0, so this may be chance"}'
        f'{"" if unit == "seed" else "; it lacks the variation between seeds"}.'
      )
    elif settings_of(group.runs[0]) != settings_of(groups[0].runs[0]):
      yield (
        f'{group.label} and {groups[0].label} were evaluated with different settings '
        '(section `evaluate`), so their evaluations are not compared.'
      )


def differences(groups: Sequence[Group]) -> tuple[str, dict[str, list[str]]]:
  """Compares each group but the first with the first.

  Returns:
    What is paired, 'seed' or 'held-out problem', and metric -> the mean difference of
    each group, '' if there are fewer than two pairs; METRICS, then those of named sets.
  """
  rows = (row for group in groups for run in group.runs for row in run.rows)
  names = [*METRICS, *of_sets(rows)]
  unit, (base, *others) = _finals(groups, names)
  table: dict[str, list[str]] = {}
  for name in names:
    pairs = [paired(base.get(name, {}), other.get(name, {})) for other in others]
    table[name] = [
      f'{plus_minus(*interval(x), "+")} (n={len(x)})' if len(x) > 1 else ''
      for x in pairs
    ]
  return unit, table
