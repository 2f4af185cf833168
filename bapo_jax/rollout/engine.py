"""Responses in flight: the host's loop around the sampler's compiled functions.

1. `ask` gives every prompt a place and queues its G responses, oldest first;
2. `advance` fills free slots, dispatches, and collects what is finished, until all is
   written or a budget is spent: what is unfinished stays in its slot for the next call;
3. `finished`, `read` and `free` hand out groups whose responses are all written.

A flight is the one value of this package that changes in place: after an exception in
`advance`, wherever it came from, calling it again goes on, and nothing is lost.
"""

import collections
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.rollout import columns, decode
from bapo_jax.types import Prompts


class RolloutEngine:
  """W places for groups of G responses, S slots to write them in.

  Args:
    places: W, the most groups in flight.
    width, new: most tokens of a prompt and of a response, its end token included.
    temperature: divides the logits; the recorded distribution has it. 0: the likeliest
      token, for evaluation.
    eos: tokens that end a response.
    slots: rows decoded side by side. refill: rows admitted at once. chunk: tokens a
      dispatch.
    segments: parts of the cache; those that no slot has reached are not read.
    late: read which slots are done this many dispatches late: 1 keeps an accelerator
      busy while the host looks, and leaves a finished slot idle for one dispatch.
    top_k, top_p: see `sampler.Pick`; evaluation only.
    mesh: where given, slots and rows are split over its data and fsdp axes.
  """

  def __init__(
    self,
    spec: transformer.ModelSpec,
    *,
    places: int,
    width: int,
    group: int,
    new: int,
    temperature: float,
    eos: tuple[int, ...],
    slots: int,
    refill: int,
    chunk: int,
    segments: int = 1,
    late: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    mesh=None,
  ):
    columns.check(spec, width, new, eos)  # before anything is made or compiled
    self.spec, self.mesh, self.eos, self.width = spec, mesh, tuple(eos), width
    self.group, self.new = group, new
    self.temperature = temperature or 1.0
    self.pick = decode.SamplingParams(temperature == 0, top_k, top_p)
    self.refill, self.chunk, self.late = min(refill, slots), chunk, late
    # So many neighbouring rows are of no more prompts than this.
    self.most = min(self.refill, -(-self.refill // group) + 1)
    self._admit_to, self._refresh_of = (
      functools.partial(sharding.under(mesh, function), spec=spec)
      for function in (decode.admit, decode.refresh)
    )
    self._run = functools.partial(
      sharding.under(mesh, decode.run), spec=spec, eos=self.eos, pick=self.pick
    )
    length = width + new
    self.sizes = columns.segments(length, segments)
    self._make(places * group, slots, length, segments)
    # What the host knows of places, of rows and of slots.
    self.asked_W = np.full(places, -1)  # learner step; -1: the place is free
    self.id_W = np.full(places, -1, np.int32)
    self.length_W = np.zeros(places, np.int32)
    self.prompt_WT = np.zeros((places, width), np.int32)
    self.uid_B = np.zeros(places * group, np.uint32)
    self.new_B = np.full(places * group, new, np.int32)
    self.done_B = np.ones(places * group, bool)
    self.row_S = np.full(slots, -1, np.int32)
    self.since_S = np.zeros(slots, int)  # first dispatch of the slot's present row
    self.reach_S = np.zeros(slots, int)  # columns that it has reached at most
    self.limit_S = np.zeros(slots, int)
    self.waiting: collections.deque[int] = collections.deque()
    self.untold: list[int] = []
    self.dispatched = 0
    self.tokens = 0  # of the responses finished in this `advance`
    self.cold = False  # restored, so without keys and values
    self._seen: collections.deque = collections.deque()

  def _make(self, B: int, slots: int, length: int, segments: int) -> None:
    def make():
      zeros = functools.partial(jnp.zeros, (B, length))
      rows = zeros(jnp.int32), zeros(jnp.float32), zeros(jnp.int32) - 1
      return decode.empty(self.spec, slots, length, segments), decode.Rows(*rows)

    if self.mesh is not None:  # made where it lies: no device could hold the whole
      like = jax.eval_shape(make)[0]
      over_rows = sharding.over_rows(self.mesh, B)
      layout = decode.slot_shardings(like, self.mesh), decode.Rows(*[over_rows] * 3)
      make = jax.jit(make, out_shardings=layout)
    self.slots, self.rows = make()

  def ask(self, prompts: Prompts, uid_B, step: int = 0, new_B=None) -> None:
    """Queues G responses to each prompt; one of length 0 is an empty seat.

    Args:
      uid_B: u32, names each response; equal (key, uid) give equal noise.
      step: learner step that asks.
      new_B: most tokens of each response, where they differ; at most `new`.

    Raises:
      ValueError: a prompt that does not fit, or more prompts than there are places.
    """
    columns.check_prompts(prompts)
    free = np.flatnonzero(self.asked_W < 0)
    if len(prompts.id_P) > len(free):
      raise ValueError(f'{len(prompts.id_P)} prompts for {len(free)} free places')
    mine = free[: len(prompts.id_P)]
    self.asked_W[mine], self.id_W[mine] = step, prompts.id_P
    self.prompt_WT[mine], self.length_W[mine] = prompts.tokens_PT, prompts.length_P
    mine_PG = mine[:, None] * self.group + np.arange(self.group)
    self.uid_B[mine_PG] = np.asarray(uid_B, np.uint32).reshape(mine_PG.shape)
    new_B = self.new if new_B is None else np.reshape(new_B, mine_PG.shape)
    self.new_B[mine_PG] = np.clip(new_B, 1, self.new)
    wanted = mine_PG[np.asarray(prompts.length_P) > 0].ravel()
    self.done_B[wanted] = False
    self.waiting.extend(wanted.tolist())

  @property
  def unfinished(self) -> int:
    """Responses in flight."""
    return int((~self.done_B).sum())

  @property
  def busy(self) -> int:
    """Slots with an unfinished response, as far as the host knows."""
    return int((self.row_S >= 0).sum())

  def advance(
    self,
    params,
    key,
    *,
    born: int = 0,
    budget: float = math.inf,
    due_W=None,
    tell: Callable[[list[int]], None] = lambda rows: None,
  ) -> None:
    """Writes until all is written, or the budget is spent and what is due is written.

    Args:
      born: learner step of these weights.
      budget: tokens a slot; a slot that is refilled shares it.
      due_W: places whose groups must be finished, whatever the budget.
      tell: called with the rows that were finished since its last call.
    """
    spent = self.tokens = 0
    while self.busy or self.waiting:
      self._fill(params)
      late = due_W is not None and (~self.done_B).reshape(len(due_W), -1)[due_W].any()
      if spent >= budget and not late:
        break
      n = self.chunk if late else int(min(self.chunk, budget - spent))
      self._dispatch(params, key, n, born)
      spent += n
      self._look(tell, self.late)
    self._look(tell, 0)

  def _fill(self, params) -> None:
    # Whole blocks only, unless nothing else is left to do.
    while self.waiting:
      free = np.flatnonzero(self.row_S < 0)
      if len(free) < min(self.refill, len(self.waiting)):
        return
      self._admit(params, free)

  def _admit(self, params, free) -> None:
    """The oldest waiting rows into the first free slots."""
    A, S, R = self.refill, len(self.row_S), self.most
    rows = [self.waiting[i] for i in range(min(A, len(self.waiting)))]
    of, from_A = np.unique(np.asarray(rows) // self.group, return_inverse=True)
    count, pad = len(rows), (0, A - len(rows))
    width = next(n for n in columns.buckets(self.width) if n >= self.length_W[of].max())
    tokens_RT = np.zeros((R, width), np.int32)
    tokens_RT[: len(of)] = self.prompt_WT[of, :width]
    length_R = np.ones(R, np.int32)
    length_R[: len(of)] = self.length_W[of]
    slot_A = np.pad(free[:count], pad, constant_values=S).astype(np.int32)
    self.slots = self._admit_to(
      params,
      self.slots,
      tokens_RT,
      length_R,
      np.pad(from_A, pad).astype(np.int32),
      slot_A,
      np.pad(np.asarray(rows, np.int32), pad, constant_values=-1),
      np.pad(self.uid_B[rows], pad),
      np.pad(self.new_B[rows], pad),
    )
    at = slot_A[:count]
    self.row_S[at], self.since_S[at] = rows, self.dispatched
    self.reach_S[at] = length_R[from_A]
    self.limit_S[at] = length_R[from_A] + self.new_B[rows]
    for _ in rows:
      self.waiting.popleft()

  def _dispatch(self, params, key, n: int, born: int) -> None:
    reached_S = np.minimum(self.reach_S + n, self.limit_S)
    most = reached_S[self.row_S >= 0].max(initial=1)
    self.slots, told_S = self._run(
      params,
      self.slots,
      key,
      self.temperature,
      n,
      born,
      live=columns.reach(self.sizes, most),
    )
    self.reach_S = reached_S
    self._seen.append((self.dispatched, told_S))
    self.dispatched += 1

  def _look(self, tell, late: int) -> None:
    """Reads what is done, all but the last `late` dispatches, and collects it."""
    while len(self._seen) > late:
      number, told_S = self._seen[0]
      told_S = np.asarray(told_S)
      # Flags of a dispatch say nothing of a row that was admitted after it.
      ready_S = (told_S < 0) & (self.row_S >= 0) & (self.since_S <= number)
      if ready_S.any():
        self.slots, self.rows = decode.harvest(self.slots, self.rows)
        rows = self.row_S[ready_S]
        self.done_B[rows] = True
        self.tokens += int(
          -told_S[ready_S].sum() - self.length_W[rows // self.group].sum()
        )
        self.untold.extend(rows.tolist())
        self.row_S[ready_S] = -1
      self._seen.popleft()
    if self.untold:
      tell(self.untold)
      self.untold = []

  def finished(self) -> np.ndarray:
    """Places of the groups that are written, the oldest first."""
    done_W = self.done_B.reshape(len(self.asked_W), -1).all(1) & (self.asked_W >= 0)
    order = np.argsort(self.asked_W, kind='stable')
    return order[done_W[order]]

  def read(self, places, seats: int) -> decode.Rows:
    """The rows [seats, G, T] of these groups, empty ones after them."""
    pad = (0, seats - len(places))
    there_P = np.pad(np.ones(len(places), bool), pad)
    rows = decode.groups(self.rows, np.pad(places, pad), there_P, self.group)
    if jax.process_count() > 1:  # every host reads them
      everywhere = sharding.replicated(self.mesh)
      rows = jax.jit(lambda x: x, out_shardings=everywhere)(rows)
    return rows

  def free(self, places) -> None:
    """Gives these places up: their groups are recorded elsewhere."""
    self.asked_W[places] = -1

  def refresh(self, params) -> None:
    """Computes the cache of every busy slot from its tokens under these weights."""
    self.cold = False
    busy = np.flatnonzero(self.row_S >= 0)
    for block in np.split(busy, range(self.refill, len(busy), self.refill)):
      if len(block):
        self._refresh(params, block, int(self.reach_S[block].max()))

  def _refresh(self, params, block, most: int) -> None:
    pad = (0, self.refill - len(block))
    self.slots = self._refresh_of(
      params,
      self.slots,
      np.pad(block, pad, constant_values=len(self.row_S)).astype(np.int32),
      columns=sum(self.sizes[: columns.reach(self.sizes, most)]),
    )

  def warm_up(self, params, key, refreshed: bool = True) -> None:
    """Compiles every shape that can occur, by calling it with nothing to do."""
    zeros, ones = np.zeros(self.refill, np.int32), np.ones(self.most, np.int32)
    names = zeros + len(self.row_S), zeros, zeros.astype(np.uint32), zeros
    for width in columns.buckets(self.width):
      tokens_RT = np.zeros((self.most, width), np.int32)
      self.slots = self._admit_to(params, self.slots, tokens_RT, ones, zeros, *names)
    at = key, self.temperature, 0, 0
    for live in range(1, len(self.sizes) + 1):
      if refreshed:
        self._refresh(params, zeros[:0], sum(self.sizes[:live]))
      self.slots, _ = self._run(params, self.slots, *at, live=live)

  KEPT = ('asked_W', 'id_W', 'length_W', 'prompt_WT', 'uid_B', 'new_B', 'done_B')

  def state(self) -> dict:
    """All but the cache, as arrays: what a checkpoint holds."""
    slots = self.slots._replace(cache=())
    host = {name: getattr(self, name) for name in self.KEPT}
    return {'slots': slots._asdict(), 'rows': self.rows._asdict(), 'host': host}

  def restore(self, state: dict) -> None:
    """Goes on from a state; the cache is to be refreshed before the next `advance`."""
    self.slots = decode.Slots(**state['slots'] | {'cache': self.slots.cache})
    self.rows = decode.Rows(**state['rows'])
    for name in self.KEPT:
      setattr(self, name, np.array(state['host'][name]))
    self.cold = True
    self.row_S = np.array(self.slots.row_S)
    self.reach_S = np.array(self.slots.position_S, int)
    self.limit_S = np.array(self.slots.limit_S, int)
    self.since_S[:] = self.dispatched
    # As they were asked: the oldest first, and in the order of their places.
    open_ = np.flatnonzero(
      ~self.done_B & ~np.isin(np.arange(len(self.done_B)), self.row_S)
    )
    asked = self.asked_W[open_ // self.group]
    self.waiting = collections.deque(open_[np.argsort(asked, kind='stable')].tolist())
