"""Prints versions and devices, and whether JAX computes on the accelerator."""

import importlib.metadata
import json
import os
import time

from benchmarks.on_gpu.sizes import IS_SMALL

PACKAGES = (
  'jax jaxlib jax-cuda13-plugin flax optax orbax-checkpoint chex numpy scipy torch '
  'transformers tokenizers huggingface_hub safetensors pydantic ml_collections '
  'math-verify sympy tensorstore nvidia-cudnn-cu13 nvidia-cublas triton'
)


def main() -> None:
  """Prints versions, devices and, as the last line, one JSON object."""
  versions = {}
  for name in PACKAGES.split():
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = 'missing'
  for name, version in versions.items():
    print(f'{name:20} {version}')
  begun = time.perf_counter()
  import jax
  import jax.numpy as jnp

  devices = jax.devices()
  started = time.perf_counter() - begun
  x = jnp.ones((1024, 1024), jnp.bfloat16)
  value = float((x @ x)[0, 0])
  ready = time.perf_counter() - begun
  stats = devices[0].memory_stats() or {}
  print(json.dumps({
    'versions': versions,
    'platform': devices[0].platform,
    'device': devices[0].device_kind,
    'devices': len(devices),
    'memory_gib': stats.get('bytes_limit', 0) / 2**30,
    'product': value,
    'import_s': started,
    'first_product_s': ready,
    'cores': os.cpu_count(),
  }))  # fmt: skip
  if value != 1024:
    raise SystemExit(f'a product of ones is {value}, not 1024')
  if devices[0].platform != 'gpu' and not IS_SMALL:
    raise SystemExit('JAX finds no GPU')


if __name__ == '__main__':
  main()
