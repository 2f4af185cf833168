"""Turns a batch into new weights, one optimiser update at a time.

In: groups with their sources. Out: parameters, optimiser state, metrics.
Reading order: optimizer, pictured, scoring, accumulation, objective, learner.
"""
