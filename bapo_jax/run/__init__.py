"""Runs an experiment: prints a summary, trains or resumes, and writes a report.

In: a config and a workdir. Out: metrics, checkpoints and a report.
Reading order: step_record, resume, series, report, run_files,
panels, comparison, samples, document, page, experiment.
"""
