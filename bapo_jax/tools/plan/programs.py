"""Makes the programs that a run compiles, with abstract arguments placed on a mesh.

The devices may be absent. Reads no problems, and only config.json of a published model:
each prompt of a vision model is assumed to have TEXT tokens of text and one picture
that fills the remaining tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Wrapped

from bapo_jax import sharding
from bapo_jax.data import gallery
from bapo_jax.data.gallery import Gallery
from bapo_jax.learner import pictured, scoring
from bapo_jax.models import lora
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.rollout import decode as decode_lib
from bapo_jax.training import budget, build, inputs, policy, resolve
from bapo_jax.training.budget import Budget, Sizes
from bapo_jax.training.config import Config
from bapo_jax.types import Pictures, Tree

TEXT = 256  # tokens of a prompt beside its picture


class Job(NamedTuple):
  """The parts of a run that a plan needs: a Resolved without tokenizer and budget."""

  config: Config
  spec: ModelSpec
  schedule: Schedule
  mesh: Mesh

  @property
  def shape(self) -> dict[str, int]:
    """The number of devices along each axis of the mesh."""
    return dict(self.mesh.shape)

  @property
  def sizes(self) -> Sizes:
    """The sizes of the run, for the formulas of the memory."""
    return budget.sizes_of(self.config, self.spec)

  @property
  def counted(self) -> Budget:
    """The bytes of the run by hand."""
    return budget.count(self.sizes, self.spec, self.schedule, self.mesh)


class Program(NamedTuple):
  """A jitted function with its arguments, and its bytes per device."""

  function: Wrapped
  args: tuple[Any, ...]  # abstract, placed
  static: dict[str, Any]  # static keyword arguments
  resident: float  # other bytes of the run, not arguments of the program
  cache: float = 0.0  # bytes of the arguments that are keys and values
  tokens: int = 1  # that a call decodes in every slot
  micro_batches: int = 1  # most turns of the loop over them


def device_spec(config: Config, platform: str) -> ModelSpec:
  """Returns the spec of the config's model, with the platform's kernels."""
  path = config.model.path or inputs.resolve(config)
  directory = hf_directory.find(path, 'model.path', ('config.json',))
  return resolve.with_kernels(inputs.read_spec(config, directory), platform)


def bytes_per_device(tree: Tree) -> int:
  """Returns the bytes per device of the placed leaves of an abstract tree."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if getattr(x, 'sharding', None)
  )


def over_rows(job: Job, tree: Any) -> Any:
  """Splits the rows of an abstract tree over the mesh."""
  return sharding.abstract(tree, sharding.layout_of_rows(tree, job.mesh))


def learner_state(job: Job) -> tuple[Tree, Tree, Tree]:
  """Returns abstract (params, opt, base), placed as in training."""
  return build.abstract(job.config, job.spec, job.mesh)


def actor(job: Job) -> Tree:
  """Returns the weights, placed and cast as for decoding."""
  return decode_lib.abstract_actor(job.spec, job.mesh)


def buffer(job: Job) -> Tree:
  """Returns the replay buffer, its rows split over the mesh as in training."""
  return over_rows(
    job, jax.eval_shape(lambda: build.empty_buffer(job.config, job.spec))
  )


def beside(job: Job, *others: Tree) -> float:
  """Returns the bytes per device of other trees, of the buffer and of a teacher."""
  split = job.shape['fsdp'] * job.shape['tensor']
  teacher = budget.teacher_bytes(job.sizes, job.spec) / split
  return bytes_per_device((others, buffer(job))) + teacher


def beside_update(job: Job) -> float:
  """Returns the bytes per device of the buffer and of an actor with older weights."""
  lags = job.config.rollout.weight_sync_interval > 1
  return beside(job, actor(job) if lags else None)


