"""Compares log-probabilities and attention kernels with their references.

  python -m benchmarks.on_gpu.check torch FOLDER NAME   writes FOLDER/NAME/logps.npy
  python -m benchmarks.on_gpu.check ours FOLDER NAME    the last line is JSON

1. log-probabilities of NAME on the accelerator in float32 (products at their highest
   precision) and bfloat16, beside ours on the CPU and beside transformers in float32;
2. the kernel of decoding, ragged.py, beside plain attention over the whole cache, rows
   filled to different lengths;
3. the kernel of packed rows, forward and gradient, beside JAX's attention with a mask
   [T, T] in float32.
"""

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax import sharding
from bapo_jax.models import attention
from bapo_jax.models import logprobs as logprobs_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights
from benchmarks import machine
from benchmarks.first_contact.kernels import error, live_columns
from benchmarks.on_gpu.sizes import IS_SMALL

ROWS, LENGTH = (2, 48) if IS_SMALL else (4, 256)
# (query heads, key heads, head width): 0.5B, 1.5B, 135M, 7B
HEADS = (
  [(4, 2, 16)] if IS_SMALL else [(14, 2, 64), (12, 2, 128), (9, 3, 64), (28, 4, 128)]
)
COLUMNS = [128] if IS_SMALL else [512, 2048]
SLOTS = 4 if IS_SMALL else 64
PACKED = (2, 128) if IS_SMALL else (8, 1024)  # rows and columns of packed rows
EPS = 2.0**-8  # of bfloat16
LIMITS = {  # largest error that passes
  'float32, beside the CPU': 2e-3,  # nats
  'bfloat16, beside the CPU': 0.25,
  'float32, beside transformers': 2e-3,
  'ragged': 4 * EPS,  # of the largest number
  'packed, forward': 4 * EPS,
  'packed, gradient': 16 * EPS,
}


def tokens_of(vocab: int) -> np.ndarray:
  """Returns the token ids to score, [ROWS, LENGTH]."""
  return np.random.default_rng(0).integers(3, vocab, (ROWS, LENGTH), np.int32)


def with_torch(folder: str, name: str) -> None:
  """Writes the log-probabilities of all tokens but the first, by transformers."""
  import torch
  import transformers

  torch.backends.cuda.matmul.allow_tf32 = False
  torch.backends.cudnn.allow_tf32 = False
  path = os.path.join(folder, name)
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  net = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
  net = net.to(device).eval()
  tokens = torch.from_numpy(tokens_of(net.config.vocab_size)).long().to(device)
  with torch.no_grad():
    logits = net(tokens).logits[:, :-1].double()
    logp = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
  np.save(os.path.join(path, 'logps.npy'), logp.float().cpu().numpy())


def logprobs(folder: str, name: str, figures: dict[str, float]) -> None:
  """Adds the largest differences of log-probabilities, in nats, to `figures`."""
  path = os.path.join(folder, name)
  places = {'cpu': jax.devices('cpu')[0], 'here': jax.devices()[0]}
  logp = {}
  for place, dtype in (('cpu', 'float32'), ('here', 'float32'), ('here', 'bfloat16')):
    device = places[place]
    spec = hf_config.read_spec(path, dtype)
    kind = attention.resolve(None, device.platform, dtype, spec.head_width)
    spec = dataclasses.replace(spec, attention=kind)
    precision = 'highest' if dtype == 'float32' else 'default'
    with jax.default_device(device), jax.default_matmul_precision(precision):
      params = weights.load(path, spec, sharding.make(1, 1, 1, [device]))
      score = jax.jit(
        functools.partial(logprobs_lib.sequence_stats, spec=spec, temperature=1.0)
      )
      tokens = jax.device_put(tokens_of(spec.vocab), device)
      logp[place, dtype] = np.asarray(score(params, tokens).logp_BT)[:, 1:]
  exact = logp['cpu', 'float32']
  figures['spread of the log-probabilities'] = float(exact.std())
  for dtype in ('float32', 'bfloat16'):
    off = np.abs(logp['here', dtype] - exact)
    figures[f'{dtype}, beside the CPU'] = float(off.max())
    figures[f'{dtype}, beside the CPU, mean'] = float(off.mean())
  file = os.path.join(path, 'logps.npy')
  if os.path.exists(file):
    off = np.abs(logp['here', 'float32'] - np.load(file))
    figures['float32, beside transformers'] = float(off.max())


def milliseconds(call: Callable[[], Any]) -> float:
  """Returns the median milliseconds of a call."""
  return 1e3 * machine.seconds(call, 20)


