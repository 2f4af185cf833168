"""In: prompts, the actor's weights, a key.
Out: `Groups` of G verified responses per prompt, with log-probabilities and versions.
Read: sampling, shapes, decode, engine, partial_rollouts, rollout; knobs.
"""
