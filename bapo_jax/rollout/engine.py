"""What decoding is given: the model, the sizes, and how tokens are drawn.

1. `RolloutEngine` is one frozen value; training, re-evaluation and evaluation differ in
   its sampling parameters and group size alone (`dataclasses.replace`);
2. its methods call the compiled functions of decode.py with them, under the mesh;
3. `warm_up` compiles every shape that can occur.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode
from bapo_jax.rollout.sampling import SamplingParams
from bapo_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class RolloutEngine:
  """How responses are decoded: the same for training, re-evaluation and evaluation.

  Args:
    max_prompt_tokens, max_new_tokens: most tokens of a prompt, and of a response with
      its end token.
    group_size: G, responses per prompt.
    temperature: divides the logits; the recorded distribution includes it. 0: greedy,
      for evaluation.
    eos: tokens that end a response.
    max_num_seqs: S, decode slots. prefill_batch_size: rows admitted at once.
    tokens_per_dispatch: tokens per slot and dispatch.
    cache_segments: parts of the KV cache; those that no slot has reached are not read.
    done_check_lag: dispatches after which the host reads the done flags: 1 keeps an
      accelerator busy meanwhile, and leaves a finished slot idle for one dispatch.
    top_k, top_p: see `SamplingParams`; evaluation only.
    mesh: where given, slots and rows are split over its data and fsdp axes.

  Raises:
    ValueError: rows of these sizes cannot be decoded or cannot end.
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
  cache_segments: int = 1
  done_check_lag: int = 0
  top_k: int = 0
  top_p: float = 1.0
  mesh: Mesh | None = None

  def __post_init__(self):
    decode.check(self.spec, self.max_prompt_tokens, self.max_new_tokens, self.eos)

  @property
  def length(self) -> int:
    """T, columns of a row."""
    return self.max_prompt_tokens + self.max_new_tokens

  @property
  def prefill_rows(self) -> int:
    """A, responses admitted at once."""
    return min(self.prefill_batch_size, self.max_num_seqs)

  @property
  def prefill_prompts(self) -> int:
    """R: so many neighbouring responses answer no more prompts than this."""
    return min(self.prefill_rows, -(-self.prefill_rows // self.group_size) + 1)

  @property
  def segment_sizes(self) -> list[int]:
    """Columns of each segment of the KV cache."""
    return decode.segments(self.length, self.cache_segments)

  def empty(self, rows: int) -> tuple[decode.Slots, decode.Rows]:
    """Free slots, and `rows` empty output rows, where they belong on the mesh."""

    def make():
      zeros = functools.partial(jnp.zeros, (rows, self.length))
      slots = decode.empty(
        self.spec, self.max_num_seqs, self.length, self.cache_segments
      )
      return slots, decode.Rows(
        zeros(jnp.int32), zeros(jnp.float32), zeros(jnp.int32) - 1
      )

    if self.mesh is not None:  # made in place: no device could hold the whole
      over_rows = sharding.over_rows(self.mesh, rows)
      slots = decode.slot_shardings(jax.eval_shape(make)[0], self.mesh)
      make = jax.jit(make, out_shardings=(slots, decode.Rows(*[over_rows] * 3)))
    return make()

  def admit(self, params: Tree, slots: decode.Slots, *rows) -> decode.Slots:
    """`decode.admit` under the mesh."""
    return sharding.under(self.mesh, decode.admit)(params, slots, *rows, spec=self.spec)

  def refresh(self, params: Tree, slots: decode.Slots, slot_A, live: int):
    """`decode.refresh` of the first `live` segments under the mesh."""
    columns = sum(self.segment_sizes[:live])
    refresh = sharding.under(self.mesh, decode.refresh)
    return refresh(params, slots, slot_A, spec=self.spec, columns=columns)

  def run(
    self, params: Tree, slots: decode.Slots, key, n: int, version: int, live: int
  ):
    """`decode.run` under the mesh."""
    return sharding.under(self.mesh, decode.run)(
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

  def warm_up(
    self, params: Tree, key: jax.Array, *, places: int, refreshed: bool
  ) -> None:
    """Compiles every shape that can occur, by calls with nothing to do."""
    slots, rows = self.empty(places * self.group_size)
    zeros = np.zeros(self.prefill_rows, np.int32)
    nowhere, uid = zeros + self.max_num_seqs, zeros.astype(np.uint32)
    ones = np.ones(self.prefill_prompts, np.int32)
    for width in decode.buckets(self.max_prompt_tokens):
      tokens_RT = np.zeros((self.prefill_prompts, width), np.int32)
      slots = self.admit(
        params, slots, tokens_RT, ones, zeros, nowhere, zeros, uid, zeros
      )
    for live in range(1, len(self.segment_sizes) + 1):
      if refreshed:
        slots = self.refresh(params, slots, nowhere, live)
      slots, _ = self.run(params, slots, key, 0, 0, live)
    jax.block_until_ready(decode.harvest(slots, rows))
