"""Computes feed-forward layers in which each token uses K of E experts.

1. `choose` gives every token its K experts and their weights, live or recorded;
2. `arrange` sorts the tokens' copies by expert, without a capacity: none is dropped;
3. `product` multiplies each group of rows by its expert's matrix, with one of KERNELS;
4. `mlp` joins them; each device of the mesh axis tensor computes its own experts.

A route is the list of the experts of a token in all layers, X = L * K numbers. Axes: N
tokens, K experts per token, E experts, R rows sorted by expert, I and O inputs and
outputs of an expert's matrix. The model is that of Qwen3-MoE (arXiv:2505.09388).
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models.quantized import Quantized
from bapo_jax.models.transformer import EXPERTS, ModelSpec
from bapo_jax.types import Tree

PRODUCT = 'experts product'  # the name under which remat policies save results
BLOCKS = (8, 128)  # least and most rows of a block; powers of two


def by_layer(routes_RTX: Array, spec: ModelSpec) -> Array:
  """Returns routes as [L, R, T, K]."""
  split = routes_RTX.reshape(*routes_RTX.shape[:-1], spec.layers, spec.active)
  return jnp.moveaxis(split, -2, 0)


class Chosen(NamedTuple):
  """The experts of tokens in one layer, [..., K]."""

  used: Array  # recorded, or the router's own
  live: Array  # the router's own


def choose(
  router_DE: Array, y_ND: Array, spec: ModelSpec, recorded_NK: Array | None = None
) -> tuple[Array, Chosen]:
  """Returns the weights of the experts used, and these experts.

  Recorded experts are used where there are any, the router's own elsewhere. The
  gradient flows through the weights, gathered from the softmax over all experts.
  """
  logits_NE = (y_ND @ router_DE.astype(y_ND.dtype)).astype(jnp.float32)
  share_NE = jax.nn.softmax(logits_NE)
  _, live_NK = lax.top_k(lax.stop_gradient(share_NE), spec.active)
  chosen_NK = live_NK
  if recorded_NK is not None and spec.replay_routes == 'on':
    is_none_NK = recorded_NK == jnp.iinfo(recorded_NK.dtype).max
    chosen_NK = jnp.where(is_none_NK, live_NK, recorded_NK.astype(jnp.int32))
  # Saved, because a recomputed router could choose others.
  chosen_NK = checkpoint_name(chosen_NK, PRODUCT)
  weight_NK = jnp.take_along_axis(share_NE, chosen_NK, -1)
  if spec.norm_topk:
    weight_NK /= weight_NK.sum(-1, keepdims=True)
  return weight_NK.astype(y_ND.dtype), Chosen(chosen_NK, live_NK)


class Rows(NamedTuple):
  """Places the copies of N tokens in rows, sorted by expert."""

  place_NK: Array  # row of each copy; R: another device computes it
  copy_R: Array  # flat index of a row's copy, token * K + k; N K: padding
  size_E: Array  # rows of each expert, padding included


def arrange(chosen_NK: Array, experts: int, block: int) -> Rows:
  """Sorts copies by expert, stably; each expert's rows fill blocks of `block` rows.

  `chosen_NK` is `experts` for copies that are left out.
  """
  copies = chosen_NK.size
  expert_C = chosen_NK.ravel()
  count_E = jnp.bincount(expert_C, length=experts + 1)
  size_E = -(-count_E[:experts] // block) * block
  R = row_count(copies, experts, block)
  before_E = jnp.cumsum(count_E) - count_E  # copies of earlier experts
  start_E = jnp.append(jnp.cumsum(size_E) - size_E, R)
  order_C = jnp.argsort(expert_C, stable=True)
  sorted_C = expert_C[order_C]
  row_C = start_E[sorted_C] + jnp.arange(copies) - before_E[sorted_C]
  row_C = jnp.minimum(row_C, R)
  place_C = jnp.zeros_like(row_C).at[order_C].set(row_C)
  copy_R = (
    jnp.full(R, copies, jnp.int32).at[row_C].set(order_C.astype(jnp.int32), mode='drop')
  )
  return Rows(place_C.reshape(chosen_NK.shape), copy_R, size_E)


def row_count(copies: int, experts: int, block: int) -> int:
  """Returns R, the rows that suffice for these copies, whatever their experts."""
  return (copies + min(experts, copies) * (block - 1)) // block * block


def block_size(copies: int, experts: int, kernel: str | None) -> int:
  """Returns rows per block: about those of an expert, so that little is padding."""
  if kernel != 'blocks':
    return 1
  least, most = BLOCKS
  each = max(copies // experts, 1)
  return min(max(least, 1 << (each.bit_length() - 1)), most)


@jax.custom_vjp
def _spread(y_ND: Array, rows: Rows) -> Array:
  """Copies tokens to their rows [R, D]; padding is 0. Its transpose is `_collect`."""
  token_R = rows.copy_R // rows.place_NK.shape[1]
  return y_ND.at[token_R].get(mode='fill', fill_value=0)


@jax.custom_vjp
def _collect(z_RD: Array, rows: Rows) -> Array:
  """Sums the rows of each token, in the order of its experts: [N, D].

  This order, unlike that of a scatter, does not depend on other tokens.
  """
  z_KND = (z_RD.at[i_N].get(mode='fill', fill_value=0) for i_N in rows.place_NK.T)
  return functools.reduce(jnp.add, z_KND)


# Without another custom_vjp call: remat 'dots' would save its result (layers.REMAT).
_spread.defvjp(
  lambda y_ND, rows: (_spread.__wrapped__(y_ND, rows), rows),
  lambda rows, d_RD: (_collect(d_RD, rows), None),
)
_collect.defvjp(
  lambda z_RD, rows: (_collect.__wrapped__(z_RD, rows), rows),
  lambda rows, d_ND: (_spread(d_ND, rows), None),
)


def _slice(x: Array, i: Array, block: int) -> Array:
  return lax.dynamic_slice_in_dim(x, i * block, block)


def _each_block(size_E: Array, block: int, body: Callable, start: Array) -> Array:
  """Folds body(block number, its expert, value) over the blocks that have rows."""
  end_E = jnp.cumsum(size_E) // block

  def step(i, value):
    return body(i, jnp.searchsorted(end_E, i, side='right'), value)

  return lax.fori_loop(0, end_E[-1], step, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_blocks(x_RI: Array, w_EIO: Array, size_E: Array, block: int) -> Array:
  """Multiplies block by block in plain JAX; exact for every platform."""

  def body(i, e, y_RO):
    y = _slice(x_RI, i, block) @ w_EIO[e].astype(x_RI.dtype)
    return lax.dynamic_update_slice_in_dim(y_RO, y, i * block, 0)

  y_RO = jnp.zeros((x_RI.shape[0], w_EIO.shape[2]), x_RI.dtype)
  return _each_block(size_E, block, body, y_RO)


def _forward(x_RI, w_EIO, size_E, block):
  return _by_blocks.__wrapped__(x_RI, w_EIO, size_E, block), (x_RI, w_EIO, size_E)


def _backward(block, saved, d_RO):
  x_RI, w_EIO, size_E = saved

  def body(i, e, dw_EIO):
    x = _slice(x_RI, i, block)
    d = _slice(d_RO, i, block)
    dw = jnp.einsum('ri,ro->io', x, d, preferred_element_type=jnp.float32)
    return dw_EIO.at[e].add(dw)

  dw_EIO = _each_block(size_E, block, body, jnp.zeros(w_EIO.shape, jnp.float32))
  dx_RI = _by_blocks(d_RO, w_EIO.swapaxes(1, 2), size_E, block)
  return dx_RI, dw_EIO.astype(w_EIO.dtype), None


_by_blocks.defvjp(_forward, _backward)


def _native(multiply: Callable, x_RI: Array, w_EIO: Array, size_E: Array) -> Array:
  """Multiplies with a kernel whose rows past the last expert's are undefined."""
  y_RO = multiply(x_RI, w_EIO.astype(x_RI.dtype), size_E)
  return jnp.where(jnp.arange(len(y_RO))[:, None] < size_E.sum(), y_RO, 0)


