"""Evaluates the policy on the held-out problems.

Training's rollout code samples the responses. A record contains everything that an
audit of the verdicts needs. avg@k, pass@k, maj@k and the rewards have standard errors
clustered by problem.

An undecided response is neither right nor wrong: measures are of the other responses,
and of the problems that have any (for k, at least k). They are nan without any.
"""

import collections
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.data.prompts import Problems
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.rollout import Rollout, Verification, rollout
from bapo_jax.runtime import digests, exchange, files, hosts, markdown
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training.knobs import EvaluateConfig
from bapo_jax.types import Tree, ended, response_length

ROUNDING = 1e-9  # a smaller interval is a rounding error
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

  `params` are the weights of learner step `step`, laid out for decoding; `ks` are the
  values of k for pass@k and maj@k.

  Returns:
    (result, samples): the result of `summarize`, under `sets` with that of each named
    set, and a dict per response with id and problem (text), answer, verifier (name of
    the rule), response, extracted (the answer in the response), verdict, reason,
    correct and reward (before shaping; both None if undecided), parts (its named
    parts), tokens, truncated (no end token), logp (summed, nats), uid, and set if it
    has a name. Key and uid determine the sampling noise.
  """
  pad = 0  # all processes need equally many rows
  if len(hosts.side()) > 1 and engine.mesh:
    pad = -len(problems.id_N) % sharding.row_shards(engine.mesh)
  id_P = np.pad(problems.id_N, (0, pad), constant_values=-1)
  sampled = rollout(
    PartialRollouts(engine, len(id_P)),
    params,
    prompts.prompts_by_id(problems, id_P),
    key,
    # A separate timer: the caller counts the seconds of an evaluation.
    verification=Verification(problems, tokenizer, verifier, PhaseTimer()),
    step=step,
    policy_version=step,
  )
  uids = range(len(problems.id_N) * engine.group_size)
  G = engine.group_size
  own = uids if sampled.own is None else sampled.own.tolist()
  read = {str(uid): _sample(sampled, problems, uid, G, verifier.k.rule) for uid in own}
  cut_length = engine.max_new_tokens if engine.stop else None
  counted = exchange.merged(_numbers(sampled, tokenizer.eos, cut_length))
  read = exchange.merged(read)
  samples = [read[str(uid)] | counted[str(uid)] for uid in uids]
  result = summarize(samples, G, ks)
  names = [row.set for row in problems.rows]
  if any(names):
    for sample in samples:
      sample['set'] = names[sample['id']]
    result['sets'] = {
      name: summarize([x for x in samples if x['set'] == name], G, ks)
      for name in dict.fromkeys(names)
    }
  return result, samples


def _sample(
  sampled: Rollout, problems: Problems, uid: int, G: int, rule: str
) -> dict[str, Any]:
  """Describes a response; `rule` is the verifier of problems without a verifier."""
  p = uid // G
  row = problems.rows[p]
  verdict = sampled.verdicts[uid]
  said = sampled.conversations.get(uid, ())
  turns = {'messages': [dict(x) for x in said]} if len(said) > 2 else {}
  return {
    'id': int(problems.id_N[p]),
    'uid': uid,
    'problem': row.problem,
    'answer': row.answer,
    'verifier': row.verifier or rule,
    'response': sampled.texts[uid],
    'extracted': verdict.answer,
    'verdict': WORDS[verdict.right],
    'reason': verdict.reason,
    'correct': verdict.right,
    'reward': None if verdict.right is None else verdict.earned,
    'parts': dict(verdict.parts or {}),
  } | turns


def _numbers(
  sampled: Rollout, eos: tuple[int, ...], cut_length: int | None
) -> dict[str, dict[str, Any]]:
  """Returns uid -> (tokens, truncated, logp) as a dict, for this host's responses."""
  groups = sampled.groups
  own = np.flatnonzero(exchange.owned(groups.tokens_PGT))
  stored = groups.tokens_PGT, groups.response_mask_PGT, groups.behavior_logp_PGT
  tokens_PGT, mask_PGT, logp_PGT = (exchange.rows_of(x, own) for x in stored)
  logp_PG = np.where(mask_PGT, logp_PGT.astype(float), 0).sum(2)
  ended_PG = ended(mask_PGT, np.isin(tokens_PGT, eos), cut_length)
  length_PG = response_length(mask_PGT)
  G = mask_PGT.shape[1]
  return {
    str(p * G + g): {
      'tokens': int(length_PG[i, g]),
      'truncated': not ended_PG[i, g],
      'logp': float(logp_PG[i, g]),
    }
    for (i, p), g in itertools.product(enumerate(own), range(G))
  }


