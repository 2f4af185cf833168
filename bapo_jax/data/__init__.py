"""Problems become rows of tokens.

In: the sources of the config, made, in files or by name. Out: `Problems`, of which
`prompts.next_prompts` takes the `Prompts` of a step.
Read: row, tokenizer, synthetic, countdown, schemas, local_files, builder, hub, dedup,
sources, prompts.
"""
