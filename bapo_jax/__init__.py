"""Off-policy reinforcement learning of language models in JAX: two BAPOs, composed."""
