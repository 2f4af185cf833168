"""Data sets of problems: generated from a seed, read from files, or downloaded by name.

Provides `Problems`, token rows with answers, and the `Prompts` of each step.
Reading order: row, made, layouts, local_files, sources, dedup, tokenizer, prompts.
"""
