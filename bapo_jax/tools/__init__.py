"""What is done around a run, from the command line: nothing below main.py needs these.

Evaluation, export, viewer and sweep work on a workdir; plan and config_docs on none.
"""
