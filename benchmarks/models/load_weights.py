"""Checks the host memory of loading: the parameters + 1.25 x the largest tensor.

  python -m benchmarks.models.load_weights [--gb=1] [--devices=1]

Writes a random Qwen2 checkpoint of two shards to a temporary directory, in float32 and
in bfloat16, loads each in a fresh process (on the CPU, where device buffers are host
memory) and measures the peak resident size above that after the imports. Prints a table
and, as the last line, one JSON object. The largest tensor is the largest single tensor
of the files, in bytes as loaded: one layer of a stacked parameter, or the embedding.
The figures are compared with this bound, because there is no peer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.transformer import ModelSpec

CASES = (  # dtype in the file, dtype of the parameters
  ('float32', 'float32'),
  ('bfloat16', 'bfloat16'),
  ('bfloat16', 'float32'),
)


def spec_of(parameters: int) -> ModelSpec:
  """Returns a Qwen2 with at least this number of parameters."""
  specs = (
    ModelSpec(
      vocab=32000,
      width=1024,
      layers=layers,
      heads=16,
      kv_heads=4,
      head_width=64,
      ffn=4096,
      tied=False,
    )
    for layers in range(2, 200)
  )
  return next(spec for spec in specs if transformer.count(spec) >= parameters)


def write(path: str, spec: ModelSpec, kind: str) -> None:
  """Writes random tensors to two files of similar size, with config.json and index."""
  rng = np.random.default_rng(0)
  dtype = {'float32': np.float32, 'bfloat16': bfloat16}[kind]
  shapes = hf_weights.stored(spec)
  names = sorted(shapes)
  for i in range(2):
    save_file(
      {
        n: rng.standard_normal(shapes[n], np.float32).astype(dtype) for n in names[i::2]
      },
      os.path.join(path, f'model-0000{i + 1}-of-00002.safetensors'),
    )
  with open(os.path.join(path, 'config.json'), 'w') as file:
    json.dump(hf_config.config_of(spec), file)


LOAD = r"""
import dataclasses, re, sys, time
import jax
from bapo_jax import sharding
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
def rss():  # not getrusage: that remembers the process before exec, which was larger
  return 1024 * int(re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1])
path, dtype = sys.argv[1:]
spec = dataclasses.replace(hf_config.read_spec(path, 'float32'), dtype=dtype)
mesh = sharding.make(data=1, fsdp=-1)
jax.block_until_ready(jax.numpy.zeros(1))
before, began = rss(), time.perf_counter()
params = jax.block_until_ready(hf_weights.load(path, spec, mesh))
print(rss() - before, time.perf_counter() - began)
"""


def measure(path: str, dtype: str, devices: int) -> tuple[int, float]:
  """Returns (growth of the peak resident size since the imports in bytes, seconds)."""
  flag = f'--xla_force_host_platform_device_count={devices}'
  run = subprocess.run(
    [sys.executable, '-c', LOAD, path, dtype],
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flag},
    capture_output=True,
    text=True,
    check=True,
  )
  peak, seconds = run.stdout.split()
  return int(peak), float(seconds)


def row(
  path: str, spec: ModelSpec, stored_as: str, dtype: str, devices: int
) -> dict[str, str | float]:
  """Measures one case."""
  size = {'float32': 4, 'bfloat16': 2}[dtype]
  peak, seconds = measure(path, dtype, devices)
  parameters = size * transformer.count(spec)
  largest = size * max(int(np.prod(s)) for s in hf_weights.stored(spec).values())
  return {
    'file': stored_as,
    'params': dtype,
    'file_mib': sum(os.path.getsize(os.path.join(path, n)) for n in os.listdir(path))
    / 2**20,
    'params_mib': parameters / 2**20,
    'largest_mib': largest / 2**20,
    'peak_mib': peak / 2**20,
    'over_in_largest': (peak - parameters) / largest,
    'seconds': seconds,
  }


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--gb', type=float, default=1.0, help='10^9 bytes of the files')
  parser.add_argument('--devices', type=int, default=1, help='virtual devices (fsdp)')
  known = parser.parse_args()
  rows = []
  for stored_as in ('float32', 'bfloat16'):
    with tempfile.TemporaryDirectory() as path:
      spec = spec_of(int(known.gb * 1e9) // {'float32': 4, 'bfloat16': 2}[stored_as])
      write(path, spec, stored_as)
      for case in CASES:
        if case[0] != stored_as:
          continue
        rows.append(row(path, spec, *case, known.devices))
        if len(rows) == 1:
          print('  '.join(f'{name:>15}' for name in rows[0]))
        print(
          '  '.join(
            f'{v:>15}' if isinstance(v, str) else f'{v:>15.4g}'
            for v in rows[-1].values()
          ),
          flush=True,
        )
  worst = max(float(r['over_in_largest']) for r in rows)
  print(
    json.dumps({'devices': known.devices, 'worst': worst, 'bound': 1.25, 'rows': rows})
  )


if __name__ == '__main__':
  main()
