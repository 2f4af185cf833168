"""Runs the host's loop around the compiled functions of decode.py.

1. `submit` gives every prompt one of W places and queues its G responses, oldest first;
   a place is the index of a group while its responses are in progress;
2. `decode` fills free slots, dispatches, and collects finished responses, until all
   have ended or a token budget is spent. Unfinished responses stay in their slots and
   continue in the next call (partial rollouts);
3. with an environment, a row whose turn has ended waits for an answer, and then goes
   back into a slot, before rows that have not begun;
4. `finished` lists the groups whose responses have all ended, `read` returns their rows
   and `free` frees their places.

Synchronous sampling has an infinite budget. `PartialRollouts` is the package's only
mutable object. After an exception anywhere in `decode` the next call loses no response.
"""

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from jax import Array

from bapo_jax import sharding
from bapo_jax.rollout import decode, shapes
from bapo_jax.rollout.decode import Rows, Slots
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.runtime import exchange, hosts
from bapo_jax.types import Prompts, Tree

OnFinished = Callable[[list[int]], object]  # receives finished output rows


class Environment(Protocol):
  """Answers turns, see `rollout.Conversations`."""

  max_turns: int

  def ask(self, rollouts: 'PartialRollouts', rows: Sequence[int]) -> None:
    """Asks about rows whose last turn has ended."""

  def answers(self, at_least: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yields (row, tokens of the message); no tokens end the response.

    Waits for `at_least` answers, and yields all that have arrived.
    """


class PartialRollouts:
  """W places for groups of G responses, B = W * G, and the S slots that decode them.

  Args:
    engine: the settings of decoding.
    places: W, the maximum number of groups that are submitted and not yet freed.
  """

  # Host arrays in a checkpoint; `restore` derives all other host arrays.
  SAVED = (
    *('submitted_W', 'id_W', 'length_W', 'prompt_WT'),
    *('uid_B', 'limit_B', 'done_B', 'turns_B', 'end_B'),
  )

  def __init__(self, engine: RolloutEngine, places: int):
    self.engine = engine
    B = places * engine.group_size
    S = engine.max_num_seqs
    self.slots, self.rows = engine.empty(B)
    self.own_B = exchange.owned(self.rows.tokens_BT)  # rows that this process verifies
    # The host's view of places and rows.
    self.submitted_W = np.full(places, -1)  # learner step; -1: the place is free
    self.id_W = np.full(places, -1, np.int32)
    self.length_W = np.zeros(places, np.int32)
    self.prompt_WT = np.zeros((places, engine.max_prompt_tokens), np.int32)
    self.uid_B = np.zeros(B, np.uint32)
    self.limit_B = np.full(B, engine.max_new_tokens, np.int32)  # maximum tokens
    self.done_B = np.ones(B, bool)
    self.turns_B = np.zeros(B, np.int32)  # turns that have ended
    self.end_B = np.zeros(B, np.int32)  # column after the last of these turns
    # The host's view of slots; with a done_check_lag it is older than the device's.
    self.row_S = np.full(S, -1, np.int32)  # -1: the slot is free
    self.first_dispatch_S = np.zeros(S, int)  # first dispatch of the slot's row
    self.reach_S = np.zeros(S, int)  # upper bound of the columns reached
    self.limit_S = np.zeros(S, int)  # column at which the response is cut off
    self.waiting: collections.deque[int] = collections.deque()  # rows, oldest first
    self.asked: set[int] = set()  # rows whose turn the environment has not answered
    self.answered: list[tuple[int, Sequence[int]]] = []  # (row, message) without a slot
    self.dispatched = 0
    self.tokens = 0  # in responses that finished in the current `decode`
    self.cache_lost = False  # True after `restore`: checkpoints have no cache
    # (dispatch, position_S) of dispatches whose done flags are not read yet.
    self._pending: collections.deque[tuple[int, Array]] = collections.deque()
    self._unreported: list[int] = []  # finished rows, not yet given to `on_finished`

  def submit(
    self,
    prompts: Prompts,
    uid_B: np.ndarray,
    step: int = 0,
    limit_B: np.ndarray | None = None,
  ) -> None:
    """Queues G responses to each prompt, but none to a prompt of length 0.

    Args:
      uid_B: u32, names each response; equal (key, uid) give equal noise.
      step: learner step of the submission.
      limit_B: maximum number of tokens of each response, clipped to 1..max_new_tokens;
        None: max_new_tokens.

    Raises:
      ValueError: there are more prompts than free places.
    """
    free = np.flatnonzero(self.submitted_W < 0)
    if len(prompts.id_P) > len(free):
      raise ValueError(f'{len(prompts.id_P)} prompts, but only {len(free)} free places')
    G = self.engine.group_size
    longest = self.engine.max_new_tokens
    place_P = free[: len(prompts.id_P)]
    self.submitted_W[place_P] = step
    self.id_W[place_P] = prompts.id_P
    self.prompt_WT[place_P] = prompts.tokens_PT
    self.length_W[place_P] = prompts.length_P
    row_PG = place_P[:, None] * G + np.arange(G)
    self.uid_B[row_PG] = np.asarray(uid_B, np.uint32).reshape(row_PG.shape)
    limit_PG = longest if limit_B is None else np.reshape(limit_B, row_PG.shape)
    self.limit_B[row_PG] = np.clip(limit_PG, 1, longest)
    wanted = row_PG[np.asarray(prompts.length_P) > 0].ravel()
    self.done_B[wanted] = False
    self.turns_B[wanted] = 0
    self.waiting.extend(wanted.tolist())

  @property
  def unfinished(self) -> int:
    """Returns the number of responses that have not ended."""
    return int((~self.done_B).sum())

  @property
  def busy(self) -> int:
    """Returns the number of slots with an unfinished response, as known to the host."""
    return int((self.row_S >= 0).sum())

  def decode(
    self,
    params: Tree,
    key: Array,
    *,
    policy_version: int = 0,
    max_tokens: float = math.inf,
    due_W: np.ndarray | None = None,
    on_finished: OnFinished = lambda rows: None,
    environment: Environment | None = None,
  ) -> None:
    """Decodes until all responses have ended, or the budget is spent.

    No bit depends on when the environment answers. So all its answers are awaited
    before the next dispatch if the budget, the segments of the cache or other processes
    depend on which rows are in slots.

    Args:
      key: with uid and position, determines the noise.
      policy_version: learner step of the weights `params`.
      max_tokens: token budget per slot, shared by the responses that the slot decodes.
      due_W: bool, places whose groups are completed even beyond the budget.
      on_finished: called with the rows that have ended since its last call.
      environment: answers turns; None: responses have one turn.
    """
    spent = self.tokens = 0
    chunk = self.engine.tokens_per_dispatch
    segments = self.engine.segment_sizes
    awaits = max_tokens < math.inf or len(segments) > 1 or hosts.processes() > 1
    # Asked before a restart, or by a call that was interrupted.
    if environment and self.asked:
      environment.ask(self, sorted(self.asked))
    while self.busy or self.waiting or self.asked or self.answered:
      idle = not (self.busy or self.waiting or self.answered)
      self._hear(environment, len(self.asked) if awaits else int(idle))
      self._fill(params)
      due = due_W is not None and (~self.done_B).reshape(len(due_W), -1)[due_W].any()
      if spent >= max_tokens and not due:
        break
      n = chunk if due else int(min(chunk, max_tokens - spent))
      if self.busy:
        self._dispatch(params, key, n, policy_version)
        spent += n
      self._collect(environment, self.engine.done_check_lag)
      self._report(on_finished)
    self._collect(environment, 0)
    self._hear(environment, len(self.asked))
    self._report(on_finished)

  def _fill(self, params: Tree) -> None:
    """Admits waiting rows once there are A free slots, or as many as rows wait.

    Answered rows go first.
    """
    while block := self._answered_block():
      free = np.flatnonzero(self.row_S < 0)
      if len(free) < len(block):
        return
      self._resume(params, block, free[: len(block)])
    while self.waiting:
      free = np.flatnonzero(self.row_S < 0)
      if len(free) < min(self.engine.prefill_rows, len(self.waiting)):
        return
      self._admit(params, free)

  def _admit(self, params: Tree, free: np.ndarray) -> None:
    """Admits the oldest waiting rows to the first free slots, as one padded block."""
    e = self.engine
    A = e.prefill_rows
    S = e.max_num_seqs
    # The rows leave the queue after `admit`, so that an exception loses no row.
    rows = [self.waiting[i] for i in range(min(A, len(self.waiting)))]
    places, from_A = np.unique(np.asarray(rows) // e.group_size, return_inverse=True)
    count = len(rows)
    pad = (0, A - len(rows))
    # Each prompt is prefilled once, at the smallest compiled shape that fits.
    R = next(n for n in e.prefill_sizes if n >= len(places))
    width = shapes.prefill_width(e.max_prompt_tokens, self.length_W[places].max())
    tokens_RT = np.zeros((R, width), np.int32)
    tokens_RT[: len(places)] = self.prompt_WT[places, :width]
    length_R = np.ones(R, np.int32)
    length_R[: len(places)] = self.length_W[places]
    slot_A = np.pad(free[:count], pad, constant_values=S).astype(np.int32)
    self.slots = e.admit(
      params,
      self.slots,
      np.pad(self.id_W[places], (0, R - len(places)), constant_values=-1),
      tokens_RT,
      length_R,
      np.pad(from_A, pad).astype(np.int32),
      slot_A,
      np.pad(np.asarray(rows, np.int32), pad, constant_values=-1),
      np.pad(self.uid_B[rows], pad),
      np.pad(self.limit_B[rows], pad),
    )
    length = length_R[from_A]
    self._occupy(free[:count], rows, length, length + self.limit_B[rows])
    for _ in rows:
      self.waiting.popleft()

  def _answered_block(self):
    """Returns the first A answered rows of one width; fewer if nothing else is to do.

    A row's width depends on its own tokens alone: other rows change no bit of it.
    """
    e = self.engine
    blocks = collections.defaultdict(list)
    for row, tokens in self.answered:
      columns = self.end_B[row] + len(tokens)
      block = blocks[shapes.prefill_width(e.length, columns)]
      block.append((row, tokens))
      if len(block) == e.prefill_rows:
        return block
    if self.busy and (self.asked or self.waiting):
      return []
    return next(iter(blocks.values()), [])

  def _resume(self, params, block, slots) -> None:
    """Puts answered rows of one width back into slots, as one padded block."""
    e = self.engine
    count = len(block)
    rows = np.asarray([row for row, _ in block])
    places = rows // e.group_size
    reach = self.end_B[rows] + [len(tokens) for _, tokens in block]
    limit = self.length_W[places] + self.limit_B[rows]
    pad = (0, e.prefill_rows - count)
    id_A = np.pad(self.id_W[places], pad, constant_values=-1)
    numbers_6A = np.zeros((6, e.prefill_rows), np.int32)
    numbers_6A[0] = e.max_num_seqs
    uid = self.uid_B[rows].view(np.int32)
    numbers_6A[:, :count] = slots, rows, uid, self.length_W[places], reach, limit
    message_AT = np.full((e.prefill_rows, e.length), -1, np.int32)
    for written_T, end, (row, tokens) in zip(message_AT, reach, block, strict=False):
      written_T[self.end_B[row] : end] = tokens
    width = shapes.prefill_width(e.length, reach.max())
    of_rows = id_A, numbers_6A, message_AT
    self.slots = e.resume(params, self.slots, self.rows, *of_rows, columns=width)
    self._occupy(slots, rows, reach, limit)
    self.answered = [(row, tokens) for row, tokens in self.answered if row not in rows]

  def _occupy(self, slots, rows, reach, limit) -> None:
    """Records which rows the slots decode from now on."""
    self.row_S[slots] = rows
    self.first_dispatch_S[slots] = self.dispatched
    self.reach_S[slots] = reach
    self.limit_S[slots] = limit

  def _dispatch(self, params: Tree, key: Array, n: int, version: int) -> None:
    """Advances every busy slot by at most n tokens."""
    # The cache segments read by attention must contain every column of this dispatch.
    reached_S = np.minimum(self.reach_S + n, self.limit_S)
    longest = reached_S[self.row_S >= 0].max(initial=1)
    live = shapes.segments_reached(self.engine.segment_sizes, longest)
    self.slots, position_S = self.engine.run(params, self.slots, key, n, version, live)
    self.reach_S = reached_S
    self._pending.append((self.dispatched, position_S))
    self.dispatched += 1

  def _collect(self, environment: Environment | None, lag: int) -> None:
    """Collects turns that have ended, without waiting for the last `lag` dispatches."""
    while len(self._pending) > lag:
      number, position_S = self._pending[0]
      position_S = np.asarray(position_S)
      # The flags of a dispatch do not apply to rows that were admitted after it.
      ready_S = (position_S < 0) & (self.row_S >= 0) & (self.first_dispatch_S <= number)
      if ready_S.any():
        # Harvests every slot that is done by now, even if it ended in a later dispatch;
        # such a slot is free on the device before the host reads its flag.
        self.slots, self.rows = decode.harvest(self.slots, self.rows)
        rows = self.row_S[ready_S]
        self.row_S[ready_S] = -1
        self.end_B[rows] = -position_S[ready_S]
        self.turns_B[rows] += 1
        self._end_turns(rows, environment)
      self._pending.popleft()

  def _end_turns(self, rows: np.ndarray, environment: Environment | None) -> None:
    """Ends the responses in these rows, or asks the environment about their turns."""
    asks = np.zeros(len(rows), bool)
    if environment:
      more = [self.left(row) > 1 for row in rows]  # a message, and a token after it
      asks = np.logical_and(more, self.turns_B[rows] < environment.max_turns)
      self.asked.update(rows[asks].tolist())
      environment.ask(self, rows[asks].tolist())
    self._end(rows[~asks])

  def _end(self, rows: np.ndarray) -> None:
    """Ends the responses in these rows."""
    self.done_B[rows] = True
    prompts = self.length_W[rows // self.engine.group_size]
    self.tokens += int(self.end_B[rows].sum() - prompts.sum())
    self._unreported.extend(rows.tolist())

  def left(self, row: int) -> int:
    """Returns how many tokens may follow the last turn of a row."""
    prompt = self.length_W[row // self.engine.group_size]
    return int(prompt + self.limit_B[row] - self.end_B[row])

  def _hear(self, environment: Environment | None, at_least: int) -> None:
    """Takes the answers that have arrived; waits for `at_least` of them."""
    if not environment or not self.asked:
      return
    for row, tokens in environment.answers(at_least):
      self.asked.discard(row)
      if tokens:
        self.answered.append((row, tokens))
      else:
        self._end(np.asarray([row]))

  def _report(self, on_finished: OnFinished) -> None:
    if self._unreported:
      on_finished(self._unreported)
      self._unreported = []

  def due(self, step: int) -> np.ndarray:
    """Returns a mask [W] of the groups that were submitted at `step` or before."""
    return (self.submitted_W >= 0) & (self.submitted_W <= step)

  def finished(self) -> np.ndarray:
    """Returns the indices of groups whose responses have all ended, oldest first."""
    done_W = self.done_B.reshape(len(self.submitted_W), -1).all(1)
    done_W &= self.submitted_W >= 0
    order = np.argsort(self.submitted_W, kind='stable')
    return order[done_W[order]]

  def read(self, places: np.ndarray, seats: int) -> Rows:
    """Returns the groups with these indices [seats, G, T]; empty seats follow."""
    pad = (0, seats - len(places))
    filled_P = np.pad(np.ones(len(places), bool), pad)
    take = sharding.under(self.engine.mesh, decode.take_groups)
    return take(self.rows, np.pad(places, pad), filled_P, self.engine.group_size)

  def free(self, places: np.ndarray) -> None:
    """Frees the places of groups that have been read."""
    self.submitted_W[places] = -1

  def refresh(self, params: Tree) -> None:
    """Recomputes the cache of every busy slot with these weights, in blocks of A."""
    self.cache_lost = False
    A = self.engine.prefill_rows
    S = self.engine.max_num_seqs
    busy = np.flatnonzero(self.row_S >= 0)
    for block in np.split(busy, range(A, len(busy), A)):
      if len(block):
        reached = int(self.reach_S[block].max())
        live = shapes.segments_reached(self.engine.segment_sizes, reached)
        pad = (0, A - len(block))
        slot_A = np.pad(block, pad, constant_values=S).astype(np.int32)
        id_A = self.id_W[self.row_S[block] // self.engine.group_size]
        id_A = np.pad(id_A, pad, constant_values=-1)
        self.slots = self.engine.refresh(params, self.slots, id_A, slot_A, live)

  def state(self) -> dict[str, dict]:
    """Returns the content of a checkpoint: all arrays except the cache."""
    slots = self.slots._replace(cache=())._asdict()
    # A text-only model has no shift_S, one without experts no routes.
    slots, rows = (
      {name: x for name, x in arrays.items() if x is not None}
      for arrays in (slots, self.rows._asdict())
    )
    host = {name: getattr(self, name) for name in self.SAVED}
    return {'slots': slots, 'rows': rows, 'host': host}

  def restore(self, state: dict[str, dict]) -> None:
    """Restores the state of a checkpoint; call `refresh` before the next `decode`."""
    self.slots = Slots(**state['slots'] | {'cache': self.slots.cache})
    self.rows = Rows(**state['rows'])
    for name in self.SAVED:
      setattr(self, name, np.array(state['host'][name]))
    self.cache_lost = True
    self.row_S = np.array(exchange.whole(self.slots.row_S))
    self.reach_S = np.array(exchange.whole(self.slots.position_S), int)
    self.limit_S = np.array(exchange.whole(self.slots.limit_S), int)
    self.first_dispatch_S[:] = self.dispatched
    # Unfinished rows without a slot are queued again, in order of submission, and turns
    # without an answer are asked about again.
    rows = np.arange(len(self.done_B))
    rows = np.flatnonzero(~self.done_B & ~np.isin(rows, self.row_S))
    asked = self.turns_B[rows] > 0
    self.asked = set(rows[asked].tolist())
    self.answered = []
    rows = rows[~asked]
    step = self.submitted_W[rows // self.engine.group_size]
    self.waiting = collections.deque(rows[np.argsort(step, kind='stable')].tolist())
