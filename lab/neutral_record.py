"""Reads and writes responses of any trainer: one JSON object per line and response.

  group          any value: the responses with the same value answer the same prompt
  reward         the number from which the advantage is computed
  tokens         ids of the response's tokens
  behavior_logp  their log-probabilities under the policy that sampled them, nats
  logp           their log-probabilities under the policy to be updated, nats
  mask           optional: 0 for tokens outside the loss (default: 1 for all tokens)
  pieces         optional: the tokens as text (default: the ids)
  update         optional: number of the minibatch, from 1 (default: 0, unknown)
  prompt         optional: ids or text of the prompt, for rollout.records

1. `append` writes such lines from the padded arrays of a trainer;
2. `read` checks the lines and returns them as step_record.read returns a recorded step.

Needs nothing but the standard library, so that other trainers can import it.
docs/guide/from_trl.md has the lines that call `append` in TRL, verl and OpenRLHF.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

REQUIRED = ('group', 'reward', 'tokens', 'behavior_logp', 'logp')
FIELDS = (*REQUIRED, 'mask', 'pieces', 'update', 'prompt')
COLUMNS = {  # name here -> name in a recorded step
  'tokens': 'ids',
  'behavior_logp': 'sampler_logp',
  'logp': 'learner_logp',
  'pieces': 'pieces',
}
# A log-probability may be above 0 by the rounding of bfloat16.
ROUNDING = 0.01
# Rules sum squares of rewards in float32, and in a group with a reward of 1e20 all
# advantages become 0.
LARGEST = 1e15


def append(path: str | os.PathLike[str], **fields: Any) -> None:
  """Appends a line per response.

  Args:
    path: the file; one file per batch of responses, with whole groups.
    group, reward: a value per response.
    tokens, behavior_logp, logp, mask, pieces: a row per response. Rows may be padded:
      tokens after the last token of the mask are not written. Log-probabilities are
      rounded to six decimals. `mask` and `pieces` are optional.
    update: optional; the number of the minibatch, or a number per response.

  All may be arrays or tensors, on any device, or contain numbers of NumPy.

  Raises:
    ValueError: a value is wrong; see `read`. Nothing is written.
  """
  columns = {k: _plain(values) for k, values in fields.items() if values is not None}
  if not isinstance(columns.get('update', []), list):
    columns['update'] = [columns['update']] * len(columns['tokens'])
  lengths = {name: len(values) for name, values in columns.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f'{lengths} responses; give the same number of each')
  lines = []
  for i, values in enumerate(zip(*columns.values(), strict=True)):
    try:
      row = _checked(dict(zip(columns, values, strict=True)))
    except (ValueError, TypeError) as error:
      raise ValueError(f'response {i}: {error}') from error
    written = {name: row[name] for name in FIELDS if name in columns}
    lines.append(json.dumps(written, ensure_ascii=False) + '\n')
  with open(path, 'a', encoding='utf-8') as file:
    file.writelines(lines)


def _plain(value: Any) -> Any:
  """Returns arrays, tensors and sequences as lists, and their numbers as Python's."""
  if hasattr(value, 'tolist'):
    value = value.tolist()
  return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the groups of a file, in the order of their first lines.

  A group is a dict as in groups/<step>.jsonl, as far as the rules read it. Tokens after
  the last token of the mask are dropped. As in a recorded step, a response has no
  log-probabilities of the learner if all rewards of its group are equal.

  Raises:
    ValueError: a line is wrong; the message has its number, the field and the cure.
  """
  groups: dict[str, list[dict[str, Any]]] = {}
  # Not splitlines: the text of a token may be another separator of lines.
  for number, line in enumerate(path.read_text(encoding='utf-8').split('\n'), 1):
    if line.strip():
      try:
        row = _checked(json.loads(line))
      except (ValueError, TypeError) as error:
        raise ValueError(f'{path}, line {number}: {error}') from error
      groups.setdefault(repr(row['group']), []).append(row)
  if not groups:
    raise ValueError(f'{path} has no lines; write one JSON object per response')
  size = max(map(len, groups.values()))
  for name, rows in groups.items():
    if len(rows) < size:
      raise ValueError(
        f'{path}: group {name:.60} has {len(rows)} responses, and another group has '
        f'{size}; write all responses of every group, each of them once'
      )
  return [_group(rows) for rows in groups.values()]


def _checked(row: Any) -> dict[str, Any]:
  """Returns the fields of a response up to its last token in the loss.

  Optional fields have their defaults, and numbers are rounded.
  """
  if not isinstance(row, dict):
    raise ValueError('not a JSON object; write one per response')
  missing = [name for name in REQUIRED if name not in row]
  if wrong := missing + [name for name in row if name not in FIELDS]:
    raise ValueError(
      f'missing or unknown: {", ".join(wrong)}; the fields are {", ".join(FIELDS)}, of '
      'which the last four are optional'
    )
  tokens = row['tokens']
  pieces = [f'<{token}>' for token in tokens]
  defaults: dict[str, Any] = {'mask': [1] * len(tokens), 'pieces': pieces, 'update': 0}
  row = defaults | row
  for name in ('mask', *COLUMNS):
    if len(row[name]) != len(tokens):
      raise ValueError(
        f'{name} has {len(row[name])} values for {len(tokens)} tokens; write '
        'a list with one per token'
      )
  if not abs(row['reward']) <= LARGEST:
    raise ValueError(
      f'reward is {row["reward"]}; write a number of at most {LARGEST:g}'
    )
  end = max((t + 1 for t, inside in enumerate(row['mask']) if inside), default=0)
  row |= {name: row[name][:end] for name in ('mask', *COLUMNS)}
  row['mask'] = list(map(int, row['mask']))
  row['reward'] = +row['reward']  # 1 for True
  for name in ('behavior_logp', 'logp'):
    # Trainers have anything as the log-probability of a token outside the loss.
    pairs = zip(row[name], row['mask'], strict=True)
    row[name] = [round(x, 6) if inside else 0.0 for x, inside in pairs]
    for t, x in enumerate(row[name]):
      if not -math.inf < x <= ROUNDING:
        raise ValueError(
          f'{name}[{t}] is {x}; write the log-probability of the token '
          '(natural logarithm, at most 0), or set its mask to 0'
        )
  return row


def _group(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns a group as in a recorded step, from its rows."""
  moved = len({row['reward'] for row in rows}) > 1
  responses = []
  for row in rows:
    response = {key: row[name] for name, key in COLUMNS.items()}
    response |= {name: row[name] for name in ('reward', 'mask', 'update')}
    learner_logp = row['logp'] if moved else None
    responses.append(response | {'learner_logp': learner_logp, 'taught': True})
  return {'source': 'fresh', 'responses': responses}
