"""Plans a run for devices that are not attached: its memory, traffic and time."""
