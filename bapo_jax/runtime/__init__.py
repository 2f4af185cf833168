"""Writes the directory, the metrics and the console of a run; joins its processes.

Nothing here knows of a model or of an algorithm.
"""
