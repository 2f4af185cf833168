"""Every metric of a run, `stage/quantity`, defined once: `GLOSSARY[name]` is a sentence.

r is the probability ratio of the current policy pi to the behaviour policy mu, which
sampled the token; A is the advantage. nan means that nothing of its kind was there.
"""

from bapo_jax.types import SOURCES

# ruff: noqa: E501
GLOSSARY: dict[str, str] = {
  'rollout/reward': 'Mean reward of the fresh responses, as the learner sees it; in [0, 1] unless shaped.',
  'rollout/accuracy': 'Share of the fresh responses that the verifier finds right, in [0, 1].',
  'rollout/length': 'Mean length of the fresh responses, tokens.',
  'rollout/length_right': 'Mean length of the right fresh responses, tokens; nan without any.',
  'rollout/length_wrong': 'Mean length of the wrong fresh responses, tokens; nan without any.',
  'rollout/truncated': 'Share of the fresh responses cut at the length limit, in [0, 1].',
  'rollout/undecided': 'Share of the responses, fresh and reevaluated, that the verifier could not decide (too slow, too large, or an error), in [0, 1]; they count as wrong.',
  'rollout/seats': 'Share of the seats for fresh groups that completed groups fill, in [0, 1]; below 1 only where partial rollouts wait for the next step.',
  'rollout/age': 'Mean age of the tokens of the fresh responses, learner steps.',
  'rollout/age_max': 'Age of the oldest of these tokens, learner steps; at most rollout.max_off_policy_steps + rollout.weight_sync_interval - 1.',
  'rollout/responses': 'Responses sampled so far in the run, those of extra rounds and of reevaluated problems included, those of evaluations excluded.',
  'rollout/rounds': 'Rounds of prompts sampled in the step: 1 plus the extra rounds.',
  'rollout/tokens': 'Response tokens of the fresh and the reevaluated groups of the step.',
  'rollout/tokens_per_s': 'Response tokens sampled per second of sampling.',
  'rollout/logp_diff': 'Mean of |learner logp - sampler logp|, nats, >= 0, over tokens that both computed with the same weights: by a pass of its own where the learner recomputes, else those of the first update that the current weights sampled; nan without any. Large where the two compute different numbers for one policy.',
  'rollout/logp_diff_max': 'Largest |learner logp - sampler logp| of the same tokens, nats, >= 0; nan without any.',
  'batch/filled': 'Share of the batch seats that are filled, in [0, 1].',
  'batch/fresh': 'Share of the batch seats filled with fresh groups, in [0, 1].',
  'batch/reevaluated': 'Share of the batch seats filled with groups of reevaluated problems, in [0, 1].',
  'batch/reused': 'Share of the batch seats filled with reusable groups of the replay buffer, in [0, 1].',
  'batch/learnable': 'Share of the fresh groups with both right and wrong responses, in [0, 1].',
  'batch/age': 'Mean age of the tokens in the batch, learner steps since they were sampled, >= 0.',
  **{
    f'batch/age_{s}': f'Mean age of the tokens in the {s} groups of the batch, learner steps; nan without any.'
    for s in SOURCES
  },
  'buffer/hard': 'Hard problems in the replay buffer.',
  'buffer/reusable': 'Reusable groups in the replay buffer.',
  'buffer/hard_max_correct': 'Most right responses of a group whose problem counts as hard, by the thresholds of the next step.',
  'buffer/reusable_min_correct': 'Fewest right responses of a reusable group, by the thresholds of the next step.',
  'buffer/reusable_max_correct': 'Most right responses of a reusable group, by the thresholds of the next step.',
  'buffer/entered': 'Problems that became hard in this step.',
  'buffer/promoted': 'Hard problems that left the replay buffer because their reevaluated responses are now sometimes right.',
  'buffer/graduated': 'Hard problems that left the replay buffer because their reevaluated responses are now all right.',
  'buffer/progressed': 'Hard problems that left the replay buffer because their fresh responses are right often enough.',
  'buffer/evicted': 'Hard problems that left the replay buffer for lack of room, those tried longest ago first.',
  'advantage/positive': 'Share of the computed tokens whose advantage is positive, among those with A != 0, in [0, 1]; nan without any.',
  'clip/low': 'Ratio below which a token with A < 0 is no longer pushed down; mean over the updates of the step.',
  'clip/high': 'Ratio above which a token with A > 0 is no longer pushed up; mean over the updates of the step.',
  'clip/search_steps': 'Mean number of steps that the bound search took from its start, >= 0.',
  'clip/moved': 'Share of the updates in which the bound search moved, in [0, 1].',
  'clip/target_met': 'Share of the updates in which the positive share reached its target, in [0, 1]; 1 without a target, 0 without evidence.',
  'clip/no_evidence': 'Share of the updates in which no token that the bound search counts had a gradient, in [0, 1]: bounds stay at their start.',
  'clip/negatives_only': 'Share of the updates in which all tokens that the bound search counts had A < 0, in [0, 1]: it runs to the last bounds.',
  'clip/share_start': 'Positive share at the starting bounds, before the search: the part of the policy gradient that tokens with A > 0 contribute, rows scaled as loss.aggregate scales them, in [0, 1]; nan where no token has a gradient.',
  'clip/share': 'Positive share at the bounds used, after the search, in [0, 1]; nan where no token has a gradient.',
  'clip/surrogate_share_start': "Positive share of the clipped surrogate at the starting bounds, as the paper's public code computes it, in [0, 1]; nan where no token has an advantage.",
  'clip/surrogate_share': "Positive share of the clipped surrogate at the bounds used, as the paper's public code computes it, in [0, 1]; nan where no token has an advantage.",
  'clip/fraction': 'Share of the computed tokens whose gradient the clip sets to zero, in [0, 1].',
  'clip/fraction_positive': 'Share of the tokens with A > 0 whose gradient the clip sets to zero, in [0, 1]; nan without any.',
  'clip/fraction_negative': 'Share of the tokens with A < 0 whose gradient the clip sets to zero, in [0, 1]; nan without any.',
  **{
    f'clip/fraction_{s}': f'Share of the tokens of {s} rows whose gradient the clip sets to zero, in [0, 1]; nan without any.'
    for s in SOURCES
  },
  'clip/probability_positive': 'Mean probability under the behaviour policy of the clipped tokens with A > 0; nan without any.',
  'clip/probability_negative': 'Mean probability under the behaviour policy of the clipped tokens with A < 0; nan without any.',
  'loss/value': 'The loss that is minimised; its sign and size mean little by themselves.',
  'loss/ratio_mean': 'Mean ratio r of the computed tokens; 1 where the two policies agree.',
  'loss/ratio_max': 'Largest ratio r of the computed tokens, > 0.',
  **{
    f'loss/ratio_mean_{s}': f'Mean ratio r over the tokens of {s} rows; nan without any.'
    for s in SOURCES
  },
  **{
    f'loss/ratio_max_{s}': f'Largest ratio r over the tokens of {s} rows; nan without any.'
    for s in SOURCES
  },
  **{
    f'loss/tv_{s}': f'Estimated total variation between pi and mu on {s} rows, half the mean of |r - 1| over their tokens; nan without any.'
    for s in SOURCES
  },
  **{
    f'loss/gain_{s}': f'Unclipped surrogate of {s} rows, mean of r A over their tokens; nan without any.'
    for s in SOURCES
  },
  'loss/ratio_nan': 'Share of the computed tokens whose ratio is not a number, in [0, 1]; above 0 the run has an error.',
  'loss/ess': 'Effective sample size of the ratios as a share of the computed tokens, (sum r)^2 / (n sum r^2), in [0, 1].',
  'loss/entropy': 'Mean entropy of the policy at the computed tokens, nats per token, >= 0.',
  'loss/entropy_slope': 'Change of entropy per unit of step size that the Entropy-Clip Rule predicts, nats, in sum over the tokens as loss.aggregate weighs them; compare its sign and relative size with loss/entropy_change.',
  'loss/entropy_change': 'Measured change of entropy from one update to the next, mean over the step, nats per token; nan with a single update.',
  'loss/kl': 'k3 estimate of KL(mu, pi), mean of r - 1 - log r over the computed tokens, nats per token, >= 0.',
  'loss/kl_plain': 'k1 estimate of KL(mu, pi), mean of -log r over the computed tokens, nats per token; noisier, may be negative.',
  'learner/grad_norm': 'Global norm of the gradient before it is clipped, >= 0.',
  'learner/updates': 'Optimiser updates applied so far in the run: not those that were skipped, nor those without a token.',
  'learner/skipped': 'Updates of the step that were skipped because the loss or the gradient was not finite.',
  'learner/tokens': 'Tokens trained on in the step, once per visit; updates without any are in no mean over the updates.',
  'learner/tokens_computed': 'Those of them that were computed, in the step: of responses with an advantage, and of all where loss.kl > 0. Metrics of computed tokens are nan without any, and such an update is in no mean over the updates.',
  'learner/idle_steps': 'Steps in a row, this one included, in which no group of the batch had rewards that differ, so that nothing was learned.',
  **{
    f'theory/gain_{s}': f'Estimate of the first term of Theorem 3.2 for {s} groups, times their share of the filled seats: the surrogate, mean over the updates; 0 without a group of both verdicts.'
    for s in SOURCES
  },
  **{
    f'theory/moved_{s}': f'Estimate of the second term of Theorem 3.2 for {s} groups, 2 K TV(pi, alpha), times their share of the filled seats: the current policy against the one that sampled them; 0 without a group of both verdicts.'
    for s in SOURCES
  },
  **{
    f'theory/stale_{s}': f'Estimate of the third term of Theorem 3.2 for {s} groups, 2 TV(pi_t, alpha), times their share of the filled seats: the policy before the first update of the step against the one that sampled them, by the first update with a token of theirs; 0 without a group of both verdicts.'
    for s in SOURCES
  },
  'theory/estimate': 'Estimate of the gain by Theorem 3.2, the first terms minus the second and third ones; total variation is estimated token by token, so it bounds nothing and is comparable only with itself.',
  'eval/accuracy': 'Mean accuracy on the held-out problems, in [0, 1].',
  'eval/stderr': 'Standard error of eval/accuracy over the problems.',
  'eval/length': 'Mean length of the responses to the held-out problems, tokens.',
  'eval/truncated': 'Share of the held-out responses cut at the length limit, in [0, 1].',
  'eval/undecided': 'Share of the held-out responses that the verifier could not decide, in [0, 1]; they count as wrong.',
  'time/step': 'Wall time of the whole step, seconds.',
  'time/sample': 'Wall time of sampling, seconds.',
  'time/verify': 'Wall time of waiting for verdicts after sampling, seconds.',
  'time/score': "Wall time of recomputing the sampler's log-probabilities with the learner, seconds.",
  'time/batch': 'Wall time of filling the batch, seconds.',
  'time/update': 'Wall time of the optimiser updates, seconds.',
  'time/insert': 'Wall time of inserting groups into the replay buffer, seconds.',
  'time/log': 'Wall time of computing these metrics, seconds.',
  'time/eval': 'Wall time of evaluation, its sampling and verification included, seconds.',
  'time/save': 'Wall time of saving checkpoints, seconds.',
  'time/other': 'Wall time of the step outside every other phase, seconds.',
}
