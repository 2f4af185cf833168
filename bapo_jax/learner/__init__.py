"""From a batch to new weights: one optimizer update at a time.

Groups come in with their sources; parameters, moments and metrics go out.
optimizer, pictured -> scoring, accumulation -> objective -> learner.
"""
