"""The policy: a Qwen2 / Qwen3 / Llama decoder as pure functions over a plain tree.

1. `describe(spec)` lists every parameter once: path -> shape and initialiser; shapes,
   initial values and shardings all derive from it;
2. `forward` runs whole rows (training, scoring): layers are scanned and rematerialised;
3. `prefill` is the same pass and returns its keys and values;
4. `decode` moves every slot by one token through the same stacked weights, unrolled.

Layers are stacked on a leading axis L. Norms, rope and softmax are float32, matrix
products run in `spec.compute`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import Array
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import attention, knobs
from bapo_jax.models.rope import table as frequency_table
from bapo_jax.types import Tree

Initialiser = tuple[tuple[int, ...], float | str]  # (shape, scale)
KeysValues = tuple[Array, Array]  # two arrays [rows, columns, K, C], of one layer
Segments = list[KeysValues]  # one after the other

_D = knobs.ModelConfig()

# What the backward pass reads back: nothing, the products with weights, everything.
REMAT = {
  'full': jax.checkpoint,
  'dots': functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  ),
  'none': lambda layer: layer,
}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Sizes and options of one decoder; the defaults are those of the embedded policy."""

  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  ffn: int
  rope_theta: float = _D.rope_theta
  rope_type: str = 'default'  # a key of rope.RULES
  rope_knobs: tuple[tuple[str, float], ...] = ()
  norm_eps: float = 1e-6
  positions: int = knobs.POSITIONS
  tied: bool = True
  qkv_bias: bool = True  # Qwen2
  o_bias: bool = False  # Llama and Qwen3 with attention_bias
  qk_norm: bool = False  # Qwen3
  dtype: str = _D.dtype  # of the parameters; norms are float32 in any case
  compute: str = _D.compute  # of the matrix products
  attention: str = _D.attention  # a kind of attention.py
  remat: str = _D.remat  # a key of REMAT


def describe(spec: ModelSpec) -> dict[str, Initialiser]:
  """path -> (shape, scale); a scale is a standard deviation, 'ones' or 'zeros'."""
  V, D, F, L = spec.vocab, spec.width, spec.ffn, spec.layers
  H, K, C = spec.heads, spec.kv_heads, spec.head_width
  # Depth-scaled output projections: the residual stream keeps its size at any depth.
  inner, outer = D**-0.5, (2 * L) ** -0.5
  tree: dict[str, Initialiser] = {
    'embed': ((V, D), 0.02 if D > 512 else D**-0.5),
    'final_norm': ((D,), 'ones'),
    'layers/attn_norm': ((L, D), 'ones'),
    'layers/q': ((L, D, H, C), inner),
    'layers/k': ((L, D, K, C), inner),
    'layers/v': ((L, D, K, C), inner),
    'layers/o': ((L, H, C, D), outer * (H * C) ** -0.5),
    'layers/mlp_norm': ((L, D), 'ones'),
    'layers/gate': ((L, D, F), inner),
    'layers/up': ((L, D, F), inner),
    'layers/down': ((L, F, D), outer * F**-0.5),
  }
  if spec.qkv_bias:
    tree |= {
      'layers/q_bias': ((L, H, C), 'zeros'),
      'layers/k_bias': ((L, K, C), 'zeros'),
      'layers/v_bias': ((L, K, C), 'zeros'),
    }
  if spec.o_bias:
    tree['layers/o_bias'] = ((L, D), 'zeros')
  if spec.qk_norm:
    tree |= {'layers/q_norm': ((L, C), 'ones'), 'layers/k_norm': ((L, C), 'ones')}
  if not spec.tied:
    tree['head'] = ((V, D), inner)
  return tree


def abstract(spec: ModelSpec) -> Tree:
  """The parameter tree as ShapeDtypeStructs."""
  flat = {
    path: jax.ShapeDtypeStruct(shape, jnp.float32)
    for path, (shape, _) in describe(spec).items()
  }
  return jax.eval_shape(lambda tree: cast(tree, spec.dtype), unflatten(flat))


