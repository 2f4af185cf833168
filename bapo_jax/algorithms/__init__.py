"""In: groups of scored responses, and log-probabilities of the current policy.
Out: a batch, its advantages, clip bounds, the objective of each token, and metrics.
Read batch_rules, replay_buffer, advantage, bound_search, clip, loss, diagnostics.
"""
