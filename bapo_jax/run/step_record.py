"""Records groups that a step trained on, token by token, in the workdir.

1. `write` saves a few groups of a step to groups/<step>.jsonl, one JSON object per
   group, for every batch rule;
2. `read` returns the recorded groups of a step, `newest` the last recorded step.

docs/notes/files.md explains every field. Non-finite numbers are null, and so are the
per-token fields of responses beyond the first MOST_TOKENS tokens of a file. Rewards and
the sampler's log-probabilities are exact: a run may train on them again (data/records).
"""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.learner.learner import Updated, advantages, settled
from bapo_jax.runtime import exchange, files, hosts
from bapo_jax.training.state import StepRecord, Trainer
from bapo_jax.types import GIVEN, SOURCES, Groups, ended, take

FOLDER = 'groups'
MOST_GROUPS = 16  # per file, spread over the filled seats
MOST_TOKENS = 2**15  # per file with per-token fields, about 40 bytes each
OF_TOKENS = (
  'ids',
  'pieces',
  'sampler_logp',
  'learner_logp',
  'ratio',
  'cut',
  'advantages',  # only if they differ within the response
)

_advantages = jax.jit(
  advantages, static_argnames=('advantage_rule', 'weights', 'teacher')
)


def write(t: Trainer, workdir: str, record: StepRecord) -> None:
  """Writes a few groups of a step to its file; every process must call it.

  Raises:
    OSError: the file cannot be written; its filename is set.
  """
  seats = chosen(exchange.whole(record.source_P) >= 0)
  if not len(seats):
    return
  index = np.resize(seats, min(MOST_GROUPS, len(record.source_P)))  # one compiled shape
  # `settled`, as in the update: its programs compute the advantages to the same bit.
  arrays = settled(record.groups), record.source_P, record.reference_PGT
  groups, source_P, reference_PGT = exchange.taken(arrays, index)
  decided_PG = exchange.taken(record.groups.decided_PG, index)
  updated = [_updated(record.updates, i, groups.reward_PG.shape[1]) for i in seats]
  if not hosts.is_first():
    return
  credit = t.config.credit
  adv_PGT = np.asarray(
    _advantages(groups, source_P, reference_PGT=reference_PGT, **credit)
  )
  budget = MOST_TOKENS
  lines = []
  for p, (number, of_seat) in enumerate(updated):
    group = take(groups, p)  # without P
    problem = int(groups.id_P[p])
    responses = _responses(t, group, decided_PG[p], adv_PGT[p], of_seat, budget)
    # Texts of all groups are kept; the per-token fields end with the budget, so a
    # step's file stays small at any length of responses.
    budget -= sum(response['tokens'] for response in responses)
    bounds = of_seat.metrics if of_seat else {}
    length = int(group.response_mask_PGT.any(0).argmax())  # the same for all responses
    # The prompt of the first response, without P.
    prompt_1T = group.tokens_PGT[:1]
    image = t.spec.image_token
    (text,) = tokenizer_lib.decode_prompts(t.tokenizer, prompt_1T, [length], image)
    row = {
      'step': record.step + 1,
      'id': problem,
      'answer': t.problems.rows[problem].answer,
      'source': SOURCES[source_P[p]],
      'completed_step': int(group.completed_step_P),
      'prompt': text,
      'prompt_tokens': length,
      'prompt_ids': np.asarray(prompt_1T[0, :length]).tolist(),
      'update': number,
      'low': _rounded(bounds.get('clip/low', math.nan)),
      'high': _rounded(bounds.get('clip/high', math.nan)),
    }
    if any(t.problems.grids):
      pictures = t.problems.rows[problem].pictures
      row['pictures'] = files.write_pictures(workdir, pictures)
    lines.append(json.dumps(row | {'responses': responses}, allow_nan=False))
    if budget <= 0:
      break
  path = os.path.join(workdir, FOLDER, f'{record.step + 1}.jsonl')
  files.write(path, '\n'.join([*lines, '']))


