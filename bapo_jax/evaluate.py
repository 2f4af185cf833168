"""How good is the policy on problems it was never trained on?

Responses come through the same rollout door as training's, and every response is kept,
so that a number can be audited.
"""

import math

import numpy as np

from bapo_jax import prompts as prompts_lib
from bapo_jax import rollout as rollout_lib


def evaluate(params, problems, text, key, *, rollout, group: int, step: int):
  """avg@group over all problems.

  Args:
    rollout: (params, problems, prompts, key, group=, step=, born=) -> Groups.

  Returns:
    (result, samples): result has accuracy, stderr (clustered by problem), n problems,
    group, length (mean tokens), truncated (share without an end token); samples is a
    list of problem, answer, response, correct, one for each response.
  """
  prompts = prompts_lib.again(problems, problems.id_N)
  groups = rollout(params, problems, prompts, key, group=group, step=step, born=step)
  correct_PG = np.asarray(groups.correct_PG)
  chosen_PGT, tokens_PGT = np.asarray(groups.chosen_PGT), np.asarray(groups.tokens_PGT)
  ended_PG = (chosen_PGT & np.isin(tokens_PGT, text.eos)).any(2)
  result = {
    'accuracy': float(correct_PG.mean()),
    'stderr': stderr(correct_PG),
    'n': int(correct_PG.shape[0]),
    'group': group,
    'length': float(chosen_PGT.sum(2).mean()),
    'truncated': float(1 - ended_PG.mean()),
  }
  samples = [
    {
      'problem': problems.text[p],
      'answer': problems.answer[p],
      'response': response,
      'correct': bool(correct_PG[p, g]),
    }
    for p, responses in enumerate(rollout_lib.texts(text, groups))
    for g, response in enumerate(responses)
  ]
  return result, samples


def stderr(correct_PG) -> float:
  """Standard error of the mean verdict: problems are drawn, responses are not."""
  mean_P = np.asarray(correct_PG, float).mean(1)
  if len(mean_P) < 2:
    return 0.0
  return float(mean_P.std(ddof=1) / math.sqrt(len(mean_P)))
