"""Decoding with a cache of keys and values: one token per slot, and its prefill.

1. `actor` lays the parameters out as decoding reads them, a layer at a time, and
   `params_of` reverses it;
2. `empty_cache` holds the keys and values of every slot, in segments of columns;
3. `prefill` runs whole prompts through an actor and returns their keys and values;
4. `decode` moves every slot by one token through the same actor.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models import attention, layers, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Tree

KeysValues = tuple[Array, Array]  # two arrays [rows, columns, K, C], of one layer
Segments = list[KeysValues]  # one after the other
JOINED = ('qkv', 'gate_up', 'out')  # of an actor alone


def actor(params: Tree, spec: ModelSpec, joined: bool = True) -> Tree:
  """The parameters as decoding reads them, in `spec.compute`: `layers` is a list.

  A step would copy each layer out of stacked arrays: 20 ms of the 97 of SmolLM2-135M at
  32 slots on two cores.

  Args:
    joined: `qkv` [D, (H + 2K) C], `gate_up` [D, 2F] and `out` [H C, D] in place of
      their parts: fewer, larger products, of two axes each: of three, XLA's CPU backend
      transposes the weights first.
  """
  cast = transformer.cast(params, spec.compute)

  def layer(i: int) -> Tree:
    w = {name: x[i] for name, x in cast['layers'].items()}
    if joined:
      qkv = [w.pop(name).reshape(spec.width, -1) for name in 'qkv']
      w['qkv'] = jnp.concatenate(qkv, 1)
      w['gate_up'] = jnp.concatenate([w.pop('gate'), w.pop('up')], 1)
      w['out'] = w.pop('o').reshape(-1, spec.width)
    return w

  return cast | {'layers': [layer(i) for i in range(spec.layers)]}


def joins(mesh: Mesh) -> bool:
  """Whether an actor on this mesh is joined: not where heads are split, whose shards
  would then hold parts of different arrays."""
  return mesh.shape['tensor'] == 1


def params_of(actor: Tree, spec: ModelSpec) -> Tree:
  """The parameters that an actor was made of, in its dtypes."""
  D, H, K, C = spec.width, spec.heads, spec.kv_heads, spec.head_width

  def layer(w: Tree) -> Tree:
    if 'qkv' in w:
      parts = jnp.split(w['qkv'].reshape(D, -1, C), (H, H + K), axis=1)
      gate, up = jnp.split(w['gate_up'], 2, axis=1)
      w = w | dict(zip('qkv', parts, strict=True)) | {'gate': gate, 'up': up}
      w['o'] = w['out'].reshape(H, C, D)
    return {name: x for name, x in w.items() if name not in JOINED}

  stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(layer, actor['layers']))
  return actor | {'layers': stacked}


def empty_cache(spec: ModelSpec, slots: int, columns: list[int]) -> list[Segments]:
  """Zeros for the keys and values of every layer, in segments of these columns.

  This layout with `.at[s, position].set` is written in place; [S, K, T, C] would cost a
  hidden second cache (1094 MiB of temporaries for a 1 GiB cache, measured). A segment
  that no slot has reached is not read: a slice of one long array would be copied.
  """

  def zeros(n: int) -> Array:
    return jnp.zeros((slots, n, spec.kv_heads, spec.head_width), spec.compute)

  return [[(zeros(n), zeros(n)) for n in columns] for _ in range(spec.layers)]


def prefill(actor: Tree, tokens_RT: Array, spec: ModelSpec) -> list[KeysValues]:
  """Keys and values [R, T, K, C] of every layer, for R prompts."""
  turn_RTc = layers.rotations(
    jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape), spec
  )
  x_RTD = sharding.constrain(layers.embed_rows(actor, tokens_RT, spec), sharding.ROWS)
  found = []
  for w in actor['layers']:
    q_RTHC, k_RTKC, v_RTKC = layers.project(w, x_RTD, turn_RTc, spec)
    found.append((k_RTKC, v_RTKC))
    attended_RTHC = attention.causal(q_RTHC, k_RTKC, v_RTKC, kind=spec.attention)
    x_RTD = sharding.constrain(
      layers.add_out(w, x_RTD, attended_RTHC, spec), sharding.ROWS
    )
  return found


@functools.partial(jax.named_call, name='decode')
def decode(
  actor: Tree,
  token_S: Array,
  position_S: Array,
  cache: list[Segments],
  spec: ModelSpec,
) -> tuple[Array, list[Segments]]:
  """One token per slot: (final hidden states [S, D], the cache with these tokens).

  Unrolled: scanning the layers here would copy each layer's cache at each token (211
  MiB of temporaries against 14 at 28 layers).
  """
  turn_Sc = layers.rotations(position_S, spec)
  x_SD, new = layers.embed(actor, token_S, spec), []
  for w, segments in zip(actor['layers'], cache, strict=True):
    q_SHC, k_SKC, v_SKC = layers.project(w, x_SD, turn_Sc, spec)
    new.append(_extend(segments, k_SKC, v_SKC, position_S))
    attended_SHC = attention.cached(q_SHC, new[-1], position_S, kind=spec.attention)
    x_SD = layers.add_out(w, x_SD, attended_SHC, spec)
  return layers.rms_norm(x_SD, actor['final_norm'], spec.norm_eps), new


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
