"""From a config to new weights: config, resolve, build, the loop, and checkpoints.

In: a config, problems, weights. Out: states, metrics, evaluations, checkpoints.
Read: knobs, config, resolve, build, trainer (the loop); the others by need.
"""
