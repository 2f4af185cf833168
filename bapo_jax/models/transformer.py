"""The policy: a Qwen2 / Qwen3 / Llama decoder as pure functions over a plain tree.

1. `describe(spec)` lists every parameter once: path -> shape and initialiser; shapes,
   initial values and shardings all derive from it;
2. `forward` runs whole rows (training, scoring): layers are scanned and rematerialised;
3. `prefill` is the same pass that keeps its keys and values;
4. `decode` moves every slot by one token through the same stacked weights, unrolled.

Layers are stacked on a leading axis L. Norms, rope and softmax are float32, matrix
products run in `spec.compute`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import attention
from bapo_jax.models.rope import table as frequency_table

# What the backward pass finds again: nothing, the products with weights, everything.
REMAT = {
  'full': jax.checkpoint,
  'dots': functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  ),
  'none': lambda layer: layer,
}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """What distinguishes one decoder from another; names as in a Hugging Face config."""

  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  ffn: int
  rope_theta: float = 1e4
  rope_type: str = 'default'  # a rule of frequency.RULES, and its knobs
  rope_knobs: tuple[tuple[str, float], ...] = ()
  norm_eps: float = 1e-6
  positions: int = 32768
  tied: bool = True
  qkv_bias: bool = True  # Qwen2
  o_bias: bool = False  # Llama and Qwen3 with attention_bias
  qk_norm: bool = False  # Qwen3
  dtype: str = 'float32'  # of the parameters; norms are float32 in any case
  compute: str = 'float32'  # of the matrix products
  attention: str = 'auto'  # or a kernel of attention.py
  remat: str = 'full'  # a key of REMAT


def describe(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], float | str]]:
  """path -> (shape, initial scale); a scale is a deviation, 'ones' or 'zeros'."""
  V, D, F, L = spec.vocab, spec.width, spec.ffn, spec.layers
  H, K, C = spec.heads, spec.kv_heads, spec.head_width
  # Depth-scaled output projections: the residual stream keeps its size at any depth.
  inner, outer = D**-0.5, (2 * L) ** -0.5
  tree = {
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


def abstract(spec: ModelSpec) -> dict:
  """The parameter tree as ShapeDtypeStructs."""
  flat = {
    path: jax.ShapeDtypeStruct(shape, jnp.float32)
    for path, (shape, _) in describe(spec).items()
  }
  return jax.eval_shape(lambda tree: cast(tree, spec.dtype), unflatten(flat))


def unflatten(flat: dict) -> dict:
  """The tree of a dict from path to array."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(tree: dict) -> dict:
  """The dict from path to array of a tree."""
  return traverse_util.flatten_dict(tree, sep='/')


@functools.partial(jax.jit, static_argnames='spec')  # eagerly: a compile a shape
def init(spec: ModelSpec, key: jax.Array) -> dict:
  """Random parameters."""
  flat = {}
  for i, (path, (shape, scale)) in enumerate(sorted(describe(spec).items())):
    if isinstance(scale, str):
      flat[path] = {'ones': jnp.ones, 'zeros': jnp.zeros}[scale](shape, jnp.float32)
    else:
      flat[path] = scale * jax.random.normal(jax.random.fold_in(key, i), shape)
  return cast(unflatten(flat), spec.dtype)


def count(spec: ModelSpec) -> int:
  """Number of parameters."""
  return sum(math.prod(shape) for shape, _ in describe(spec).values())


def cast(params: dict, dtype: str) -> dict:
  """Norms in float32, all else in this dtype.

  In `spec.compute` they are what products read: a model computes the same from either,
  to the last bit; a decoder reads half of it.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.astype(
      jnp.float32 if sharding.path_name(path).endswith('norm') else dtype
    ),
    params,
  )


def head(params: dict) -> jax.Array:
  """The output projection [V, D]: the embedding itself where the two are tied."""
  return params.get('head', params['embed'])


def rms_norm(x, scale, eps):
  """x / rms(x) * scale over the last axis, in float32 (Zhang and Sennrich, 2019)."""
  x32 = x.astype(jnp.float32)
  x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  return (x32 * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rope(x, position, spec):
  """Rotary embedding (Su et al., 2021), halves convention of Hugging Face.

  x [..., heads, C], position [...]; float32, since a bf16 angle is wrong by a radian
  beyond position 256.
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


def _qkv(w, x, position, spec):
  """Queries [..., H, C], keys and values [..., K, C] of normalised x [..., D]."""
  y = rms_norm(x, w['attn_norm'], spec.norm_eps)

  def project(name):
    out = jnp.einsum('...d,dhc->...hc', y, w[name].astype(y.dtype))
    bias = w.get(f'{name}_bias')
    if bias is not None:
      out += bias.astype(y.dtype).reshape((1,) * (out.ndim - 2) + bias.shape)
    norm = w.get(f'{name}_norm')
    return out if norm is None else rms_norm(out, norm, spec.norm_eps)

  q, k, v = project('q'), project('k'), project('v')
  return rope(q, position, spec), rope(k, position, spec), v


