"""Verifies responses and computes their rewards.

In: responses as text, right answers, and a rule name per problem.
Out: verdicts (right, wrong, undecided) with reasons, and rewards.
Reading order: answers, latex/ (spelling, trees, symbolic), math_rule,
number_rules, verifiers, gold, verifier_worker, verifier_pool, rewards; knobs.
"""
