"""Binds the fixed settings of decoding to the compiled functions of decode.py.

1. `RolloutEngine` is a frozen value: model, sizes, sampling parameters. Training,
   re-evaluation and evaluation differ only in sampling parameters and group size
   (`dataclasses.replace`);
2. its methods return the compiled functions with these settings, to be called or
   lowered under the mesh;
3. `programs` lists all shapes that can occur, to be compiled ahead.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.stages import Wrapped

from bapo_jax import sharding
from bapo_jax.data.gallery import Gallery
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode, knobs, shapes, turns
from bapo_jax.rollout.decode import Entering, Rows, Slots
from bapo_jax.rollout.sampling import SOFTMAX, SamplingParams
from bapo_jax.runtime.ahead import Call
from bapo_jax.types import Pictures, Tree

_D = knobs.SamplerConfig()


@dataclasses.dataclass(frozen=True)
class RolloutEngine:
  """The settings of decoding.

  The weights `params` of every method are an actor, the copy of the learner's weights
  that is laid out for decoding: `decode.sync_actor(params, spec, mesh)`, or
  `decoder.actor(params, spec)` without a mesh. Call it again after each update.

  Args:
    max_new_tokens: maximum number of tokens of a response, end token included.
    group_size: G, responses per prompt.
    temperature: divides the logits, also in recorded log-probabilities; at least 1e-3.
      0 means greedy decoding, for evaluation only: every token is recorded with
      log-probability 0, because greedy decoding gives it probability 1.
    max_num_seqs: S, the number of decode slots.
    prefill_batch_size: responses admitted at once.
    tokens_per_dispatch: tokens per slot and dispatch.
    cache_segments: parts of the KV cache; attention skips parts that no slot has
      reached. Unused if the kernel skips the free columns of each slot.
    done_check_lag: number of later dispatches that start before the host reads which
      slots a dispatch finished. 1 keeps an accelerator busy while the host reads, but
      leaves a finished slot idle for one dispatch.
    stop: strings that end a turn, with the token that completes one; needs
      done_check_lag=0.
    top_k, top_p: see `SamplingParams`; evaluation only.
    mesh: slots and rows are split over its data and fsdp axes; None for one device.
    gallery: pictures of the problems, by problem id; None for text only. Galleries of
      equal capacity use the same compiled programs.

  Example: two responses to each of two prompts, by random weights.

    >>> import jax
    >>> import numpy as np
    >>> from bapo_jax.models import decoder, transformer
    >>> from bapo_jax.rollout.partial_rollouts import PartialRollouts
    >>> from bapo_jax.types import Prompts
    >>> spec = transformer.ModelSpec(
    ...   vocab=16, width=16, layers=1, heads=2, kv_heads=1, head_width=8, ffn=32
    ... )
    >>> engine = RolloutEngine(
    ...   spec,
    ...   max_prompt_tokens=3,
    ...   max_new_tokens=5,
    ...   group_size=2,
    ...   temperature=1.0,
    ...   eos=(1,),
    ...   max_num_seqs=4,
    ...   prefill_batch_size=4,
    ...   tokens_per_dispatch=5,
    ... )
    >>> rollouts = PartialRollouts(engine, places=2)
    >>> id_P = np.arange(2, dtype=np.int32)
    >>> tokens_PT = np.asarray([[5, 6, 7], [8, 9, 0]], np.int32)
    >>> prompts = Prompts(id_P, tokens_PT, np.asarray([3, 2], np.int32))
    >>> rollouts.submit(prompts, np.arange(4, dtype=np.uint32))
    >>> params = transformer.init(spec, jax.random.key(0))
    >>> rollouts.decode(decoder.actor(params, spec), jax.random.key(1))
    >>> rows = rollouts.read(id_P, seats=2)
    >>> rows.tokens_BT.shape, rows.tokens_BT[1, 0, :2].tolist()
    ((2, 2, 8), [8, 9])
  """

  spec: ModelSpec
  _: dataclasses.KW_ONLY
  max_prompt_tokens: int
  max_new_tokens: int
  group_size: int
  temperature: float
  eos: tuple[int, ...]
  max_num_seqs: int
  prefill_batch_size: int
  tokens_per_dispatch: int
  cache_segments: int = _D.cache_segments
  done_check_lag: int = _D.done_check_lag
  stop: tuple[str, ...] = _D.stop
  top_k: int = SOFTMAX.top_k
  top_p: float = SOFTMAX.top_p
  mesh: Mesh | None = None
  gallery: Gallery | None = None

  @property
  def length(self) -> int:
    """Returns T, the number of columns of a row."""
    return self.max_prompt_tokens + self.max_new_tokens

  @property
  def prefill_rows(self) -> int:
    """Returns A, the number of responses admitted at once."""
    return min(self.prefill_batch_size, self.max_num_seqs)

  @property
  def prefill_sizes(self) -> list[int]:
    """Returns the one or two prompt counts for which prefilling is compiled, ascending.

    If A responses start in the middle of a group, they may answer one prompt more than
    if they start with a group. The smaller count has a separate program if this program
    saves more than a tenth of the work.
    """
    aligned = -(-self.prefill_rows // self.group_size)
    unaligned = min(self.prefill_rows, aligned + 1)
    return [aligned, unaligned] if unaligned > 1.1 * aligned else [unaligned]

  @property
  def segment_sizes(self) -> list[int]:
    """Returns the number of columns of each segment of the KV cache."""
    return shapes.cache_columns(self.spec, self.length, self.cache_segments)

  def empty(self, rows: int) -> Call:
    """Makes free slots and `rows` empty output rows, placed on the mesh."""
    slots = self.max_num_seqs
    parts = self.cache_segments
    return Call(
      self.mesh, _empty(self.spec, slots, rows, self.length, parts, self.mesh)
    )

  def pictures(self, id_P: np.ndarray) -> Pictures | None:
    """Returns the pictures of problems, empty for id -1; None if the run has none."""
    return None if self.gallery is None else self.gallery.of(id_P)

  def admit(
    self,
    params: Tree,
    slots: Slots,
    id_R: np.ndarray,
    tokens_RT: np.ndarray,
    from_A: np.ndarray,
    entering: Entering,
  ) -> Call:
    """Starts responses to prompts in free slots, by `decode.admit`.

    Args:
      id_R: problem ids of the prompts, -1 for padding.
    """
    return Call(
      self.mesh,
      decode.admit,
      params,
      slots,
      tokens_RT,
      from_A,
      np.stack(entering),
      self.pictures(id_R),
      spec=self.spec,
    )

  def refresh(
    self, params: Tree, slots: Slots, id_A: np.ndarray, slot_A: np.ndarray, live: int
  ) -> Call:
    """Recomputes the KV cache of some slots with new weights, by `decode.refresh`.

    Args:
      id_A: problem ids of the rows in these slots, -1 for padding.
      slot_A: the slots to refresh; the number S is padding.
      live: number of leading cache segments to recompute.
    """
    return Call(
      self.mesh,
      decode.refresh,
      params,
      slots,
      slot_A,
      self.pictures(id_A),
      spec=self.spec,
      columns=sum(self.segment_sizes[:live]),
    )

  def resume(
    self,
    params: Tree,
    slots: Slots,
    rows: Rows,
    id_A: np.ndarray,
    entering: Entering,
    message_AT: np.ndarray,
    *,
    columns: int,
  ) -> Call:
    """Continues rows after messages of an environment, by `decode.resume`.

    Args:
      id_A: problem ids of the rows, -1 for padding.
      columns: number of columns to compute, one of the widths of a whole row.
    """
    return Call(
      self.mesh,
      decode.resume,
      params,
      slots,
      rows,
      np.stack(entering),
      message_AT,
      self.pictures(id_A),
      spec=self.spec,
      columns=columns,
    )

  def run(
    self, params: Tree, slots: Slots, key: Array, n: int, version: int, live: int
  ) -> Call:
    """Decodes up to n tokens in every busy slot; returns the slots and position_S."""
    return Call(
      self.mesh,
      decode.run,
      params,
      slots,
      key,
      self.temperature or 1.0,
      n,
      version,
      spec=self.spec,
      eos=self.eos,
      live=live,
      sampling=SamplingParams(self.temperature == 0, self.top_k, self.top_p),
    )

  def recent(self, slots: Slots, first_S: np.ndarray) -> Call:
    """Returns the tokens of a dispatch and those before it that a stop string spans."""
    width = self.tokens_per_dispatch + turns.longest(self.stop)
    return Call(self.mesh, decode.recent, slots, first_S, width=width)

  def harvest(self, slots: Slots, rows: Rows, end_S: np.ndarray) -> Call:
    """Collects finished rows, by `decode.harvest`; end_S is used with stop strings."""
    return Call(None, decode.harvest, slots, rows, end_S if self.stop else None)

  def give(
    self, rows: Rows, to_N: np.ndarray, tokens_NT: np.ndarray, sampled_NT: np.ndarray
  ) -> Call:
    """Writes given responses into output rows, by `decode.give`."""
    return Call(self.mesh, decode.give, rows, to_N, tokens_NT, sampled_NT)

  def programs(
    self,
    params: Tree,
    *,
    places: int,
    refreshed: bool = True,
    resumed: bool = False,
    given: int = 0,
  ) -> Iterator[Call]:
    """Yields the program of every shape that can occur, for `ahead.compile_all`.

    Args:
      params: an actor, whose arrays may be abstract.
      places: the maximum number of groups in progress, as in PartialRollouts.
      refreshed: whether to include the program of `refresh`, for partial rollouts.
      resumed: whether to include the program of `resume`, for an environment.
      given: number of given responses per submission.
    """
    made = self.empty(places * self.group_size)
    yield made
    slots, rows = made.lower().out_info
    # Slot S is past the end and problem -1 has no pictures: every row is padding.
    zeros = np.zeros(self.prefill_rows, np.int32)
    no_slot = zeros + self.max_num_seqs
    no_id = zeros - 1
    none = Entering(no_slot, zeros, zeros, zeros, zeros, zeros)
    widths = shapes.prefill_widths(self.max_prompt_tokens)
    for R, width in itertools.product(self.prefill_sizes, widths):
      tokens_RT = np.zeros((R, width), np.int32)
      yield self.admit(params, slots, no_id[:R], tokens_RT, zeros, none)
    message_AT = np.zeros((len(zeros), self.length), np.int32)
    for width in shapes.prefill_widths(self.length) if resumed else []:
      yield self.resume(params, slots, rows, no_id, none, message_AT, columns=width)
    key = jax.eval_shape(jax.random.key, 0)
    for live in range(1, len(self.segment_sizes) + 1):
      if refreshed:
        yield self.refresh(params, slots, no_id, no_slot, live)
      yield self.run(params, slots, key, 0, 0, live)
    no_end = np.zeros(self.max_num_seqs, np.int32)
    if self.stop:
      yield self.recent(slots, no_end)
    yield self.harvest(slots, rows, no_end)
    if given:
      to_N = np.zeros(given, np.int32)
      tokens_NT = np.zeros((given, self.length), np.int32)
      yield self.give(rows, to_N, tokens_NT, tokens_NT > 0)


@functools.cache
def _empty(
  spec: ModelSpec, slots: int, rows: int, length: int, parts: int, mesh: Mesh | None
) -> Wrapped:
  """Compiles `RolloutEngine.empty`, once per mesh and size."""

  def make() -> tuple[Slots, Rows]:
    return decode.empty(spec, slots, length, parts), Rows(
      tokens_BT=jnp.zeros((rows, length), jnp.int32),
      logp_BT=jnp.zeros((rows, length), jnp.float32),
      policy_version_BT=jnp.full((rows, length), -1, jnp.int32),
      routes_BTX=spec.routes.empty(rows, length) if spec.routes else None,
    )

  if mesh is None:
    return jax.jit(make)
  # Each device creates its own shard: the full cache may not fit on one device.
  made, out = jax.eval_shape(make)
  layout = decode.slot_shardings(made, mesh), sharding.layout_of_rows(out, mesh)
  return jax.jit(make, out_shardings=layout)
