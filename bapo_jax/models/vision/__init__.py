"""In: pictures as rows of patches with their grids, and tokens with image tokens.
Out: embeddings of merged patches, and the three-part positions of every token.
Read spec, grids, tower, then sequence.
"""