def _tokamax(*arrays: Array) -> Array:
  """Multiplies with the kernels of tokamax, for a GPU."""
  import tokamax  # pyrefly: ignore[missing-import]

  flags.FLAGS.mark_as_parsed()  # else tokamax parses the command line
  # `resolve` has checked the platform; --mode=plan lowers for an absent GPU.
  flags.FLAGS.tokamax_cross_compile = True
  # Named: its autotuner could choose another one in a run that is resumed.
  multiply = functools.partial(tokamax.ragged_dot, implementation='triton')
  return _native(multiply, *arrays)


def _dense(x_RI: Array, w_EIO: Array, size_E: Array) -> Array:
  """Multiplies every row by every expert, for tests."""
  one_RE = jax.nn.one_hot(_expert(size_E, len(x_RI)), len(size_E), dtype=x_RI.dtype)
  return jnp.einsum('re,ri,eio->ro', one_RE, x_RI, w_EIO.astype(x_RI.dtype))


def _expert(size_E: Array, rows: int) -> Array:
  """Returns the expert [R] of each row; E for rows past the last one's."""
  return jnp.searchsorted(jnp.cumsum(size_E), jnp.arange(rows), side='right')


# All but `blocks`, whose rows are in blocks.
KERNELS = {
  'ragged': functools.partial(_native, lax.ragged_dot),  # which a TPU runs natively
  'tokamax': _tokamax,
  'dense': _dense,
}


