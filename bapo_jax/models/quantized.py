"""Stores projections with one byte per weight and one scale per output channel.

`quantize` divides each output channel by a scale, so that its largest weight is the
largest number of the narrow type, and rounds (symmetric absmax quantisation).
`layers.product` multiplies by the narrow numbers and scales the result; no wide copy
of the weight is needed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class Quantized(struct.PyTreeNode):
  """A projection [..., *in, *out], approximately `values` times `scale`."""

  values: Array  # int8 or float8_e4m3fn [..., *in, *out]
  scale: Array  # float32 [..., *out]


Weight = Array | Quantized


def quantize(w: Weight, axes: int, dtype: str) -> Weight:
  """Quantises a projection [*in, *out] with `axes` input axes.

  The error of an int8 weight is at most scale / 2. That of a float8_e4m3fn weight,
  which has 3 bits of mantissa, is at most |weight| / 16, or scale / 1024 if larger.
  Returns w itself if it is quantised, or if `dtype` is 'compute' (no quantisation).
  """
  if dtype == 'compute' or isinstance(w, Quantized):
    return w
  whole = jnp.issubdtype(dtype, jnp.integer)
  largest = float((jnp.iinfo if whole else jnp.finfo)(dtype).max)
  w = w.astype(jnp.float32)
  peak = jnp.abs(w).max(tuple(range(axes)))
  # A channel of zeros has the smallest scale whose quotients are finite.
  scale = jnp.maximum(peak / largest, jnp.finfo(jnp.float32).tiny)
  scaled = w / scale.reshape((1,) * axes + scale.shape)
  return Quantized((jnp.round(scaled) if whole else scaled).astype(dtype), scale)


def map_values(function: Callable[[Array], Array], w: Weight) -> Weight:
  """Applies a function that leaves the output channels alone, to values or a weight."""
  if not isinstance(w, Quantized):
    return function(w)
  return w.replace(values=function(w.values))


def concatenate(*weights: Weight) -> Weight:
  """Joins projections along their last output axis; all or none are quantised."""
  return jax.tree.map(lambda *x: jnp.concatenate(x, -1), *weights)
