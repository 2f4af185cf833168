"""Evaluates, exports, shows, compares and plans runs."""