def unflatten(flat: dict[str, Any]) -> Tree:
  """The tree of a dict from path to array."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(tree: Tree) -> dict[str, Any]:
  """The dict from path to array of a tree."""
  return traverse_util.flatten_dict(tree, sep='/')


@functools.partial(jax.jit, static_argnames='spec')  # eager: one compile per shape
def init(spec: ModelSpec, key: Array) -> Tree:
  """Random parameters, those of `describe`."""
  flat: dict[str, Array] = {}
  for i, (path, (shape, scale)) in enumerate(sorted(describe(spec).items())):
    if isinstance(scale, str):
      flat[path] = {'ones': jnp.ones, 'zeros': jnp.zeros}[scale](shape, jnp.float32)
    else:
      flat[path] = scale * jax.random.normal(jax.random.fold_in(key, i), shape)
  return cast(unflatten(flat), spec.dtype)


def count(spec: ModelSpec) -> int:
  """Number of parameters."""
  return sum(math.prod(shape) for shape, _ in describe(spec).values())


def cast(params: Tree, dtype: str) -> Tree:
  """The parameters in this dtype, norms in float32.

  Products read weights in `spec.compute`: a model computes the same, to the last bit,
  from weights cast to it beforehand, and a decoder then reads half as many bytes.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.astype(
      jnp.float32 if sharding.path_name(path).endswith('norm') else dtype
    ),
    params,
  )


