r"""Times the forward pass of Qwen2.5-VL's vision tower, ours and transformers'.

  python -m benchmarks.models.tower
  python -m benchmarks.models.tower --tower=published --layers=8 --pictures=8

Both towers have the same random float32 weights and the same pictures of noise. Each
processes all pictures in calls of `--batches` pictures; the best batch counts, and for
torch the best attention. The embeddings are compared. Needs torch
(requirements/parity.txt). Prints a table and, as the last line, one JSON object. Takes
about five minutes on two cores.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import grids, tower
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime import markdown
from bapo_jax.tools.plan import roofline
from bapo_jax.types import Tree
from benchmarks.machine import gemm_rate

# Name -> width, layers, heads, ffn, layers that see whole pictures. The first has the
# proportions of the published tower at a size that two cores compute in a minute.
TOWERS = {
  'small': (384, 8, 6, 1024, (3, 7)),
  'published': (1280, 32, 16, 3420, (7, 15, 23, 31)),
}
OUT = 512  # width of the language model, which has next to no layers
ATTENTION = ('sdpa', 'eager')
Run = Callable[[int], np.ndarray]  # pictures of a call -> embeddings of all pictures


def spec_of(name: str) -> ModelSpec:
  """Returns a model with this tower and a minimal language model."""
  width, layers, heads, ffn, full = TOWERS[name]
  v = VisionSpec(
    width=width,
    layers=layers,
    heads=heads,
    ffn=ffn,
    out=OUT,
    full_layers=full,
    image_token=5,
  )
  return ModelSpec(
    vocab=8,
    width=OUT,
    layers=1,
    heads=8,
    kv_heads=8,
    head_width=64,
    ffn=8,
    mrope=(8, 12, 12),
    vision=v,
  )


def ours(params: Tree, spec: ModelSpec, pixels_NZE: np.ndarray, grid: Any) -> Run:
  """Returns a runner of our tower, one picture per row."""
  v = tower.vision_of(spec)
  run = jax.jit(
    functools.partial(
      tower.forward,
      spec=spec,
      windows=grids.count_windows([grid], v),
      schedule=Schedule(remat='none'),
    )
  )

  def forward(batch: int) -> np.ndarray:
    grid_RI2 = np.tile(np.asarray(grid, np.int32), (batch, 1, 1))
    each = [
      run(params['vision'], pixels_NZE[i : i + batch], grid_RI2)
      for i in range(0, len(pixels_NZE), batch)
    ]
    return np.concatenate([np.asarray(x) for x in each])

  return forward


def theirs(
  params: Tree, spec: ModelSpec, pixels_NZE: np.ndarray, grid: Any, kind: str
) -> Run:
  """Returns a runner of transformers' tower on concatenated pictures."""
  import torch

  v = tower.vision_of(spec)
  module = importlib.import_module('transformers.models.qwen2_5_vl.modeling_qwen2_5_vl')
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  with tempfile.TemporaryDirectory() as path:
    flat = transformer.flatten(jax.tree.map(np.asarray, params))
    hf_weights.save(path, flat.__getitem__, spec, 'float32')
    with open(f'{path}/config.json', 'w') as file:
      ends = {'bos_token_id': None, 'eos_token_id': None}
      json.dump(hf_config.config_of(spec) | ends, file)
    whole = module.Qwen2_5_VLForConditionalGeneration.from_pretrained(
      path, dtype=torch.float32, attn_implementation=kind
    )
  net = whole.model.visual.eval()
  # What the processor would give: normalised, and each picture twice, as two frames.
  mean, std = (np.reshape(x, (3, 1, 1, 1)).astype(np.float32) for x in (v.mean, v.std))
  N, Z, _ = pixels_NZE.shape
  x = pixels_NZE.reshape(N, Z, 3, 1, v.patch, v.patch) / np.float32(255)
  x = np.broadcast_to((x - mean) / std, (N, Z, 3, v.frames, v.patch, v.patch))
  x_NZE = torch.from_numpy(np.ascontiguousarray(x).reshape(N, Z, -1))

  def forward(batch: int) -> np.ndarray:
    grid_thw = torch.tensor([[1, *grid]] * batch)
    with torch.inference_mode():
      each = [
        net(x_NZE[i : i + batch].flatten(0, 1), grid_thw=grid_thw).pooler_output
        for i in range(0, N, batch)
      ]
    return torch.cat(each).numpy().reshape(N, Z // v.merge**2, v.out)

  return forward


def seconds(run: Callable[[], Any], times: int) -> float:
  """Returns the median wall time of a call, after a first call."""
  run()
  took = []
  for _ in range(times):
    begun = time.perf_counter()
    run()
    took.append(time.perf_counter() - begun)
  return statistics.median(took)


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
  """The options."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tower', choices=TOWERS, default='small')
  parser.add_argument('--layers', type=int, default=0, help='the first of them alone')
  parser.add_argument('--pictures', type=int, default=64)
  parser.add_argument('--side', type=int, default=448, help='pixels of a picture')
  parser.add_argument('--batches', default='1,8', help='pictures of a call')
  parser.add_argument('--times', type=int, default=2, help='timed runs of each')
  return parser.parse_args(args)


def main() -> None:
  """Prints the table and the JSON line."""
  known = parse()
  spec = spec_of(known.tower)
  v = tower.vision_of(spec)
  if known.layers:
    full = tuple(i for i in v.full_layers if i < known.layers)
    v = dataclasses.replace(v, layers=known.layers, full_layers=full)
    spec = dataclasses.replace(spec, vision=v)
  grid = (known.side // v.patch, known.side // v.patch)
  params = transformer.init(spec, jax.random.key(0))
  shape = (known.pictures, grid[0] * grid[1], v.numbers)
  pixels_NZE = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  sides: dict[str, Run] = {'ours': ours(params, spec, pixels_NZE, grid)}
  for kind in ATTENTION:
    sides[f'torch, {kind}'] = theirs(params, spec, pixels_NZE, grid, kind)
  batches = [int(n) for n in known.batches.split(',') if int(n) <= known.pictures]
  alone = {'data': 1, 'fsdp': 1, 'tensor': 1}
  work = roofline.tower(spec, alone, known.pictures, shape[1]).flops
  cells, best, found = [], {}, {}
  for name, run in sides.items():
    for batch in batches:
      took = seconds(functools.partial(run, batch), known.times)
      best[name] = min(took, best.get(name, took))
      figures = (
        f'{took:.2f}',
        f'{known.pictures / took:.2f}',
        f'{work / took / 1e9:.0f}',
      )
      cells.append((name, str(batch), *figures))
    found[name] = run(batches[0])
  header = ('tower', 'pictures of a call', 'seconds', 'pictures/s', 'GFLOP/s')
  print(markdown.table(cells, header, 'lrrrr'))
  worst = {name: float(abs(x - found['ours']).max()) for name, x in found.items()}
  peer = min(seconds for name, seconds in best.items() if name != 'ours')
  print(
    json.dumps(
      vars(known)
      | {
        'parameters': sum(x.size for x in jax.tree.leaves(params['vision'])),
        'gflop': work / 1e9,
        'gemm_gflop_s': gemm_rate() / 1e9,
        'seconds': best,
        'times_faster': peer / best['ours'],
        'largest_difference': max(worst.values()),
        'largest_embedding': float(abs(found['ours']).max()),
      }
    )
  )


if __name__ == '__main__':
  main()
