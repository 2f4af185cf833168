"""Derives the knobs that a config does not set, and checks a run before it starts.

`facts` reads model, problems and devices; `derive_text` and `derive_sizes` hold a rule
per knob, and `derive` applies them; `check_rules` finds likely mistakes for `check`.
"""
