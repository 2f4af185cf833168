"""Research tools outside the wheel: experiments, the papers' claims, and their figures.

These tools read workdirs and small result files; bapo_jax does not import them.
"""
