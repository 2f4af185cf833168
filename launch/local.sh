#!/usr/bin/env bash
# Eight virtual devices on one host: the sharded program, without the hardware.
# Usage: launch/local.sh [overrides], from the top of the repository, after the README's
# first command made .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=8"
exec "${PYTHON:-.venv/bin/python}" -m bapo_jax.main --config=configs/aime.py \
  --config.mesh.data=2 --config.mesh.fsdp=2 --config.mesh.tensor=2 \
  --workdir=runs/local "$@"
