"""Decodes responses in JAX: a fixed set of slots, reused as their rows finish.

1. `admit` prefills R prompts and copies each into the slots of its A responses;
2. `run` advances every slot by at most n tokens in one dispatch;
3. `harvest` writes finished rows to the output and frees their slots;
4. `refresh` computes the cache of slots anew, under other weights or after a restart.

All four are compiled functions of `Slots`; partial_rollouts.py is the host's loop
around them. The noise of a token is a function of (key, uid of the response, position):
the text does not depend on the slot, on the other rows, or on how many tokens a
dispatch runs. Beside the letters of types.py: A responses admitted at once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Bool, Float32, Int32, UInt32

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.rollout import shapes
from bapo_jax.rollout.sampling import SOFTMAX, SamplingParams, draw
from bapo_jax.types import Pictures, Tree

DONE_CHECK_INTERVAL = 8  # tokens between two checks whether any slot is still busy


class Slots(NamedTuple):
  """S rows that are being decoded."""

  row_S: Int32[Array, ' S']  # output row that the slot is writing; -1: it is free
  uid_S: UInt32[Array, ' S']  # names the response; with the position it keys the noise
  tokens_ST: Int32[Array, 'S T']  # prompt, response so far, then whatever was there
  logp_ST: Float32[Array, 'S T']  # log mu(token), nats; from column prompt_length on
  policy_version_ST: Int32[
    Array, 'S T'
  ]  # learner step of the sampling weights; likewise
  prompt_length_S: Int32[Array, ' S']  # tokens in the prompt
  position_S: Int32[Array, ' S']  # column of the next token
  limit_S: Int32[Array, ' S']  # column at which the response is cut
  done_S: Bool[Array, ' S']  # an end token is written, or the limit is reached
  cache: Tree  # per layer segments of keys and values, as in decoder.empty_cache
  shift_S: Int32[Array, ' S'] | None = None  # of `sequence.prefill`, of a seeing model


class Rows(NamedTuple):
  """Finished rows; [P, G, T] once they are grouped."""

  tokens_BT: Int32[Array, 'B T']  # prompt, response, zeros
  logp_BT: Float32[Array, 'B T']  # log mu(token), nats; 0 outside the response
  policy_version_BT: Int32[Array, 'B T']  # of the sampling weights; -1 elsewhere

  @property
  def response_mask_BT(self) -> Array:
    """True on the response, its end token included."""
    return self.policy_version_BT >= 0


def empty(spec: ModelSpec, slots: int, length: int, parts: int = 1) -> Slots:
  """Free slots for rows of `length` tokens, their cache in `parts` segments at most."""
  zeros = functools.partial(jnp.zeros, slots)
  return Slots(
    row_S=jnp.full(slots, -1, jnp.int32),
    uid_S=zeros(jnp.uint32),
    tokens_ST=jnp.zeros((slots, length), jnp.int32),
    logp_ST=jnp.zeros((slots, length), jnp.float32),
    policy_version_ST=jnp.full((slots, length), -1, jnp.int32),
    prompt_length_S=zeros(jnp.int32),
    position_S=jnp.ones(slots, jnp.int32),
    limit_S=zeros(jnp.int32),
    done_S=jnp.ones(slots, bool),
    cache=decoder.empty_cache(spec, slots, shapes.segment_sizes(length, parts)),
    shift_S=zeros(jnp.int32) if spec.vision else None,
  )


def sync_actor(params: Tree, spec: ModelSpec, mesh: Mesh) -> Tree:
  """The actor of these weights, a copy; the learner may donate its own."""
  return _syncs(spec, mesh)[0](params)


def params_of(actor: Tree, spec: ModelSpec, mesh: Mesh) -> Tree:
  """The weights of an actor, placed as the learner's."""
  return _syncs(spec, mesh)[1](actor)


@functools.cache
def _syncs(spec: ModelSpec, mesh: Mesh) -> tuple[Wrapped, Wrapped]:
  """`sync_actor` and `params_of`, each compiled once per model and mesh."""

  def copy(params: Tree) -> Tree:
    return jax.tree.map(jnp.copy, decoder.actor(params, spec, decoder.joins(mesh)))

  def unstack(actor: Tree) -> Tree:
    return decoder.params_of(actor, spec)

  params = transformer.abstract(spec)
  actor = jax.eval_shape(copy, params)
  return (
    jax.jit(copy, out_shardings=sharding.shardings(actor, mesh, 'decode')),
    jax.jit(unstack, out_shardings=sharding.shardings(params, mesh)),
  )


