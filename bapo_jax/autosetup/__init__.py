"""From facts about model, problems and devices to derived knobs and a dry run.

A config with open knobs comes in; the config with every knob decided goes out.
facts -> derive_text, derive_sizes -> derive -> check_rules -> check.
"""
