"""Problems made from a seed: their texts, pictures, answers and worked solutions.

In: `ProblemsConfig`. Out: `Problem`s, the training problems before the held-out ones.
Read: problem, synthetic, countdown, drawn.
"""