def head(params: Tree) -> Array:
  """The output projection [V, D]; the embedding if the two are tied."""
  return params.get('head', params['embed'])


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """x / rms(x) * scale over the last axis, in float32 (Zhang and Sennrich, 2019)."""
  x32 = x.astype(jnp.float32)
  x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  return (x32 * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rope(x: Array, position: Array, spec: ModelSpec) -> Array:
  """Rotary embedding (Su et al., 2021), halves convention of Hugging Face.

  x is [..., heads, C] and position [...]. Angles are float32: in bfloat16 they are
  wrong by a radian beyond position 256.
  """
  frequency, factor = frequency_table(
    spec.head_width, spec.rope_theta, spec.rope_type, spec.rope_knobs
  )
  shape = (1,) * position.ndim + frequency.shape
  angle = position[..., None].astype(jnp.float32) * frequency.reshape(shape)
  sin, cos = factor * jnp.sin(angle), factor * jnp.cos(angle)
  sin, cos = sin[..., None, :], cos[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _qkv(
  w: Tree, x: Array, position: Array, spec: ModelSpec
) -> tuple[Array, Array, Array]:
  """Queries [..., H, C], keys and values [..., K, C] of normalised x [..., D]."""
  y = rms_norm(x, w['attn_norm'], spec.norm_eps)

  def project(name: str) -> Array:
    out = jnp.einsum('...d,dhc->...hc', y, w[name].astype(y.dtype))
    bias = w.get(f'{name}_bias')
    if bias is not None:
      out += bias.astype(y.dtype).reshape((1,) * (out.ndim - 2) + bias.shape)
    norm = w.get(f'{name}_norm')
    return out if norm is None else rms_norm(out, norm, spec.norm_eps)

  q, k, v = project('q'), project('k'), project('v')
  return rope(q, position, spec), rope(k, position, spec), v


def _out(w: Tree, x: Array, attended: Array, spec: ModelSpec) -> Array:
  """Adds the attention's output [..., H, C] to x, then that of the gated MLP."""
  x = x + jnp.einsum('...hc,hcd->...d', attended, w['o'].astype(x.dtype))
  if spec.o_bias:
    x += w['o_bias'].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
  # 2-D products: XLA's CPU backend runs [B*T, D] up to twice as fast as [B, T, D].
  y = rms_norm(x, w['mlp_norm'], spec.norm_eps).reshape(-1, x.shape[-1])
  gate, up, down = (w[name].astype(y.dtype) for name in ('gate', 'up', 'down'))
  y = (jax.nn.silu(y @ gate) * (y @ up)) @ down
  return x + y.reshape(x.shape)


def _embed(params: Tree, token: Array, spec: ModelSpec) -> Array:
  return params['embed'][token].astype(spec.compute)


def _embed_rows(params: Tree, tokens_BT: Array, spec: ModelSpec) -> Array:
  """`_embed` of whole rows, one share of the vocabulary per device.

  By itself XLA adds up all rows in float32 and then moves them to their devices.
  """
  mesh, embed_VD = sharding.ambient(), params['embed']
  if mesh is None or (
    tokens_BT.shape[0] % sharding.row_shards(mesh)
    or embed_VD.shape[0] % mesh.shape['tensor']
  ):
    return _embed(params, tokens_BT, spec)

  def look_up(embed_VD, tokens_BT):
    at_BT = tokens_BT - jax.lax.axis_index('tensor') * embed_VD.shape[0]
    here_BT = (at_BT >= 0) & (at_BT < embed_VD.shape[0])
    x_BTD = embed_VD[jnp.where(here_BT, at_BT, 0)].astype(spec.compute)
    return jax.lax.psum(jnp.where(here_BT[..., None], x_BTD, 0), 'tensor')

  rows = P(sharding.ROWS)
  return jax.shard_map(look_up, in_specs=(P('tensor'), rows), out_specs=rows)(
    embed_VD, tokens_BT
  )


def _layers(
  params: Tree, tokens_BT: Array, spec: ModelSpec, with_cache: bool
) -> tuple[Array, Any]:
  """(hidden_BTD, keys and values [L, B, T, K, C] of all layers, or None)."""
  position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)

  def layer(x_BTD, w):
    q_BTHC, k_BTKC, v_BTKC = _qkv(w, x_BTD, position_BT, spec)
    attended_BTHC = attention.causal(q_BTHC, k_BTKC, v_BTKC, kind=spec.attention)
    x_BTD = sharding.constrain(_out(w, x_BTD, attended_BTHC, spec), sharding.ROWS)
    return x_BTD, (k_BTKC, v_BTKC) if with_cache else None

  body = layer if with_cache else REMAT[spec.remat](layer)
  # Rows stay on their devices and weights move to them, whatever XLA would prefer.
  x_BTD = sharding.constrain(_embed_rows(params, tokens_BT, spec), sharding.ROWS)
  x_BTD, cache = jax.lax.scan(body, x_BTD, params['layers'])
  return rms_norm(x_BTD, params['final_norm'], spec.norm_eps), cache


def forward(params: Tree, tokens_BT: Array, spec: ModelSpec) -> Array:
  """Final hidden states [B, T, D]; column t depends on tokens 0..t.

  Rows are padded on the right: attention is causal, so padding never reaches a token
  before it, and needs no mask.
  """
  return _layers(params, tokens_BT, spec, with_cache=False)[0]


def empty_cache(spec: ModelSpec, slots: int, columns: list[int]) -> list[Segments]:
  """Zeros for the keys and values of every layer, in segments of these columns.

  This layout with `.at[s, position].set` is written in place; [S, K, T, C] would cost a
  hidden second cache (1094 MiB of temporaries for a 1 GiB cache, measured). A segment
  that no slot has reached is not read: a slice of one long array would be copied.
  """

  def zeros(n: int) -> Array:
    return jnp.zeros((slots, n, spec.kv_heads, spec.head_width), spec.compute)

  return [[(zeros(n), zeros(n)) for n in columns] for _ in range(spec.layers)]


def prefill(params: Tree, tokens_RT: Array, spec: ModelSpec) -> list[KeysValues]:
  """Keys and values [R, T, K, C] of every layer, for R prompts."""
  _, (k_LRTKC, v_LRTKC) = _layers(params, tokens_RT, spec, with_cache=True)
  return [(k_LRTKC[i], v_LRTKC[i]) for i in range(spec.layers)]


@functools.partial(jax.named_call, name='decode')
def decode(
  params: Tree,
  token_S: Array,
  position_S: Array,
  cache: list[Segments],
  spec: ModelSpec,
) -> tuple[Array, list[Segments]]:
  """One token per slot: (final hidden states [S, D], the cache with these tokens).

  Unrolled over the same stacked weights with static indices: scanning the layers here
  would copy each layer's cache at each token (211 MiB of temporaries against 14 at 28
  layers).
  """
  x_SD = _embed(params, token_S, spec)
  new = []
  for i, segments in enumerate(cache):
    w = jax.tree.map(lambda p, i=i: p[i], params['layers'])
    q_SHC, k_SKC, v_SKC = _qkv(w, x_SD, position_S, spec)
    new.append(_extend(segments, k_SKC, v_SKC, position_S))
    attended_SHC = attention.cached(q_SHC, new[-1], position_S, kind=spec.attention)
    x_SD = _out(w, x_SD, attended_SHC, spec)
  return rms_norm(x_SD, params['final_norm'], spec.norm_eps), new


def _extend(
  segments: Segments, k_SKC: Array, v_SKC: Array, position_S: Array
) -> Segments:
  """The segments with each token's keys and values at its position."""
  row_S, start, new = jnp.arange(position_S.shape[0]), 0, []
  for k_StKC, v_StKC in segments:
    columns = k_StKC.shape[1]
    # A negative index would count from the end; past the end is dropped.
    at_S = jnp.where(position_S < start, columns, position_S - start)
    k_StKC = k_StKC.at[row_S, at_S].set(k_SKC, mode='drop')
    v_StKC = v_StKC.at[row_S, at_S].set(v_SKC, mode='drop')
    new.append((k_StKC, v_StKC))
    start += columns
  return new
