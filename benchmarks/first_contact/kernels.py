"""Compares the attention kernels of this platform with attention in float64.

`whole_rows` are forward pass and gradient of packed rows, `decoding` one query per slot
at positions from the first column to the last. Every kernel is checked in the dtypes in
which a run on this platform uses it; a CPU emulates those of others.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models import attention, ragged, scatter
from benchmarks import machine
from benchmarks.first_contact import oracle
from benchmarks.first_contact.figures import Context, Figure
from benchmarks.first_contact.parity import EPS

# Kernels that a CPU emulates, in addition to its own: one line each.
EMULATED = {
  'splash': functools.partial(attention.attend, kind='splash', interpret=True)
}
# Roundings that (a forward pass, a gradient) may be off by, relative to the largest
# number. As in parity.py, float32 gets more for its exponentials; a CPU needs two.
ROUNDINGS = {'float32': (16, 64), 'bfloat16': (4, 16)}


def live_columns(
  q_SHC: jax.Array, segments: Sequence[tuple], position_S: jax.Array
) -> jax.Array:
  """Runs the kernel of ragged.py on segments joined to one cache.

  The kernel writes the column of the query, which is emptied before. The result is NaN
  if the cache is not that of the segments afterwards.
  """
  k_SKCT = jnp.concatenate([k for k, _ in segments], 3)
  v_SKTC = jnp.concatenate([v for _, v in segments], 2)
  at = position_S[:, None, None, None]
  k_SKC = jnp.take_along_axis(k_SKCT, at, 3)[..., 0]
  v_SKC = jnp.take_along_axis(v_SKTC, at, 2)[:, :, 0]
  empty = (
    scatter.put(k_SKCT, 0 * k_SKC, position_S, 3),
    scatter.put(v_SKTC, 0 * v_SKC, position_S, 2),
  )
  new = k_SKC, v_SKC
  mixed_SHC, (k, v) = ragged.attend(q_SHC, new, empty, position_S, position_S + 1)
  same = (k == k_SKCT).all() & (v == v_SKTC).all()
  return jnp.where(same, mixed_SHC, jnp.nan)


# Kernels of decoding: (query, segments, positions) -> mixed values; one line each.
DECODING: dict[str, Callable] = {'cached': attention.cached, 'ragged': live_columns}


def whole_rows(platform: str, dtype: str, width: int) -> dict[str, Callable]:
  """Returns the kernels of whole rows by name: plain, the platform's, emulated ones."""
  kinds = {'plain', attention.resolve(None, platform, dtype, width)}
  found = {k: functools.partial(attention.attend, kind=k) for k in sorted(kinds)}
  return found | (EMULATED if platform == 'cpu' and dtype == 'float32' else {})


def decoding(platform: str, dtype: str, width: int) -> dict[str, Callable]:
  """Returns the kernels of decoding by name; see `decoder.is_ragged`."""
  plain = attention.resolve(None, platform, dtype, width) == 'plain'
  unused = {'ragged'} if plain and platform != 'cpu' else set()
  return {name: kernel for name, kernel in DECODING.items() if name not in unused}


def sizes(platform: str, *, small: bool) -> tuple[int, int, int, int, int]:
  """Returns (rows, columns, query heads, key heads, head width).

  320 columns are several blocks of every kernel, the last one padded. More would take
  minutes to compile: the blocks of `plain` are unrolled.
  """
  return (2, 48, 2, 1, 8) if small else (2, 192 if platform == 'cpu' else 320, 8, 2, 64)


def error(found: object, exact: object) -> float:
  """Returns the largest difference in units of the largest exact number."""
  a, b = (np.asarray(x, np.float64) for x in (found, exact))
  return float(np.abs(a - b).max() / np.abs(b).max())