def chosen(filled_P: np.ndarray, most: int = MOST_GROUPS) -> np.ndarray:
  """Picks at most `most` of the filled seats, evenly spread over the sources."""
  # Seats are in order of sources, so an even spread shows each of them.
  seats = np.flatnonzero(filled_P)
  count = min(most, len(seats))
  return seats[np.arange(count) * len(seats) // max(count, 1)]


def _updated(updates: Sequence[Updated], seat, group_size):
  """Returns (number, update) of a seat's last update, with only its tokens [G, T]."""
  # With several epochs the last update of a seat is the most off-policy one.
  for number, updated in reversed(list(enumerate(updates, 1))):
    for i in np.flatnonzero(updated.seats_P == seat):
      rows = i * group_size + np.arange(group_size)
      return number, updated._replace(tokens=exchange.taken(updated.tokens, rows))
  return None, None


def _responses(
  t: Trainer,
  group: Groups,
  decided_G: np.ndarray,
  adv_GT: np.ndarray,
  of_seat: Updated | None,
  budget,
):
  """Describes a group's responses; beyond `budget` tokens, without per-token fields."""
  tokenizer = t.tokenizer
  tokens_GT = group.tokens_PGT
  mask_GT = group.response_mask_PGT
  texts = tokenizer_lib.decode_responses(tokenizer, tokens_GT, mask_GT)
  is_end_GT = np.isin(tokens_GT, tokenizer.eos)
  cut_length = t.config.sampler.cut_length
  ended_G = ended(np.asarray(mask_GT), is_end_GT, cut_length).tolist()
  responses = []
  for g, text in enumerate(texts):
    mask_T = np.array(mask_GT[g])
    tokens_N = tokens_GT[g, mask_T]
    version_N = group.policy_version_PGT[g, mask_T]
    given = version_N[0] == GIVEN
    adv_N = adv_GT[g, mask_T]
    # One number for most rules; a list only where a rule gives each token its own.
    equal = (adv_N == adv_N[0]).all()
    sampled = {}
    first, last = np.flatnonzero(mask_T)[[0, -1]]
    if not mask_T[first : last + 1].all():
      sampled = {'sampled': mask_T[first : last + 1].tolist()}
      mask_T[first:last] = True  # with the messages of the environment
      (text,) = tokenizer.decode([tokens_GT[g, mask_T].tolist()])
    budget -= len(tokens_N)
    response: dict[str, Any] = {
      'response': text,
      'correct': bool(group.correct_PG[g]) if decided_G[g] else None,
      'reward': exact(group.reward_PG[g]) if decided_G[g] else None,
      'advantage': _rounded(adv_N[0] if equal else adv_N.mean()),
      'taught': bool(group.teaches_PG[g]),
      'tokens': len(tokens_N),
      'truncated': not ended_G[g],
      'version': [-1, -1] if given else [int(version_N.min()), int(version_N.max())],
    }
    if given:
      response['given'] = True
    response |= dict.fromkeys(OF_TOKENS)
    if budget >= 0:
      ids = tokens_GT[g, mask_T].tolist()
      response |= sampled | {'ids': ids, 'pieces': tokenizer_lib.pieces(tokenizer, ids)}
      response['sampler_logp'] = [*map(exact, group.behavior_logp_PGT[g, mask_T])]
      response['advantages'] = None if equal else [*map(_rounded, adv_GT[g, mask_T])]
      if of_seat and of_seat.tokens.ratio_BT[g].any():  # the update computed it
        logp_N, ratio_N, cut_N = (x[g, mask_T] for x in of_seat.tokens)
        response['learner_logp'] = [*map(_rounded, logp_N)]
        response['ratio'] = [*map(_rounded, ratio_N)]
        response['cut'] = [*map(int, cut_N)]
    responses.append(response)
  return responses


def _rounded(value: Any):
  """Rounds a number to four decimals for JSON; None if not finite."""
  return round(float(value), 4) if math.isfinite(value) else None


def exact(value: Any) -> float | None:
  """Returns the shortest decimals of a float32 number for JSON; None if not finite."""
  return float(str(np.float32(value))) if math.isfinite(value) else None


def newest(
  workdir: str, until: float = math.inf, files: str = f'{FOLDER}/*.jsonl'
) -> int | None:
  """Returns the last step up to `until` that has one of the files, or None."""
  paths = pathlib.Path(workdir).glob(files)
  steps = (int(path.stem) for path in paths if path.stem.isdecimal())
  return max((step for step in steps if step <= until), default=None)


def read(workdir: str, step: int) -> list[dict[str, Any]]:
  """Reads the recorded groups of a step.

  Raises:
    ValueError: the file is missing or does not contain recorded groups.
  """
  path = os.path.join(workdir, FOLDER, f'{step}.jsonl')
  try:
    with open(path, encoding='utf-8') as file:
      rows = [json.loads(line) for line in file]
    if not all(isinstance(row, dict) and 'responses' in row for row in rows):
      raise ValueError('a line contains no recorded group')
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} cannot be read ({error}); delete the file') from error
  return rows


def taught(row: dict[str, Any]) -> bool:
  """Returns whether right and wrong responses of a recorded group entered the loss."""
  return {r['correct'] for r in row['responses'] if r['taught']} == {True, False}
