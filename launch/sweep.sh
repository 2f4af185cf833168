#!/usr/bin/env bash
# The grid of configs/countdown.py for each of $SEEDS, one after another, and one table
# of all seeds that are in runs/grid. The same command resumes, more seeds join in.
# Usage: SEEDS="0 1 2" launch/grid.sh [overrides], from the top of the repository, after
# the README's first command made .venv. RUNS=... for another folder than runs/grid.
set -euo pipefail
cd "$(dirname "$0")/.."
main=("${PYTHON:-.venv/bin/python}" -m bapo_jax.main --config=configs/countdown.py)
runs="${RUNS:-runs/grid}"
for seed in ${SEEDS:-0 1 2}; do
  "${main[@]}" --workdir="$runs/seed$seed" --config.seed="$seed" "$@"
done
exec "${main[@]}" --mode=table --workdir="$runs"
