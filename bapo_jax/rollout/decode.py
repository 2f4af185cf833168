"""Samples responses in JAX: a fixed set of slots, refilled as their rows finish.

1. `admit` prefills R prompts and copies each into the slots of its responses;
2. `run` moves every slot by at most n tokens in one dispatch;
3. `harvest` writes finished rows where they belong and frees their slots;
4. `refresh` computes the cache of slots anew, under other weights or after a restart.

All four are compiled functions of `Slots`; flight.py is the host's loop around them.
The noise of a token is a function of (key, uid of the response, position): the text
does not depend on the slot, on the other rows, or on how many tokens a dispatch runs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.rollout import columns

DONE_CHECK_INTERVAL = 8  # tokens between two looks at whether any slot is still busy


class Slots(NamedTuple):
  row_S: Any  # i32   row of the output that this slot is writing; -1: the slot is free
  uid_S: Any  # u32   names the response; with the position it keys the noise
  tokens_ST: Any  # i32   prompt, response so far, whatever was there before
  logp_ST: Any  # f32   log mu(token), nats; defined from column `prompt_S` on
  born_ST: Any  # i32   learner step of the weights that chose the token; likewise
  prompt_S: Any  # i32   tokens in the prompt
  position_S: Any  # i32   column that the next token goes to
  limit_S: Any  # i32   column at which the response is cut
  done_S: Any  # bool  an end token is written, or the limit is reached
  cache: Any  # per layer a list of segments: keys and values [S, columns, K, C]


class Rows(NamedTuple):
  tokens_BT: Any  # i32   prompt, response, zeros
  logp_BT: Any  # f32   log mu(token), nats, 0 outside the response
  born_BT: Any  # i32   learner step of the weights that chose the token; -1 elsewhere

  @property
  def chosen_BT(self):
    """True on the response, its end token included."""
    return self.born_BT >= 0


class SamplingParams(NamedTuple):
  """How a token is drawn; anything but the softmax is for evaluation only."""

  greedy: bool = False  # the likeliest token; its recorded log-probability is 0
  top_k: int = 0  # of the k likeliest only; 0: of all
  top_p: float = 1.0  # of the fewest that have this probability together


SOFTMAX = SamplingParams()


def empty(
  spec: transformer.ModelSpec, slots: int, length: int, parts: int = 1
) -> Slots:
  """Free slots for rows of `length` tokens, their cache in `parts` segments."""
  zeros = functools.partial(jnp.zeros, slots)
  return Slots(
    row_S=jnp.full(slots, -1, jnp.int32),
    uid_S=zeros(jnp.uint32),
    tokens_ST=jnp.zeros((slots, length), jnp.int32),
    logp_ST=jnp.zeros((slots, length), jnp.float32),
    born_ST=jnp.full((slots, length), -1, jnp.int32),
    prompt_S=zeros(jnp.int32),
    position_S=jnp.ones(slots, jnp.int32),
    limit_S=zeros(jnp.int32),
    done_S=jnp.ones(slots, bool),
    cache=transformer.empty_cache(spec, slots, columns.segments(length, parts)),
  )


def sync_actor(params, spec: transformer.ModelSpec, mesh):
  """A copy of the weights as decoding reads them; the learner may donate its own."""

  def copy(params):
    return jax.tree.map(jnp.copy, transformer.cast(params, spec.compute))

  layout = sharding.shardings(params, mesh, 'decode')
  return jax.jit(copy, out_shardings=layout)(params)


def slot_shardings(like: Slots, mesh) -> Slots:
  """Where each array of the slots lies: rows by slot, keys and values by head too."""
  rows = sharding.over_rows(mesh)
  heads = sharding.over_cache(mesh, like.cache[0][0][0].shape[2])
  cache = jax.tree.map(lambda _: heads, like.cache)
  return Slots(*[rows] * (len(like) - 1), cache=cache)


def _store(cache, kept, slot_A, from_A):
  """The cache with prefilled keys and values in these slots; slot S is nowhere."""
  filled = []
  for layer, (k_RTKC, v_RTKC) in zip(cache, kept, strict=True):
    start, new = 0, []
    for k_StKC, v_StKC in layer:
      columns = slice(start, start + k_StKC.shape[1])
      piece_k, piece_v = k_RTKC[:, columns], v_RTKC[:, columns]
      at = (slot_A, slice(0, piece_k.shape[1]))
      new.append(
        (
          k_StKC.at[at].set(piece_k[from_A], mode='drop'),
          v_StKC.at[at].set(piece_v[from_A], mode='drop'),
        )
        if piece_k.shape[1]
        else (k_StKC, v_StKC)
      )
      start = columns.stop
    filled.append(new)
  return filled


@functools.partial(jax.jit, static_argnames='spec', donate_argnames='slots')
def admit(
  params,
  slots: Slots,
  tokens_RT,
  length_R,
  from_A,
  slot_A,
  row_A,
  uid_A,
  new_A,
  *,
  spec,
):
  """Puts A responses to R prompts into free slots; each prompt is prefilled once.

  Args:
    from_A: which of the R prompts the response answers.
    slot_A: where it goes; S, past the end, is nowhere: such an entry is padding.
    new_A: most tokens of the response, its end token included.
  """
  tokens_AT, length_A = tokens_RT[from_A], length_R[from_A]

  def put(x, value):
    return x.at[slot_A].set(value, mode='drop')

  head = (slot_A, slice(0, tokens_RT.shape[1]))
  return slots._replace(
    row_S=put(slots.row_S, row_A),
    uid_S=put(slots.uid_S, uid_A),
    tokens_ST=slots.tokens_ST.at[head].set(tokens_AT, mode='drop'),
    prompt_S=put(slots.prompt_S, length_A),
    position_S=put(slots.position_S, length_A),
    limit_S=put(slots.limit_S, length_A + new_A),
    done_S=put(slots.done_S, False),
    cache=_store(
      slots.cache, transformer.prefill(params, tokens_RT, spec), slot_A, from_A
    ),
  )


@functools.partial(
  jax.jit, static_argnames=('spec', 'columns'), donate_argnames='slots'
)
def refresh(params, slots: Slots, slot_A, *, spec, columns: int):
  """Computes the first columns of the cache of these slots from their tokens."""
  tokens_At = slots.tokens_ST[jnp.minimum(slot_A, slots.row_S.shape[0] - 1), :columns]
  kept, each_A = (
    transformer.prefill(params, tokens_At, spec),
    jnp.arange(slot_A.shape[0]),
  )
  return slots._replace(cache=_store(slots.cache, kept, slot_A, each_A))


@functools.partial(
  jax.jit, static_argnames=('spec', 'eos', 'live', 'pick'), donate_argnames='slots'
)
def run(
  params,
  slots: Slots,
  key,
  temperature,
  n,
  born,
  *,
  spec,
  eos: tuple[int, ...],
  live: int,
  pick: SamplingParams = SOFTMAX,
):
  """(slots, told_S): every busy slot has up to n more tokens.

  Args:
    n: may change from call to call, nothing compiles anew.
    born: learner step of these weights.
    live: segments of the cache that hold every column of this dispatch; attention
      reads no others.

  Returns:
    told_S, i32: the slot's position, negative where it is done; an array of its own,
    the same on every device, to be read when the slots are long donated.
  """
  row_S, ends = jnp.arange(slots.row_S.shape[0]), jnp.asarray(eos)

  def step(_, s: Slots) -> Slots:
    # The newest token, read again at its own position: so a prompt's last token needs
    # no logits at prefill, and a finished slot rewrites what is there already.
    token_S = s.tokens_ST[row_S, s.position_S - 1]
    hidden_SD, cache = transformer.decode(
      params, token_S, s.position_S - 1, s.cache, spec
    )
    logits_SV = jnp.einsum(
      'sd,vd->sv',
      hidden_SD,
      transformer.head(params).astype(hidden_SD.dtype),
      preferred_element_type=jnp.float32,
    )
    token_S, logp_S = draw(key, s.uid_S, s.position_S, logits_SV, temperature, pick)
    live_S = ~s.done_S & (s.row_S >= 0)
    at = (row_S, jnp.where(live_S, s.position_S, s.tokens_ST.shape[1]))
    position_S = s.position_S + live_S
    return s._replace(
      tokens_ST=s.tokens_ST.at[at].set(token_S, mode='drop'),
      logp_ST=s.logp_ST.at[at].set(logp_S, mode='drop'),
      born_ST=s.born_ST.at[at].set(born, mode='drop'),
      position_S=position_S,
      done_S=~live_S
      | (token_S[:, None] == ends[None]).any(1)
      | (position_S >= s.limit_S),
      cache=cache,
    )

  def some(carry):
    i, s = carry
    return i + DONE_CHECK_INTERVAL, jax.lax.fori_loop(
      0, jnp.minimum(DONE_CHECK_INTERVAL, n - i), step, s
    )

  def more(carry):
    # The only reduction over slots, and so over devices: once in LOOK tokens.
    return (carry[0] < n) & ~carry[1].done_S.all()

  near = [layer[:live] for layer in slots.cache]
  far = [layer[live:] for layer in slots.cache]
  _, s = jax.lax.while_loop(more, some, (jnp.int32(0), slots._replace(cache=near)))
  cache = [a + b for a, b in zip(s.cache, far, strict=True)]
  told_S = jnp.where(s.done_S, -s.position_S, s.position_S)
  return s._replace(cache=cache), sharding.constrain(told_S, None)


def draw(
  key, uid_S, position_S, logits_SV, temperature, pick: SamplingParams = SOFTMAX
):
  """A token a slot and its log-probability (nats), from one and the same f32 array.

  The Gumbel-max trick in two levels: a block of the vocabulary by its whole
  probability, then a token in it. The distribution is the softmax; the noise is of
  about 2 sqrt(V) numbers a token and not of V, which was half the time of a step.
  """
  S, V = logits_SV.shape
  if pick.greedy:
    return logits_SV.argmax(-1).astype(jnp.int32), jnp.zeros(S)
  logits_SV = _truncate(logits_SV / temperature, pick)
  # Strided blocks, a power of two of rows: a vocabulary split over devices stays split.
  size = min(V & -V, 256)
  logits_Sbn = logits_SV.reshape(S, size, V // size)
  most_Sn = logits_Sbn.max(1)
  most_Sn = jnp.where(jnp.isinf(most_Sn), 0, most_Sn)  # a block that is cut off whole
  sum_Sn = jnp.exp(logits_Sbn - most_Sn[:, None]).sum(1)
  block_Sn = most_Sn + jnp.log(sum_Sn)

  def one(uid, position, block_n, logits_bn):
    noise = jax.random.fold_in(jax.random.fold_in(key, uid), position)
    of_block, of_token = jax.random.split(noise)
    n = jax.random.categorical(of_block, block_n)
    b = jax.random.categorical(of_token, logits_bn[:, n])
    return b * (V // size) + n, logits_bn[b, n]

  token_S, chosen_S = jax.vmap(one)(uid_S, position_S, block_Sn, logits_Sbn)
  return token_S.astype(jnp.int32), chosen_S - jax.nn.logsumexp(block_Sn, -1)


def _truncate(logits_SV, pick: SamplingParams):
  """-inf wherever top-k or top-p leaves a token out."""
  if pick.top_k:
    least_S1 = jax.lax.top_k(logits_SV, pick.top_k)[0][:, -1:]
    logits_SV = jnp.where(logits_SV < least_S1, -jnp.inf, logits_SV)
  if pick.top_p < 1:
    falling_SV = jnp.flip(jnp.sort(logits_SV, -1), -1)
    p_SV = jax.nn.softmax(falling_SV)
    # Kept: those before which less than top_p was reached; the first one always.
    kept_SV = jnp.cumsum(p_SV, -1) - p_SV < pick.top_p
    least_S1 = jnp.where(kept_SV, falling_SV, jnp.inf).min(-1, keepdims=True)
    logits_SV = jnp.where(logits_SV < least_S1, -jnp.inf, logits_SV)
  return logits_SV


@functools.partial(jax.jit, donate_argnames=('slots', 'rows'))
def harvest(slots: Slots, rows: Rows):
  """Moves finished rows to the output and frees their slots."""
  column_T = jnp.arange(rows.tokens_BT.shape[1])[None]
  written_ST = column_T < slots.position_S[:, None]
  chosen_ST = written_ST & (column_T >= slots.prompt_S[:, None])
  ready_S = slots.done_S & (slots.row_S >= 0)
  to_S = jnp.where(ready_S, slots.row_S, rows.tokens_BT.shape[0])

  def put(x_BT, value_ST):
    return x_BT.at[to_S].set(value_ST, mode='drop')

  rows = Rows(
    put(rows.tokens_BT, jnp.where(written_ST, slots.tokens_ST, 0)),
    put(rows.logp_BT, jnp.where(chosen_ST, slots.logp_ST, 0)),
    put(rows.born_BT, jnp.where(chosen_ST, slots.born_ST, -1)),
  )
  return slots._replace(row_S=jnp.where(ready_S, -1, slots.row_S)), rows


@functools.partial(jax.jit, static_argnames='group')
def groups(rows: Rows, places, there_P, group: int) -> Rows:
  """The rows [P, G, T] of these groups; where there_P is False, empty ones."""

  def grouped(x_BT, nothing):
    x_PGT = x_BT.reshape(-1, group, x_BT.shape[1])[places]
    return jnp.where(there_P[:, None, None], x_PGT, nothing)

  return Rows(*map(grouped, rows, (0, 0.0, -1)))


@jax.jit
def take_rows(rows: Rows, row_R) -> Rows:
  """These rows."""
  return jax.tree.map(lambda x_BT: x_BT[row_R], rows)
