"""Plans a run for TPUs that are not attached: its memory, traffic and time."""
