#!/usr/bin/env bash
# The sweep of configs/countdown.py for each of $SEEDS, one after another, and one table
# of all seeds in runs/sweep. The same command resumes; further seeds join the table.
# Usage: SEEDS="0 1 2" launch/sweep.sh [overrides], from the top of the repository, after
# the README's first command made .venv. RUNS=... gives another folder than runs/sweep.
set -euo pipefail
cd "$(dirname "$0")/.."
main=("${PYTHON:-.venv/bin/python}" -m bapo_jax.main --config=configs/countdown.py)
runs="${RUNS:-runs/sweep}"
for seed in ${SEEDS:-0 1 2}; do
  "${main[@]}" --workdir="$runs/seed$seed" --config.seed="$seed" "$@"
done
exec "${main[@]}" --mode=table --workdir="$runs"
