#!/usr/bin/env bash
# Functions of the launchers: their help, and a sentence if Python is missing.
# Usage: source launch/common.sh

usage() { # prints the comment at the top of the script
  awk 'NR > 1 { if (!/^#/) exit; if (/^#( |$)/) print substr($0, 3) }' "$0"
}

need_python() { # ends the script with one sentence unless the program $1 exists
  command -v "$1" > /dev/null && return
  echo "launch/${0##*/}: no program $1; make it with 'python3 -m venv .venv &&" \
    ".venv/bin/pip install -r requirements.txt -c requirements/constraints.txt' in" \
    "$PWD (for GPUs and TPUs see docs/system/scaling.md), or set PYTHON to a Python" \
    "that has these packages" >&2
  exit 2
}
