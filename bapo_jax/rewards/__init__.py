"""Verifies responses and computes their rewards.

Read answers, latex/, math_rule, number_rules, verifiers, gold, verifier_worker,
verifier_pool, then rewards.
"""
