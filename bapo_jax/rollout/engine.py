"""The fixed settings of decoding, bound to the compiled functions of decode.py.

1. `RolloutEngine` is one frozen value: model, sizes, sampling parameters; training,
   re-evaluation and evaluation differ in sampling parameters and group size alone
   (`dataclasses.replace`);
2. its methods call the compiled functions with these settings, under the mesh;
3. `warm_up` compiles every shape that can occur.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data.gallery import Gallery
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode, knobs, shapes
from bapo_jax.rollout.decode import Rows, Slots
from bapo_jax.rollout.sampling import SOFTMAX, SamplingParams
from bapo_jax.types import Pictures, Tree

_D = knobs.SamplerConfig()


@dataclasses.dataclass(frozen=True)
class RolloutEngine:
  """One setting of decoding, for training, re-evaluation and evaluation alike.

  Args:
    max_prompt_tokens, max_new_tokens: most tokens of a prompt, and of a response with
      its end token.
    group_size: G, responses per prompt.
    temperature: divides the logits; the recorded distribution includes it. 0: greedy,
      for evaluation only.
    eos: tokens that end a response.
    max_num_seqs: S, decode slots.
    prefill_batch_size: responses admitted at once.
    tokens_per_dispatch: tokens per slot and dispatch.
    cache_segments: parts of the KV cache; those that no slot has reached are not read.
    done_check_lag: dispatches after which the host reads the done flags; 1 keeps an
      accelerator busy while the host reads, and leaves a finished slot idle for one
      dispatch.
    top_k, top_p: see `SamplingParams`; evaluation only.
    mesh: where given, slots and rows are split over its data and fsdp axes.
    gallery: pictures of the problems by their ids; None: texts. Others of the same
      capacity, those of held-out problems, are decoded by the same programs.

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
  cache_segments: int = _D.cache_segments
  done_check_lag: int = _D.done_check_lag
  top_k: int = SOFTMAX.top_k
  top_p: float = SOFTMAX.top_p
  mesh: Mesh | None = None
  gallery: Gallery | None = None

  def __post_init__(self):
    # Before anything is made or compiled.
    shapes.check_rows(self.spec, self.max_prompt_tokens, self.max_new_tokens, self.eos)

  @property
  def length(self) -> int:
    """T, columns of a row."""
    return self.max_prompt_tokens + self.max_new_tokens

  @property
  def prefill_rows(self) -> int:
    """A, responses admitted at once."""
    return min(self.prefill_batch_size, self.max_num_seqs)

  @property
  def prefill_sizes(self) -> list[int]:
    """Numbers of prompts that are prefilled at once, rising.

    A block of responses that starts with its group has one prompt less than one that
    cuts two groups; a program of its own where that is a tenth of the work.
    """
    whole = -(-self.prefill_rows // self.group_size)
    most = min(self.prefill_rows, whole + 1)
    return [whole, most] if most > 1.1 * whole else [most]

  @property
  def segment_sizes(self) -> list[int]:
    """Columns of each segment of the KV cache."""
    return shapes.segment_sizes(self.length, self.cache_segments)

  def empty(self, rows: int) -> tuple[Slots, Rows]:
    """Free slots, and `rows` empty output rows, where they belong on the mesh."""

    def make() -> tuple[Slots, Rows]:
      slots, T = self.max_num_seqs, self.length
      return decode.empty(self.spec, slots, T, self.cache_segments), Rows(
        tokens_BT=jnp.zeros((rows, T), jnp.int32),
        logp_BT=jnp.zeros((rows, T), jnp.float32),
        policy_version_BT=jnp.zeros((rows, T), jnp.int32) - 1,
      )

    if self.mesh is None:
      return make()
    # Made in place: no device could hold the whole.
    slots, like = jax.eval_shape(make)
    over_rows = sharding.over_rows(self.mesh, rows)
    layout = (
      decode.slot_shardings(slots, self.mesh),
      jax.tree.map(lambda _: over_rows, like),
    )
    return jax.jit(make, out_shardings=layout)()

  def pictures(self, id_P: np.ndarray) -> Pictures | None:
    """Those of problems with these ids, -1 without any; None: there is no gallery."""
    return None if self.gallery is None else self.gallery.of(id_P)

  def admit(
    self, params: Tree, slots: Slots, id_R: np.ndarray, *rows: np.ndarray
  ) -> Slots:
    """`decode.admit` under the mesh; `rows` are its arrays from tokens_RT to new_A.

    Args:
      id_R: problems of the prompts.
    """
    admit = sharding.under(self.mesh, decode.admit)
    return admit(params, slots, *rows, self.pictures(id_R), spec=self.spec)

  def refresh(
    self, params: Tree, slots: Slots, id_A: np.ndarray, slot_A: np.ndarray, live: int
  ) -> Slots:
    """`decode.refresh` of the first `live` segments under the mesh.

    Args:
      id_A: problems of the rows in these slots.
    """
    columns = sum(self.segment_sizes[:live])
    refresh = sharding.under(self.mesh, decode.refresh)
    pictures = self.pictures(id_A)
    return refresh(params, slots, slot_A, pictures, spec=self.spec, columns=columns)

  def run(
    self, params: Tree, slots: Slots, key: Array, n: int, version: int, live: int
  ) -> tuple[Slots, Array]:
    """`decode.run` under the mesh: (slots, position_S)."""
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
    self, params: Tree, key: Array, *, places: int, refreshed: bool = True
  ) -> None:
    """Compiles every shape that can occur, by calls with nothing to do.

    Args:
      places: groups that the output holds, as PartialRollouts has them.
      refreshed: the cache is computed anew at times: rollouts are partial.
    """
    slots, rows = self.empty(places * self.group_size)
    zeros = np.zeros(self.prefill_rows, np.int32)
    nowhere, uid = zeros + self.max_num_seqs, zeros.astype(np.uint32)
    nothing = zeros - 1
    widths = shapes.prefill_widths(self.max_prompt_tokens)
    for R, width in itertools.product(self.prefill_sizes, widths):
      tokens_RT, ones = np.zeros((R, width), np.int32), np.ones(R, np.int32)
      slots = self.admit(
        params, slots, nothing[:R], tokens_RT, ones, zeros, nowhere, zeros, uid, zeros
      )
    for live in range(1, len(self.segment_sizes) + 1):
      if refreshed:
        slots = self.refresh(params, slots, nothing, nowhere, live)
      slots, _ = self.run(params, slots, key, 0, 0, live)
    jax.block_until_ready(decode.harvest(slots, rows))
