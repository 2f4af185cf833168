"""Turns a config into new weights: config, resolve, build, the loop, and checkpoints.

In: a config, problems, weights. Out: states, metrics, evaluations, checkpoints.
Reading order: knobs, config, resolve, build, trainer (the loop); then the others.
"""