def train_step(job: Job) -> Program:
  """Builds the program of one optimiser update on one minibatch."""
  config, spec, schedule, mesh = job
  B = config.minibatch_rows
  params, opt, base = learner_state(job)
  seen = embedded(job, B // config.sampler.group_size)
  batch = build.abstract_batch(config, mesh, seen, spec.routes)
  return Program(
    build.make_train_step(config, spec, schedule),
    (params, opt, batch, base),
    {},
    beside_update(job),
    micro_batches=config.learner.grad_accum_steps,
  )


def score(job: Job) -> Program:
  """Builds the program that computes log-probabilities of a packed micro-batch.

  With teacher.path it is the teacher's.
  """
  config = job.config
  T = job.config.row_length
  B = config.minibatch_rows // config.learner.grad_accum_steps
  params, opt, base = learner_state(job)
  weights = lora.attach(base, params)
  rest = beside(job, opt, actor(job))
  if spec := inputs.teacher_spec(config):
    weights = build.abstract_weights('', spec, job.mesh)
    rest = bytes_per_device((learner_state(job), actor(job), buffer(job)))
    job = job._replace(spec=spec)
  knobs = dict(temperature=config.sampler.temperature)
  knobs |= dict(micro_batches=1, spec=job.spec, schedule=job.schedule)
  like = functools.partial(jax.ShapeDtypeStruct, sharding=sharding.over_rows(job.mesh))
  seen = embedded(job, max(1, B // config.sampler.group_size))
  if routes := job.spec.routes:
    routes = build.abstract_routes(B, T, job.mesh, routes)
  return Program(
    jax.jit(functools.partial(scoring.packed_logprobs, **knobs)),
    (weights, like((B, T), 'int32'), like((B, T), 'bool')),
    {'pictures': seen, 'routes_BTX': routes},
    rest,
  )


def slots_of(job: Job) -> decode_lib.Slots:
  """Returns the sampler's abstract slots, placed as in training."""
  T = job.config.row_length
  k = job.config.sampler
  slots = jax.eval_shape(
    lambda: decode_lib.empty(job.spec, k.max_num_seqs, T, k.cache_segments)
  )
  return sharding.abstract(slots, decode_lib.slot_shardings(slots, job.mesh))


def prefill(job: Job) -> Program:
  """Builds the program that admits prompts into free slots."""
  config = job.config
  spec = job.spec
  R = min(config.sampler.prefill_batch_size, config.sampler.max_num_seqs)
  width = config.prompts.max_prompt_tokens
  slots = slots_of(job)
  # As many prompts as responses, as in an evaluation of one response per prompt.
  tokens = jax.ShapeDtypeStruct((R, width), jnp.int32)
  of_prompt = jax.ShapeDtypeStruct((R,), jnp.int32)
  entering = jax.ShapeDtypeStruct((len(decode_lib.Entering._fields), R), jnp.int32)
  pictures = pixels_of(job, R) if spec.vision else None
  return Program(
    decode_lib.admit,
    (actor(job), slots, tokens, of_prompt, entering, pictures),
    {'spec': spec},
    beside(job, learner_state(job)),
    bytes_per_device(slots.cache),
  )


def decode(job: Job) -> Program:
  """Builds the program that decodes `tokens_per_dispatch` tokens in every slot."""
  sampler = job.config.sampler
  n = sampler.tokens_per_dispatch
  slots = slots_of(job)
  key = jax.eval_shape(lambda: jax.random.key(0))
  return Program(
    decode_lib.run,
    (actor(job), slots, key, sampler.temperature, n, 0),
    {'spec': job.spec, 'eos': (0,), 'live': len(slots.cache[0])},
    beside(job, learner_state(job)),
    bytes_per_device(slots.cache),
    tokens=n,
  )


def gallery_of(job: Job) -> Gallery | None:
  """Returns an empty Gallery sized for the largest picture; None for text models."""
  v = job.spec.vision
  if v is None:
    return None
  room = max(1, job.config.prompts.max_prompt_tokens - TEXT)
  merged = min(v.most_pixels // (v.merge * v.patch) ** 2, room)
  high = math.isqrt(merged)
  grid = high * v.merge, -(-merged // high) * v.merge
  return Gallery([], v, gallery.capacity([[grid]], v))


def embedded(job: Job, prompts: int) -> pictured.Seen:
  """Returns abstract pictures of `prompts` prompts, embedded if the tower is frozen."""
  _, _, base = learner_state(job)
  return over_rows(job, pictured.abstract(gallery_of(job), prompts, job.spec, base))


def pixels_of(job: Job, prompts: int) -> Pictures:
  """Returns abstract pictures of `prompts` prompts, as pixels."""
  gallery = gallery_of(job)
  assert gallery is not None, 'only called for vision models'
  return over_rows(job, jax.eval_shape(lambda: gallery.empty(prompts)))


def tower(job: Job) -> Program:
  """Builds the program that embeds a block of pictures with the vision tower."""
  params, opt, base = learner_state(job)
  pixels = pixels_of(job, pictured.BLOCK * sharding.row_shards(job.mesh))
  rest = {name: w for name, w in params.items() if name != policy.TOWER}
  return Program(
    jax.jit(sequence.embedded, static_argnames=('spec', 'schedule')),
    ({policy.TOWER: (base or params)[policy.TOWER]}, pixels),
    {'spec': job.spec, 'schedule': job.schedule},
    bytes_per_device((rest, opt)) + beside_update(job),
  )


Programs = dict[str, Callable[[Job], Program]]  # name -> function that builds it
PROGRAMS: Programs = {
  'train step': train_step,
  'log-prob pass': score,
  'prefill': prefill,
  'decode': decode,
}


def programs_of(spec: ModelSpec) -> Programs:
  """Returns the programs of a run of this model, by name."""
  return PROGRAMS | ({'tower': tower} if spec.vision else {})
