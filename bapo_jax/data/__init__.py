"""Data sets of problems: made from a seed, read from files, or downloaded by name.

Returns `Problems`, token rows with their answers, and the `Prompts` of each step.
Reading order: row, made, layouts, local_files, sources, dedup, tokenizer, prompts.
"""
