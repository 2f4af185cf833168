"""Decodes one token per slot with a cache of keys and values, and prefills the cache.

An actor is the parameters rearranged for decoding. `prefill` runs whole prompts through
it, `store` writes their keys and values to slots of the cache, and `decode` advances
every slot by one token.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models import attention, experts, layers, lora, quantized, transformer
from bapo_jax.models.knobs import PROJECTIONS
from bapo_jax.models.quantized import Quantized
from bapo_jax.models.scatter import KeysValues, put, put_values
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Tree

Segments = list[KeysValues]  # consecutive columns
Cache = list[Segments]  # of every layer
JOINED = ('qkv', 'gate_up', 'out')  # weights that only actors have


def actor(params: Tree, spec: ModelSpec, joined: bool = True) -> Tree:
  """Rearranges the parameters for decoding: a list of layers, in `spec.compute`.

  The layers' projections are quantised to `spec.actor_dtype`, unless this is 'compute';
  projections that are quantised already are unchanged.

  With stacked layers, every decoded token would copy each layer: 20 of 97 ms for
  SmolLM2-135M with 32 slots on two cores. If `joined`, weights are joined into `qkv`
  [D, (H + 2K) C], `gate_up` [D, 2F] and `out` [H C, D], for fewer and larger products.
  Joined weights have two axes: XLA's CPU backend would transpose weights with three.
  """

  def layer(i):
    w = {name: lora.layer(x, i) for name, x in params['layers'].items()}
    for path, axes in PROJECTIONS.items():
      if (name := path.removeprefix('layers/')) in w:
        w[name] = quantized.quantize(w[name], axes, spec.actor_dtype)
    for name in transformer.EXPERTS if spec.experts else ():
      quantize = functools.partial(quantized.quantize, axes=1, dtype=spec.actor_dtype)
      w[name] = jax.vmap(quantize)(w[name])
    wide = {name: x for name, x in w.items() if not isinstance(x, Quantized)}
    w |= transformer.cast(wide, spec.compute)
    if joined:
      heads = [
        jax.tree.map(lambda x: x.reshape(*x.shape[:-2], -1), w.pop(name))
        for name in 'qkv'
      ]
      w['qkv'] = quantized.concatenate(*heads)
      if not spec.experts:
        w['gate_up'] = quantized.concatenate(w.pop('gate'), w.pop('up'))
      flat = functools.partial(jnp.reshape, shape=(-1, spec.width))
      w['out'] = quantized.map_values(flat, w.pop('o'))
    return w

  rest = {name: x for name, x in params.items() if name != 'layers'}
  rest = transformer.cast(rest, spec.compute)
  return rest | {'layers': [layer(i) for i in range(spec.layers)]}


def joins(mesh: Mesh) -> bool:
  """Returns whether an actor on this mesh joins weights.

  If heads are sharded, a shard of a joined weight would mix queries, keys and values.
  """
  return mesh.shape['tensor'] == 1


def params_of(actor: Tree, spec: ModelSpec) -> Tree:
  """Recovers the parameters from an actor, in the actor's dtypes.

  Quantised projections remain quantised, so that `actor(params_of(a))` equals a.
  """
  D = spec.width
  H = spec.heads
  K = spec.kv_heads
  C = spec.head_width

  def layer(w):
    if 'qkv' in w:
      ends = 0, H * C, (H + K) * C, (H + 2 * K) * C
      w = dict(w)
      for name, (start, end) in zip('qkv', itertools.pairwise(ends), strict=True):
        w[name] = jax.tree.map(
          lambda x, at=slice(start, end): x[..., at].reshape(*x.shape[:-1], -1, C),
          w['qkv'],
        )
      if not spec.experts:
        w['gate'] = jax.tree.map(lambda x: x[..., : spec.ffn], w['gate_up'])
        w['up'] = jax.tree.map(lambda x: x[..., spec.ffn :], w['gate_up'])
      heads = functools.partial(jnp.reshape, shape=(H, C, D))
      w['o'] = quantized.map_values(heads, w['out'])
    return {name: x for name, x in w.items() if name not in JOINED}

  stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(layer, actor['layers']))
  return actor | {'layers': stacked}


def is_ragged(spec: ModelSpec) -> bool:
  """Returns whether decoding reads only the live blocks of each slot's cache.

  The kernel of ragged.py does, on the platforms that have a kernel for whole rows.
  model.attention=plain turns both off. The kernel's products need heads whose width is
  a power of two, 16 or more.
  """
  kind = spec.attention
  C = spec.head_width
  if kind is None:
    kind = attention.resolve(kind, jax.default_backend(), spec.compute, C)
  return kind != 'plain' and C >= 16 and C.bit_count() == 1


def empty_cache(spec: ModelSpec, slots: int, columns: list[int]) -> Cache:
  """Returns zeros for the keys and values of every layer, in segments of `columns`.

  Keys are [slots, K, C, n] and values [slots, K, n, C], which `attention.cached` reads
  without a transpose. Decoding skips segments that no slot has reached; a slice of a
  single array would be copied. If the spec `is_ragged`, there is one segment, whose
  columns are a multiple of attention.LANES.
  """

  def zeros(*shape):
    return jnp.zeros((slots, spec.kv_heads, *shape), spec.compute)

  C = spec.head_width
  return [[(zeros(C, n), zeros(n, C)) for n in columns] for _ in range(spec.layers)]


class Prefilled(NamedTuple):
  """The result of the first columns of R rows."""

  cache: list[KeysValues]  # of every layer: keys [R, K, C, T] and values [R, K, T, C]
  routes_RTX: Array | None  # used in these columns; None: none are recorded


def prefill(
  actor: Tree,
  x_RTD: Array,
  turns: layers.Turns,
  spec: ModelSpec,
  routes_RTX: Array | None = None,
) -> Prefilled:
  """Computes keys and values of every layer for R embedded prompts.

  `turns` are the `rotations` of their positions. Uses the recorded routes, if any.
  """
  x_RTD = sharding.constrain(x_RTD, sharding.ROWS)
  prefilled = []
  used = []
  recorded = itertools.repeat(None)
  if routes_RTX is not None:
    recorded = experts.by_layer(routes_RTX, spec)
  of_layers = zip(actor['layers'], spec.layer_kinds, recorded, strict=False)
  for w, kind, recorded_RTK in of_layers:
    q_RTHC, k_RTKC, v_RTKC = layers.project(w, x_RTD, spec)
    q_RTHC = layers.turned(q_RTHC, turns, kind)
    k_RTKC = layers.turned(k_RTKC, turns, kind)
    prefilled.append((k_RTKC.transpose(0, 2, 3, 1), v_RTKC.swapaxes(1, 2)))
    attended_RTHC = attention.attend(
      q_RTHC, k_RTKC, v_RTKC, kind=spec.attention, window=kind.window
    )
    x_RTD, chosen = layers.add_out(w, x_RTD, attended_RTHC, spec, recorded_RTK)
    x_RTD = sharding.constrain(x_RTD, sharding.ROWS)
    used.append(chosen)
  used_RTX = _record(used, spec)
  if routes_RTX is not None and used_RTX is not None and spec.routes:
    # A token keeps the route that it had when the next token was sampled.
    used_RTX = jnp.where(routes_RTX == spec.routes.none, used_RTX, routes_RTX)
  return Prefilled(prefilled, used_RTX)


def _record(chosen: list[experts.Chosen | None], spec: ModelSpec) -> Array | None:
  """Returns the routes [..., X] of the experts that each layer used, if recorded."""
  if spec.routes is None:
    return None
  used = [of_layer.used for of_layer in chosen if of_layer]
  return jnp.concatenate(used, -1).astype(spec.routes.dtype)


def store(
  cache: Cache, prefilled: list[KeysValues], slot_A: Array, from_A: Array
) -> Cache:
  """Writes prefilled row from_A[a] to cache slot slot_A[a] for all a; skips slot S."""
  filled = []
  for layer, (k_RKCT, v_RKTC) in zip(cache, prefilled, strict=True):
    start = 0
    new = []
    # Each segment takes its columns of the prompts; later segments are unchanged.
    for k_SKCt, v_SKtC in layer:
      end = start + v_SKtC.shape[2]
      piece_k = k_RKCT[..., start:end]
      piece_v = v_RKTC[:, :, start:end]
      if n := piece_v.shape[2]:
        k_SKCt = k_SKCt.at[slot_A, :, :, :n].set(piece_k[from_A], mode='drop')
        v_SKtC = v_SKtC.at[slot_A, :, :n].set(piece_v[from_A], mode='drop')
      new.append((k_SKCt, v_SKtC))
      start = end
    filled.append(new)
  return filled


@functools.partial(jax.named_call, name='decode')
def decode(
  actor: Tree,
  token_S: Array,
  position_S: Array,
  cache: Cache,
  spec: ModelSpec,
  shift_S: Array | None = None,
  done_S: Array | None = None,
) -> tuple[Array, Cache, Array | None]:
  """Decodes a token per slot.

  Returns (final hidden states [S, D], extended cache, routes [S, X] of these tokens if
  they are recorded).

  Layers are unrolled: a scan would copy the cache of each layer at each token (211 MiB
  of temporaries instead of 14 at 28 layers).

  Args:
    position_S: cache column of each token; its rotary position is this plus shift_S.
    shift_S: see `sequence.prefill`; None stands for 0, for prompts without pictures.
    done_S: slots whose hidden states are not used. A ragged kernel reads one block of
      their cache. None: no slot.
  """
  rotary_S = position_S if shift_S is None else position_S + shift_S
  turns = layers.rotations(rotary_S, spec)
  x_SD = layers.embed(actor, token_S, spec)
  new = []
  used = []
  length_S = position_S + 1
  if done_S is not None:
    length_S = jnp.where(done_S, 1, length_S)
  of_layers = zip(actor['layers'], spec.layer_kinds, cache, strict=True)
  for w, kind, segments in of_layers:
    q_SHC, k_SKC, v_SKC = layers.project(w, x_SD, spec)
    q_SHC = layers.turned(q_SHC, turns, kind)
    k_SKC = layers.turned(k_SKC, turns, kind)
    if is_ragged(spec):
      from bapo_jax.models import ragged  # loads Pallas

      attended_SHC, extended = ragged.attend(
        q_SHC, (k_SKC, v_SKC), segments[0], position_S, length_S, kind.window
      )
      new.append([extended])
    else:
      new.append(_extend(segments, k_SKC, v_SKC, position_S))
      attended_SHC = attention.cached(q_SHC, new[-1], position_S, kind.window)
    x_SD, chosen = layers.add_out(w, x_SD, attended_SHC, spec)
    used.append(chosen)
  hidden_SD = layers.norm(actor, 'final_norm', x_SD, spec)
  return hidden_SD, new, _record(used, spec)


def _extend(segments: Segments, k_SKC, v_SKC, position_S):
  start = 0
  new = []
  for k_SKCt, v_SKtC in segments:
    columns = v_SKtC.shape[2]
    # A negative index would count from the end; an index past the end is dropped.
    at_S = jnp.where(position_S < start, columns, position_S - start)
    new.append((put(k_SKCt, k_SKC, at_S, 3), put_values(v_SKtC, v_SKC, at_S)))
    start += columns
  return new
