"""In: responses as text, the right answers, the name of a rule per problem.
Out: verdicts (right, wrong, undecided) with their reasons, and the rewards they earn.
Read: answer_extraction, verdict, spelling, latex_trees, closed_forms, structures,
symbolic, math_rule, number_rules, verifiers, verifier_worker, verifier_pool, rewards;
knobs.
"""
