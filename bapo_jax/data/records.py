"""Reads recorded rollouts, of this program or of any trainer, to train on them again.

1. `_lines` yields the responses of the files, one dict each:

     prompt         ids of the prompt's tokens, or its text as the policy read it
     group          any value: responses with the same value belong together
     tokens         ids of the response's tokens, messages of an environment included
     behavior_logp  their log-probabilities under the policy that sampled them, nats
     mask           optional: 0 for tokens that the policy did not sample
     reward         the number from which the advantage is computed; null: undecided
     correct        optional; default: whether the reward is above 0
     taught         optional: false leaves the response out of the loss
     step, answer   optional: the learner step that sampled it; the right answer

   A line of a `groups/<step>.jsonl` becomes the responses of its group;
2. `_response` checks them, and `read` makes them whole groups, in order of steps;
3. `Record.round` returns the groups of a round, a function of seed and number alone.
"""

import glob
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.data import prompt_rules
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.prompts import EncodedPrompt, Problems, padded
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.runtime.files import Object, first_line
from bapo_jax.runtime.progress import log

# Nats by which rounding to bfloat16 may raise a log-probability above 0.
ROUNDING = 0.01


class Response(NamedTuple):
  tokens: np.ndarray  # int32 ids
  sampled: np.ndarray  # bool, False for messages of an environment
  logp: np.ndarray  # float32, log mu of each token, nats; 0 where not sampled
  reward: float
  correct: bool | None  # None: undecided
  teaches: bool  # False: left out of the loss


class Group(NamedTuple):
  problem: int  # row of Record.problems
  step: int | None  # None: not recorded
  prompt: tuple[int, ...]
  responses: list[Response]


class Record(NamedTuple):
  groups: Sequence[Group]
  steps: Sequence[int]  # ascending; empty unless all groups have a step
  problems: Problems  # the distinct prompts
  digest: str  # of the files, 16 hexadecimal digits long

  def round(self, number: int, seed: int, count: int) -> list[Group]:
    """Returns up to `count` groups: those of a recorded step, or the next in an epoch.

    After the last recorded step the first one follows.
    """
    if self.steps:
      step = self.steps[number % len(self.steps)]
      return [group for group in self.groups if group.step == step]
    rows = prompt_rules.shuffled(len(self.groups), (seed, number), count)
    return [self.groups[row] for row in rows[:count]]


def read(
  records: str,
  tokenizer: Tokenizer,
  *,
  count: int,
  group_size: int,
  length: int,
  vocab: int,
  scored: bool,
  longest: float = math.inf,
) -> Record:
  """Reads the groups of all files that `records`, rollout.records, names.

  Args:
    count: maximum number of groups of a step.
    length: T, the maximum number of tokens of prompt and response.
    vocab: number of tokens that the model knows.
    scored: whether log-probabilities are computed later, so that none are required.
    longest: maximum number of tokens of a response, inf if only `length` limits it.

  Raises:
    ValueError: one sentence, with the file, the line and the field.
  """
  digest = hashlib.sha256()
  gathered: dict[str, list[Response]] = {}  # by step and value of `group`
  first: dict[str, tuple[str, tuple[int, ...], Object]] = {}  # its first response
  for where, row in _lines(records, digest):
    try:
      prompt = _prompt(row, tokenizer)
      response = _response(row, prompt, length, vocab, scored)
      if (size := len(response.tokens)) > longest:
        raise ValueError(
          f'a response has {size} tokens, more than sampler.max_new_tokens={longest}, '
          'but learner.share_prompts counts on the limit; raise '
          'sampler.max_new_tokens, or set learner.share_prompts=1'
        )
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(f'{where}: {error}') from error
    name = repr((row.get('step'), row['group']))
    gathered.setdefault(name, []).append(response)
    _, before, _ = first.setdefault(name, (where, prompt, row))
    if prompt != before:
      raise ValueError(
        f'{where}: another response of group {row["group"]!r:.60} has another prompt; '
        'give the groups different values'
      )
  if not gathered:
    raise ValueError(f'rollout.records={records} has no groups; give other files')
  problems = {prompt: row.get('answer', '') for _, prompt, row in first.values()}
  ids = {prompt: i for i, prompt in enumerate(problems)}
  groups = []
  for name, (where, prompt, row) in first.items():
    if (size := len(gathered[name])) != group_size:
      raise ValueError(
        f'{where}: group {row["group"]!r:.60} has {size} responses, but '
        f'sampler.group_size={group_size}; set sampler.group_size={size} if all groups '
        'have as many'
      )
    groups.append(Group(ids[prompt], row.get('step'), prompt, gathered[name]))
  encoded = [EncodedPrompt(list(prompt), ()) for prompt in problems]
  texts = tokenizer.decode([prompt.tokens for prompt in encoded])
  table = padded([*map(Row, texts, problems.values())], encoded, length)
  record = Record(groups, _steps(groups, count), table, digest.hexdigest()[:16])
  log(
    f'rollout.records={records}: {len(groups)} groups with {len(problems)} prompts, '
    + (f'of {len(record.steps)} steps' if record.steps else 'in a new order per epoch')
  )
  return record


