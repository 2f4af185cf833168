"""Runs an experiment: prints a summary, trains or resumes, and writes a report.

In: a config and a workdir. Out: metrics, checkpoints and a report.
Reading order: step_record, resume, series, report, run_files,
comparison, charts, samples, page, experiment.
"""
