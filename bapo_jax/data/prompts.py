"""What is asked at which step: a pure function of (seed, step).

1. `load` reads a data set once: what comes twice or is too long is told and left out;
2. token rows on the host, answers beside them; `fingerprint` says which they are;
3. `ask` deals the problems in epochs, each shuffled anew, no problem twice in a step;
4. `again` asks the problems with given ids once more: re-evaluation is more prompts.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.data import dedup, sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.runtime.progress import log
from bapo_jax.types import Prompts

CHOICES = {  # knob -> what it may be, the first is the default
  'prompts.overlong': ('drop', 'refuse'),
  'problems.duplicates': ('drop', 'keep'),
  'problems.overlap': ('keep', 'drop'),
}


class Problems(NamedTuple):
  id_N: Any  # i32   0..N-1, the row itself
  tokens_NT: Any  # i32   the prompt from column 0, then padding
  length_N: Any  # i32   tokens in the prompt
  text: list[str]  # as the data set states them
  answer: list[str]
  verifier: Sequence[str] = ()  # that a problem asks for; '' or none: rewards.rule


def load(
  tokenizer: Tokenizer,
  workdir: str,
  *,
  count: int,
  max_prompt_tokens: int,
  overlong: str,
  **problems,
) -> tuple[Problems, Problems]:
  """Training and held-out problems.

  Args:
    count: prompts a step; max_prompt_tokens: the most tokens a prompt may have.
    overlong: what becomes of a training prompt with more: 'drop', 'refuse'. Of the
      held-out problems none is dropped: the score would be one of another set.
    problems: the config's section of that name.

  Raises:
    ValueError: a source cannot be read, a prompt is too long, or too few are left.
  """
  folder = os.path.join(workdir, 'data')
  training, held_out = (
    sources.rows(knob, folder, problems) for knob in ('source', 'test_source')
  )
  both, told = dedup.overlap(training, held_out)
  if both:
    drop = problems['overlap'] == 'drop'
    log(told + ('; they are not trained on' if drop else '; problems.overlap=keep'))
    training = [row for i, row in enumerate(training) if not (drop and i in both)]
  found = (
    _tokenize(tokenizer, training, max_prompt_tokens, overlong == 'drop'),
    _tokenize(tokenizer, held_out, max_prompt_tokens, False),
  )
  check_count(found[0], count)
  return found


def _tokenize(tokenizer: Tokenizer, rows, max_prompt_tokens, drop: bool) -> Problems:
  encoded = tokenizer_lib.encode_prompts(tokenizer, [row['problem'] for row in rows])
  if drop:
    fits = [i for i, row in enumerate(encoded) if len(row) <= max_prompt_tokens]
    if len(fits) < len(rows):
      log(
        f'prompts.max_prompt_tokens={max_prompt_tokens}: {len(rows) - len(fits)} of {len(rows)} training '
        f'prompts are longer, up to {max(map(len, encoded))} tokens, and left out'
      )
    rows, encoded = ([x[i] for i in fits] for x in (rows, encoded))
  problem, answer, verifier = (
    [row[name] for row in rows] for name in ('problem', 'answer', 'verifier')
  )
  tokens_NT, length_N = tokenizer_lib.pad(encoded, problem, max_prompt_tokens)
  id_N = np.arange(len(rows), dtype=np.int32)
  return Problems(id_N, tokens_NT, length_N, problem, answer, verifier)


def fingerprint(problems: Problems) -> str:
  """Sixteen hexadecimal digits: of every id, text, answer and verifier, in order."""
  digest = hashlib.sha256()
  verifier = problems.verifier or [''] * len(problems.text)
  columns = (problems.id_N.tolist(), problems.text, problems.answer, verifier)
  for row in zip(*columns, strict=True):
    digest.update(json.dumps(row).encode() + b'\n')
  return digest.hexdigest()[:16]


def check_count(problems: Problems, count: int) -> None:
  """Raises ValueError where there are fewer problems than prompts in a step."""
  if count > len(problems.id_N):
    raise ValueError(
      f'prompts.count={count} prompts a step, but only {len(problems.id_N)} problems; '
      'lower prompts.count or give more problems'
    )


def next_prompts(
  problems: Problems,
  step: int,
  seed: int,
  count: int,
  process: int = 0,
  processes: int = 1,
) -> Prompts:
  """The `count` prompts of a learner step, or the part of them that a process asks.

  The parts of all processes, one after the other, are what one process would ask.

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
  # An epoch's remainder is skipped, so that no problem is asked twice in one step.
  n = len(problems.id_N)
  epoch, place = divmod(step, n // count)
  order = np.random.default_rng((seed, epoch)).permutation(n)
  share = count // processes
  start = place * count + process * share
  return prompts_by_id(problems, order[start : start + share])


def prompts_by_id(problems: Problems, id_P) -> Prompts:
  """The prompts of the problems with these ids; id -1 is an empty seat, of length 0."""
  id_P = np.asarray(id_P, np.int32)
  length_P = np.where(id_P < 0, 0, problems.length_N[id_P]).astype(np.int32)
  return Prompts(id_P, problems.tokens_NT[id_P], length_P)
