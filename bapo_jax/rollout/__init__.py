"""Samples responses and verifies them.

In: prompts, the actor's weights, a random key.
Out: `Groups`: G verified responses per prompt, log-probabilities and weight versions.
Reading order: sampling, shapes, decode, engine, partial_rollouts, rollout; knobs.
"""
