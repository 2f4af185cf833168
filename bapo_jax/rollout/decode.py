"""Decodes responses on the device, in a fixed set of slots that are reused.

1. `admit` prefills R prompts and copies each into the slots of its responses, A in all;
2. `run` advances every slot by at most n tokens in one dispatch;
3. `harvest` copies finished rows to the output and frees their slots; a row with a stop
   string, which the host finds in the tokens that `recent` returns, ends there;
4. `refresh` recomputes the cache of slots, for new weights or after a restart;
5. `resume` puts finished rows back into slots, with a message after their last turn.

All are compiled functions of `Slots`; partial_rollouts.py runs the host's loop
around them. (key, uid of the response, position) determine the noise of a token, so a
response depends neither on its slot, nor on other rows, nor on the dispatch length.
Besides the axes of types.py, A is the number of responses admitted at once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Wrapped
from jaxtyping import Bool, Float32, Int32, UInt, UInt32

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.models.scatter import put
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.rollout import shapes
from bapo_jax.rollout.sampling import SOFTMAX, SamplingParams, draw
from bapo_jax.runtime.ahead import Call
from bapo_jax.types import GIVEN, Pictures, Tree

DONE_CHECK_INTERVAL = 8  # tokens between two checks for a busy slot


class Slots(NamedTuple):
  """The state of the S decode slots, each with one unfinished row or free."""

  row_S: Int32[Array, ' S']  # output row of the response; -1: the slot is free
  uid_S: UInt32[Array, ' S']  # names the response, for the noise
  tokens_ST: Int32[Array, 'S T']  # prompt, response so far, then leftovers
  # From column prompt_length on:
  logp_ST: Float32[Array, 'S T']  # log mu(token), nats
  policy_version_ST: Int32[Array, 'S T']  # learner step of the sampling weights
  prompt_length_S: Int32[Array, ' S']  # tokens in the prompt
  position_S: Int32[Array, ' S']  # column of the next token
  limit_S: Int32[Array, ' S']  # column at which the response is cut off
  done_S: Bool[Array, ' S']  # an end token is written, or the limit is reached
  cache: Tree  # segments of keys and values per layer, as in decoder.empty_cache
  shift_S: Int32[Array, ' S'] | None = None  # see `sequence.prefill`; None: text only
  routes_STX: UInt[Array, 'S T X'] | None = None  # see types.Groups, then leftovers


class Rows(NamedTuple):
  """Rows whose last turn has ended; `take_groups` returns them as [P, G, T]."""

  tokens_BT: Int32[Array, 'B T']  # prompt, response, zeros
  logp_BT: Float32[Array, 'B T']  # log mu(token), nats; 0 outside the response
  policy_version_BT: Int32[Array, 'B T']  # step of the weights, or GIVEN; -1 elsewhere
  routes_BTX: UInt[Array, 'B T X'] | None = None  # see types.Groups

  @property
  def response_mask_BT(self) -> Array:
    """Returns the mask of what the policy sampled, end tokens included."""
    return self.policy_version_BT >= 0

  def empty(self) -> 'Rows':
    """Returns the number in each array that stands for no token."""
    routes_BTX = self.routes_BTX
    none = None if routes_BTX is None else jnp.iinfo(routes_BTX.dtype).max
    return Rows._make((0, 0.0, -1, none))


class Entering(NamedTuple):
  """The A rows that enter slots; fields are i32, stacked for one copy to the device."""

  slot_A: Any  # free slots; entries equal to S are padding, and are dropped
  row_A: Any  # output rows
  uid_A: Any  # names of the responses, for the noise; the bits of u32
  prompt_A: Any  # tokens of each prompt
  position_A: Any  # column of the next token
  limit_A: Any  # column at which the response is cut off


def empty(spec: ModelSpec, slots: int, length: int, parts: int = 1) -> Slots:
  """Returns free slots for rows of `length` tokens; parts: `shapes.cache_columns`."""
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
    cache=decoder.empty_cache(spec, slots, shapes.cache_columns(spec, length, parts)),
    shift_S=zeros(jnp.int32) if spec.vision else None,
    routes_STX=spec.routes.empty(slots, length) if spec.routes else None,
  )


def sync_actor(params: Tree, spec: ModelSpec, mesh: Mesh) -> Tree:
  """Copies the weights to the decoding layout; the originals may then be donated."""
  return _syncs(spec, mesh)[0](params)


def sync_program(params: Tree, spec: ModelSpec, mesh: Mesh) -> Call:
  """Returns the program of `sync_actor`."""
  return Call(None, _syncs(spec, mesh)[0], params)


def params_of(actor: Tree, spec: ModelSpec) -> Tree:
  """Returns an actor's weights in the learner's structure and layout, on its mesh."""
  mesh = jax.tree.leaves(actor)[0].sharding.mesh
  return _syncs(spec, mesh)[1](actor)


@functools.cache  # a plan compares arrays by identity
def abstract_actor(spec: ModelSpec, mesh: Mesh) -> Tree:
  """Returns the shapes, types and shardings of an actor."""
  make = functools.partial(decoder.actor, spec=spec, joined=decoder.joins(mesh))
  actor = jax.eval_shape(make, transformer.abstract(spec))
  return sharding.abstract(actor, sharding.shardings(actor, mesh, 'decode'))


@functools.cache
def _syncs(spec: ModelSpec, mesh: Mesh) -> tuple[Wrapped, Wrapped]:
  """Compiles `sync_actor` and `params_of`, once per model and mesh."""

  def copy(params: Tree) -> Tree:
    return jax.tree.map(jnp.copy, decoder.actor(params, spec, decoder.joins(mesh)))

  def unstack(actor: Tree) -> Tree:
    return decoder.params_of(actor, spec)

  actor = abstract_actor(spec, mesh)
  params = jax.eval_shape(unstack, actor)  # with quantised projections, if any
  return (
    jax.jit(copy, out_shardings=jax.tree.map(lambda x: x.sharding, actor)),
    jax.jit(unstack, out_shardings=sharding.shardings(params, mesh)),
  )


def slot_shardings(like: Slots, mesh: Mesh | AbstractMesh) -> Slots:
  """Returns the shardings of `Slots`: split by slot, and the cache also by head."""
  heads = sharding.over_cache(mesh, like.cache[0][0][0].shape[1])
  cache = jax.tree.map(lambda _: heads, like.cache)
  return sharding.layout_of_rows(like._replace(cache=()), mesh)._replace(cache=cache)


def _constrain(slots: Slots) -> Slots:
  """Shards the slots over the ambient mesh, if there is one."""
  mesh = sharding.ambient()
  if mesh is None:
    return slots
  return jax.lax.with_sharding_constraint(slots, slot_shardings(slots, mesh))


@jax.jit(static_argnames='spec', donate_argnames='slots')
def admit(
  params: Tree,
  slots: Slots,
  tokens_RT: Array,
  from_A: Array,
  packed_6A: Array,
  pictures: Pictures | None = None,
  *,
  spec: ModelSpec,
) -> Slots:
  """Starts A responses to R prompts in free slots; prefills each prompt once.

  Donates `slots`.

  Args:
    tokens_RT: i32, prompts, at one of the prefill widths.
    from_A: i32, index of the prompt that the response answers.
    packed_6A: i32, see `Entering`.
    pictures: pictures of the R prompts; None for text only.
  """
  entering = Entering(*packed_6A)
  # Only the prompt's columns are written. Leftovers in later columns are never read:
  # masks end at position_S, and `harvest` copies the columns before position_S.
  head = (entering.slot_A, slice(0, tokens_RT.shape[1]))
  slots = _occupied(slots, entering)
  slots = slots._replace(
    tokens_ST=slots.tokens_ST.at[head].set(tokens_RT[from_A], mode='drop')
  )
  return _prefilled(
    params,
    slots,
    entering.slot_A,
    tokens_RT=tokens_RT,
    pictures=pictures,
    spec=spec,
    from_A=from_A,
  )


def _occupied(slots: Slots, entering: Entering) -> Slots:
  """Fills slots with rows, except for the fields that have a column per token."""

  def put(x: Array, value: Array | bool) -> Array:
    return x.at[entering.slot_A].set(value, mode='drop')

  return slots._replace(
    row_S=put(slots.row_S, entering.row_A),
    uid_S=put(slots.uid_S, entering.uid_A.astype(jnp.uint32)),
    prompt_length_S=put(slots.prompt_length_S, entering.prompt_A),
    position_S=put(slots.position_S, entering.position_A),
    limit_S=put(slots.limit_S, entering.limit_A),
    done_S=put(slots.done_S, False),
  )


def _prefilled(
  params: Tree,
  slots: Slots,
  slot_A: Array,
  tokens_RT: Array,
  pictures: Pictures | None,
  spec: ModelSpec,
  routes_RTX: Array | None = None,
  from_A: Array | None = None,
) -> Slots:
  """Prefills rows, with pictures or with recorded routes.

  Cache, shift and routes of row from_A[a], by default a, go to slot slot_A[a].
  """
  prefilled, shift_R = sequence.prefill(params, tokens_RT, pictures, spec, routes_RTX)
  from_A = jnp.arange(slot_A.shape[0]) if from_A is None else from_A
  cache = decoder.store(slots.cache, prefilled.cache, slot_A, from_A)
  slots = slots._replace(cache=cache)
  if slots.shift_S is not None:
    shift_S = slots.shift_S.at[slot_A].set(shift_R[from_A], mode='drop')
    slots = slots._replace(shift_S=shift_S)
  if slots.routes_STX is not None and prefilled.routes_RTX is not None:
    head = slot_A, slice(0, tokens_RT.shape[1])
    routes_AtX = prefilled.routes_RTX[from_A]
    routes_STX = slots.routes_STX.at[head].set(routes_AtX, mode='drop')
    slots = slots._replace(routes_STX=routes_STX)
  return _constrain(slots)


@jax.jit(static_argnames=('spec', 'columns'), donate_argnames='slots')
def refresh(
  params: Tree,
  slots: Slots,
  slot_A: Array,
  pictures: Pictures | None = None,
  *,
  spec: ModelSpec,
  columns: int,
) -> Slots:
  """Recomputes the first `columns` cache columns of some slots from their tokens.

  Donates `slots`. Recorded routes are kept, and used.

  Args:
    slot_A: i32, the slots. Entries equal to S are padding and are dropped.
    pictures: pictures of the A prompts in the slots; None for text only.
    columns: number of columns, at least the largest position of these slots.
  """
  at_A = jnp.minimum(slot_A, slots.row_S.shape[0] - 1)
  routes_AtX = None
  if slots.routes_STX is not None:
    # The newest token has not been read yet.
    routes_AtX = _read(slots.routes_STX[at_A, :columns], slots.position_S[at_A] - 1)
  return _prefilled(
    params,
    slots,
    slot_A,
    tokens_RT=slots.tokens_ST[at_A, :columns],
    pictures=pictures,
    spec=spec,
    routes_RTX=routes_AtX,
  )


def _read(routes_BTX: Array, end_B: Array) -> Array:
  """Returns the routes of columns before end_B; the others have no recorded one."""
  column_T = jnp.arange(routes_BTX.shape[1])
  is_read_BT = column_T[None] < end_B[:, None]
  none = jnp.iinfo(routes_BTX.dtype).max
  return jnp.where(is_read_BT[..., None], routes_BTX, none)


@jax.jit(static_argnames=('spec', 'columns'), donate_argnames='slots')
def resume(
  params: Tree,
  slots: Slots,
  rows: Rows,
  packed_6A: Array,
  message_AT: Array,
  pictures: Pictures | None = None,
  *,
  spec: ModelSpec,
  columns: int,
) -> Slots:
  """Continues A rows in free slots, each after a message of an environment.

  Donates `slots`. The cache is computed anew. Tokens of messages have version -1 and
  log-probability 0, as those of prompts have.

  Args:
    packed_6A: i32, see `Entering`.
    message_AT: i32, the message in its columns, -1 elsewhere.
    pictures: pictures of the A prompts; None for text only.
    columns: number of columns, at least the largest column after a message.
  """
  entering = Entering(*packed_6A)
  row_A = entering.row_A
  tokens_AT = jnp.where(message_AT < 0, rows.tokens_BT[row_A], message_AT)

  def put(x: Array, value: Array) -> Array:
    return x.at[entering.slot_A].set(value, mode='drop')

  slots = _occupied(slots, entering)
  slots = slots._replace(
    tokens_ST=put(slots.tokens_ST, tokens_AT),
    logp_ST=put(slots.logp_ST, rows.logp_BT[row_A]),
    policy_version_ST=put(slots.policy_version_ST, rows.policy_version_BT[row_A]),
  )
  routes_AtX = None
  if rows.routes_BTX is not None:
    routes_AtX = rows.routes_BTX[row_A, :columns]
  return _prefilled(
    params,
    slots,
    entering.slot_A,
    tokens_RT=tokens_AT[:, :columns],
    pictures=pictures,
    spec=spec,
    routes_RTX=routes_AtX,
  )


@jax.jit(static_argnames=('spec', 'eos', 'live', 'sampling'), donate_argnames='slots')
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
  """Decodes up to n more tokens in every busy slot, in one dispatch.

  Donates `slots`.

  Args:
    key: with uid and position, determines the noise.
    temperature: divides the logits.
    n: maximum number of tokens per slot; changing n does not recompile.
    policy_version: learner step that made the weights `params`.
    live: number of leading cache segments that contain all columns of this dispatch;
      attention reads only these segments.
    sampling: truncation of the distribution, or greedy.

  Returns:
    the slots, and position_S, i32: position of each slot, negative if the slot is done.
    position_S is a separate array, replicated on all devices: the host can read it
    after the slots were donated to the next dispatch.
  """
  draw_token = functools.partial(
    draw, key=key, temperature=temperature, sampling=sampling
  )
  step = functools.partial(_step, params, spec, eos, policy_version, draw_token)

  # The loop runs blocks of tokens and checks between them whether a slot is busy.
  def decode_block(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
    i, s = carry
    steps = jnp.minimum(DONE_CHECK_INTERVAL, n - i)
    s = jax.lax.fori_loop(0, steps, lambda _, s: _constrain(step(s)), s)
    return i + DONE_CHECK_INTERVAL, s

  def unfinished(carry: tuple[Array, Slots]) -> Array:
    # The only reduction over slots, which are split over devices.
    return (carry[0] < n) & ~carry[1].done_S.all()

  # Attention reads only the live segments; other segments stay outside the loop.
  near = [layer[:live] for layer in slots.cache]
  far = [layer[live:] for layer in slots.cache]
  carry = jnp.int32(0), slots._replace(cache=near)
  _, s = jax.lax.while_loop(unfinished, decode_block, carry)
  cache = [a + b for a, b in zip(s.cache, far, strict=True)]
  position_S = jnp.where(s.done_S, -s.position_S, s.position_S)
  s = _constrain(s._replace(cache=cache))
  return s, sharding.constrain(position_S, None)


def _step(
  params: Tree,
  spec: ModelSpec,
  eos: tuple[int, ...],
  policy_version: Array | int,
  draw_token: Callable[..., tuple[Array, Array]],
  s: Slots,
) -> Slots:
  """Decodes one token in every busy slot."""
  ends = jnp.asarray(eos)
  # The model reads the newest token again, at its own position. So prefill computes no
  # logits for the last token of a prompt, and a finished slot only rewrites its last
  # keys and values.
  token_S = jnp.take_along_axis(s.tokens_ST, s.position_S[:, None] - 1, 1)[:, 0]
  hidden_SD, cache, routes_SX = decoder.decode(
    params, token_S, s.position_S - 1, s.cache, spec, s.shift_S, s.done_S
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
  # Slots that are done or free write to column T, past the end, which drops the write.
  live_S = ~s.done_S & (s.row_S >= 0)
  at_S = jnp.where(live_S, s.position_S, s.tokens_ST.shape[1])
  version_S = jnp.full_like(at_S, policy_version)
  if s.routes_STX is not None and routes_SX is not None:
    # Of the column before, which the model has read.
    s = s._replace(routes_STX=put(s.routes_STX, routes_SX, at_S - live_S))
  position_S = s.position_S + live_S
  ended_S = (token_S[:, None] == ends[None]).any(1)
  return s._replace(
    tokens_ST=put(s.tokens_ST, token_S, at_S),
    logp_ST=put(s.logp_ST, logp_S, at_S),
    policy_version_ST=put(s.policy_version_ST, version_S, at_S),
    position_S=position_S,
    done_S=~live_S | ended_S | (position_S >= s.limit_S),
    cache=cache,
  )


@jax.jit(static_argnames='width')
def recent(slots: Slots, first_S: Array, *, width: int) -> Array:
  """Returns `width` tokens of every slot from a column on, on all devices."""
  column_SW = first_S[:, None] + jnp.arange(width)[None]
  tokens_SW = jnp.take_along_axis(slots.tokens_ST, column_SW, 1, mode='clip')
  return sharding.constrain(tokens_SW, None)


@jax.jit(donate_argnames=('slots', 'rows'))
def harvest(slots: Slots, rows: Rows, end_S: Array | None = None) -> tuple[Slots, Rows]:
  """Copies finished rows to the output and frees their slots.

  end_S is the column after a stop string, at which the row ends, 0 without one. Later
  columns are left out like those that were never written. None: no stop strings.
  """
  if end_S is not None:
    slots = slots._replace(
      position_S=jnp.where(end_S > 0, end_S, slots.position_S),
      done_S=slots.done_S | (end_S > 0),
    )
  column_T = jnp.arange(rows.tokens_BT.shape[1])[None]
  written_ST = column_T < slots.position_S[:, None]
  response_mask_ST = written_ST & (column_T >= slots.prompt_length_S[:, None])
  ready_S = slots.done_S & (slots.row_S >= 0)
  # Slots without a finished row write past the last output row, which drops the write.
  to_S = jnp.where(ready_S, slots.row_S, rows.tokens_BT.shape[0])

  routes_STX = slots.routes_STX
  if routes_STX is not None:
    # The last token has been sampled, and not read.
    routes_STX = _read(routes_STX, slots.position_S - 1)
  finished = Rows(
    jnp.where(written_ST, slots.tokens_ST, 0),
    jnp.where(response_mask_ST, slots.logp_ST, 0),
    jnp.where(response_mask_ST, slots.policy_version_ST, -1),
    routes_STX,
  )
  slots = slots._replace(row_S=jnp.where(ready_S, -1, slots.row_S))
  return _constrain(slots), _written(rows, to_S, finished)


def _written(rows: Rows, to_N: Array, new: Rows) -> Rows:
  """Writes new rows into output rows; rows past the last are dropped."""

  def put(x_BT: Array, value_NT: Array | int) -> Array:
    return x_BT.at[to_N].set(value_NT, mode='drop')

  return sharding.constrain_rows(jax.tree.map(put, rows, new))


@jax.jit
def give(rows: Rows, row_N: Array, tokens_NT: Array, sampled_NT: Array) -> Rows:
  """Writes given responses into output rows; rows past the last are dropped.

  Args:
    tokens_NT: prompt, response, zeros.
    sampled_NT: True where a policy would have sampled the token, False in prompts and
      in messages.
  """
  version_NT = jnp.where(sampled_NT, GIVEN, -1)
  given = rows.empty()._replace(tokens_BT=tokens_NT, policy_version_BT=version_NT)
  return _written(rows, row_N, given)


@jax.jit(static_argnames='group')
def take_groups(rows: Rows, place_P: Array, filled_P: Array, group: int) -> Rows:
  """Returns the groups [P, G, T] with these indices; empty where filled_P is False."""

  def gather(x_BT: Array, empty_value: float) -> Array:
    x_PGT = x_BT.reshape(-1, group, *x_BT.shape[1:])[place_P]
    x_PGT = jnp.where(filled_P.reshape(-1, *[1] * x_BT.ndim), x_PGT, empty_value)
    return sharding.constrain(x_PGT, sharding.ROWS)

  return jax.tree.map(gather, rows, rows.empty())
