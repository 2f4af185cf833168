"""In: responses as text, the right answers, the name of a rule per problem.
Out: verdicts (right, wrong, undecided) with their reasons, and the rewards they earn.
Read: answer_extraction, verifiers, verifier_worker, verifier_pool, rewards; knobs.
"""