def _lines(records: str, digest: Any) -> Iterator[tuple[str, Object]]:
  """Yields (file and line, response) of all files, and adds their bytes to a digest."""
  omitted = 0
  for part in records.split(','):
    # A workdir stands for its groups.
    pattern = os.path.join(part, 'groups', '*.jsonl') if os.path.isdir(part) else part
    paths = sorted(glob.glob(pattern))
    if not paths:
      raise ValueError(
        f'rollout.records={part}: no such file; give .jsonl files, a pattern or a '
        'workdir with groups/'
      )
    for path in paths:
      try:
        with open(path, 'rb') as file:
          content = file.read()
        lines = content.decode().split('\n')
      except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{path} cannot be read ({first_line(error)})') from error
      digest.update(content)
      for number, line in enumerate(lines, 1):
        where = f'{path}, line {number}'
        if not line.strip():
          continue
        try:
          responses = _unfolded(json.loads(line), where)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
          raise ValueError(f'{where}: no recorded response ({error!r})') from error
        omitted += not responses
        yield from ((where, response) for response in responses)
  if omitted:
    log(
      f'rollout.records={records}: {omitted} groups are left out, because they were '
      'replayed, have given responses or no tokens (a file has those of 2^15)'
    )


def _unfolded(row: Object, where: str) -> list[Object]:
  """Returns the responses of a line; none if its group cannot be trained on again."""
  if 'responses' not in row:
    return [row]
  if row.get('pictures'):
    raise ValueError('its problem has pictures; records must be text')
  responses = row['responses']
  lacks = any(r['ids'] is None or r.get('given') for r in responses)
  if row['source'] == 'reused' or lacks:
    return []
  shared = {'prompt': row['prompt_ids'], 'group': where}
  shared |= {'step': row['step'], 'answer': row['answer']}
  names = {'tokens': 'ids', 'behavior_logp': 'sampler_logp', 'mask': 'sampled'}
  names |= {name: name for name in ('reward', 'correct', 'taught')}
  return [
    shared | {name: r[key] for name, key in names.items() if key in r}
    for r in responses
  ]


def _prompt(row: Object, tokenizer: Tokenizer) -> tuple[int, ...]:
  """Returns the ids of a prompt."""
  prompt = row['prompt']
  if isinstance(prompt, str):
    (prompt,) = tokenizer_lib.encode(tokenizer, [prompt])
  return tuple(prompt)


def _response(
  row: Object, prompt: Sequence[int], length: int, vocab: int, scored: bool
) -> Response:
  """Returns the response of a line; raises ValueError or KeyError if it is wrong."""
  tokens = row['tokens']
  ids = np.asarray([*prompt, *tokens])
  if not (prompt and tokens) or ids.dtype.kind != 'i':
    raise ValueError('prompt and tokens must be ids, at least one of each')
  if not 0 <= ids.min() <= ids.max() < vocab:
    raise ValueError(
      f'the ids go from {ids.min()} to {ids.max()}, but the model has {vocab} tokens, '
      f"0 to {vocab - 1}; give a record of this model's tokenizer"
    )
  if len(ids) > length:
    raise ValueError(
      f'prompt and response have {len(ids)} tokens, but a row has {length}; raise '
      'prompts.max_prompt_tokens or sampler.max_new_tokens'
    )
  sampled = np.asarray(row.get('mask', [1] * len(tokens)), bool)
  logp = row.get('behavior_logp')
  if scored:
    logp = [0.0] * len(tokens)
  elif logp is None:
    raise ValueError(
      'behavior_logp is missing; record the log-probabilities, or set '
      "learner.recompute_logprobs='on': the first weights then compute them once"
    )
  logp = np.asarray(logp, np.float32)
  if not len(sampled) == len(logp) == len(tokens):
    raise ValueError('mask and behavior_logp need a number per token')
  if not ((logp > -np.inf) & (logp <= ROUNDING) | ~sampled).all():
    raise ValueError('behavior_logp must be natural logarithms, finite and at most 0')
  reward = row['reward']
  correct = row.get('correct', None if reward is None else reward > 0)
  if not np.isfinite(earned := reward or 0.0):
    raise ValueError(f'reward is {reward}; give a finite number, or null if undecided')
  return Response(
    tokens=np.asarray(tokens, np.int32),
    sampled=sampled,
    logp=np.where(sampled, logp, np.float32(0)),
    reward=earned,
    correct=correct,
    teaches=row.get('taught', True) and correct is not None,
  )


def _steps(groups: Sequence[Group], count: int) -> list[int]:
  """Returns the recorded steps; raises ValueError if `count` groups do not fit them."""
  steps = [group.step for group in groups if group.step is not None]
  if len(steps) < len(groups):
    if len(groups) < count:
      raise ValueError(
        f'prompts.count={count} is too large for only {len(groups)} recorded groups; '
        'lower prompts.count or give more records'
      )
    return []
  most = max(steps, key=steps.count)
  if (size := steps.count(most)) > count:
    raise ValueError(
      f'step {most} has {size} recorded groups, more than prompts.count={count}; set '
      f'prompts.count={size}'
    )
  return sorted({*steps})