def resolve(kind: str | None, platform: str) -> str:
  """Returns the kernel that `model.experts_kernel=kind` selects on this platform.

  Raises:
    ValueError: tokamax is not installed, or the platform has no such kernel.
  """
  is_gpu = platform in ('gpu', 'cuda')
  has_tokamax = is_gpu and importlib.util.find_spec('tokamax') is not None
  if kind is None:
    return 'ragged' if platform == 'tpu' else 'tokamax' if has_tokamax else 'blocks'
  if kind == 'tokamax' and not has_tokamax:
    raise ValueError(
      'model.experts_kernel=tokamax needs a gpu and the package tokamax, but this '
      f'{platform} lacks one of them; set it to None'
    )
  return kind


def product(
  x_RI: Array, w: Array | Quantized, rows: Rows, kernel: str, block: int
) -> Array:
  """Multiplies each row by the matrix [I, O] of its expert: [R, O], 0 for padding."""
  values = w.values if isinstance(w, Quantized) else w
  if kernel == 'blocks':
    y_RO = _by_blocks(x_RI, values, rows.size_E, block)
  else:
    y_RO = KERNELS[kernel](x_RI, values, rows.size_E)
  if isinstance(w, Quantized):
    scale_RO = w.scale.at[_expert(rows.size_E, len(y_RO))].get(mode='clip')
    y_RO = (y_RO * scale_RO).astype(y_RO.dtype)
  return checkpoint_name(y_RO, PRODUCT)


def _experts(y, weight, chosen, gate, up, down, *, kernel: str, experts: int) -> Array:
  """Computes the experts that this device holds; 0 for the others' share.

  `gate`, `up` and `down` are its part of the weights, of all `experts`.
  """
  shape = y.shape
  K = weight.shape[-1]
  mine = jax.tree.leaves(gate)[0].shape[0]
  first = lax.axis_index('tensor') * mine if mine < experts else 0
  chosen_NK = chosen.reshape(-1, K) - first
  is_mine_NK = (chosen_NK >= 0) & (chosen_NK < mine)
  block = block_size(chosen_NK.size, experts, kernel)
  rows = arrange(jnp.where(is_mine_NK, chosen_NK, mine), mine, block)
  x_RD = _spread(y.reshape(-1, shape[-1]), rows)
  weight_R = weight.ravel().at[rows.copy_R].get(mode='fill', fill_value=0)
  times = functools.partial(product, rows=rows, kernel=kernel, block=block)
  a_RF = jax.nn.silu(times(x_RD, gate)) * times(x_RD, up) * weight_R[:, None]
  return _collect(times(a_RF, down), rows).reshape(shape)


def mlp(
  w: Tree, y: Array, spec: ModelSpec, recorded: Array | None = None
) -> tuple[Array, Chosen]:
  """Computes the experts of y [..., D]; returns also which these are.

  Args:
    w: a layer of the parameters or of an actor.
    recorded: [..., K], see `choose`.
  """
  weight, chosen = choose(w['router'], y, spec, recorded)
  kernel = spec.experts_kernel or resolve(None, jax.default_backend())
  run = functools.partial(_experts, kernel=kernel, experts=spec.experts)
  gate, up, down = (w[name] for name in EXPERTS)
  mesh = sharding.ambient()
  if mesh is None:
    return run(y, weight, chosen.used, gate, up, down), chosen
  rows = P(None if y.shape[0] % sharding.row_shards(mesh) else sharding.ROWS)
  summed = jax.shard_map(
    lambda *args: lax.psum(run(*args), 'tensor'),
    in_specs=(*[rows] * 3, *[P('tensor')] * 3),
    out_specs=rows,
    check_vma=False,
  )
  return summed(y, weight, chosen.used, gate, up, down), chosen


def load(routes_BTX: Array, spec: ModelSpec) -> Array:
  """Returns the tokens of the busiest expert over those of the mean one.

  It is the mean over layers; 1 for equal experts, E / K if all tokens use the same.
  """
  flat_LC = by_layer(routes_BTX, spec).reshape(spec.layers, -1)
  count_LE = jax.vmap(lambda x: jnp.bincount(x, length=spec.experts))(flat_LC)
  return (count_LE.max(1) / count_LE.mean(1)).mean()
