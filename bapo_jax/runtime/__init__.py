"""Files, metrics, console and processes of a run; knows no model and no algorithm."""