def summarize(
  samples: Sequence[dict[str, Any]], group_size: int, ks: Sequence[int]
) -> dict[str, Any]:
  """Computes the metrics of samples, `group_size` consecutive samples per problem.

  Returns:
    accuracy (avg@group_size) and its stderr; reward (mean) and reward_stderr; n, the
    number of problems; group_size; length (mean tokens); truncated (share without an
    end token); undecided (share) and undecided_because (the most frequent reason, or
    ''); under pass and maj, the mean over problems and its stderr for each k; and under
    parts, the same for each named part of the reward, 0 where a response lacks it.
  """

  def column(name: str) -> np.ndarray:
    values = np.asarray([sample[name] for sample in samples], float)
    return values.reshape(-1, group_size)

  decided = []  # the decided responses to each problem
  for i in range(0, len(samples), group_size):
    responses = samples[i : i + group_size]
    decided.append([x for x in responses if x['correct'] is not None])
  counts = [(len(x), sum(sample['correct'] for sample in x)) for x in decided]
  passed = {k: [pass_at(n, right, k) for n, right in counts] for k in ks}
  voted = {k: [majority(responses, k) for responses in decided] for k in ks}
  names = (sample['parts'] for sample in samples)
  accuracy = mean_of_decided(column('correct'))
  reward = mean_of_decided(column('reward'))
  undecided = [sample for sample in samples if sample['correct'] is None]
  reasons = collections.Counter(sample['reason'] for sample in undecided)
  return {
    'accuracy': accuracy['mean'],
    'stderr': accuracy['stderr'],
    'reward': reward['mean'],
    'reward_stderr': reward['stderr'],
    'n': len(samples) // group_size,
    'group_size': group_size,
    'length': float(column('tokens').mean()),
    'truncated': float(column('truncated').mean()),
    'undecided': len(undecided) / len(samples),
    'undecided_because': next((text for text, _ in reasons.most_common(1)), ''),
    'pass': {k: mean_of_decided(values) for k, values in passed.items()},
    'maj': {k: mean_of_decided(values) for k, values in voted.items()},
    'parts': {
      name: mean_of_decided([_part(name, responses) for responses in decided])
      for name in dict.fromkeys(itertools.chain(*names))
    },
  }


def _part(name: str, responses: Sequence[dict[str, Any]]) -> float:
  values = [response['parts'].get(name, 0.0) for response in responses]
  return sum(values) / len(values) if values else math.nan


def mean_of_decided(values: Sequence[float] | np.ndarray) -> dict[str, float]:
  """Returns the mean over P problems of values [P, G] or [P], and its standard error.

  nan values, of undecided responses, are left out of the mean of their problem. A
  problem without other values is left out; without any problem both results are nan.

  Responses to one problem are correlated, so the error is that of the mean of the
  per-problem means; 0.0 with fewer than two problems. Treating all responses as
  independent would give too small an error.
  """
  value_PG = np.reshape(values, (len(values), -1)).astype(float)
  value_PG = value_PG[~np.isnan(value_PG).all(1)]
  if not len(value_PG):
    return {'mean': math.nan, 'stderr': math.nan}
  mean_P = np.nanmean(value_PG, 1)
  # A value that is filled with the mean of its problem does not change the mean.
  filled_PG = np.where(np.isnan(value_PG), mean_P[:, None], value_PG)
  error = mean_and_error(mean_P)[1] if len(mean_P) > 1 else 0.0
  return {'mean': float(filled_PG.mean()), 'stderr': error}


