"""What a run writes while it goes on: its directory, its metrics, its console.

Nothing here knows of a model or of an algorithm.
"""
