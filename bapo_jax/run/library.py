"""Starts a run from Python, with functions and rows of the calling program."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bapo_jax import custom_code
from bapo_jax.run import experiment
from bapo_jax.runtime import files, hosts, machine
from bapo_jax.runtime.progress import log
from bapo_jax.training import config as config_lib

Rule = str | Callable[..., Any]
Rows = Iterable[Mapping[str, Any]]  # such as a list, or a Dataset of `datasets`
HELD_OUT = 0.1  # share of the rows that are held out if none are given
MOST_HELD_OUT = 512
NOTHING: Mapping[str, Any] = MappingProxyType({})


def train(
  config: str | Mapping[str, Any],
  workdir: str,
  *,
  knobs: Mapping[str, Any] | Sequence[str] = NOTHING,
  reward: Rule | Sequence[Rule] | None = None,
  rows: Rows | None = None,
  held_out: Rows | None = None,
  rules: Mapping[str, Rule] = NOTHING,
) -> int:
  """Trains in the workdir, or resumes its run; returns the exit status of the command.

  Args:
    config: a config file, or its values as nested dicts.
    knobs: dotted name -> value, such as {'steps': 10}, or arguments of the command
      line; overrides values of `config`.
    reward: a reward function or the name of a verifier, or a list of them; see
      docs/guide/library.md. A function runs in a thread of this process, without a
      deadline; the path of a function ('my.py:score') runs in processes that can be
      killed.
    rows: training problems; each row has the fields of a row in a file.
    held_out: problems for evaluation; by default the last tenth of `rows`.
    rules: slot ('loss', 'clip', 'mask', 'advantage', 'batch', 'buffer.thresholds',
      'rewards.shaping', 'prompts') -> function, its path, or name of a rule.

  Raises:
    ValueError: the config is invalid, or the run cannot start or continue.

  Example: a reward and rows of one's own.

    >>> def score(sample):
    ...   return float(sample.answer in sample.response)
    >>> rows = [{'problem': f'{i}+1=', 'answer': str(i + 1)} for i in range(80)]
    >>> knobs = {'steps': 1}
    >>> train('configs/aime.py', 'runs/mine', knobs=knobs, reward=score, rows=rows)
    The last 8 of 80 rows are held out; `held_out` gives others.
    ...
    0
  """
  workdir = files.local(workdir, flag='workdir=')
  overrides = {f'{slot}.rule': _path(rule) for slot, rule in rules.items()}
  if reward is not None:
    one = isinstance(reward, str) or callable(reward)
    overrides['rewards.rule'] = ','.join(map(_path, [reward] if one else reward))
  if rows is not None:
    overrides |= _sources(list(rows), held_out)
  with hosts.together():  # a config file may raise an error in one process alone
    values = config_lib.load(files.local(config)) if isinstance(config, str) else config
    parsed = config_lib.compose(config_lib.merged(values, overrides), knobs)
  asked = {'config': parsed.model_dump(), 'functions': parsed.code}
  hosts.same_everywhere(asked | machine.versions())
  return experiment.train(parsed, workdir)


def join(
  config: str,
  knobs: Sequence[str],
  workdir: str = 'runs/default',
  coordinator: str = '',
  process: int | None = None,
  processes: int | None = None,
  start_s: float = hosts.START_S,
) -> int:
  """Trains together with other processes, or alone: `bapo train`.

  Args:
    config: a config file.
    knobs: arguments such as --config.steps=10.
    workdir: directory of all results
    coordinator: host:port of process 0 of several; empty: detected
    process: number of this process, from 0
    processes: number of processes
    start_s: seconds to wait for the other processes
  """
  # Before a config or a custom file uses JAX.
  hosts.initialise(coordinator, process, processes, start_s)
  return train(config, workdir, knobs=knobs)


def _sources(rows: list[Mapping[str, Any]], held_out: Rows | None) -> dict[str, str]:
  """Registers rows as functions; returns the knobs of the two sources."""
  if held_out is None:
    count = min(max(int(len(rows) * HELD_OUT), 1), MOST_HELD_OUT)
    log(f'The last {count} of {len(rows)} rows are held out; `held_out` gives others.')
    held_out = rows[-count:]
    rows = rows[:-count]
  return {
    'problems.source': custom_code.register(_returning('rows', rows)),
    'problems.test_source': custom_code.register(_returning('held_out', held_out)),
  }


def _path(rule: Rule):
  """Returns the name or path of a rule; functions are registered."""
  return rule if isinstance(rule, str) else custom_code.register(rule)


def _returning(name, rows: Rows):
  """Returns a function of this name that returns the rows, whatever the split."""

  rows = list(rows)

  def function(split):
    del split
    return rows

  function.__name__ = name
  return function
