"""What is done around a run, from the command line: nothing below main.py needs these.

Evaluation, export and viewer work on a workdir; plan and config_docs on none.
"""
