"""What a step trained on, token by token, as a file of the workdir.

1. `write` saves groups/<step>.jsonl, one line per group, from the record that the loop
   yields: a few groups, whatever the batch rule;
2. `read` returns them, `newest` finds the last one.

A line is an object of
  step: learner steps done, with this one; id: of the problem; answer; source: one of
  types.SOURCES; completed_step: learner step at which the group was completed;
  prompt: as the policy reads it, the patches of a picture as their number;
  prompt_tokens: its length; prompt_ids: its tokens, all of them;
  pictures: files of the workdir, where problems have pictures;
  update: which update of the step, from 1, had the group, the last one where several
  had; low, high: its bounds, means over it; null where none had it;
  responses: a list of objects of
    response: the text, end tokens left out; correct; reward; advantage, times the
    weight of the source; taught: false where it was left out of the loss; tokens;
    truncated: no end token; version: learner steps of the oldest and the newest weights
    that sampled it;
    ids: its tokens; pieces: each as text; sampler_logp: their log-probabilities, nats,
    under the distribution sampled from; learner_logp: those of the weights before the
    update, null where nothing was computed since the advantage is 0; ratio: what the
    loss rule clipped; cut: 1 where the bounds left a token with an advantage no
    gradient.
    All null in responses beyond MOST_TOKENS of the file.
Numbers that are not finite are null.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner.learner import Updated
from bapo_jax.runtime import exchange, files, hosts, picture_files
from bapo_jax.training.state import StepRecord, Trainer
from bapo_jax.types import SOURCES, Groups, UpdatedTokens

FOLDER = 'groups'
MOST_GROUPS = 16  # of a file, spread over the filled seats
MOST_TOKENS = 2**15  # of a file that have numbers: some 40 bytes each
OF_TOKENS = ('ids', 'pieces', 'sampler_logp', 'learner_logp', 'ratio', 'cut')


def path_of(workdir: str, step: int) -> str:
  """The file of a step."""
  return os.path.join(workdir, FOLDER, f'{step}.jsonl')


def write(t: Trainer, workdir: str, record: StepRecord) -> None:
  """Writes the groups of a step; all processes call it, the first one writes.

  Raises:
    OSError: the system refuses, with the file's name.
  """
  seats = chosen(exchange.whole(record.source_P) >= 0)
  if not len(seats):
    return
  index = np.resize(seats, min(MOST_GROUPS, len(record.source_P)))  # one compiled shape
  groups, source_P = exchange.taken((record.groups, record.source_P), index)
  updated = [
    _updated(record.updates, seat, groups.reward_PG.shape[1]) for seat in seats
  ]
  if not hosts.is_first():
    return
  weights = t.config.batch.weights
  weight_P = np.asarray([getattr(weights, SOURCES[i]) for i in source_P], np.float32)
  adv_PG = np.asarray(t.rules.advantage(jnp.asarray(groups.reward_PG)))
  adv_PG = adv_PG * weight_P[:, None]
  left, lines = MOST_TOKENS, []
  for p, of_seat in enumerate(updated):
    group = Groups(*(x[p] for x in groups))  # without P
    responses = _responses(t.tokenizer, group, adv_PG[p], of_seat, left)
    left -= sum(response['tokens'] for response in responses)
    source = SOURCES[source_P[p]]
    answer = t.problems.answer[int(group.id_P)]
    head = {'step': record.step + 1, 'id': int(group.id_P), 'answer': answer}
    head |= {'source': source, 'completed_step': int(group.completed_step_P)}
    head |= _prompt(t.tokenizer, group, t.spec.image_token) | _bounds(of_seat)
    if any(t.problems.pictures):
      pictures = t.problems.pictures[int(group.id_P)]
      head |= {'pictures': picture_files.write(workdir, pictures)}
    lines.append(json.dumps(head | {'responses': responses}, allow_nan=False))
    if left <= 0:
      break
  path = path_of(workdir, record.step + 1)
  with files.naming(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
  files.write(path, '\n'.join([*lines, '']))


def chosen(filled_P: np.ndarray, most: int = MOST_GROUPS) -> np.ndarray:
  """At most so many of the filled seats, evenly spread: each source has its own."""
  seats = np.flatnonzero(filled_P)
  count = min(most, len(seats))
  return seats[np.arange(count) * len(seats) // max(count, 1)]


class OfSeat(NamedTuple):
  """The last update that had a seat of the batch."""

  number: int  # in the step, from 1
  metrics: dict[str, Array]
  tokens: UpdatedTokens  # of the seat's group, [G, T], on the host


def _updated(updates: Sequence[Updated], seat: int, group_size: int) -> OfSeat | None:
  """The last update that had this seat; None without any."""
  for number, updated in reversed(list(enumerate(updates, 1))):
    for i in np.flatnonzero(updated.seats_P == seat):
      rows = i * group_size + np.arange(group_size)
      return OfSeat(number, updated.metrics, exchange.taken(updated.tokens, rows))
  return None


def _bounds(of_seat: OfSeat | None) -> dict[str, Any]:
  """The update and its bounds, as JSON values."""
  if of_seat is None:
    return {'update': None, 'low': None, 'high': None}
  low, high = (of_seat.metrics[f'clip/{name}'] for name in ('low', 'high'))
  low, high = _numbers([low, high])
  return {'update': of_seat.number, 'low': low, 'high': high}


def _prompt(
  tokenizer: Tokenizer, group: Groups, image_token: int | None
) -> dict[str, Any]:
  """The prompt as the policy reads it, and its length."""
  length = int(group.response_mask_PGT.any(0).argmax())  # that of all its responses
  tokens_1T = group.tokens_PGT[:1]  # of the first response, without P
  (text,) = tokenizer_lib.decode_prompts(tokenizer, tokens_1T, [length], image_token)
  ids = np.asarray(group.tokens_PGT[0, :length]).tolist()
  return {'prompt': text, 'prompt_tokens': length, 'prompt_ids': ids}


def _responses(
  tokenizer: Tokenizer,
  group: Groups,
  adv_G: np.ndarray,
  of_seat: OfSeat | None,
  left: int,
) -> list[dict[str, Any]]:
  """The responses of one group, its arrays [G, T], as JSON values.

  Args:
    left: tokens that may have numbers.
  """
  _, tokens_GT, mask_GT, logp_GT, version_GT, correct_G, reward_G, teaches_G, _ = group
  texts = tokenizer_lib.decode_responses(tokenizer, tokens_GT, mask_GT)
  found = []
  for g, text in enumerate(texts):
    mask_T = np.asarray(mask_GT[g])
    tokens_N, version_N = tokens_GT[g, mask_T], version_GT[g, mask_T]
    left -= len(tokens_N)
    response = {
      'response': text,
      'correct': bool(correct_G[g]),
      'reward': _numbers([reward_G[g]])[0],
      'advantage': _numbers([adv_G[g]])[0],
      'taught': bool(teaches_G[g]),
      'tokens': len(tokens_N),
      'truncated': not np.isin(tokens_N, tokenizer.eos).any(),
      'version': [int(v) for v in (version_N.min(), version_N.max())],
    }
    numbers = dict.fromkeys(OF_TOKENS)
    if left >= 0:
      pieces = tokenizer.backend.batch_decode(tokens_N[:, None].tolist())
      numbers |= {'ids': tokens_N.tolist(), 'pieces': pieces}
      numbers |= {'sampler_logp': _numbers(logp_GT[g, mask_T])}
      numbers |= _of_update(of_seat, g, mask_T)
    found.append(response | numbers)
  return found


def _of_update(of_seat: OfSeat | None, g: int, mask_T: np.ndarray) -> dict[str, Any]:
  """What the update made of a response; {} where it computed nothing of it."""
  if of_seat is None or not of_seat.tokens.ratio_BT[g].any():
    return {}
  logp_N, ratio_N, cut_N = (x[g, mask_T] for x in of_seat.tokens)
  return {
    'learner_logp': _numbers(logp_N),
    'ratio': _numbers(ratio_N),
    'cut': [int(cut) for cut in cut_N],
  }


def _numbers(values: Any) -> list[float | None]:
  """Numbers of four decimals for JSON; None where one is not finite."""
  floats = np.asarray(values, float).tolist()
  return [round(x, 4) if math.isfinite(x) else None for x in floats]


def newest(workdir: str, until: float = math.inf) -> int | None:
  """The last recorded step up to `until`; None without any."""
  names = (
    os.listdir(folder) if os.path.isdir(folder := os.path.join(workdir, FOLDER)) else ()
  )
  steps = (int(m[1]) for name in names if (m := re.fullmatch(r'(\d+)\.jsonl', name)))
  return max((step for step in steps if step <= until), default=None)


def read(workdir: str, step: int) -> list[dict[str, Any]]:
  """The groups recorded of a step.

  Raises:
    ValueError: the file is not there or holds something else.
  """
  path = path_of(workdir, step)
  way_out = 'delete it; the next checkpoint records its step'
  try:
    with open(path, encoding='utf-8') as file:
      rows = [json.loads(line) for line in file]
  except OSError as error:
    raise ValueError(f'{path} cannot be read ({error.strerror}); {way_out}') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is no JSON ({error}); {way_out}') from error
  if not all(isinstance(row, dict) and 'responses' in row for row in rows):
    raise ValueError(f'{path} holds no recorded groups; {way_out}')
  return rows
