"""Finds where the time of an update and of a decoded token goes, on one GPU.

  python -m benchmarks.on_gpu.parts [SECTION...]     prints a JSON line per figure

The model has the sizes of Qwen2.5-0.5B and random weights. The sections are:

1. `ceilings`: a large product and a copy;
2. `head`: log-probabilities by the size of a tile, beside plain JAX;
3. `body`: the layers by attention kernel and remat;
4. `step`: whole updates by tile, remat, pass for the bounds and micro-batches;
5. `token`: the layers, the head, the draw and attention (by tile) of a decoded token;
6. `attention`: the attention of a layer, by our kernel and by tokamax's, if installed.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from bapo_jax import main as command_line
from bapo_jax.learner import scoring
from bapo_jax.models import attention as kernels
from bapo_jax.models import (
  decoder,
  layers,
  logprob_tiles,
  logprobs,
  ragged,
  transformer,
)
from bapo_jax.models.layers import Schedule
from bapo_jax.rollout import sampling
from bapo_jax.tools.plan.chips import CHIPS
from bapo_jax.training import build
from bapo_jax.types import Batch
from benchmarks.on_gpu import traces
from benchmarks.on_gpu.sizes import IS_SMALL

LIMIT_S = float(os.environ.get('PARTS_LIMIT', '170'))
FAILED: list[str] = []  # parts
LEAST_S = 12  # no part starts with less time left
MOST_S = 15  # of timed calls per figure; the first may compile again
BEGUN = time.perf_counter()
TRACED_KERNELS = 32
TOKENS = 32  # decoded in one program
SPEC = transformer.ModelSpec(
  vocab=512 if IS_SMALL else 151936,
  width=64 if IS_SMALL else 896,
  layers=2 if IS_SMALL else 24,
  heads=2 if IS_SMALL else 14,
  kv_heads=1 if IS_SMALL else 2,
  head_width=32 if IS_SMALL else 64,
  ffn=128 if IS_SMALL else 4864,
  rope_theta=1e6,
  tied=True,
  qkv_bias=True,
  compute='bfloat16',
  positions=32768,
  attention='plain' if IS_SMALL else 'flash',
)
B, T, SCORED = (2, 64, 48) if IS_SMALL else (16, 512, 384)  # of a micro-batch
CELLS = B * SCORED
ROWS = 8 if IS_SMALL else 64  # of an update
TILES_MIB = [4, 148, 592, 1300]  # of logits, see logprob_tiles.largest
SLOTS, COLUMNS = (4, 128) if IS_SMALL else (256, 512)
# Of the kernel of decoding: columns per block and per program, warps, stages of loads.
RAGGED = [
  *((n, 2048, warps, 2) for n in (64, 128) for warps in (2, 4, 8)),
  *((n, 2048, warps, 3) for n in (32, 64) for warps in (1, 2, 4)),
  *((64, 2048, 4, 4), (64, 256, 4, 3), (128, 128, 4, 2)),
]
UPDATES = [  # MiB of a tile, remat, bounds_pass, micro-batches
  (1300, 'full', 'stored', 4),
  (1300, 'full', 'stored', 2),
  (1300, 'dots', 'stored', 2),
  (1300, 'full', 'again', 2),
  (1300, 'full', 'stored', 1),
  (1300, 'dots', 'stored', 4),
]
TRACED = UPDATES[:1]
PACKED = [(2, 64)] if IS_SMALL else [(16, 512), (2, 8192)]  # rows, columns of a layer
if IS_SMALL:  # compiling takes minutes on a CPU
  TILES_MIB, UPDATES, RAGGED = TILES_MIB[:2], UPDATES[:2], RAGGED[:1]


def say(what: str, **figures: Any) -> None:
  """Prints a JSON line."""
  print(json.dumps({'what': what} | figures), flush=True)


def report(
  what: str, f: Callable, *args: Any, flops: float = 0, is_update: bool = False
) -> Any:
  """Times a jitted function, prints its figures and returns its last results.

  The results of an update (params, opt, ...) replace its first arguments, which are
  donated.
  """
  begun = time.perf_counter()
  results = jax.block_until_ready(f(*args))
  first_s = time.perf_counter() - begun
  seconds: list[float] = []
  while len(seconds) < 3 and sum(seconds) < MOST_S:
    if is_update:
      args = (*results[:2], *args[2:])
    begun = time.perf_counter()
    results = jax.block_until_ready(f(*args))
    seconds.append(time.perf_counter() - begun)
  took = statistics.median(seconds)
  figures: dict[str, Any] = {'ms': round(1e3 * took, 3), 'first_s': round(first_s, 1)}
  if max(seconds) > 2 * took or len(seconds) < 3:
    figures['each_ms'] = [round(1e3 * x, 3) for x in seconds]
  if flops:
    figures['tflops'] = round(flops / took / 1e12, 1)
    figures['mfu'] = round(flops / took / CHIPS['h100'].flops, 3)
  say(what, **figures)
  return results


@contextlib.contextmanager
def part(what: str) -> Iterator[None]:
  """Prints an error instead of raising it, so that the other parts run."""
  try:
    if LIMIT_S - (time.perf_counter() - BEGUN) < LEAST_S:
      raise TimeoutError('no time left')
    yield
  except Exception as error:
    say(what, error=repr(error)[:300])
    FAILED.append(what)


def normal(key: int, *shape: int, dtype: str = 'bfloat16') -> jax.Array:
  """Returns normal random numbers."""
  return jax.random.normal(jax.random.key(key), shape, dtype)


def ceilings() -> None:
  """Reports a product and a copy, which bound all others."""
  n = 512 if IS_SMALL else 8192
  x = normal(0, n, n)
  report(f'product of {n}', jax.jit(jnp.matmul), x, x, flops=2 * n**3)
  x = normal(0, 64 if IS_SMALL else 1024, 1 << 20, dtype='float32')
  report(f'copy of {x.nbytes} bytes', jax.jit(lambda x: x + 1), x)


def head() -> None:
  """Reports log-probabilities of the tokens of a micro-batch, and their gradient."""
  hidden = normal(0, 1, CELLS, SPEC.width)
  w = 0.04 * normal(1, SPEC.vocab, SPEC.width, dtype='float32')
  token = jax.random.randint(jax.random.key(2), (1, CELLS), 0, SPEC.vocab)
  flops = 2 * CELLS * SPEC.width * SPEC.vocab

  def both(what: str, value: Callable, *args: Any) -> None:
    with part(what):
      report(f'{what}: forward', jax.jit(value), *args, flops=flops)
      gradient = jax.jit(jax.grad(value, (0, 1)))
      report(f'{what}: gradient', gradient, *args, flops=3 * flops)

  def tiled(tile, hidden, w, token, used):
    stats = logprobs.token_stats(hidden, w, token, 1.0, tile=tile, columns=used)
    return stats.logp_BT.sum()

  for mib in TILES_MIB:
    tile = logprob_tiles.largest(mib, SPEC.vocab)
    value = functools.partial(tiled, tile)
    what = f'head, tile {tile.columns} x {tile.rows}, {mib} MiB'
    both(what, value, hidden, w, token, jnp.int32(CELLS))

  def plain(hidden, w, token):
    logits = jnp.einsum(
      'bd,vd->bv', hidden[0], w.astype('bfloat16'), preferred_element_type='float32'
    )
    chosen = jnp.take_along_axis(logits, token[0][:, None], 1)[:, 0]
    return (chosen - jax.nn.logsumexp(logits, -1)).sum()

  both('head, plain JAX', plain, hidden, w, token)


def layer_flops() -> float:
  """Counts the FLOPs of all layers for a micro-batch, forward."""
  H, C = SPEC.heads, SPEC.head_width
  heads = 2 * H + 2 * SPEC.kv_heads
  weights = SPEC.layers * SPEC.width * (heads * C + 3 * SPEC.ffn)
  return B * T * (2 * weights + 2 * SPEC.layers * H * C * T)


def body() -> None:
  """Reports the layers by kernel (cuDNN on rows that are not packed) and remat."""
  params = transformer.init(SPEC, jax.random.key(0))
  token = jax.random.randint(jax.random.key(1), (B, T), 0, SPEC.vocab)
  segment = jnp.zeros((B, T), jnp.int32)

  def value(spec, remat, params, token, segment):
    schedule = Schedule(remat)
    hidden = layers.forward(params, token, spec, segment, schedule=schedule)
    return hidden.astype(jnp.float32).sum()

  cases = [('plain', 'dots', True)]
  if not IS_SMALL:
    cases += [('flash', remat, True) for remat in ('dots', 'none', 'full')]
    cases += [('flash', 'dots', False)]
  for kind, remat, packed in cases:
    what = f'layers, {kind if packed else "cuDNN"}, {remat}'
    args = (params, token, segment if packed else None)
    spec = dataclasses.replace(SPEC, attention=kind)
    f = functools.partial(value, spec, remat)
    with part(what):
      report(f'{what}: forward', jax.jit(f), *args, flops=layer_flops())
      report(f'{what}: gradient', jax.jit(jax.grad(f)), *args, flops=3 * layer_flops())


def step() -> None:
  """Reports whole updates and the scores before them, and traces two updates."""
  params = transformer.init(SPEC, jax.random.key(0))
  tokens_BT = jax.random.randint(jax.random.key(2), (ROWS, T), 0, SPEC.vocab)
  mask_BT = jnp.broadcast_to(jnp.arange(T) >= T - SCORED, (ROWS, T))
  logp_BT = None
  for mib in (TILES_MIB[0], TILES_MIB[-1]):
    score = functools.partial(
      scoring.packed_logprobs,
      micro_batches=4,
      spec=SPEC,
      schedule=Schedule('dots', tile_mib=mib),
      temperature=1.0,
    )
    what = f'score of {ROWS} rows, tile of {mib} MiB'
    with part(what):
      logp_BT = report(what, jax.jit(score), params, tokens_BT, mask_BT)
  if logp_BT is None:
    return
  adv_B1 = jnp.where(jnp.arange(ROWS) % 2 == 0, 1.0, -1.0)[:, None]
  batch = Batch(
    tokens_BT=tokens_BT,
    loss_mask_BT=mask_BT,
    behavior_logp_BT=logp_BT,
    prox_BT=logp_BT,
    adv_BT=jnp.broadcast_to(adv_B1, tokens_BT.shape),
    source_B=jnp.zeros(ROWS, jnp.int32),
    on_policy_BT=mask_BT,
  )
  head_flops = 2 * SPEC.width * SPEC.vocab * ROWS * SCORED
  flops = 3 * (layer_flops() * ROWS / B + head_flops)
  for case in UPDATES:
    mib, remat, bounds_pass, pieces = case
    values = {'model.compute': 'bfloat16', 'learner.grad_accum_steps': pieces}
    given = [f'--config.{knob}={value}' for knob, value in values.items()]
    what = f'update, tile of {mib} MiB, {remat}, {bounds_pass}, {pieces}'
    with part(what):
      config = command_line.read_config('configs/aime.py', given)
      schedule = Schedule(remat, False, bounds_pass, mib)
      update = build.make_train_step(config, SPEC, schedule)
      copies = jax.tree.map(jnp.copy, params)  # the update donates its arguments
      opt = jax.jit(build.optimizer(config).init)(copies)
      args = (copies, opt, batch)
      results = report(what, update, *args, flops=flops, is_update=True)
      if case in TRACED:
        traced(what, update, *results[:2], batch)


def traced(what: str, f: Callable, *args: Any) -> None:
  """Prints the longest kernels of a call, and how long any kernel ran."""
  with tempfile.TemporaryDirectory() as folder:
    begun = time.perf_counter()
    with jax.profiler.trace(folder):
      jax.block_until_ready(f(*args))
    wall = time.perf_counter() - begun
    spans = traces.spans(folder)
  busy, wall = traces.busy_ms(spans), 1e3 * wall
  say(f'trace of {what}', busy_ms=busy, wall_ms=wall, kernels=len(spans))
  for name, ms, calls in traces.kernels(spans)[:TRACED_KERNELS]:
    say(f'kernel {name}', ms=ms, calls=calls)


def token() -> None:
  """Reports the parts of a decoded token, TOKENS of them in one program."""
  kernels.resolve('flash', 'gpu', SPEC.compute, SPEC.head_width)  # loads Pallas now
  actor = jax.jit(functools.partial(decoder.actor, spec=SPEC))(
    transformer.init(SPEC, jax.random.key(0))
  )
  cache = decoder.empty_cache(SPEC, SLOTS, [COLUMNS])
  position = jnp.full(SLOTS, COLUMNS * 5 // 8, jnp.int32)

  def repeated(what: str, body: Callable, start: Any, *args: Any) -> None:
    def program(start: Any, *args: Any) -> Any:
      return jax.lax.fori_loop(0, TOKENS, lambda i, x: body(i, x, *args), start)

    with part(what):
      report(f'{what}, {TOKENS} tokens', jax.jit(program), start, *args)

  def decode(_, state, actor, position):
    token, cache = state
    hidden, cache, _ = decoder.decode(actor, token, position, cache, SPEC)
    # A token that depends on the layers, so that the compiler keeps them.
    return (hidden[:, :1].sum(-1) > 1e9).astype(jnp.int32), cache

  start = jnp.zeros(SLOTS, jnp.int32), cache
  repeated('decoder layers', decode, start, actor, position)

  def project(_, hidden, w):
    logits = jnp.einsum('sd,vd->sv', hidden, w, preferred_element_type=jnp.float32)
    return hidden + logits.max(-1, keepdims=True).astype(hidden.dtype) * 1e-9

  repeated('decoder head', project, normal(0, SLOTS, SPEC.width), actor['embed'])

  def draw(i, state, uid):
    total, logits = state
    key, at = jax.random.key(0), jnp.full(SLOTS, i)
    _, logp = sampling.draw(key, uid, at, logits, 1.0)
    return total + logp, logits + 1e-6

  logits = normal(0, SLOTS, SPEC.vocab, dtype='float32')
  uid = jnp.arange(SLOTS, dtype=jnp.uint32)
  repeated('draw and a pass over the logits', draw, (jnp.zeros(SLOTS), logits), uid)

  q = normal(0, SLOTS, SPEC.heads, SPEC.head_width)
  new = tuple(normal(i, SLOTS, SPEC.kv_heads, SPEC.head_width) for i in (1, 2))

  def attended(what, kernel, q):
    def attend(_, state, new, position):
      q, cache = state
      mixed, cache = kernel(q, new, cache, position, position + 1)
      return mixed * jnp.bfloat16(1.01), cache

    repeated(f'{what} of a layer', attend, (q, cache[0][0]), new, position)

  attended('ragged attention', ragged.attend, q)
  if IS_SMALL or jax.default_backend() == 'gpu':  # a CPU emulates it
    by_head = q.reshape(SLOTS, SPEC.kv_heads, -1, SPEC.head_width)
    for n, span, warps, stages in RAGGED:
      kernel = functools.partial(ragged._gpu, n=n, span=span, interpret=IS_SMALL)
      kernel = functools.partial(kernel, warps=warps, stages=stages)
      attended(f'ragged {n, span, warps, stages}', kernel, by_head)


def tokamax_kernels() -> dict[str, Callable]:
  """Returns tokamax's attention of packed rows by name; empty if it is not installed.

  In public, tokamax takes packed rows as a mask of [T, T] only. `causal` has no mask:
  it bounds the time of a kernel that reads where the text of each query starts.
  """
  if importlib.util.find_spec('tokamax') is None:
    return {}
  if importlib.util.find_spec('xprof') is None:
    # tokamax imports these 30 MiB for benchmarks of its own.
    sys.modules['xprof.cli.tools'] = mock.MagicMock()
  tokamax = importlib.import_module('tokamax')
  run = functools.partial(
    tokamax.dot_product_attention,
    is_causal=True,
    implementation='xla' if IS_SMALL else 'mosaic',
  )

  def masked(q, k, v, segment):
    return run(q, k, v, mask=segment[:, None, :, None] == segment[:, None, None])

  return {
    'tokamax, mask': masked,
    'tokamax, causal': lambda q, k, v, segment: run(q, k, v),
  }


def attention() -> None:
  """Reports a layer's attention of packed rows, and how far tokamax's is from ours."""

  def ours(q, k, v, segment):
    return kernels.attend(q, k, v, kind=SPEC.attention, segment_BT=segment)

  def both(kernel, q, k, v, segment, out):
    attended, pull = jax.vjp(lambda *x: kernel(*x, segment), q, k, v)
    return attended, *pull(out)

  H, K, C = SPEC.heads, SPEC.kv_heads, SPEC.head_width
  for rows, columns in PACKED:
    q, out = (normal(key, rows, columns, H, C) for key in (0, 1))
    k, v = (normal(key, rows, columns, K, C) for key in (2, 3))
    texts = jnp.searchsorted(jnp.array([0.3, 0.9]) * columns, jnp.arange(columns))
    segment = jnp.where(texts == 2, -1, texts)  # the last cells are empty
    args = q, k, v, jnp.broadcast_to(segment, (rows, columns))
    flops = 2 * rows * H * columns**2 * C  # of causal rows without texts
    results = {}
    for name, kernel in ({'ours': ours} | tokamax_kernels()).items():
      what = f'attention of {rows} x {columns}, {name}'
      with part(what):
        report(f'{what}: forward', jax.jit(kernel), *args, flops=flops)
        f = jax.jit(functools.partial(both, kernel))
        results[name] = report(f'{what}: both', f, *args, out, flops=3.5 * flops)
    if 'tokamax, mask' in results and 'ours' in results:
      largest = differences(results['tokamax, mask'], results['ours'])
      say(f'attention of {rows} x {columns}: masked differs from ours', largest=largest)


def differences(found: Any, exact: Any) -> list[float]:
  """Returns each array's largest difference, relative to the largest number."""
  pairs = [
    (a.astype('float32'), b.astype('float32'))
    for a, b in zip(found, exact, strict=True)
  ]
  return [float(abs(a - b).max() / abs(b).max()) for a, b in pairs]


SECTIONS = (ceilings, head, body, step, token, attention)


def main() -> None:
  """Runs the given sections, by default all."""
  names = sys.argv[1:]
  for section in SECTIONS:
    if not names or section.__name__ in names:
      at_s = round(time.perf_counter() - BEGUN, 1)
      say(f'section {section.__name__}', at_s=at_s)
      with part(section.__name__):
        section()
  sys.exit(bool(FAILED))


if __name__ == '__main__':
  main()
