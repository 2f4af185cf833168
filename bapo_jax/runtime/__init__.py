"""Handles files, metrics, console and processes of a run; imports no model code."""
