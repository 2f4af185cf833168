"""Runs Qwen2.5-VL's vision tower: patches in, embeddings for the language model out.

Every layer attends within windows, or within pictures (`VisionSpec.full_layers`); the
merger joins 2 x 2 patches into one embedding of the language model.

Axis letters are those of grids.py. Norms, rotary positions and softmax are float32;
matrix products run in `spec.compute`.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from bapo_jax import sharding
from bapo_jax.models import attention, rope
from bapo_jax.models.layers import REMAT, Schedule, expand, product, rms_norm, rotate
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import grids
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.types import Tree


def forward(
  params: Tree,
  pixels_RZE: Array,
  grid_RI2: Array,
  spec: ModelSpec,
  windows: int,
  *,
  schedule: Schedule = Schedule(),
) -> Array:
  """Embeds the merged patches of each row, [R, M, D of the language model].

  Args:
    params: the tree below `vision`.
    pixels_RZE: uint8, the channels, rows and columns of each patch; E = v.numbers.
    grid_RI2: see `grids.layout`; the embedding of an empty patch is 0.
    windows: windows of a row, at least as many as its pictures have.
  """
  v = vision_of(spec)
  R, Z, _ = pixels_RZE.shape

  at = grids.layout(grid_RI2, Z, windows, v)
  x_RZD = _hidden(params, pixels_RZE, at, spec, schedule)
  y_RMX = rms_norm(x_RZD, params['merger_norm'], v.norm_eps)
  y_RMX = y_RMX.reshape(R, Z // v.merge**2, v.width * v.merge**2)
  y_RMX = _affine(y_RMX, params, 'merger_in')
  merged_RMD = _affine(jax.nn.gelu(y_RMX, approximate=False), params, 'merger_out')
  live_RM1 = (at.picture_RZ[:, :: v.merge**2] >= 0)[..., None]
  return jnp.where(live_RM1, merged_RMD, 0)


def _hidden(params, pixels_RZE, at: grids.Layout, spec, schedule: Schedule):
  v = vision_of(spec)
  # Half of the rotary pairs rotate by the row of a patch, half by the column.
  frequency, _ = rope.table(v.head_width // 2, v.rope_theta, 'default', ())
  angle = at.place_RZ2[..., None].astype(jnp.float32) * frequency[None, None, None]
  angle = angle.reshape(*at.place_RZ2.shape[:2], v.head_width // 2)
  sin = jnp.sin(angle)
  cos = jnp.cos(angle)

  def layer(x_RZD, xs):
    w, is_full = xs
    qkv_RZ3HC = _affine(rms_norm(x_RZD, w['attn_norm'], v.norm_eps), w, 'qkv')
    q, k, value = (qkv_RZ3HC[:, :, i] for i in range(3))
    attended_RZHC = lax.cond(
      is_full,
      lambda q, k, value: attention.attend(
        q, k, value, kind=spec.attention, segment_BT=at.picture_RZ, is_causal=False
      ),
      lambda q, k, value: _in_windows(q, k, value, at),
      rotate(q, sin, cos),
      rotate(k, sin, cos),
      value,
    )
    x_RZD = x_RZD + _affine(attended_RZHC, w, 'o', 2)
    y_RZD = rms_norm(x_RZD, w['mlp_norm'], v.norm_eps)
    y_RZF = jax.nn.silu(_affine(y_RZD, w, 'gate')) * _affine(y_RZD, w, 'up')
    x_RZD = x_RZD + _affine(y_RZF, w, 'down')
    return sharding.constrain(x_RZD, sharding.ROWS), None

  is_full_L = jnp.asarray([i in v.full_layers for i in range(v.layers)])
  # The kernel spans two frames, and a picture repeats its frame. One product with the
  # sum of the kernel over frames therefore suffices.
  mean_E, std_E = (
    jnp.repeat(jnp.asarray(x, jnp.float32), v.patch**2) for x in (v.mean, v.std)
  )
  x_RZE = pixels_RZE.astype(jnp.float32) / 255
  x_RZE = (x_RZE - mean_E[None, None]) / std_E[None, None]
  kernel_ED = params['patch'].sum(1).reshape(v.numbers, v.width)
  x_RZD = product(x_RZE.astype(spec.compute), kernel_ED)
  x_RZD = sharding.constrain(x_RZD, sharding.ROWS)
  xs = params['layers'], is_full_L
  return lax.scan(REMAT[schedule.remat](layer), x_RZD, xs)[0]


def vision_of(spec: ModelSpec) -> VisionSpec:
  """Returns the spec of a model's vision tower; raises a ValueError if it has none."""
  if spec.vision is None:
    raise ValueError('this model has no vision tower; choose a Qwen2.5-VL model')
  return spec.vision


def _in_windows(q_RZHC, k_RZHC, v_RZHC, at: grids.Layout):
  """Computes attention [R, Z, H, C] from each patch to the patches of its window.

  Windows are small and of one size, so the plain kernel suffices on every platform.
  """
  R, W, Y = at.patch_RWY.shape
  H, C = q_RZHC.shape[2:]
  patch_RX11 = jnp.maximum(at.patch_RWY, 0).reshape(R, W * Y, 1, 1)

  def windows(x_RZHC):
    x_RXHC = jnp.take_along_axis(x_RZHC, patch_RX11, 1)
    return x_RXHC.reshape(R * W, Y, H, C)

  attended_NYHC = attention.attend(
    *map(windows, (q_RZHC, k_RZHC, v_RZHC)),
    kind='plain',
    # Empty places of a window form a segment that no patch attends to.
    segment_BT=jnp.where(at.patch_RWY < 0, -1, 0).reshape(R * W, Y),
    is_causal=False,
  )
  slot_RZ11 = jnp.minimum(at.slot_RZ, W * Y - 1)[..., None, None]
  return jnp.take_along_axis(attended_NYHC.reshape(R, W * Y, H, C), slot_RZ11, 1)


def _affine(x, w, name, axes=1):
  """Multiplies x [..., *in] by a weight [*in, *out] and adds its bias."""
  bias = w[f'{name}_bias'].astype(x.dtype)
  out = product(x, w[name], axes)
  return out + expand(bias, out.ndim)
