"""One run as its user sees it: the first screen, resume, log, save, report.

A config and a workdir come in; metrics, checkpoints and a report go out.
step_record, resume, report -> experiment.
"""