def rows_figures(name: str, kernel: Callable, dtype: str, shape: tuple) -> Iterator:
  """Yields forward and gradient errors of a kernel on packed rows, and its time."""
  B, T, H, K, C = shape
  rng = np.random.default_rng(0)
  q, k, v, weight = (
    jnp.asarray(rng.standard_normal((B, T, n, C), np.float32), dtype)
    for n in (H, K, K, H)
  )
  # Texts of several lengths, the last cells empty.
  ends = np.array([[0.1, 0.6, 0.9], [0.3, 0.31, 0.97]])[np.arange(B) % 2] * T
  segment_BT = (np.arange(T)[None, :, None] >= ends[:, None]).sum(-1).astype(np.int32)
  segment_BT = np.where(segment_BT == 3, -1, segment_BT)

  def both(run: Callable, weight, *arrays) -> tuple:
    out, pull = jax.vjp(run, *arrays)
    return out, pull(weight)

  packed = functools.partial(kernel, segment_BT=jnp.asarray(segment_BT))
  compiled = jax.jit(functools.partial(both, packed))
  out, grads = compiled(weight, q, k, v)
  with oracle.exact():
    live_BTT = np.tri(T, dtype=bool) & (segment_BT[:, :, None] == segment_BT[:, None])
    exact = functools.partial(oracle.attention, live_BTj=jnp.asarray(live_BTT))
    truth = jax.jit(functools.partial(both, exact))(*oracle.wide((weight, q, k, v)))
  forward, backward = (n * EPS[dtype] for n in ROUNDINGS[dtype])
  yield Figure(f'{name}, {dtype}', error(out, truth[0]), 'of the largest', forward)
  worst = max(error(a, b) for a, b in zip(grads, truth[1], strict=True))
  yield Figure(f'{name}, gradient, {dtype}', worst, 'of the largest', backward)
  took = machine.seconds(functools.partial(compiled, weight, q, k, v), 3)
  yield Figure(f'{name}, forward and gradient, {dtype}', 1e3 * took, 'ms')


def decoding_figure(name: str, kernel: Callable, dtype: str, shape: tuple) -> Figure:
  """Returns the error of a kernel of decoding, slots at their first to last column."""
  _, T, H, K, C = shape
  T += -T % attention.LANES  # `ragged` needs whole tiles, and heads of 16 or more
  C = max(C, 16)
  position_S = np.array([0, 1, T // 2 - 1, T // 2, T - 2, T - 1], np.int32)
  S, half = len(position_S), T // 2
  rng = np.random.default_rng(1)
  q_SHC, k_SKCT, v_SKTC = (
    jnp.asarray(rng.standard_normal(size, np.float32), dtype)
    for size in ((S, H, C), (S, K, C, T), (S, K, T, C))
  )
  segments = [
    (k_SKCT[..., part], v_SKTC[:, :, part]) for part in (slice(half), slice(half, T))
  ]
  found = jax.jit(kernel)(q_SHC, segments, jnp.asarray(position_S))
  with oracle.exact():
    q, k, v = oracle.wide((q_SHC[:, None], k_SKCT, v_SKTC))
    live_S1T = jnp.arange(T) <= position_S[:, None, None]
    exact = oracle.attention(q, k.transpose(0, 3, 1, 2), v.swapaxes(1, 2), live_S1T)
  limit = ROUNDINGS[dtype][0] * EPS[dtype]
  found = error(found, exact[:, 0])
  return Figure(f'decoding, {name}, {dtype}', found, 'of the largest', limit)


def run(context: Context) -> Iterator[Figure]:
  """Yields the errors of every kernel in both dtypes."""
  platform = jax.default_backend()
  shape = sizes(platform, small=context.small)
  for dtype in EPS:
    with jax.default_matmul_precision('highest' if dtype == 'float32' else 'default'):
      for name, kernel in whole_rows(platform, dtype, shape[-1]).items():
        yield from rows_figures(name, kernel, dtype, shape)
      for name, kernel in decoding(platform, dtype, shape[-1]).items():
        yield decoding_figure(name, kernel, dtype, shape)
