"""What is asked at which step: a pure function of (seed, step).

1. `load` reads a data set once: token rows on the host, answers beside them;
2. `ask` deals the problems in epochs, each shuffled anew, no problem twice in a step;
3. `again` asks the problems with given ids once more: re-evaluation is more prompts.
"""

import os
from typing import Any, NamedTuple

import numpy as np

from bapo_jax import text as text_lib
from bapo_jax.types import Prompts


class Problems(NamedTuple):
  id_N: Any  # i32   0..N-1, the row itself
  tokens_NT: Any  # i32   the prompt from column 0, then padding
  length_N: Any  # i32   tokens in the prompt
  text: list[str]  # as the data set states them
  answer: list[str]


def load(
  text: text_lib.Text,
  workdir: str,
  width: int,
  *,
  source: str,
  test_source: str,
  family: str,
  level: int,
  seed: int,
  train: int,
  test: int,
) -> tuple[Problems, Problems]:
  """Training and held-out problems.

  Args:
    source, test_source: 'synthetic', or paths of jsonl files with the fields problem
      and answer.
    family, level, seed, train, test: what to generate where source is 'synthetic'.
  """
  if source == 'synthetic':
    from bapo_jax.problems import synthetic

    builder = synthetic.prepare(
      os.path.join(workdir, 'data'),
      family=family,
      level=level,
      seed=seed,
      train=train,
      test=test,
    )
    splits = [list(builder.as_data_source(split)) for split in ('train', 'test')]
  else:
    from bapo_jax.problems import math_file

    splits = [math_file.read(path) for path in (source, test_source)]
  return tuple(_tokenize(text, rows, width) for rows in splits)


def _tokenize(text, rows, width) -> Problems:
  problem = [_string(row['problem']) for row in rows]
  answer = [_string(row['answer']) for row in rows]
  tokens_NT, length_N = text_lib.ask(text, problem, width)
  return Problems(
    np.arange(len(rows), dtype=np.int32), tokens_NT, length_N, problem, answer
  )


def _string(value) -> str:
  """Text comes back from array_record as bytes."""
  return value.decode() if isinstance(value, bytes) else value


def ask(problems: Problems, step: int, seed: int, count: int) -> Prompts:
  """The `count` prompts of a learner step.

  Raises:
    ValueError: there are fewer problems than prompts in a step.
  """
  n = len(problems.id_N)
  if count > n:
    raise ValueError(
      f'prompts.count={count} prompts a step, but only {n} problems; lower '
      'prompts.count or give more problems'
    )
  # An epoch's remainder is skipped, so that no problem is asked twice in one step.
  epoch, place = divmod(step, n // count)
  order = np.random.default_rng((seed, epoch)).permutation(n)
  return again(problems, order[place * count : (place + 1) * count])


def again(problems: Problems, id_P) -> Prompts:
  """The prompts of the problems with these ids; id -1 is an empty seat, of length 0."""
  id_P = np.asarray(id_P, np.int32)
  length_P = np.where(id_P < 0, 0, problems.length_N[id_P]).astype(np.int32)
  return Prompts(id_P, problems.tokens_NT[id_P], length_P)