def slot_shardings(like: Slots, mesh: Mesh) -> Slots:
  """The sharding of each array of the slots: by slot, keys and values by head too."""
  rows = sharding.over_rows(mesh)
  heads = sharding.over_cache(mesh, like.cache[0][0][0].shape[1])
  cache = jax.tree.map(lambda _: heads, like.cache)
  return jax.tree.map(lambda _: rows, like._replace(cache=()))._replace(cache=cache)


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='slots')
def admit(
  params: Tree,
  slots: Slots,
  tokens_RT: Array,
  length_R: Array,
  from_A: Array,
  slot_A: Array,
  row_A: Array,
  uid_A: Array,
  new_A: Array,
  pictures: Pictures | None = None,
  *,
  spec: ModelSpec,
) -> Slots:
  """Puts A responses to R prompts into free slots; each prompt is prefilled once.

  Args:
    from_A: which of the R prompts the response answers.
    slot_A: its slot; S, past the end, is nowhere: such an entry is padding.
    row_A, uid_A: its output row, and its name for the noise.
    new_A: most tokens of the response, its end token included.
    pictures: of the R prompts; None: texts.
  """
  tokens_AT, length_A = tokens_RT[from_A], length_R[from_A]

  def put(x: Array, value: Array | bool) -> Array:
    return x.at[slot_A].set(value, mode='drop')

  head = (slot_A, slice(0, tokens_RT.shape[1]))
  slots = slots._replace(
    row_S=put(slots.row_S, row_A),
    uid_S=put(slots.uid_S, uid_A),
    tokens_ST=slots.tokens_ST.at[head].set(tokens_AT, mode='drop'),
    prompt_length_S=put(slots.prompt_length_S, length_A),
    position_S=put(slots.position_S, length_A),
    limit_S=put(slots.limit_S, length_A + new_A),
    done_S=put(slots.done_S, False),
  )
  prefilled, shift_R = _prefill(params, tokens_RT, pictures, spec)
  return slots._replace(
    cache=decoder.store(slots.cache, prefilled, slot_A, from_A),
    shift_S=None if slots.shift_S is None else put(slots.shift_S, shift_R[from_A]),
  )


def _prefill(
  params: Tree, tokens_RT: Array, pictures: Pictures | None, spec: ModelSpec
) -> tuple[list[decoder.KeysValues], Array]:
  """(keys and values, shift_R) of rows, by their pictures if there are any."""
  if pictures is None:
    shift_R = jnp.zeros(tokens_RT.shape[0], jnp.int32)
    return decoder.prefill(params, tokens_RT, spec), shift_R
  return sequence.prefill(params, tokens_RT, pictures, spec)


@functools.partial(
  jax.jit, static_argnames=('spec', 'columns'), donate_argnames='slots'
)
def refresh(
  params: Tree,
  slots: Slots,
  slot_A: Array,
  pictures: Pictures | None = None,
  *,
  spec: ModelSpec,
  columns: int,
) -> Slots:
  """Computes the first `columns` of the cache of these slots from their tokens.

  Args:
    pictures: of the A prompts in them, as `admit` has had them.
  """
  tokens_At = slots.tokens_ST[jnp.minimum(slot_A, slots.row_S.shape[0] - 1), :columns]
  prefilled, _ = _prefill(params, tokens_At, pictures, spec)
  each_A = jnp.arange(slot_A.shape[0])
  return slots._replace(cache=decoder.store(slots.cache, prefilled, slot_A, each_A))


