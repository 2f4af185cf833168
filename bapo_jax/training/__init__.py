"""From rollouts to new weights: the loop, and the run as its user sees it.

In: a config, problems, weights. Out: checkpoints, metrics, evaluations, a report.
Read: knobs, config, trainer (the loop), learner, setup, experiment; the rest by need.
"""
