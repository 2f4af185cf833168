"""How good is the policy on problems it was never trained on?

1. responses come through the same rollout door as training's, each is kept with all
   that an audit of its verdict needs;
2. avg@k, pass@k and maj@k, each with a standard error clustered by problem.
"""

import collections
import math
from collections.abc import Sequence

import numpy as np

from bapo_jax.data import prompts as prompts_lib
from bapo_jax.rewards import rewards
from bapo_jax.rollout import rollout as rollout_lib

WORDS = {True: 'right', False: 'wrong', None: 'undecided'}


def check(
  group: int, ks: Sequence[int], temperature: float, top_k: int, top_p: float
) -> None:
  """Raises ValueError where there are too few responses, or no way to draw a token."""
  if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
    raise ValueError(
      f'evaluate.sampling: temperature={temperature}, top_k={top_k}, top_p={top_p}; '
      'give temperature >= 0, top_k >= 0 (0: of all tokens) and 0 < top_p <= 1'
    )
  for k in ks:
    if not 1 <= k <= group:
      raise ValueError(
        f'evaluate.k={tuple(ks)}: pass@{k} needs at least {max(k, 1)} responses a '
        f'problem; evaluate.group={group}'
      )


def evaluate(
  params,
  problems,
  text,
  key,
  *,
  rollout,
  judge: rewards.Verifier,
  group: int,
  step: int,
  ks: Sequence[int] = (1,),
):
  """`group` responses to every problem, judged.

  Args:
    rollout: (params, problems, prompts, key, group=, step=, born=, verify=) -> Groups.
    ks: of pass@k and maj@k, none above `group`.

  Returns:
    (result, samples): result has accuracy (avg@group), stderr, n problems, group,
    length (mean tokens), truncated (share without an end token), undecided (share), and
    under pass and maj for each k the mean and its stderr. samples is a list of dicts,
    one for each response: id and text of the problem, answer, response, correct,
    verdict, reason, said (the answer found), tokens, truncated, logp (its sum, nats)
    and uid, the number that with the key names the noise.
  """
  heard = {}

  def verify(answers, texts, *rules):
    verdicts = judge.submit(answers, texts, *rules).result()
    heard.update(zip(zip(answers, texts, strict=True), verdicts, strict=True))
    return rewards.right(verdicts)

  prompts = prompts_lib.prompts_by_id(problems, problems.id_N)
  groups = rollout(
    params,
    problems,
    prompts,
    key,
    group=group,
    step=step,
    born=step,
    verify=verify,
  )
  chosen_PGT, tokens_PGT = np.asarray(groups.chosen_PGT), np.asarray(groups.tokens_PGT)
  logp_PG = np.where(chosen_PGT, np.asarray(groups.logp_PGT, float), 0).sum(2)
  ended_PG = (chosen_PGT & np.isin(tokens_PGT, text.eos)).any(2)
  samples = []
  for p, responses in enumerate(rollout_lib.texts(text, groups)):
    for g, response in enumerate(responses):
      verdict = heard[problems.answer[p], response]
      samples.append(
        {
          'id': int(problems.id_N[p]),
          'uid': p * group + g,
          'problem': problems.text[p],
          'answer': problems.answer[p],
          'response': response,
          'said': verdict.said,
          'verdict': WORDS[verdict.right],
          'reason': verdict.reason,
          'correct': verdict.right is True,
          'tokens': int(chosen_PGT[p, g].sum()),
          'truncated': not ended_PG[p, g],
          'logp': float(logp_PG[p, g]),
        }
      )
  return summarize(samples, group, ks), samples


def summarize(samples: list[dict], group: int, ks: Sequence[int]) -> dict:
  """The result of `evaluate` from its samples, `group` in a row of one problem."""

  def column(name):
    return np.asarray([sample[name] for sample in samples]).reshape(-1, group)

  correct_PG = column('correct')
  rows = [samples[i : i + group] for i in range(0, len(samples), group)]
  passed = {k: [pass_at(group, int(c), k) for c in correct_PG.sum(1)] for k in ks}
  voted = {
    k: [majority([s['said'] for s in r], [s['correct'] for s in r], k) for r in rows]
    for k in ks
  }
  return {
    'accuracy': float(correct_PG.mean()),
    'stderr': stderr(correct_PG),
    'n': len(rows),
    'group': group,
    'length': float(column('tokens').mean()),
    'truncated': float(column('truncated').mean()),
    'undecided': float((column('verdict') == 'undecided').mean()),
    'pass': {k: mean_and_error(value_P) for k, value_P in passed.items()},
    'maj': {k: mean_and_error(value_P) for k, value_P in voted.items()},
  }


def mean_and_error(value_P) -> dict[str, float]:
  """Mean over problems and its standard error."""
  value_P = np.asarray(value_P, float)
  return {'mean': float(value_P.mean()), 'stderr': stderr(value_P[:, None])}


def pass_at(n: int, c: int, k: int) -> float:
  """Chance that k of n responses, c of them right, hold a right one.

  The unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (Codex, arXiv:2107.03374,
  section 2.1); the binomials are integers, so nothing overflows or cancels.
  """
  ways = math.comb(n, k)
  return (ways - math.comb(n - c, k)) / ways


def majority(said: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
  """Share of maj@k that is right, over the n // k whole blocks of k responses.

  Equal answers vote together; a response without an answer does not vote. Of answers
  that tie each counts in part, as a fair draw among them would on average. No vote at
  all is wrong. Answers that mean the same and are spelled differently vote apart.
  """
  shares = []
  for i in range(0, len(said) - k + 1, k):
    votes = collections.Counter(s for s in said[i : i + k] if s is not None)
    right = {s for s, c in zip(said, correct, strict=True) if c}
    most = max(votes.values(), default=0)
    first = [s for s, n in votes.items() if n == most]
    shares.append(sum(s in right for s in first) / max(len(first), 1))
  return sum(shares) / len(shares)


def stderr(correct_PG) -> float:
  """Standard error of the mean verdict: problems are drawn, responses are not."""
  mean_P = np.asarray(correct_PG, float).mean(1)
  if len(mean_P) < 2:
    return 0.0
  return float(mean_P.std(ddof=1) / math.sqrt(len(mean_P)))


def table(result: dict, title: str) -> str:
  """The result as a Markdown table, which reads well on a terminal too."""
  rows = [(f'avg@{result["group"]}', result['accuracy'], result['stderr'])]
  for name in ('pass', 'maj'):
    rows += [(f'{name}@{k}', v['mean'], v['stderr']) for k, v in result[name].items()]
  lines = [f'{n:<12} | {mean:>9.4f} | {error:>9.4f}' for n, mean, error in rows]
  counts = (('tokens', 'length'), ('truncated', 'truncated'), ('undecided',) * 2)
  lines += [f'{n:<12} | {result[name]:>9.4g} | {"":>9}' for n, name in counts]
  head = [f'{"measure":<12} | {"mean":>9} | {"std. err.":>9}', ':--|--:|--:']
  asked = f'{result["n"]} problems x {result["group"]} responses'
  table = '\n'.join(f'| {line} |' for line in head + lines)
  return f'{title}: {asked}\n\n{table}\n'
