"""Samples responses and verifies them.

In: prompts, the actor's weights, a random key.
Out: `Groups` of G verified responses per prompt, with log-probabilities and versions.
Reading order: sampling, shapes, decode, engine, partial_rollouts, rollout; knobs.
"""
