"""Measures the policy on problems that it was never trained on.

1. `evaluate` samples through the same rollout as training, and records with each
   response everything that an audit of its verdict needs;
2. `summarize` computes avg@k, pass@k and maj@k, each with a standard error clustered by
   problem;
3. `table` shows them; `read_recorded` reads what training wrote of them.
"""

import collections
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.data.prompts import Problems
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Rollout, Verification, rollout
from bapo_jax.runtime import exchange, files, hosts, markdown
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.runtime.statistics import clustered_error
from bapo_jax.types import Tree

WORDS = {True: 'right', False: 'wrong', None: 'undecided'}


def evaluate(
  params: Tree,
  problems: Problems,
  tokenizer: Tokenizer,
  key: Array,
  *,
  engine: RolloutEngine,
  verifier: Verifier,
  step: int,
  ks: Sequence[int] = (1,),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Samples and verifies `engine.group_size` responses to every problem.

  Args:
    params: an actor, the weights laid out for decoding.
    step: the learner step of these weights.
    ks: k of pass@k and maj@k, at most the group size.

  Returns:
    (result, samples): `result` as from `summarize`; samples is a list of dicts, one per
    response: id and text of the problem, answer, verifier (the name of its rule),
    response, correct, verdict, reason, extracted (the answer in the response), tokens,
    truncated (no end token), logp (summed, nats) and uid, which with the key determines
    the noise.
  """
  pad = 0  # of several processes each has as many rows
  if hosts.processes() > 1 and engine.mesh:
    pad = -len(problems.id_N) % sharding.row_shards(engine.mesh)
  id_P = np.pad(problems.id_N, (0, pad), constant_values=-1)
  sampled = rollout(
    PartialRollouts(engine, len(id_P)),
    params,
    prompts.prompts_by_id(problems, id_P),
    key,
    # A timer of its own: the caller counts the seconds of an evaluation.
    verification=Verification(problems, tokenizer, verifier, PhaseTimer()),
    step=step,
    policy_version=step,
  )
  uids = range(len(problems.id_N) * engine.group_size)
  read = {
    str(uid): _sample(
      uid,
      problems,
      engine.group_size,
      sampled.texts[uid],
      sampled.verdicts[uid],
      verifier.rule,
    )
    for uid in (uids if sampled.own is None else sampled.own.tolist())
  }
  counted = exchange.merged(_numbers(sampled, tokenizer.eos))
  read = exchange.merged(read)
  samples = [read[str(uid)] | counted[str(uid)] for uid in uids]
  return summarize(samples, engine.group_size, ks), samples


def _sample(
  uid: int,
  problems: Problems,
  group_size: int,
  text: str,
  verdict: Verdict,
  rule: str,
) -> dict[str, Any]:
  """Describes one response; `rule` is the verifier of problems that name none."""
  p = uid // group_size
  return {
    'id': int(problems.id_N[p]),
    'uid': uid,
    'problem': problems.text[p],
    'answer': problems.answer[p],
    'verifier': (problems.verifier[p] if problems.verifier else '') or rule,
    'response': text,
    'extracted': verdict.answer,
    'verdict': WORDS[verdict.right],
    'reason': verdict.reason,
    'correct': verdict.right is True,
  }


def _numbers(sampled: Rollout, eos: tuple[int, ...]) -> dict[str, dict[str, Any]]:
  """Returns uid -> tokens, truncation and log-probability, for this host."""
  groups = sampled.groups
  own = np.flatnonzero(exchange.owned(groups.tokens_PGT))
  mask_PGT = exchange.rows_of(groups.response_mask_PGT, own)
  logp_PGT = exchange.rows_of(groups.behavior_logp_PGT, own).astype(float)
  ended_PGT = mask_PGT & np.isin(exchange.rows_of(groups.tokens_PGT, own), eos)
  G = mask_PGT.shape[1]
  columns = (
    (own[:, None] * G + np.arange(G)).ravel(),
    mask_PGT.sum(2).ravel(),
    ended_PGT.any(2).ravel(),
    np.where(mask_PGT, logp_PGT, 0).sum(2).ravel(),
  )
  return {
    str(uid): {'tokens': int(tokens), 'truncated': not ended, 'logp': float(logp)}
    for uid, tokens, ended, logp in zip(*columns, strict=True)
  }


def summarize(
  samples: Sequence[dict[str, Any]], group_size: int, ks: Sequence[int]
) -> dict[str, Any]:
  """Computes the measures of samples, `group_size` in a row per problem.

  Returns:
    accuracy (avg@group_size) and its stderr, n problems, group_size, length (mean
    tokens), truncated (share without an end token), undecided (share), and under pass
    and maj for each k the mean over problems and its stderr.
  """

  def column(name: str) -> np.ndarray:
    return np.asarray([sample[name] for sample in samples]).reshape(-1, group_size)

  def vote(rows: Sequence[dict[str, Any]], k: int) -> float:
    return majority([s['extracted'] for s in rows], [s['correct'] for s in rows], k)

  correct_PG = column('correct')
  rows = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
  passed = {k: [pass_at(group_size, int(c), k) for c in correct_PG.sum(1)] for k in ks}
  voted = {k: [vote(r, k) for r in rows] for k in ks}
  return {
    'accuracy': float(correct_PG.mean()),
    'stderr': clustered_error(correct_PG),
    'n': len(rows),
    'group_size': group_size,
    'length': float(column('tokens').mean()),
    'truncated': float(column('truncated').mean()),
    'undecided': float((column('verdict') == 'undecided').mean()),
    'pass': {k: _measure(values) for k, values in passed.items()},
    'maj': {k: _measure(values) for k, values in voted.items()},
  }


def _measure(values: Sequence[float]) -> dict[str, float]:
  """Returns the mean over problems and its standard error."""
  value_P = np.asarray(values, float)
  return {'mean': float(value_P.mean()), 'stderr': clustered_error(value_P[:, None])}


def pass_at(n: int, c: int, k: int) -> float:
  """Returns the chance that k of n responses, c of them right, include a right one.

  The unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (Codex, arXiv:2107.03374,
  section 2.1); the binomials are integers, so nothing overflows or cancels.

  Args:
    n, c, k: 0 <= c <= n and 1 <= k <= n.
  """
  ways = math.comb(n, k)
  return (ways - math.comb(n - c, k)) / ways


def majority(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
  """Returns the share of maj@k that is right, over n // k whole blocks of responses.

  Equal answers vote together; a response without an answer does not vote. Answers that
  tie each count in part, as a fair draw among them would on average. Without any vote
  the block is wrong. Answers of equal meaning and different spelling vote apart.
  """
  shares = []
  for i in range(0, len(answers) - k + 1, k):
    votes = collections.Counter(s for s in answers[i : i + k] if s is not None)
    right = {s for s, c in zip(answers, correct, strict=True) if c}
    most = max(votes.values(), default=0)
    first = [s for s, n in votes.items() if n == most]
    shares.append(sum(s in right for s in first) / max(len(first), 1))
  return sum(shares) / len(shares)


def table(result: dict[str, Any], title: str) -> str:
  """Formats the result of `summarize` as a Markdown table."""
  measures = {f'avg@{result["group_size"]}': (result['accuracy'], result['stderr'])}
  for name in ('pass', 'maj'):
    for k, value in result[name].items():
      measures[f'{name}@{k}'] = (value['mean'], value['stderr'])
  rows = [(n, f'{mean:.4f}', f'{error:.4f}') for n, (mean, error) in measures.items()]
  counts = {'tokens': 'length', 'truncated': 'truncated', 'undecided': 'undecided'}
  rows += [(n, f'{result[key]:.4g}', '') for n, key in counts.items()]
  header, *cells = (
    (name.ljust(12), mean.rjust(9), error.rjust(9))
    for name, mean, error in [('measure', 'mean', 'std. err.'), *rows]
  )
  size = f'{result["n"]} problems x {result["group_size"]} responses'
  return f'{title}: {size}\n\n{markdown.table(cells, header, "lrr")}\n'


def record(
  workdir: str,
  step: int,
  result: dict[str, Any],
  samples: Sequence[dict[str, Any]],
  problems: Problems,
) -> None:
  """Writes an evaluation of training, and the pictures of its problems.

  Args:
    problems: the evaluated problems, by their ids.

  Raises:
    OSError: the system refused to write one of the files.
  """
  path = recorded_path(workdir, step)
  if any(problems.pictures):
    names = [files.write_pictures(workdir, each) for each in problems.pictures]
    samples = [sample | {'pictures': names[sample['id']]} for sample in samples]
  files.write_json(path, {'result': result, 'samples': samples})


def recorded_path(workdir: str, step: int) -> str:
  """Returns the file of an evaluation of training."""
  return os.path.join(workdir, 'eval', f'{step}.json')


def read_recorded(workdir: str, step: int) -> dict[str, Any]:
  """Reads {'result', 'samples'} of an evaluation of training.

  Raises:
    ValueError: the file is missing, or is not an evaluation.
  """
  path = recorded_path(workdir, step)
  way_out = 'the command of the run makes those of step 0 and of its last step again'
  found = files.read_json(path, way_out)
  try:
    ok = 'accuracy' in found['result'] and all('correct' in s for s in found['samples'])
  except (TypeError, KeyError):
    ok = False
  if not ok:
    raise ValueError(f'{path} holds no evaluation; {way_out}')
  return found
