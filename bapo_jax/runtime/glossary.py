"""Defines every metric of a run, `stage/quantity`, in a sentence: `GLOSSARY[name]`.

r is the probability ratio of the current policy pi to the behaviour policy mu, which
sampled the token; A is the advantage. nan means that there is no such token, response or
group; in metrics.jsonl nan and infinite values are null.

A step has one value of each metric in `OF_STEPS`. A metric in `OF_UPDATES` is measured
at every optimiser update, and declares how the values become the value of the step.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bapo_jax.types import SOURCES

# Start of a metric of one named set: eval/aime24/accuracy is its eval/accuracy. The
# named parts of rewards are eval/reward/<part>.
OF_SET = re.compile(r'eval/(?!reward/)[\w-]+/')


class Metric(NamedTuple):
  """A metric that is measured at every optimiser update."""

  sentence: str
  reduce: Callable[[np.ndarray], float]  # the values of a step's U updates -> one value
  of: str = ''  # the metric whose values are reduced; '': the metric itself
  optional: bool = False  # whether only some runs have it


def mean(value_U: np.ndarray) -> float:
  """Returns the mean; a nan, which is an error of the run, is kept."""
  return value_U.mean() if len(value_U) else np.nan


def nanmean(value_U: np.ndarray) -> float:
  """Returns the mean of the updates that have such tokens; nan without any."""
  return mean(value_U[~np.isnan(value_U)])


def largest(value_U: np.ndarray) -> float:
  """Returns the largest value that is not nan; nan without any."""
  return np.fmax.reduce(value_U, initial=np.nan)


def mean_change(value_U: np.ndarray) -> float:
  """Returns the mean change from one update to the next; nan with a single update."""
  return mean(np.diff(value_U[~np.isnan(value_U)]))


def first(value_U: np.ndarray) -> float:
  """Returns the value of the first update, before the weights move."""
  return value_U[0] if len(value_U) else np.nan


# ruff: noqa: E501
OF_UPDATES = {
  'rollout/logp_diff': Metric(
    'Mean of |learner logp - sampler logp|, nats, >= 0, over tokens that both computed with the same weights: from a separate pass where the learner recomputes log-probabilities, else from the tokens of the first update that the current weights sampled; nan without any. Large where the two compute different numbers for one policy.',
    first,
  ),
  'rollout/logp_diff_max': Metric(
    'Largest |learner logp - sampler logp| of the same tokens, nats, >= 0; nan without any.',
    first,
  ),
  'advantage/positive': Metric(
    'Share of the computed tokens whose advantage is positive, among those with A != 0, in [0, 1]; nan without any.',
    nanmean,
  ),
  'clip/low': Metric(
    'Ratio below which a token with A < 0 is no longer pushed down; mean over the updates of the step.',
    mean,
  ),
  'clip/high': Metric(
    'Ratio above which a token with A > 0 is no longer pushed up; mean over the updates of the step.',
    mean,
  ),
  'clip/search_steps': Metric(
    'Mean number of steps that the bound search took from its start, >= 0.', mean
  ),
  'clip/moved': Metric(
    'Share of the updates in which the bound search moved, in [0, 1].', mean
  ),
  'clip/target_met': Metric(
    'Share of the updates in which the positive share reached its target, in [0, 1]; 1 without a target, 0 without evidence.',
    mean,
  ),
  'clip/no_evidence': Metric(
    'Share of the updates in which no token that the bound search counts had a gradient, in [0, 1]: the bounds then keep their starting values.',
    mean,
  ),
  'clip/negatives_only': Metric(
    'Share of the updates in which all tokens that the bound search counts had A < 0, in [0, 1]: the search then runs to its last bounds.',
    mean,
  ),
  'clip/share_start': Metric(
    'Positive share at the starting bounds, before the search: the part of the policy gradient that tokens with A > 0 contribute, rows scaled as loss.aggregate scales them, in [0, 1]; nan where no token has a gradient.',
    nanmean,
  ),
  'clip/share': Metric(
    'Positive share at the bounds used, after the search, in [0, 1]; nan where no token has a gradient.',
    nanmean,
  ),
  'clip/fraction': Metric(
    'Share of the computed tokens whose gradient the clip or a mask sets to zero, in [0, 1].',
    nanmean,
  ),
  'clip/masked': Metric(
    'Share of the computed tokens that the mask rule leaves out, or a clip rule that gives a mask, in [0, 1]; 0 without a mask.',
    mean,
  ),
  'clip/fraction_positive': Metric(
    'Share of the tokens with A > 0 whose gradient the clip or a mask sets to zero, in [0, 1]; nan without any.',
    nanmean,
  ),
  'clip/fraction_negative': Metric(
    'Share of the tokens with A < 0 whose gradient the clip or a mask sets to zero, in [0, 1]; nan without any.',
    nanmean,
  ),
  **{
    f'clip/fraction_{s}': Metric(
      f'Share of the tokens of {s} rows whose gradient the clip or a mask sets to zero, in [0, 1]; nan without any.',
      nanmean,
    )
    for s in SOURCES
  },
  'clip/probability_positive': Metric(
    'Mean probability under the behaviour policy of the clipped tokens with A > 0; nan without any.',
    nanmean,
  ),
  'clip/probability_negative': Metric(
    'Mean probability under the behaviour policy of the clipped tokens with A < 0; nan without any.',
    nanmean,
  ),
  'loss/value': Metric(
    'The loss that is minimised; its sign and size mean little by themselves.', mean
  ),
  'loss/ratio_mean': Metric(
    'Mean ratio r of the computed tokens; 1 where the two policies agree.', nanmean
  ),
  'loss/ratio_max': Metric('Largest ratio r of the computed tokens, > 0.', largest),
  **{
    f'loss/ratio_mean_{s}': Metric(
      f'Mean ratio r over the tokens of {s} rows; nan without any.', nanmean
    )
    for s in SOURCES
  },
  **{
    f'loss/tv_{s}': Metric(
      f'Estimated total variation between pi and mu on {s} rows, half the mean of |r - 1| over their tokens; nan without any.',
      nanmean,
    )
    for s in SOURCES
  },
  'loss/ess': Metric(
    'Effective sample size of the ratios as a share of the computed tokens, (sum r)^2 / (n sum r^2), in [0, 1].',
    nanmean,
  ),
  'loss/entropy': Metric(
    'Mean entropy of the policy at the computed tokens, nats per token, >= 0.', nanmean
  ),
  'loss/entropy_slope': Metric(
    'Change of entropy per unit of step size that the Entropy-Clip Rule predicts, nats, in sum over the tokens as loss.aggregate weighs them; compare its sign and relative size with loss/entropy_change.',
    nanmean,
  ),
  'loss/entropy_change': Metric(
    'Measured change of entropy from one update to the next, mean over the step, nats per token; nan with a single update.',
    mean_change,
    of='loss/entropy',
  ),
  'loss/kl': Metric(
    'k3 estimate of KL(mu, pi), mean of r - 1 - log r over the computed tokens, nats per token, >= 0.',
    nanmean,
  ),
  'loss/reference': Metric(
    'k3 estimate of KL(pi, p), whatever loss.reference_estimator is, mean over the computed tokens, nats per token, >= 0; p: the teacher, or with loss.reference alone the first weights.',
    mean,
    optional=True,
  ),
  'given/logp': Metric(
    'Mean log-probability of the computed tokens that no policy sampled: given responses, or messages of the environment, nats per token; nan without any.',
    nanmean,
    optional=True,
  ),
  'moe/agree': Metric(
    'Share of the layers and computed tokens whose router would use the experts that the sampler used, in any order, in [0, 1]; a token without a recorded route does not agree; mean over the updates. These metrics exist with experts and model.replay_routes other than off only.',
    nanmean,
    optional=True,
  ),
  'moe/agree_first': Metric(
    'moe/agree of the first update of the step, before the weights move; nan if it has no computed token.',
    first,
    of='moe/agree',
    optional=True,
  ),
  'learner/grad_norm': Metric(
    'Global norm of the gradient before it is clipped, >= 0.', mean
  ),
  'learner/skipped': Metric(
    'Updates of the step that were skipped because the loss or the gradient was not finite.',
    np.sum,
  ),
  'learner/tokens': Metric(
    'Tokens trained on in the step, once per visit; updates without any are in no mean over the updates.',
    np.sum,
  ),
  'learner/tokens_computed': Metric(
    'Tokens trained on in the step that were also computed: those of responses with an advantage, or all tokens where loss.kl, loss.entropy or loss.reference is above 0. Metrics of computed tokens are nan without any, and such an update is in no mean over the updates.',
    np.sum,
  ),
}
OF_STEPS = {
  'rollout/reward': 'Mean reward of the decided fresh responses, as the learner sees it; in [0, 1] unless shaped; nan without any.',
  'rollout/accuracy': 'Share of the decided fresh responses that the verifier finds right, in [0, 1]; nan without any.',
  'rollout/length': 'Mean length of the fresh responses, tokens, the messages of an environment included, as in sampler.max_new_tokens; nan without any.',
  'rollout/length_right': 'Mean length of the right fresh responses, tokens; nan without any.',
  'rollout/length_wrong': 'Mean length of the wrong fresh responses, tokens; nan without any.',
  'rollout/truncated': 'Share of the fresh responses cut at the length limit, in [0, 1]; nan without any.',
  'rollout/undecided': 'Share of the responses, fresh and reevaluated, that the verifier could not decide (too slow, too large, an error, or None of a custom function), in [0, 1]; they are neither right nor wrong, in no mean of rewards or pass rates, and not in the loss.',
  'rollout/turns': 'Mean number of turns of the fresh responses; only with rollout.environment.',
  'rollout/environment_failed': 'Turns, of fresh and reevaluated responses, to which the environment gave no usable answer (an error, too late, too long): their responses end there; only with rollout.environment.',
  'rollout/age': 'Mean age of the tokens of the fresh responses, learner steps.',
  'rollout/age_max': 'Age of the oldest token of the fresh responses, learner steps; at most rollout.max_off_policy_steps + rollout.weight_sync_interval - 1 + rollout.depth.',
  'rollout/responses': 'Training responses so far in the run, those of extra rounds, of reevaluated problems and given ones included, those of evaluations excluded.',
  'rollout/rounds': 'Rounds of prompts sampled in the step: 1 plus the extra rounds.',
  'rollout/tokens': 'Sampled tokens of the fresh and the reevaluated groups of the step.',
  'rollout/tokens_per_s': 'Response tokens sampled per second of sampling.',
  'batch/filled': 'Share of the batch seats that are filled, in [0, 1].',
  'batch/fresh': 'Share of the batch seats filled with fresh groups, in [0, 1].',
  'batch/reevaluated': 'Share of the batch seats filled with groups of reevaluated problems, in [0, 1].',
  'batch/reused': 'Share of the batch seats filled with reusable groups of the replay buffer, in [0, 1].',
  'batch/learnable': 'Share of the fresh groups with both right and wrong responses, in [0, 1]; undecided ones are neither.',
  'batch/age': 'Mean age of the tokens in the batch, learner steps since they were sampled, >= 0.',
  **{
    f'batch/age_{s}': f'Mean age of the tokens in the {s} groups of the batch, learner steps; nan without any.'
    for s in SOURCES
  },
  'buffer/hard': 'Hard problems in the replay buffer.',
  'buffer/reusable': 'Reusable groups in the replay buffer.',
  'buffer/entered': 'Problems that became hard in this step.',
  'buffer/promoted': 'Hard problems that left the replay buffer because their reevaluated responses are now sometimes right.',
  'buffer/graduated': 'Hard problems that left the replay buffer because their reevaluated responses are now all right.',
  'buffer/progressed': 'Hard problems that left the replay buffer because their fresh responses are right often enough.',
  'buffer/evicted': 'Hard problems that left the full replay buffer: the first to enter (buffer.hard_order=fifo), or those tried least recently (least_recent).',
  'given/filled': 'Share of the seats for given responses (rollout.given) that have one, in [0, 1]; the policy samples in the others.',
  'teacher/kl': 'k1 estimate of KL(mu, p), mean of log mu - log p over the tokens trained on, nats per token; p as in loss/reference.',
  'moe/load': 'Tokens of the busiest expert over those of the mean expert, mean over the layers, >= 1, of the prompt and one response of each fresh group.',
  'moe/missing': 'Share of the tokens trained on without a recorded route, in [0, 1]; the live router chooses their experts.',
  'learner/updates': 'Optimiser updates applied so far in the run: skipped updates and updates without a token excluded.',
  'update/number': 'Number of the optimiser update, from 0, in updates.jsonl: step s of n updates has s n to s n + n - 1, even if its batch is underfilled.',
  'learner/idle_steps': 'Steps in a row, this one included, in which no token of the batch had an advantage, so that nothing was learned.',
  'eval/accuracy': 'Mean accuracy on the held-out problems, in [0, 1]: the mean over the problems of the share of right responses among the decided ones; nan without any. A named set of problems.test_source has every metric too: eval/<set>/accuracy.',
  'eval/settings': 'A number that stands for the settings of the evaluation: evaluate.group_size, evaluate.sampling and the held-out problems. Evaluations with different numbers are not compared.',
  'eval/stderr': 'Standard error of eval/accuracy over the problems.',
  'eval/reward': 'Mean reward of the decided responses to the held-out problems, before shaping; eval/accuracy unless a custom function gives the reward.',
  'eval/reward_stderr': 'Standard error of eval/reward over the problems.',
  'eval/length': 'Mean length of the responses to the held-out problems, tokens, as in rollout/length.',
  'eval/truncated': 'Share of the held-out responses cut at the length limit, in [0, 1].',
  'eval/undecided': 'Share of the held-out responses that the verifier could not decide, in [0, 1]; eval/accuracy and eval/reward leave them out.',
  'overlap/learner_idle': 'Share of the step in which the learner waited for groups, in [0, 1]; these metrics exist with mesh.rollout only.',
  'overlap/sampler_idle': 'Share of the step in which the mesh.rollout devices had nothing to sample, in [0, 1].',
  'overlap/sampling': "When sampling the step's groups began, seconds since the start of the process.",
  'overlap/sampled': "When sampling the step's groups ended, seconds since the start of the process.",
  'time/step': 'Wall time of the whole step, seconds.',
  'time/sample': 'Wall time of sampling, seconds; none where mesh.rollout devices sample beside the learner.',
  'time/wait': 'Wall time in which the learner waits for groups that mesh.rollout devices sample, seconds.',
  'time/send': 'Wall time of copying the weights to the mesh.rollout devices, seconds.',
  'time/receive': "Wall time of copying the groups to the learner's devices, seconds.",
  'time/verify': 'Wall time of waiting for verdicts after sampling, seconds.',
  'time/score': "Wall time of recomputing the sampler's log-probabilities with the learner, seconds.",
  'time/teacher': 'Wall time of scoring the batch with the teacher or the first weights, seconds.',
  'time/batch': 'Wall time of filling the batch, seconds.',
  'time/update': 'Wall time of the optimiser updates, seconds.',
  'time/insert': 'Wall time of inserting groups into the replay buffer, seconds.',
  'time/log': 'Wall time of computing these metrics, seconds.',
  'time/eval': 'Wall time of evaluation, its sampling and verification included, seconds.',
  'time/save': 'Wall time of saving checkpoints, seconds.',
  'time/other': 'Wall time of the step outside every other phase, seconds.',
}
GLOSSARY = OF_STEPS | {name: metric.sentence for name, metric in OF_UPDATES.items()}