@functools.partial(
  jax.jit, static_argnames=('spec', 'eos', 'live', 'sampling'), donate_argnames='slots'
)
def run(
  params: Tree,
  slots: Slots,
  key: Array,
  temperature: Array | float,
  n: Array | int,
  policy_version: Array | int,
  *,
  spec: ModelSpec,
  eos: tuple[int, ...],
  live: int,
  sampling: SamplingParams = SOFTMAX,
) -> tuple[Slots, Array]:
  """(slots, position_S): every busy slot has up to n more tokens.

  Args:
    n: tokens per slot; may change from call to call, nothing compiles anew.
    policy_version: learner step of these weights.
    live: segments of the cache that hold every column of this dispatch; attention
      reads no others.

  Returns:
    position_S, i32: the slot's position, negative where it is done; an array of its
    own, the same on every device, to be read when the slots are long donated.
  """
  draw_token = functools.partial(
    draw, key=key, temperature=temperature, sampling=sampling
  )
  step = functools.partial(_step, params, spec, eos, policy_version, draw_token)

  def some_steps(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
    i, s = carry
    steps = jnp.minimum(DONE_CHECK_INTERVAL, n - i)
    s = jax.lax.fori_loop(0, steps, lambda _, s: step(s), s)
    return i + DONE_CHECK_INTERVAL, s

  def unfinished(carry: tuple[Array, Slots]) -> Array:
    # The only reduction over slots, and so over devices: once per DONE_CHECK_INTERVAL.
    return (carry[0] < n) & ~carry[1].done_S.all()

  near = [layer[:live] for layer in slots.cache]
  far = [layer[live:] for layer in slots.cache]
  carry = jnp.int32(0), slots._replace(cache=near)
  _, s = jax.lax.while_loop(unfinished, some_steps, carry)
  cache = [a + b for a, b in zip(s.cache, far, strict=True)]
  position_S = jnp.where(s.done_S, -s.position_S, s.position_S)
  return s._replace(cache=cache), sharding.constrain(position_S, None)


def _step(
  params: Tree,
  spec: ModelSpec,
  eos: tuple[int, ...],
  policy_version: Array | int,
  draw_token: Callable[..., tuple[Array, Array]],
  s: Slots,
) -> Slots:
  """One token in every busy slot."""
  ends = jnp.asarray(eos)
  # The newest token, read again at its own position: so a prompt's last token needs
  # no logits at prefill, and a finished slot rewrites what is there already.
  token_S = jnp.take_along_axis(s.tokens_ST, s.position_S[:, None] - 1, 1)[:, 0]
  hidden_SD, cache = decoder.decode(
    params, token_S, s.position_S - 1, s.cache, spec, s.shift_S
  )
  logits_SV = jnp.einsum(
    'sd,vd->sv',
    hidden_SD,
    transformer.head(params).astype(hidden_SD.dtype),
    preferred_element_type=jnp.float32,
  )
  token_S, logp_S = draw_token(
    uid_S=s.uid_S, position_S=s.position_S, logits_SV=logits_SV
  )
  live_S = ~s.done_S & (s.row_S >= 0)
  at_S = jnp.where(live_S, s.position_S, s.tokens_ST.shape[1])
  version_S = jnp.full_like(at_S, policy_version)
  position_S = s.position_S + live_S
  ended_S = (token_S[:, None] == ends[None]).any(1)
  return s._replace(
    tokens_ST=decoder.put(s.tokens_ST, token_S, at_S),
    logp_ST=decoder.put(s.logp_ST, logp_S, at_S),
    policy_version_ST=decoder.put(s.policy_version_ST, version_S, at_S),
    position_S=position_S,
    done_S=~live_S | ended_S | (position_S >= s.limit_S),
    cache=cache,
  )


@functools.partial(jax.jit, donate_argnames=('slots', 'rows'))
def harvest(slots: Slots, rows: Rows) -> tuple[Slots, Rows]:
  """Copies finished rows to the output and frees their slots."""
  column_T = jnp.arange(rows.tokens_BT.shape[1])[None]
  written_ST = column_T < slots.position_S[:, None]
  response_mask_ST = written_ST & (column_T >= slots.prompt_length_S[:, None])
  ready_S = slots.done_S & (slots.row_S >= 0)
  to_S = jnp.where(ready_S, slots.row_S, rows.tokens_BT.shape[0])

  def put(x_BT: Array, value_ST: Array) -> Array:
    return x_BT.at[to_S].set(value_ST, mode='drop')

  rows = Rows(
    put(rows.tokens_BT, jnp.where(written_ST, slots.tokens_ST, 0)),
    put(rows.logp_BT, jnp.where(response_mask_ST, slots.logp_ST, 0)),
    put(
      rows.policy_version_BT, jnp.where(response_mask_ST, slots.policy_version_ST, -1)
    ),
  )
  return slots._replace(row_S=jnp.where(ready_S, -1, slots.row_S)), rows


@functools.partial(jax.jit, static_argnames='group')
def take_groups(rows: Rows, place_P: Array, filled_P: Array, group: int) -> Rows:
  """The rows of these places as [P, G, T]; where filled_P is False, empty ones."""

  def grouped(x_BT: Array, nothing: float) -> Array:
    x_PGT = x_BT.reshape(-1, group, x_BT.shape[1])[place_P]
    x_PGT = jnp.where(filled_P[:, None, None], x_PGT, nothing)
    return sharding.constrain(x_PGT, sharding.ROWS)

  return Rows(*map(grouped, rows, (0, 0.0, -1)))
