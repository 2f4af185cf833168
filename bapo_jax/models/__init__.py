"""In: a Hugging Face directory or the sizes of a model, and rows of tokens.
Out: parameters, hidden states, and the log-probability and entropy of every token.
Read knobs, rope, attention, transformer, logprob_tiles, logprobs, then hf_weights.
"""
