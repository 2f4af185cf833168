"""Defines the decoder's layers as pure functions; `forward` runs whole rows.

Layers are scanned and rematerialised; if they are of several kinds, the body of the
scan has a branch for each kind. Norms, rotary positions and softmax are float32; matrix
products run in `spec.compute`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from bapo_jax import sharding
from bapo_jax.models import attention, experts, rope
from bapo_jax.models.lora import Adapted
from bapo_jax.models.quantized import Quantized
from bapo_jax.models.transformer import LayerKind, ModelSpec
from bapo_jax.types import Tree


def _is_flash(primitive: Primitive, *_, **__):
  # Its library names no results, but its gradient rule calls a differentiable function,
  # as no other part of a layer does.
  return primitive.name == 'custom_vjp_call'


# What the forward pass saves for the backward pass. full: nothing; dots: the products
# with weights and the results of a GPU's or TPU's attention kernel; none: everything.
_SAVED = jax.checkpoint_policies
_ADAPTED = 'adapted product'  # names a sum, saved in place of its two products
REMAT = {
  'full': functools.partial(jax.checkpoint, prevent_cse=False),
  'dots': functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=_SAVED.save_from_both_policies(
      _SAVED.save_from_both_policies(
        _SAVED.dots_with_no_batch_dims_saveable, _is_flash
      ),
      _SAVED.save_only_these_names(attention.ATTENDED, _ADAPTED, experts.PRODUCT),
    ),
  ),
  'none': lambda layer: layer,
}


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': jax.nn.gelu}  # keys: spec.activation

Turn = tuple[Array, Array]  # sine and cosine of rotary angles, [..., C / 2]
Turns = dict[str, Turn]  # by LayerKind.rotation, without 'none'


class Schedule(NamedTuple):
  """Chooses how an update is computed; trades time for memory, with equal results."""

  remat: str = 'full'  # key of REMAT
  sequence_sharding: bool = False  # splits columns between layers over mesh axis tensor
  bounds_pass: str = 'again'  # or 'stored', see objective.gradient
  tile_mib: int = 4  # of logits per device, see logprob_tiles.largest


def product(x: Array, w: Array | Adapted | Quantized, axes: int = 1) -> Array:
  """Multiplies x [..., *in] by a weight [*in, *out], in the dtype of x.

  The product sums over the last `axes` axes of x. An adapted weight is not merged: the
  gradient of the merged weight would be a third of all products. The result of a
  quantised weight is scaled in float32, once per output.
  """

  def times(x, w, axes):
    # The last axis comes first, so that sums equal those of einsum bit for bit.
    inner = list(reversed(range(axes)))
    outer = [i - axes for i in inner]
    return jnp.tensordot(x, w.astype(x.dtype), (outer, inner))

  if isinstance(w, Quantized):
    out = times(x, w.values, axes)
    return (out * expand(w.scale, out.ndim)).astype(x.dtype)
  if not isinstance(w, Adapted):
    return times(x, w, axes)

  def both(x, w):
    low = w.adapter.scale * times(x, w.adapter.a, axes)
    return times(x, w.base, axes) + times(low, w.adapter.b, 1)

  # The backward pass computes x A again; the sum is saved, not its two products.
  return checkpoint_name(jax.checkpoint(both, prevent_cse=False)(x, w), _ADAPTED)


def expand(x: Any, ndim: int) -> Any:
  """Adds leading axes of length 1 to an array, up to `ndim` axes."""
  return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def rms_norm(x: Array, scale: Array, eps: float, offset: bool = False) -> Array:
  """Computes x / rms(x) * scale over the axes of the scale, in float32 (RMSNorm).

  With an offset, the factor is 1 + scale.
  """
  x32 = x.astype(jnp.float32)
  axes = tuple(range(-scale.ndim, 0))
  x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axes, keepdims=True) + eps)
  factor = 1 + scale if offset else scale
  return (x32 * expand(factor, x.ndim)).astype(x.dtype)


def norm(w: Tree, name: str, x: Array, spec: ModelSpec) -> Array:
  """Applies the norm `name` of a layer or of the model; x itself if it has none."""
  scale = w.get(name)
  if scale is None:
    return x
  return rms_norm(x, scale, spec.norm_eps, spec.norm_offset)


def rotations(position: Array, spec: ModelSpec, by_parts: bool = False) -> Turns:
  """Returns (sine, cosine) [..., C / 2] of the rotary angles at positions [...].

  Each rotation of the model's layers has its own angles.

  Angles are float32; bfloat16 angles would be off by a radian beyond position 256.

  If `by_parts`, positions [..., 3] have three parts: time, row and column. The first
  spec.mrope[0] pairs of a head rotate by time, the next spec.mrope[1] by row and the
  last by column (Wang et al., 2024, arXiv:2409.12191). If the three parts are equal, as
  for text tokens, the result is that of positions [...], bit for bit.
  """
  part = np.repeat(np.arange(3), spec.mrope) if by_parts else None
  position = position[..., part]
  rules = {
    'scaled': (spec.rope_theta, spec.rope_type, spec.rope_knobs),
    'plain': (spec.plain_theta, 'default', ()),
  }
  turns: Turns = {}
  for rotation in {kind.rotation: None for kind in spec.layer_kinds}:
    if rotation != 'none':
      frequency, factor = rope.table(spec.head_width, *rules[rotation])
      angle = position.astype(jnp.float32) * expand(frequency, position.ndim)
      turns[rotation] = factor * jnp.sin(angle), factor * jnp.cos(angle)
  return turns


def rotate(x: Array, sin: Array, cos: Array) -> Array:
  """Rotates x [..., heads, C] by angles [..., C / 2] (RoPE, Su et al., 2021).

  A pair consists of coordinates i and i + C / 2, as in Hugging Face models.
  """
  sin = sin[..., None, :]
  cos = cos[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def turned(x: Array, turns: Turns, kind: LayerKind) -> Array:
  """Rotates queries or keys [..., heads, C] by the rotation of a layer's kind.

  `turns` are the `rotations` of the positions [...], computed once for all layers.
  """
  return x if kind.rotation == 'none' else rotate(x, *turns[kind.rotation])


def project(w: Tree, x: Array, spec: ModelSpec) -> tuple[Array, Array, Array]:
  """Projects x [..., D] to queries [..., H, C], keys and values, not yet `turned`.

  `w` is a layer of the parameters or of an actor.
  """
  y = norm(w, 'attn_norm', x, spec)
  joined: dict[str, Array] = {}
  if 'qkv' in w:
    out = product(y, w['qkv'])
    out = out.reshape(*out.shape[:-1], -1, spec.head_width)
    H = spec.heads
    K = spec.kv_heads
    joined.update(zip('qkv', jnp.split(out, (H, H + K), axis=-2), strict=True))

  def heads(name):
    out = joined[name] if joined else product(y, w[name])
    bias = w.get(f'{name}_bias')
    if bias is not None:
      out += expand(bias.astype(y.dtype), out.ndim)
    return norm(w, f'{name}_norm', out, spec)

  q, k, v = map(heads, 'qkv')
  if spec.score_scale is not None:
    # The kernels multiply scores by C ** -.5; rotations do not change the length of q.
    factor = spec.score_scale * spec.head_width**0.5
    q = (q.astype(jnp.float32) * factor).astype(q.dtype)
  return q, k, v


def add_out(
  w: Tree, x: Array, attended: Array, spec: ModelSpec, recorded: Array | None = None
) -> tuple[Array, experts.Chosen | None]:
  """Adds the attention output [..., H, C] to x [..., D], then the output of the MLP.

  Returns also the chosen experts, which may be `recorded` ones, [..., K]; None without
  experts.
  """
  if 'out' in w:
    added = [product(attended.reshape(*x.shape[:-1], -1), w['out'])]
  else:
    added = [product(attended, w['o'], 2)]
  if spec.o_bias:
    added.append(expand(w['o_bias'].astype(x.dtype), x.ndim))
  x = _add(w, 'attn_post_norm', x, added, spec)
  y = norm(w, 'mlp_norm', x, spec)
  if spec.experts:
    y, chosen = experts.mlp(w, y, spec, recorded)
    return _add(w, 'mlp_post_norm', x, [y], spec), chosen
  # 2-D products: XLA's CPU backend runs [B*T, D] up to twice as fast as [B, T, D].
  y = y.reshape(-1, x.shape[-1])
  if 'gate_up' in w:
    gate, up = jnp.split(product(y, w['gate_up']), 2, axis=-1)
  else:
    gate, up = (product(y, w[name]) for name in ('gate', 'up'))
  y = product(ACTIVATIONS[spec.activation](gate) * up, w['down'])
  return _add(w, 'mlp_post_norm', x, [y.reshape(x.shape)], spec), None


def _add(w: Tree, name: str, x: Array, terms: list[Array], spec: ModelSpec) -> Array:
  """Adds terms to x one by one; with the norm `name`, adds the norm of their sum."""
  if name in w:
    terms = [norm(w, name, sum(terms[1:], terms[0]), spec)]
  return sum(terms, x)


def embed(params: Tree, token: Array, spec: ModelSpec) -> Array:
  """Returns the embeddings [..., D] of tokens [...]."""
  return _scaled(params['embed'][token].astype(spec.compute), spec)


def _scaled(x: Array, spec: ModelSpec) -> Array:
  """Multiplies embeddings by the scale, rounded to their dtype as in Gemma."""
  if spec.embed_scale == 1:
    return x
  return x * jnp.asarray(spec.embed_scale, x.dtype)


def embed_rows(params: Tree, tokens_BT: Array, spec: ModelSpec) -> Array:
  """Embeds whole rows like `embed`; each device looks up its part of the vocabulary.

  Without `shard_map`, XLA would sum all rows in float32 on every device, then reshard.
  """
  mesh = sharding.ambient()
  embed_VD = params['embed']
  if mesh is None or (
    tokens_BT.shape[0] % sharding.row_shards(mesh)
    or embed_VD.shape[0] % mesh.shape['tensor']
  ):
    return embed(params, tokens_BT, spec)

  def look_up(embed_VD, tokens_BT):
    # Tokens of other shares give 0, so that the sum over devices is the embedding.
    row_BT = tokens_BT - lax.axis_index('tensor') * embed_VD.shape[0]
    local_BT = (row_BT >= 0) & (row_BT < embed_VD.shape[0])
    x_BTD = embed_VD[jnp.where(local_BT, row_BT, 0)].astype(spec.compute)
    return lax.psum(jnp.where(local_BT[..., None], x_BTD, 0), 'tensor')

  rows = P(sharding.ROWS)
  x_BTD = jax.shard_map(look_up, in_specs=(P('tensor'), rows), out_specs=rows)(
    embed_VD, tokens_BT
  )
  return _scaled(x_BTD, spec)


def embed_patches(x_BTD: Array, merged_BT: Array, patch_XD: Array) -> Array:
  """Replaces embeddings by patch_XD[merged_BT], except for text (merged_BT of -1)."""
  # Any row may read any patch, so patches are replicated: few bytes per prompt.
  patch_XD = sharding.constrain(patch_XD, None)
  patch_BTD = patch_XD[jnp.maximum(merged_BT, 0)].astype(x_BTD.dtype)
  return jnp.where(merged_BT[..., None] >= 0, patch_BTD, x_BTD)


def split(x_BTD: Array, schedule: Schedule) -> Array:
  """Shards the residual stream by rows, and by columns if schedule.sequence_sharding.

  This pins rows to their devices, so that XLA moves the weights instead. Columns are
  split over the tensor axis, as in Megatron's sequence parallelism (Korthikanti et al.,
  2022): the sum of a product over that axis becomes a reduce-scatter, and an all-gather
  precedes the next product. Traffic is unchanged, and activations take less memory.
  """
  mesh = sharding.ambient()
  divides = mesh is not None and x_BTD.shape[1] % mesh.shape['tensor'] == 0
  columns = 'tensor' if schedule.sequence_sharding and divides else None
  return sharding.constrain(x_BTD, sharding.ROWS, columns)


def forward(
  params: Tree,
  tokens_BT: Array,
  spec: ModelSpec,
  segment_BT: Array | None = None,
  *,
  schedule: Schedule = Schedule(),
) -> Array:
  """Computes the final hidden states [B, T, D]; column t depends on tokens 0..t.

  Rows are padded on the right. Attention is causal, so padding never affects a token
  before it and needs no mask. See `through` for `segment_BT`.
  """
  column_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  x_BTD = embed_rows(params, tokens_BT, spec)
  turns = rotations(column_BT, spec)
  return through(params, x_BTD, turns, spec, segment_BT, schedule=schedule)[0]


def through(
  params: Tree,
  x_BTD: Array,
  turns: Turns,
  spec: ModelSpec,
  segment_BT: Array | None = None,
  routes_BTX: Array | None = None,
  *,
  shared: attention.Shared | None = None,
  schedule: Schedule = Schedule(),
) -> tuple[Array, Array | None]:
  """Runs embedded rows through all layers; `turns` are `rotations` of their positions.

  If rows contain several texts, `segment_BT` is the text index of each token, and
  `shared` are the tokens that several texts begin with (`attention.attend`). Returns
  also, with recorded routes, the share [B, T] of the layers whose router would use the
  recorded experts; else None.
  """
  recorded_LBTK = None
  if routes_BTX is not None:
    recorded_LBTK = experts.by_layer(routes_BTX, spec)

  def attend(kind):
    return lambda q_BTHC, k_BTKC, v_BTKC: attention.attend(
      turned(q_BTHC, turns, kind),
      turned(k_BTKC, turns, kind),
      v_BTKC,
      kind=spec.attention,
      segment_BT=segment_BT,
      shared=shared,
      window=kind.window,
    )

  # Kernels need static windows, so each kind of layer is a branch of one program.
  kinds = list(dict.fromkeys(spec.layer_kinds))
  branches = [attend(kind) for kind in kinds]
  kind_L = None
  if len(kinds) > 1:
    kind_L = jnp.asarray([kinds.index(kind) for kind in spec.layer_kinds])

  def layer(x_BTD, of_layer):
    w, recorded_BTK, kind = of_layer
    heads = project(w, x_BTD, spec)
    if kind is None:
      attended_BTHC = branches[0](*heads)
    else:
      attended_BTHC = lax.switch(kind, branches, *heads)
    x_BTD, chosen = add_out(w, x_BTD, attended_BTHC, spec, recorded_BTK)
    agree_BT = None
    if chosen and recorded_BTK is not None:
      # Whether both have the same experts, in any order.
      agree_BT = (jnp.sort(recorded_BTK) == jnp.sort(chosen.live)).all(-1)
    return split(x_BTD, schedule), agree_BT

  x_BTD = split(x_BTD, schedule)
  of_layers = params['layers'], recorded_LBTK, kind_L
  x_BTD, agree_LBT = lax.scan(REMAT[schedule.remat](layer), x_BTD, of_layers)
  agree_BT = None if agree_LBT is None else agree_LBT.mean(0, dtype=jnp.float32)
  return norm(params, 'final_norm', x_BTD, spec), agree_BT
