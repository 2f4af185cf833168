"""Reads and writes responses of any trainer: one JSON object per line and response.

  group          any value: the responses with the same value answer the same prompt
  reward         the number from which the advantage is computed
  tokens         ids of the response's tokens
  behavior_logp  their log-probabilities under the policy that sampled them, nats
  logp           their log-probabilities under the policy to be updated, nats
  mask           optional: 0 for tokens outside the loss (default: 1 for all tokens)
  pieces         optional: the tokens as text (default: the ids)
  update         optional: number of the minibatch, from 1 (default: 0, unknown)

1. `append` writes such lines from the padded arrays of a trainer;
2. `read` checks the lines and returns them as step_record.read returns a recorded step;
3. `columns` converts a recorded step for `append`.

Needs nothing but the standard library, so that other trainers can import it.
docs/guide/running.md has the lines that call `append` in TRL, verl and OpenRLHF.
"""

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REQUIRED = ('group', 'reward', 'tokens', 'behavior_logp', 'logp')
OPTIONAL = ('mask', 'pieces', 'update')
COLUMNS = {  # name here -> name in a recorded step
  'tokens': 'ids',
  'behavior_logp': 'sampler_logp',
  'logp': 'learner_logp',
  'pieces': 'pieces',
}
# A log-probability may be above 0 by the rounding of bfloat16.
ROUNDING = 0.01
# Of rewards and log-probabilities. Rules sum squares of rewards in float32, and in a
# group with a reward of 1e20 all advantages become 0.
LARGEST = 1e15


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and abs(value) <= LARGEST


def _is_logp(value: Any) -> bool:
  return _is_number(value) and value <= ROUNDING


def _is_int32(value: Any) -> bool:
  return type(value) is int and -(1 << 31) <= value < 1 << 31


LOGP = (
  _is_logp,
  'the log-probability of the token (natural logarithm, from '
  f'{-LARGEST:g} to 0), or set its mask to 0',
)
# Field -> whether a value is right, and what to write. Lists have a value per token.
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
  'reward': (_is_number, f'a finite number, from {-LARGEST:g} to {LARGEST:g}'),
  'update': (
    lambda x: _is_int32(x) and x >= 0,
    'the number of the minibatch, less than 2^31',
  ),
  'tokens': (_is_int32, 'the id of the token, a whole number of 32 bits'),
  'mask': (lambda x: x in (0, 1), '1 for tokens in the loss, else 0'),
  'pieces': (lambda x: isinstance(x, str), 'the text of the token'),
  'behavior_logp': LOGP,
  'logp': LOGP,
}


def append(
  path: str | os.PathLike[str],
  *,
  group: Any,
  reward: Any,
  tokens: Any,
  behavior_logp: Any,
  logp: Any,
  mask: Any = None,
  pieces: Any = None,
  update: Any = None,
) -> None:
  """Appends a line per response.

  Args:
    path: the file; one file per batch of responses, with whole groups.
    group, reward: a value per response.
    tokens, behavior_logp, logp, mask, pieces: a row per response. Rows may be padded:
      tokens after the last token of the mask are not written. Log-probabilities are
      rounded to six decimals.
    update: the number of the minibatch, or a number per response.

  All may be arrays or tensors, on any device, or contain numbers of NumPy.

  Raises:
    ValueError: a value is wrong; see `read`. Nothing is written.
  """
  fields = {
    'group': group,
    'reward': reward,
    'tokens': tokens,
    'behavior_logp': behavior_logp,
    'logp': logp,
    'mask': mask,
    'pieces': pieces,
    'update': update,
  }
  columns = {k: _plain(values) for k, values in fields.items() if values is not None}
  if not isinstance(columns.get('update', []), list):
    columns['update'] = [columns['update']] * len(columns['tokens'])
  lengths = {name: len(values) for name, values in columns.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f'{lengths} responses; give the same number of each')
  lines = []
  for i, values in enumerate(zip(*columns.values(), strict=True)):
    row = _checked(dict(zip(columns, values, strict=True)), f'response {i}')
    written = {name: row[name] for name in columns}
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
      row = _parsed(line, f'{path}, line {number}')
      groups.setdefault(repr(row['group']), []).append(row)
  if not groups:
    raise ValueError(f'{path} has no lines; write one JSON object per response')
  sizes = {name: len(rows) for name, rows in groups.items()}
  small = min(sizes, key=sizes.__getitem__)
  large = max(sizes, key=sizes.__getitem__)
  if sizes[small] != sizes[large]:
    raise ValueError(
      f'{path}: group {small:.60} has {sizes[small]} responses and group {large:.60} '
      f'has {sizes[large]}; write all responses of every group, each of them once'
    )
  return [_group(rows) for rows in groups.values()]


def _parsed(line: str, where: str) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{where}: not JSON ({error}); write one object per line'
    ) from error
  if not isinstance(row, dict):
    raise ValueError(f'{where}: not a JSON object; write one per response')
  return _checked(row, where)


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
  """Returns the fields of a response up to its last token in the loss.

  Optional fields have their defaults, and numbers are rounded.
  """
  for name in REQUIRED:
    if name not in row:
      raise ValueError(f'{where}: {name} is missing; write {", ".join(REQUIRED)}')
  for name in row:
    if name not in (*REQUIRED, *OPTIONAL):
      known = ', '.join((*REQUIRED, *OPTIONAL))
      raise ValueError(
        f'{where}: {name} is no field; rename or remove it (fields: {known})'
      )
  tokens = row['tokens']
  if not isinstance(tokens, list):
    raise ValueError(f'{where}: tokens is {tokens!r:.40}; write a list of token ids')
  pieces = [f'<{token}>' for token in tokens]
  defaults: dict[str, Any] = {'mask': [1] * len(tokens), 'pieces': pieces, 'update': 0}
  row = defaults | row
  for name in ('mask', *COLUMNS):
    values = row[name]
    if not isinstance(values, list) or len(values) != len(tokens):
      count = f'{len(values)} values' if isinstance(values, list) else repr(values)
      raise ValueError(
        f'{where}: {name} has {count} for {len(tokens)} tokens; write a list with one '
        'per token'
      )
  for name, (right, cure) in VALUES.items():
    of_token = name in ('mask', *COLUMNS)
    for t, value in enumerate(row[name] if of_token else [row[name]]):
      # Trainers have anything as the log-probability of a token outside the loss.
      if not right(value) and not ('logp' in name and not row['mask'][t]):
        item = f'{name}[{t}]' if of_token else name
        raise ValueError(f'{where}: {item} is {value!r:.40}; write {cure}')
  end = max((t + 1 for t, inside in enumerate(row['mask']) if inside), default=0)
  short = {name: row[name][:end] for name in ('mask', *COLUMNS)}
  for name in ('behavior_logp', 'logp'):
    pairs = zip(short[name], short['mask'], strict=True)
    short[name] = [round(x, 6) if inside else 0.0 for x, inside in pairs]
  short['mask'] = list(map(int, short['mask']))
  return row | short | {'reward': +row['reward']}  # 1 for True


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


def columns(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Returns the arguments of `append` for the groups of step_record.read.

  A response without log-probabilities of the learner, or left out of the loss, has no
  tokens: its reward counts. Groups are numbered, since a step may have two groups of a
  problem.
  """
  rows = []
  for number, group in enumerate(groups):
    for response in group['responses']:
      used = response['learner_logp'] and response['taught']
      row = {name: response[key] if used else [] for name, key in COLUMNS.items()}
      row |= {'group': number, 'reward': response['reward']}
      rows.append(row | {'update': group['update'] or 0})
  return {name: [row[name] for row in rows] for name in rows[0]}
