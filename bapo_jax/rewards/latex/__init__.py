"""Reads LaTeX answers: normalises the text, parses it, and compares expressions."""