def _out(w, x, attended, spec):
  """Residual add of the attention's output [..., H, C], then of the gated MLP."""
  x = x + jnp.einsum('...hc,hcd->...d', attended, w['o'].astype(x.dtype))
  if spec.o_bias:
    x += w['o_bias'].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
  y = rms_norm(x, w['mlp_norm'], spec.norm_eps)
  # 2-D products: XLA's CPU backend runs [B*T, D] up to twice as fast as [B, T, D].
  y = y.reshape(-1, y.shape[-1])
  gate, up, down = (w[name].astype(y.dtype) for name in ('gate', 'up', 'down'))
  y = (jax.nn.silu(y @ gate) * (y @ up)) @ down
  return x + y.reshape(x.shape)


def _embed(params, token, spec):
  return params['embed'][token].astype(spec.compute)


def _embed_rows(params, tokens_BT, spec):
  """The same of whole rows, a share of the vocabulary each device.

  Left to itself XLA adds up all rows in float32 and then moves them to their devices.
  """
  devices, embed_VD = sharding.ambient(), params['embed']
  if devices is None or (
    tokens_BT.shape[0] % sharding.row_shards(devices)
    or embed_VD.shape[0] % devices.shape['tensor']
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


def _layers(params, tokens_BT, spec, keep: bool):
  position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)

  def layer(x_BTD, w):
    q_BTHC, k_BTKC, v_BTKC = _qkv(w, x_BTD, position_BT, spec)
    attended_BTHC = attention.causal(q_BTHC, k_BTKC, v_BTKC, kind=spec.attention)
    x_BTD = sharding.constrain(_out(w, x_BTD, attended_BTHC, spec), sharding.ROWS)
    return x_BTD, (k_BTKC, v_BTKC) if keep else None

  body = layer if keep else REMAT[spec.remat](layer)
  # Rows stay where they are and weights come to them, whatever XLA would prefer.
  x_BTD = sharding.constrain(_embed_rows(params, tokens_BT, spec), sharding.ROWS)
  x_BTD, kept = jax.lax.scan(body, x_BTD, params['layers'])
  return rms_norm(x_BTD, params['final_norm'], spec.norm_eps), kept


def forward(params: dict, tokens_BT, spec: ModelSpec) -> jax.Array:
  """Final hidden states [B, T, D]; column t has seen tokens 0..t.

  Rows are padded on the right: attention is causal, so padding never reaches a token
  before it, and needs no mask.
  """
  return _layers(params, tokens_BT, spec, keep=False)[0]


def empty_cache(spec: ModelSpec, slots: int, columns: list[int]) -> list:
  """A list over layers of a list over segments of keys and values [S, columns, K, C].

  This layout with `.at[s, position].set` is written in place; [S, K, T, C] would cost a
  hidden second cache (1094 MiB of temporaries for a 1 GiB cache, measured). A segment
  that no slot has reached is not read: a slice of one long array would be copied.
  """
  shapes = [(slots, n, spec.kv_heads, spec.head_width) for n in columns]

  def zeros(shape):
    return jnp.zeros(shape, spec.compute), jnp.zeros(shape, spec.compute)

  return [[zeros(shape) for shape in shapes] for _ in range(spec.layers)]


def prefill(params: dict, tokens_RT, spec: ModelSpec) -> list:
  """Keys and values [R, T, K, C] of every layer of R prompts, laid out as the cache."""
  _, (k_LRTKC, v_LRTKC) = _layers(params, tokens_RT, spec, keep=True)
  return [(k_LRTKC[i], v_LRTKC[i]) for i in range(spec.layers)]


@functools.partial(jax.named_call, name='decode')
def decode(params: dict, token_S, position_S, cache: list, spec: ModelSpec):
  """One token a slot: final hidden states [S, D] and the cache with that token in it.

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


def _extend(segments, k_SKC, v_SKC, position_S):
  """The segments with a token's keys and values at its position."""
  row_S, start, new = jnp.arange(position_S.shape[0]), 0, []
  for k_StKC, v_StKC in segments:
    columns = k_StKC.shape[1]
    # A negative index would count from the end; past the end is dropped.
    at_S = jnp.where(position_S < start, columns, position_S - start)
    new.append(
      tuple(
        x_StKC.at[row_S, at_S].set(x_SKC, mode='drop')
        for x_StKC, x_SKC in ((k_StKC, k_SKC), (v_StKC, v_SKC))
      )
    )
    start += columns
  return new
