"""In: problems, made from the seed, in users' files, or by the name of a data set.
Out: `Problems`, rows of tokens with their answers, and the `Prompts` of each step.
Read: row, synthetic, countdown, schemas, dedup, sources, tokenizer, prompts; the rest.
"""
