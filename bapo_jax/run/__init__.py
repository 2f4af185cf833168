"""Runs an experiment: first screen, resume, log, checkpoints, report.

In: a config and a workdir. Out: metrics, checkpoints and a report.
Reading order: step_record, resume, report, charts, report_page, experiment.
"""
