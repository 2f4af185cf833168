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
from collections.abc import Mapping, Sequence
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
  update: Any = 0,
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
  given = {
    'group': group,
    'reward': reward,
    'tokens': tokens,
    'behavior_logp': behavior_logp,
    'logp': logp,
    'mask': mask,
    'pieces': pieces,
  }
  columns = {k: _plain(values) for k, values in given.items() if values is not None}
  update = _plain(update)
  if not isinstance(update, list):
    update = [update] * len(columns['tokens'])
  columns['update'] = update
  lengths = {name: len(values) for name, values in columns.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f'{lengths} responses; give the same number of each')
  texts = []
  for i, values in enumerate(zip(*columns.values(), strict=True)):
    try:
      row = _trimmed(_checked(dict(zip(columns, values, strict=True))))
    except ValueError as error:
      raise ValueError(f'response {i}: {error}') from error
    written = {name: row[name] for name in columns}
    if all(row['mask']):
      written.pop('mask', None)
    texts.append(json.dumps(written, ensure_ascii=False) + '\n')
  with open(path, 'a', encoding='utf-8') as file:
    file.writelines(texts)


def _plain(value: Any) -> Any:
  """Returns arrays, tensors and sequences as lists, and their numbers as Python's."""
  if hasattr(value, 'tolist'):
    value = value.tolist()
  return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _trimmed(row: dict[str, Any]) -> dict[str, Any]:
  """Returns a checked row up to its last token in the loss, with rounded numbers."""
  end = max((t + 1 for t, inside in enumerate(row['mask']) if inside), default=0)
  mask = row['mask'][:end]
  short = {name: row[name][:end] for name in ('tokens', 'pieces')}
  for name in ('behavior_logp', 'logp'):
    pairs = zip(row[name][:end], mask, strict=True)
    short[name] = [round(x, 6) if m else 0.0 for x, m in pairs]
  return row | short | {'mask': [int(m) for m in mask]}


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
        row = _trimmed(_checked(_parsed(line)))
      except ValueError as error:
        raise ValueError(f'{path}, line {number}: {error}') from error
      groups.setdefault(repr(row['group']), []).append(row)
  if not groups:
    raise ValueError(f'{path} has no lines; write one JSON object per response')
  sizes = {len(rows) for rows in groups.values()}
  if len(sizes) > 1:
    small, large = (
      pick(groups, key=lambda name: len(groups[name])) for pick in (min, max)
    )
    raise ValueError(
      f'{path}: group {small:.60} has {len(groups[small])} responses and group '
      f'{large:.60} has '
      f'{len(groups[large])}; write all responses of every group, each of them once'
    )
  return [_group(rows) for rows in groups.values()]


def _parsed(line: str) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON ({error}); write one object per line') from error
  if not isinstance(row, dict):
    raise ValueError(f'not a JSON object; write one with {", ".join(REQUIRED)}')
  return row


def _checked(row: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a response, with defaults for the optional ones."""
  for name in REQUIRED:
    if name not in row:
      raise ValueError(f'{name} is missing; a line needs {", ".join(REQUIRED)}')
  if unknown := sorted(set(row) - set(REQUIRED) - set(OPTIONAL)):
    known = ', '.join((*REQUIRED, *OPTIONAL))
    raise ValueError(f'{unknown[0]} is no field; rename or remove it (fields: {known})')
  if isinstance(row['reward'], bool):
    row['reward'] = int(row['reward'])
  if not _finite(row['reward']):
    raise ValueError(
      f'reward is {row["reward"]!r:.40}; write a finite number, from {-LARGEST:g} to '
      f'{LARGEST:g}'
    )
  tokens = row['tokens']
  if not isinstance(tokens, list) or not all(map(_is_int32, tokens)):
    raise ValueError(
      'tokens is not a list of token ids; write whole numbers of 32 bits'
    )
  row.setdefault('mask', [1] * len(tokens))
  row.setdefault('pieces', [f'<{token}>' for token in tokens])
  if not _is_int32(row.setdefault('update', 0)) or row['update'] < 0:
    raise ValueError(
      f'update is {row["update"]!r:.40}; write the number of the minibatch, less than '
      '2^31'
    )
  for name in ('mask', 'pieces', 'behavior_logp', 'logp'):
    values = row[name]
    if not isinstance(values, list) or len(values) != len(tokens):
      count = f'{len(values)} values' if isinstance(values, list) else repr(values)
      raise ValueError(
        f'{name} has {count} for {len(tokens)} tokens; write a list with one per token'
      )
  if bad := [x for x in row['mask'] if x not in (0, 1)]:
    raise ValueError(
      f'mask contains {bad[0]!r:.40}; write 1 for tokens in the loss, else 0'
    )
  if not all(isinstance(piece, str) for piece in row['pieces']):
    raise ValueError('pieces contains a value that is not text; decode each token')
  for name in ('behavior_logp', 'logp'):
    for t, value in enumerate(row[name]):
      if row['mask'][t] and not (_finite(value) and value <= ROUNDING):
        raise ValueError(
          f'{name}[{t}] is {value!r:.40}; write the log-probability of the token '
          f'(natural logarithm, {-LARGEST:g} to 0), or set its mask to 0'
        )
  return row


def _finite(value: Any) -> bool:
  return type(value) in (int, float) and abs(value) <= LARGEST


def _is_int32(value: Any) -> bool:
  return type(value) is int and -(1 << 31) <= value < 1 << 31


def _group(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns a group as in a recorded step, from its rows."""
  moved = len({row['reward'] for row in rows}) > 1
  responses = [
    {
      'reward': row['reward'],
      'taught': True,
      'ids': row['tokens'],
      'pieces': row['pieces'],
      'sampler_logp': row['behavior_logp'],
      'learner_logp': row['logp'] if moved else None,
      'mask': row['mask'],
      'update': row['update'],
    }
    for row in rows
  ]
  return {'source': 'fresh', 'responses': responses}


def columns(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Returns the arguments of `append` for the groups of step_record.read.

  A response without log-probabilities of the learner, or left out of the loss, has no
  tokens: its reward counts. Groups are numbered, since a step may have two groups of a
  problem.
  """
  found: dict[str, list[Any]] = {name: [] for name in (*REQUIRED, 'pieces', 'update')}
  for number, group in enumerate(groups):
    for response in group['responses']:
      used = response['learner_logp'] and response['taught']
      found['group'].append(number)
      found['reward'].append(response['reward'])
      found['update'].append(group['update'] or 0)
      for name, key in COLUMNS.items():
        found[name].append(response[key] if used else [])
  return found