def ragged_decoding(figures: dict[str, float]) -> None:
  """Adds errors of the kernel of decoding."""
  rng = np.random.default_rng(1)
  kernel = jax.jit(live_columns)
  plain = jax.jit(lambda q, k, v, position: attention.cached(q, [(k, v)], position))
  for (H, K, C), T in itertools.product(HEADS, COLUMNS):
    shapes = (SLOTS, H, C), (SLOTS, K, C, T), (SLOTS, K, T, C)
    wide = [rng.standard_normal(shape, np.float32) for shape in shapes]
    q, k, v = (jnp.asarray(x, 'bfloat16') for x in wide)
    # From the first column to the last; a quarter of the columns on average.
    ends = np.linspace(0, 1, SLOTS) ** 3 * (T - 1)
    position = jnp.asarray(ends.astype(np.int32))
    out = kernel(q, [(k, v)], position)
    with jax.default_matmul_precision('highest'):
      exact = plain(*(x.astype(jnp.float32) for x in (q, k, v)), position)
    figures[f'ragged, {H}/{K}x{C}, {T} columns'] = error(out, exact)


def packed_rows(figures: dict[str, float]) -> None:
  """Adds errors and times of the kernel of packed rows, forward and gradient."""
  B, T = PACKED
  rng = np.random.default_rng(2)
  ends = np.array([0.1, 0.6, 0.9]) * T
  segment_T = (np.arange(T)[:, None] >= ends).sum(1)
  segment_BT = jnp.asarray(np.broadcast_to(segment_T, (B, T)), jnp.int32)

  def masked(q: Any, k: Any, v: Any) -> Any:
    # `attention.blockwise` unrolls its blocks of queries: the compiler would tune and
    # compile 48 products of different shapes, for each of HEADS; here there are 6.
    same_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
    mask_B1TT = (same_BTT & jnp.tri(T, dtype=bool))[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask_B1TT)

  def both(run: Callable, weight: Any, q: Any, k: Any, v: Any) -> tuple:
    out, pull = jax.vjp(run, q, k, v)
    return out, pull(weight)

  for H, K, C in HEADS[:2]:  # to compile the reference of all takes over a minute
    kind = attention.resolve(None, jax.default_backend(), 'bfloat16', C)
    arrays = [
      jnp.asarray(rng.standard_normal((B, T, n, C), np.float32), 'bfloat16')
      for n in (H, H, K, K)
    ]
    kernel = functools.partial(attention.attend, kind=kind, segment_BT=segment_BT)
    run = jax.jit(functools.partial(both, kernel))
    out, grads = run(*arrays)
    with jax.default_matmul_precision('highest'):
      wide = [x.astype(jnp.float32) for x in arrays]
      exact, truth = jax.jit(functools.partial(both, masked))(*wide)
    label = f'{kind}, {H}/{K}x{C}, {T} columns'
    figures[f'packed, forward, {label}'] = error(out, exact)
    worst = max(error(a, b) for a, b in zip(grads, truth, strict=True))
    figures[f'packed, gradient, {label}'] = worst
    ms = milliseconds(functools.partial(run, *arrays))
    figures[f'packed, {label}, ms'] = ms
    figures[f'packed, {label}, TFLOP/s'] = 9 * B * H * C * T**2 / ms / 1e9


def ours(folder: str, name: str) -> Iterator[dict[str, Any]]:
  """Yields all figures so far after each part, and which are beyond their limits."""
  figures: dict[str, float] = {}
  failed = []
  scores = functools.partial(logprobs, folder, name)
  for part in (ragged_decoding, packed_rows, scores):
    begun = time.perf_counter()
    try:
      part(figures)
    except Exception as problem:  # the other parts go on
      traceback.print_exc()
      failed.append(f'{type(problem).__name__}: {" ".join(str(problem).split())[:300]}')
    print(f'{time.perf_counter() - begun:.1f} s', file=sys.stderr, flush=True)
    yield {'failed': failed + beyond(figures), 'figures': figures}


def beyond(figures: dict[str, float]) -> list[str]:
  """Returns a sentence for each error that is beyond its limit."""
  found = []
  for key, value in figures.items():
    is_error = not key.endswith((', ms', ', mean', 'TFLOP/s'))
    limits = [limit for start, limit in LIMITS.items() if key.startswith(start)]
    if is_error and limits and not value <= limits[0]:
      found.append(f'{key}: {value:.3g} > {limits[0]:.3g}')
  return found


def main() -> None:
  """Does what the first argument says."""
  what, folder, name = sys.argv[1:]
  if what == 'torch':
    with_torch(folder, name)
    return
  for result in ours(folder, name):
    print(json.dumps(result), flush=True)  # what is done counts at the time limit
  sys.exit(bool(result['failed']))


if __name__ == '__main__':
  main()
