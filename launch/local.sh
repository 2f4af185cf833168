#!/usr/bin/env bash
# Trains the embedded default on eight virtual devices of this machine's CPU.
# Usage: launch/local.sh [flags of bapo_jax.main]
# The mesh is data=2, fsdp=2, tensor=2, the workdir runs/local; later flags win:
#   launch/local.sh --config.steps=2 --workdir=runs/sharded
# Python is .venv/bin/python of the repository, or $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
case ${1:-} in -h | --help) usage && exit ;; esac
need_python "${PYTHON:-.venv/bin/python}"
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=8"
exec "${PYTHON:-.venv/bin/python}" -m bapo_jax.main --config=configs/aime.py \
  --config.mesh.data=2 --config.mesh.fsdp=2 --config.mesh.tensor=2 \
  --workdir=runs/local "$@"
