"""Decoding with a cache of keys and values: one token per slot, and its prefill.

1. `empty_cache` holds the keys and values of every slot, in segments of columns;
2. `prefill` runs whole prompts and returns their keys and values;
3. `decode` moves every slot by one token through the same stacked weights, unrolled.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax.models import attention, layers
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Tree

KeysValues = tuple[Array, Array]  # two arrays [rows, columns, K, C], of one layer
Segments = list[KeysValues]  # one after the other


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
  _, (k_LRTKC, v_LRTKC) = layers.run(params, tokens_RT, spec, with_cache=True)
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
  x_SD = layers.embed(params, token_S, spec)
  new = []
  for i, segments in enumerate(cache):
    w = jax.tree.map(lambda p, i=i: p[i], params['layers'])
    q_SHC, k_SKC, v_SKC = layers.project(w, x_SD, position_S, spec)
    new.append(_extend(segments, k_SKC, v_SKC, position_S))
    attended_SHC = attention.cached(q_SHC, new[-1], position_S, kind=spec.attention)
    x_SD = layers.add_out(w, x_SD, attended_SHC, spec)
  return layers.rms_norm(x_SD, params['final_norm'], spec.norm_eps), new


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
