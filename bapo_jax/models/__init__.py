"""In: a Hugging Face directory or the sizes of a model, and rows of tokens.
Out: parameters, hidden states, and the log-probability and entropy of every token.
Read transformer, layers, attention, decoder, packing, logprobs, logprob_tiles, then hf.
"""
