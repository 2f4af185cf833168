"""Evaluates, exports, shows and plans runs; writes the reference of the knobs."""
