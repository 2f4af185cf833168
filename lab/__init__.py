"""Research tools outside the wheel: experiments, the papers' claims, and their figures.

They read workdirs and small result files; nothing in bapo_jax imports them.
"""
