"""Evaluates, exports, shows and plans runs."""
