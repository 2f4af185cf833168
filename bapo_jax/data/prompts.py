"""Which prompts come at which step: a pure function of (seed, step).

1. `load` reads the data sets once: repeats and prompts that are too long are logged
   and left out; tokens are rows on the host, answers stand beside them;
2. `fingerprint` identifies the problems of a run;
3. `next_prompts` deals them in epochs, each shuffled anew, no problem twice in a step;
4. `prompts_by_id` returns those with given ids: re-evaluation is more prompts.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from bapo_jax.data import dedup, sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.knobs import ProblemsConfig, PromptsConfig
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.runtime.progress import log
from bapo_jax.types import Prompts


class Problems(NamedTuple):
  """A data set, column by column."""

  id_N: Int32[np.ndarray, ' N']  # 0..N-1, the row itself
  tokens_NT: Int32[np.ndarray, 'N T']  # the prompt from column 0, then padding
  length_N: Int32[np.ndarray, ' N']  # tokens in the prompt
  text: Sequence[str]  # as the data set states them
  answer: Sequence[str]
  verifier: Sequence[str] = ()  # rule of each problem; '' or (): rewards.rule
  system: Sequence[str] = ()  # system message of each; '' or (): none
  pictures: Sequence[tuple[bytes, ...]] = ()  # files of those of each; (): texts
  grids: Sequence[tuple[tuple[int, int], ...]] = ()  # patches of each picture


def load_held_out(
  tokenizer: Tokenizer, workdir: str, prompts: PromptsConfig, problems: ProblemsConfig
) -> Problems:
  """The held-out problems alone, for an evaluation without training.

  Raises:
    ValueError: as `load`.
  """
  held_out = sources.load(problems, 'test_source', os.path.join(workdir, 'data'))
  return tokenize(tokenizer, held_out, prompts.max_prompt_tokens, drop=False)


def load(
  tokenizer: Tokenizer, workdir: str, prompts: PromptsConfig, problems: ProblemsConfig
) -> tuple[Problems, Problems]:
  """Training and held-out problems.

  Of the held-out problems none is dropped for its length: the score would be one of
  another set.

  Raises:
    ValueError: a source cannot be read, a prompt is too long, or too few are left.
  """
  data_dir = os.path.join(workdir, 'data')
  training = sources.load(problems, 'source', data_dir)
  held_out = sources.load(problems, 'test_source', data_dir)
  both, message = dedup.overlap(training, held_out)
  if both and problems.overlap == 'drop':
    training = [row for i, row in enumerate(training) if i not in both]
    log(message + '; they are not trained on')
  elif both:
    log(message + '; problems.overlap=keep')
  most = prompts.max_prompt_tokens
  loaded = (
    tokenize(tokenizer, training, most, drop=prompts.overlong == 'drop'),
    tokenize(tokenizer, held_out, most, drop=False),
  )
  check_count(loaded[0], prompts.count)
  return loaded


def tokenize(
  tokenizer: Tokenizer, rows: Sequence[Row], max_prompt_tokens: int, *, drop: bool
) -> Problems:
  """The problems of these rows; longer ones are dropped and counted where `drop` is.

  Raises:
    ValueError: a prompt is too long.
  """
  encoded = tokenizer_lib.encode_prompts(
    tokenizer, [row.problem for row in rows], [row.system for row in rows]
  )
  if drop:
    fits = fitting(encoded, max_prompt_tokens)
    rows, encoded = [rows[i] for i in fits], [encoded[i] for i in fits]
  return table(rows, encoded, max_prompt_tokens)


def fitting(encoded: Sequence[list[int]], max_prompt_tokens: int) -> list[int]:
  """Which of these training prompts are not too long; counts the others."""
  fits = [i for i, ids in enumerate(encoded) if len(ids) <= max_prompt_tokens]
  if len(fits) < len(encoded):
    log(
      f'prompts.max_prompt_tokens={max_prompt_tokens}: {len(encoded) - len(fits)} of '
      f'{len(encoded)} training prompts are longer, up to {max(map(len, encoded))} '
      'tokens, and left out'
    )
  return fits


def table(
  rows: Sequence[Row], encoded: Sequence[list[int]], max_prompt_tokens: int
) -> Problems:
  """The problems of these rows, whose prompts are these token ids.

  Raises:
    ValueError: a prompt is too long.
  """
  text = [row.problem for row in rows]
  tokens_NT, length_N = tokenizer_lib.pad(encoded, text, max_prompt_tokens)
  return Problems(
    np.arange(len(rows), dtype=np.int32),
    tokens_NT,
    length_N,
    text,
    [row.answer for row in rows],
    [row.verifier for row in rows],
    [row.system for row in rows] if any(row.system for row in rows) else (),
  )


def fingerprint(problems: Problems) -> str:
  """Sixteen hexadecimal digits that change with any id, text, answer or verifier.

  Or system message or picture: problems without them have the digits that they always
  had.
  """
  digest = hashlib.sha256()
  verifier = problems.verifier or [''] * len(problems.text)
  columns = [problems.id_N.tolist(), problems.text, problems.answer, verifier]
  if any(problems.system):
    columns.append(problems.system)
  if any(problems.pictures):
    columns.append([picture_digests(files) for files in problems.pictures])
  for row in zip(*columns, strict=True):
    digest.update(json.dumps(row).encode() + b'\n')
  return digest.hexdigest()[:16]


def picture_digests(files: Sequence[bytes]) -> list[str]:
  """Sixteen hexadecimal digits for each picture."""
  return [hashlib.sha256(data).hexdigest()[:16] for data in files]


def check_count(problems: Problems, count: int) -> None:
  """Raises ValueError where there are fewer problems than prompts in a step."""
  if count > len(problems.id_N):
    raise ValueError(
      f'prompts.count={count} prompts per step, but only {len(problems.id_N)} '
      'problems; lower prompts.count or give more problems'
    )


def next_prompts(
  problems: Problems,
  step: int,
  seed: int,
  count: int,
  process: int = 0,
  processes: int = 1,
) -> Prompts:
  """The `count` prompts of a learner step, or the part of them of one process.

  The parts of all processes, one after the other, are the prompts of a single one.

  Raises:
    ValueError: there are fewer problems than prompts in a step, or the prompts do not
      divide over the processes.
  """
  check_count(problems, count)
  if count % processes or not 0 <= process < processes:
    raise ValueError(
      f'prompts.count={count} prompts do not divide over {processes} processes, of '
      f'which this is number {process}; give a multiple'
    )
  # An epoch's remainder is skipped, so that no problem comes twice in one step.
  n = len(problems.id_N)
  epoch, position = divmod(step, n // count)
  order = np.random.default_rng((seed, epoch)).permutation(n)
  share = count // processes
  start = position * count + process * share
  return prompts_by_id(problems, order[start : start + share])


def prompts_by_id(problems: Problems, id_P: ArrayLike) -> Prompts:
  """The prompts of the problems with these ids; id -1 is an empty seat, of length 0."""
  id_P = np.asarray(id_P, np.int32)
  length_P = np.where(id_P < 0, 0, problems.length_N[id_P]).astype(np.int32)
  return Prompts(id_P, problems.tokens_NT[id_P], length_P)