def rewards_of(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
  """Returns (mean, standard error) of the reward and of its named parts.

  Returns {} without custom reward functions: then the mean reward is the accuracy.
  """
  if not (parts := result.get('parts')):  # a record may have none
    return {}
  reward = {'reward': (result['reward'], result['reward_stderr'])}
  if len(parts) == 1:  # of one function: the reward itself
    return reward
  return reward | {f'reward/{x}': (v['mean'], v['stderr']) for x, v in parts.items()}


def pass_at(n: int, c: int, k: int) -> float:
  """Returns the chance that k of n responses, c of them right, include a right one.

  The unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (Codex, arXiv:2107.03374,
  section 2.1); integer binomials neither overflow nor cancel. nan for n < k.
  """
  ways = math.comb(n, k)
  return (ways - math.comb(n - c, k)) / ways if ways else math.nan


def majority(responses: Sequence[dict[str, Any]], k: int) -> float:
  """Returns maj@k: the share of n // k blocks of k responses whose majority is right.

  A response votes for its exact answer string; without an answer it does not vote.
  A tie counts as the share of right answers among the tied answers, as in a fair draw;
  a block without votes is wrong. nan for fewer than k responses.
  """
  answers = [response['extracted'] for response in responses]
  right = {x['extracted'] for x in responses if x['correct']}
  shares = []
  for i in range(0, len(answers) - k + 1, k):
    votes = collections.Counter(s for s in answers[i : i + k] if s is not None)
    most = max(votes.values(), default=0)
    first = [s for s, n in votes.items() if n == most]
    shares.append(sum(s in right for s in first) / max(len(first), 1))
  return sum(shares) / len(shares) if shares else math.nan


def table(result: dict[str, Any], title: str) -> str:
  """Formats the result of `summarize` as Markdown tables: of all, and of each set."""
  measures = {f'avg@{result["group_size"]}': (result['accuracy'], result['stderr'])}
  for name in ('pass', 'maj'):
    for k, value in result[name].items():
      measures[f'{name}@{k}'] = (value['mean'], value['stderr'])
  measures |= rewards_of(result)
  rows = [('measure', 'mean', 'std. err.')]
  rows += [(n, f'{mean:.4f}', f'{error:.4f}') for n, (mean, error) in measures.items()]
  for name in ('length', 'truncated', 'undecided'):
    rows.append(('tokens' if name == 'length' else name, f'{result[name]:.4g}', ''))
  header, *cells = ((a.ljust(12), b.rjust(9), c.rjust(9)) for a, b, c in rows)
  size = f'{result["n"]} problems x {result["group_size"]} responses'
  of_sets = (f'\n{table(x, name)}' for name, x in result.get('sets', {}).items())
  text = f'{title}: {size}\n\n{markdown.table(cells, header, "lrr")}\n'
  return text + ''.join(of_sets)


def record(
  workdir: str,
  step: int,
  result: dict[str, Any],
  samples: Sequence[dict[str, Any]],
  problems: Problems,
) -> None:
  """Writes eval/<step>.json during training, and the pictures of its problems.

  Raises OSError if a file cannot be written.
  """
  path = os.path.join(workdir, 'eval', f'{step}.json')
  os.makedirs(os.path.dirname(path), exist_ok=True)
  if any(problems.grids):
    names = [files.write_pictures(workdir, row.pictures) for row in problems.rows]
    samples = [sample | {'pictures': names[sample['id']]} for sample in samples]
  files.write_json(path, {'result': result, 'samples': samples})


def settings(knobs: EvaluateConfig, problems: Problems) -> float:
  """Returns a number that changes with everything but the policy that is evaluated.

  The section `evaluate` may change when a run resumes, and the held-out problems with
  problems.changed='accept'. Only evaluations with equal numbers are compared.
  """
  values = knobs.model_dump(exclude={'every', 'k'})
  read = prompts.fingerprint(problems), prompts.prompt_fingerprint(problems)
  return float(
    int(digests.fingerprint(values | {'': read})[:6], 16)
  )  # exact in float32 too


def comparable(before: dict[str, Any], after: dict[str, Any]) -> bool:
  """Returns whether two results have equal settings, as far as records have them."""
  return before.get('settings') in (None, after.get('settings'))


def read_recorded(workdir: str, step: int) -> dict[str, Any]:
  """Reads the {'result', 'samples'} that `record` wrote for a step.

  Raises ValueError if the file is missing or damaged.
  """
  path = os.path.join(workdir, 'eval', f'{step}.json')
  way_out = "repeat the run's command to evaluate step 0 and the last step again"
  return files.read_json(path, way_out)


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
  """Returns the mean of n >= 1 independent values and its standard error.

  The error is s / sqrt(n), with the sample standard deviation s (ddof=1); nan if n = 1.
  """
  value_N = np.asarray(values, float)
  n = len(value_N)
  error = value_N.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
  return float(value_N.mean()), float(error)


def plus_minus(middle: float, half: float, sign: str = '') -> str:
  """Formats a value ± half an interval or an error, with equal decimals.

  The interval has two significant digits: 0.0130 and 0.0561 give '0.013 ± 0.056'. An
  interval of 0, up to rounding, leaves four digits of the value; nan is left out.

  Args:
    sign: '+' also writes the sign of a positive value.
  """
  if not half > ROUNDING:
    return f'{middle:{sign}.4g}{" ± 0" * (half <= ROUNDING)}'
  decimals = max(0, 1 - int(f'{half:.1e}'[4:]))  # 1 - the exponent of 5.6e-02
  return f'{middle:{sign}.{decimals}f} ± {half:.{decimals}f}'
