"""Runs the host's loop around the compiled functions of decode.py.

1. `submit` gives every prompt one of W places and queues its G responses, oldest first;
   a place is the index of a group while its responses are in progress;
2. `decode` fills free slots, dispatches, and collects finished responses, until all
   have ended or a token budget is spent. Unfinished responses stay in their slots and
   continue in the next call (partial rollouts);
3. with an environment, a row whose turn has ended waits for an answer, and then goes
   back into a slot (turns.py);
4. `finished` lists the groups whose responses have all ended, `read` returns their rows
   and `free` frees their places.

Synchronous sampling has an infinite budget. After an exception anywhere in `decode` the
next call loses no response.
"""

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array

from bapo_jax import sharding
from bapo_jax.rollout import decode, shapes
from bapo_jax.rollout.decode import Entering, Rows, Slots
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.given import Given
from bapo_jax.rollout.turns import Environment, Queue, Read, Turn, longest, stopped
from bapo_jax.runtime import exchange, hosts
from bapo_jax.types import Prompts, Tree

OnFinished = Callable[[list[int]], object]  # receives finished output rows


class PartialRollouts:
  """W places for groups of G responses, B = W * G, and the S slots that decode them.

  Args:
    engine: the settings of decoding.
    places: W, the maximum number of groups that are submitted and not yet freed.
  """

  # Host arrays in a checkpoint; `restore` derives all other host arrays.
  SAVED = (
    'submitted_W',
    'id_W',
    'length_W',
    'prompt_WT',
    'uid_B',
    'limit_B',
    'done_B',
    'turns_B',
    'end_B',
  )

  def __init__(self, engine: RolloutEngine, places: int):
    self.engine = engine
    B = places * engine.group_size
    S = engine.max_num_seqs
    self.slots, self.rows = engine.empty(B)()
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
    self.turn_S = np.zeros(S, int)  # first column of the current turn
    self.searched_S = np.zeros(S, int)  # columns that were searched for stop strings
    self.queue = Queue()
    self.dispatched = 0
    self.tokens = 0  # in responses that finished in the current `decode`
    self.cache_lost = False  # True after `restore`: checkpoints have no cache
    # (dispatch, position_S) of dispatches whose done flags are not read yet.
    self._pending: collections.deque[tuple[int, Array]] = collections.deque()
    self._environment: Environment | None = None  # see `decode`
    self._read: Read | None = None  # see `decode`
    self._unreported: list[int] = []  # finished rows, not yet given to `on_finished`

  def submit(
    self,
    prompts: Prompts,
    uid_B: np.ndarray,
    step: int = 0,
    limit_B: np.ndarray | None = None,
    given: Sequence[Given | None] = (),
  ) -> None:
    """Queues G responses to each prompt, but none to a prompt of length 0.

    Args:
      uid_B: u32, names each response; equal (key, uid) give equal noise.
      step: learner step of the submission.
      limit_B: maximum number of tokens of each response, clipped to 1..max_new_tokens;
        None: max_new_tokens.
      given: responses for the last seats of each prompt, equally many per prompt; None:
        the policy samples there too.

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
    if given:
      seats = len(given) // len(place_P)
      self._give(row_PG[:, G - seats :].ravel(), given)
      wanted = wanted[~self.done_B[wanted]]
    self.queue.waiting.extend(wanted.tolist())

  def _give(self, rows: np.ndarray, given: Sequence[Given | None]) -> None:
    """Writes given responses into rows, which have ended then."""
    to_N = np.full(len(rows), len(self.done_B), np.int32)  # past the last: dropped
    tokens_NT = np.zeros((len(rows), self.engine.length), np.int32)
    sampled_NT = np.zeros(tokens_NT.shape, bool)
    for n, (row, response) in enumerate(zip(rows.tolist(), given, strict=True)):
      if response is None:
        continue
      place = row // self.engine.group_size
      begin = self.length_W[place]
      end = begin + len(response.tokens)
      tokens_NT[n, :begin] = self.prompt_WT[place, :begin]
      tokens_NT[n, begin:end] = response.tokens
      sampled_NT[n, begin:end] = response.sampled
      to_N[n] = row
      self.end_B[row] = end
      self.turns_B[row] = response.turns
      self.done_B[row] = True
    self.rows = self.engine.give(self.rows, to_N, tokens_NT, sampled_NT)()

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
    read: Read | None = None,
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
      read: returns the text of tokens, for the stop strings of the engine.
    """
    spent = self.tokens = 0
    chunk = self.engine.tokens_per_dispatch
    segments = self.engine.segment_sizes
    awaits = max_tokens < math.inf or len(segments) > 1 or len(hosts.side()) > 1
    if self.engine.stop:
      # A later dispatch would end rows that were not searched.
      assert not self.engine.done_check_lag
    self._read = read
    self._environment = environment
    # Asked before a restart, or by a call that was interrupted.
    if environment and self.queue.asked:
      environment.ask(self.turns(sorted(self.queue.asked)))
    if self.engine.stop:  # an interrupted call left a dispatch
      self._collect(0)
    while self.unfinished:
      idle = not (self.busy or self.queue.waiting or self.queue.answered)
      self._hear(len(self.queue.asked) if awaits else int(idle))
      self._fill(params)
      due = due_W is not None and (~self.done_B).reshape(len(due_W), -1)[due_W].any()
      if spent >= max_tokens and not due:
        break
      n = chunk if due else int(min(chunk, max_tokens - spent))
      if self.busy:
        self._dispatch(params, key, n, policy_version)
        spent += n
      self._collect(self.engine.done_check_lag)
      self._report(on_finished)
    self._collect(0)
    self._hear(len(self.queue.asked))
    self._report(on_finished)

  def _fill(self, params: Tree) -> None:
    """Admits waiting rows once there are A free slots, or as many as rows wait.

    Answered rows go first.
    """
    e = self.engine
    while block := self.queue.block(e.prefill_rows, self._width, not self.busy):
      free = np.flatnonzero(self.row_S < 0)
      if len(free) < len(block):
        return
      self._resume(params, block, free[: len(block)])
    while self.queue.waiting:
      free = np.flatnonzero(self.row_S < 0)
      if len(free) < min(e.prefill_rows, len(self.queue.waiting)):
        return
      self._admit(params, free)

  def _admit(self, params: Tree, free: np.ndarray) -> None:
    """Admits the oldest waiting rows to the first free slots, as one padded block."""
    e = self.engine
    # The rows leave the queue after `admit`, so that an exception loses no row.
    rows = list(itertools.islice(self.queue.waiting, e.prefill_rows))
    # Where responses are given, fewer wait per prompt than the programs expect.
    _, first = np.unique(np.asarray(rows) // e.group_size, return_index=True)
    starts = [*sorted(first), len(rows)]
    rows = rows[: starts[min(len(first), e.prefill_sizes[-1])]]
    slots = free[: len(rows)]
    places, from_A = np.unique(np.asarray(rows) // e.group_size, return_inverse=True)
    # Each prompt is prefilled once, at the smallest compiled shape that fits.
    R = next(n for n in e.prefill_sizes if n >= len(places))
    width = shapes.prefill_width(e.max_prompt_tokens, self.length_W[places].max())
    tokens_RT = np.zeros((R, width), np.int32)
    tokens_RT[: len(places)] = self.prompt_WT[places, :width]
    id_R = np.pad(self.id_W[places], (0, R - len(places)), constant_values=-1)
    entering = self._entering(slots, rows, self.length_W[places[from_A]])
    from_A = self._padded(from_A)
    self.slots = e.admit(params, self.slots, id_R, tokens_RT, from_A, entering)()
    self._occupy(entering, len(rows))
    for _ in rows:
      self.queue.waiting.popleft()

  def _entering(self, slots: np.ndarray, rows: Any, position: np.ndarray) -> Entering:
    """Describes rows that enter these slots, with their next token's column."""
    prompt = self.length_W[np.asarray(rows) // self.engine.group_size]
    return Entering(
      slot_A=self._padded(slots, self.engine.max_num_seqs),
      row_A=self._padded(rows),
      uid_A=self._padded(self.uid_B[rows].view(np.int32)),
      prompt_A=self._padded(prompt),
      position_A=self._padded(position),
      limit_A=self._padded(prompt + self.limit_B[rows]),
    )

  def _padded(self, values: Any, fill: int = 0) -> np.ndarray:
    """Returns one value for each of the A rows of a block."""
    pad = (0, self.engine.prefill_rows - len(values))
    return np.pad(np.asarray(values, np.int32), pad, constant_values=fill)

  def _width(self, row: int) -> int:
    """Returns the columns that are computed for an answered row."""
    columns = self.end_B[row] + len(self.queue.answered[row])
    return shapes.prefill_width(self.engine.length, columns)

  def _resume(
    self, params: Tree, messages: dict[int, Sequence[int]], slots: np.ndarray
  ) -> None:
    """Puts answered rows of one width back into slots, as one padded block."""
    e = self.engine
    rows = np.asarray(list(messages))
    reach = self.end_B[rows] + [len(tokens) for tokens in messages.values()]
    entering = self._entering(slots, rows, reach)
    message_AT = np.full((e.prefill_rows, e.length), -1, np.int32)
    for message_T, (row, tokens) in zip(message_AT, messages.items(), strict=False):
      message_T[self.end_B[row] :][: len(tokens)] = tokens
    self.slots = e.resume(
      params,
      self.slots,
      self.rows,
      self._padded(self.id_W[rows // e.group_size], -1),
      entering,
      message_AT,
      columns=shapes.prefill_width(e.length, reach.max()),
    )()
    self._occupy(entering, len(rows))
    for row in messages:
      del self.queue.answered[row]

  def _occupy(self, entering: Entering, count: int) -> None:
    """Records which rows the slots decode from now on."""
    slots = entering.slot_A[:count]
    self.row_S[slots] = entering.row_A[:count]
    self.first_dispatch_S[slots] = self.dispatched
    self.reach_S[slots] = entering.position_A[:count]
    self.limit_S[slots] = entering.limit_A[:count]
    self.turn_S[slots] = self.searched_S[slots] = entering.position_A[:count]

  def _dispatch(self, params: Tree, key: Array, n: int, version: int) -> None:
    """Advances every busy slot by at most n tokens."""
    # The cache segments read by attention must contain every column of this dispatch.
    reached_S = np.minimum(self.reach_S + n, self.limit_S)
    longest = reached_S[self.row_S >= 0].max(initial=1)
    live = shapes.segments_reached(self.engine.segment_sizes, longest)
    self.slots, position_S = self.engine.run(
      params, self.slots, key, n, version, live
    )()
    self.reach_S = reached_S
    self._pending.append((self.dispatched, position_S))
    self.dispatched += 1

  def _collect(self, lag: int) -> None:
    """Collects turns that have ended, without waiting for the last `lag` dispatches."""
    while len(self._pending) > lag:
      number, position_S = self._pending[0]
      # The flags of a dispatch do not apply to rows that were admitted after it.
      decoded_S = (self.row_S >= 0) & (self.first_dispatch_S <= number)
      end_S = np.zeros(len(decoded_S), np.int32)
      if self.engine.stop:
        end_S = self._stops(abs(np.asarray(position_S)), decoded_S)
      position_S = np.where(end_S > 0, -end_S, position_S)
      ready_S = (position_S < 0) & decoded_S
      if ready_S.any():
        # Harvests every slot that is done by now, even if it ended in a later dispatch;
        # such a slot is free on the device before the host reads its flag.
        self.slots, self.rows = self.engine.harvest(self.slots, self.rows, end_S)()
        rows = self.row_S[ready_S]
        self.row_S[ready_S] = -1
        self.end_B[rows] = -position_S[ready_S]
        self.turns_B[rows] += 1
        self._end_turns(rows)
      self.searched_S[decoded_S] = abs(position_S[decoded_S])
      self._pending.popleft()

  def _stops(self, position_S: np.ndarray, decoded_S: np.ndarray) -> np.ndarray:
    """Returns the column after the first stop string of each slot's turn, or 0.

    Searches the columns before position_S that were not searched yet.
    """
    stop = self.engine.stop
    end_S = np.zeros(len(decoded_S), np.int32)
    first_S = np.maximum(self.turn_S, self.searched_S - longest(stop)).astype(np.int32)
    tokens_SW = np.asarray(self.engine.recent(self.slots, first_S)())
    slots = np.flatnonzero(decoded_S)
    turns = [
      (
        tokens_SW[s, : position_S[s] - first_S[s]].tolist(),
        self.searched_S[s] - first_S[s],
      )
      for s in slots
    ]
    assert self._read
    for s, count in zip(slots, stopped(self._read, stop, turns), strict=True):
      end_S[s] = (first_S[s] + count) * (count > 0)
    return end_S

  def _end_turns(self, rows: np.ndarray) -> None:
    """Ends the responses in these rows, or asks the environment about their turns."""
    asks = np.zeros(len(rows), bool)
    if environment := self._environment:
      more = [self.left(row) > 1 for row in rows]  # a message, and a token after it
      asks = np.logical_and(more, self.turns_B[rows] < environment.max_turns)
      self.queue.asked.update(rows[asks].tolist())
      environment.ask(self.turns(rows[asks].tolist()))
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

  def turns(self, rows: Sequence[int]) -> list[Turn]:
    """Returns the last turns of those rows that this process verifies."""
    rows = [row for row in rows if self.own_B[row]]
    tokens_BT = exchange.rows_of(self.rows.tokens_BT, rows)
    version_BT = exchange.rows_of(self.rows.policy_version_BT, rows)
    return [
      Turn(
        row=row,
        problem=int(self.id_W[row // self.engine.group_size]),
        number=int(self.turns_B[row]),
        left=self.left(row),
        tokens_T=tokens_T,
        mask_T=version_T >= 0,
      )
      for row, tokens_T, version_T in zip(rows, tokens_BT, version_BT, strict=True)
    ]

  def _hear(self, at_least: int) -> None:
    """Takes the answers that have arrived; waits for `at_least` of them."""
    if self._environment:
      ended = self.queue.hear(self._environment, at_least)
      self._end(np.asarray(ended, int))

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
    busy = np.flatnonzero(self.row_S >= 0)
    for block in np.split(busy, range(A, len(busy), A)):
      if len(block):
        reached = int(self.reach_S[block].max())
        live = shapes.segments_reached(self.engine.segment_sizes, reached)
        slot_A = self._padded(block, self.engine.max_num_seqs)
        id_A = self._padded(self.id_W[self.row_S[block] // self.engine.group_size], -1)
        self.slots = self.engine.refresh(params, self.slots, id_A, slot_A, live)()

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
    if self.engine.stop:
      # A turn begins after its message, whose tokens have no version. A checkpoint is
      # written after the search of all its tokens.
      version_ST = exchange.whole(self.slots.policy_version_ST)
      column_T = np.arange(version_ST.shape[1])
      message_ST = (version_ST < 0) & (column_T < self.reach_S[:, None])
      first_S = exchange.whole(self.slots.prompt_length_S)
      self.turn_S = np.maximum(first_S, ((column_T + 1) * message_ST).max(1))
      self.searched_S = self.reach_S.copy()
    # Unfinished rows without a slot are queued again, in order of submission, and turns
    # without an answer are asked about again.
    rows = np.arange(len(self.done_B))
    rows = np.flatnonzero(~self.done_B & ~np.isin(rows, self.row_S))
    asked = self.turns_B[rows] > 0
    step = self.submitted_W[rows // self.engine.group_size]
    order = np.argsort(step, kind='stable')
    waiting = rows[order][~asked[order]].tolist()
    self.queue = Queue(waiting, asked=rows[asked].tolist())
