"""Data sets of problems: generated from a seed, read from files, or downloaded by name.

`Problems` is a data set as rows of tokens with answers, `Prompts` the rows of one step.
Reading order: row, made, layouts, local_files, sources, dedup, tokenizer, prompts.
"""
