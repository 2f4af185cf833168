"""Generates problems from a seed: texts, pictures, answers and worked solutions."""
