"""The programs that a run compiles, with abstract arguments placed on a mesh.

1. `tpu_spec` reads the model of a config from its config.json alone;
2. `PROGRAMS` makes the train step, the log-probabilities, prefill and decode as the run
   itself calls them, for any mesh, of attached devices or not; `programs_of` adds the
   vision tower of a model that has one.

A plan knows no problems: of a model that sees, each prompt has one picture, as large as
the prompt has room for beside TEXT tokens of text.
"""

import dataclasses
import functools
import math
import os
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
from bapo_jax.models import attention, decoder, lora, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import sequence
from bapo_jax.rollout import decode as decode_lib
from bapo_jax.tools.plan import roofline
from bapo_jax.training import budget, frozen, policy, setup
from bapo_jax.training.config import Config
from bapo_jax.types import Pictures, Rules, Tree

TEXT = 256  # tokens of a prompt beside its picture


class Program(NamedTuple):
  """A jitted function, its arguments and its cost; bytes on one device."""

  function: Wrapped  # jitted
  args: tuple[Any, ...]  # abstract, placed
  static: dict[str, Any]  # static keyword arguments
  cost: Callable[
    [float], roofline.Cost
  ]  # of one step, given the bytes that links bring
  resident: float  # bytes of the run that the program does not take
  cache: float = 0.0  # bytes of the arguments that are keys and values
  steps: int = 1  # per call
  micro_batches: int = 1  # at most; the loop over them ends when the data do


def tpu_spec(config: Config) -> ModelSpec:
  """The model of the config, with the attention kernel of a TPU.

  Raises:
    ValueError: the model's directory has no config.json.
  """
  path = config.model.path
  if path and not os.path.isfile(os.path.join(path, 'config.json')):
    raise ValueError(
      f'--config.model.path={path} has no config.json; a plan needs no other file'
    )
  tokenizer = None if path else policy.load_tokenizer(config)
  spec = policy.spec_of(config, tokenizer)
  kind = attention.resolve(spec.attention, 'tpu', spec.compute)
  return dataclasses.replace(spec, attention=kind)


def place(tree: Tree, shardings: Tree) -> Tree:
  """The abstract tree with a sharding on every leaf."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
  )


def bytes_per_device(tree: Tree) -> int:
  """Bytes on one device of the placed leaves of the abstract tree."""
  placed = (x for x in jax.tree.leaves(tree) if getattr(x, 'sharding', None))
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in placed
  )


def gallery_of(config: Config, spec: ModelSpec) -> Gallery | None:
  """Room for the largest picture of a prompt, as good as square; None for texts."""
  v = spec.vision
  if v is None:
    return None
  room = max(1, config.prompts.max_prompt_tokens - TEXT)
  merged = min(v.most_pixels // (v.merge * v.patch) ** 2, room)
  high = math.isqrt(merged)
  grid = high * v.merge, -(-merged // high) * v.merge
  return Gallery([], v, gallery.capacity([[grid]], v))


def language(spec: ModelSpec) -> ModelSpec:
  """The language model without its tower, as hand counts want it."""
  return dataclasses.replace(spec, vision=None)


def learner_state(
  config: Config, spec: ModelSpec, mesh: Mesh
) -> tuple[Tree, Tree, Tree]:
  """(params, opt, base), placed as in training; base is None where all is trained."""
  params, base = transformer.abstract(spec), None
  if config.lora.rank:
    make = functools.partial(lora.init, spec, **config.lora.model_dump())
    params, base = jax.eval_shape(make, jax.random.key(0)), params
  elif frozen.has_tower(config, spec):
    base = {frozen.TOWER: params.pop(frozen.TOWER)}
  opt = jax.eval_shape(setup.optimizer(config).init, params)
  found = params, opt, base
  return place(found, sharding.shardings(found, mesh))


def actor(spec: ModelSpec, mesh: Mesh) -> Tree:
  """The weights, placed and cast as for decoding."""
  made = jax.eval_shape(
    lambda params: decoder.actor(params, spec, decoder.joins(mesh)),
    transformer.abstract(spec),
  )
  return place(made, sharding.shardings(made, mesh, 'decode'))


def held_actor(config: Config, spec: ModelSpec, mesh: Mesh) -> Tree | None:
  """The actor beside an update; None where it is freed, see trainer.train_loop."""
  lags = config.rollout.weight_sync_interval > 1
  return actor(spec, mesh) if lags else None


def buffer(config: Config, rules: Rules, mesh: Mesh) -> Tree:
  """Returns the replay buffer, its rows over the devices as in training."""
  made = jax.eval_shape(functools.partial(setup.empty_buffer, config, rules))
  return place(made, sharding.layout_of_rows(made, mesh))


def train_step(
  config: Config, rules: Rules, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> Program:
  """One optimiser update on one minibatch."""
  B, T = config.minibatch_rows, config.row_length
  params, opt, base = learner_state(config, spec, mesh)
  seen = embedded(config, spec, mesh, B // config.sampler.group_size)
  return Program(
    setup.make_train_step(config, rules, spec, schedule),
    (params, opt, setup.abstract_batch(config, mesh, seen), base),
    {},
    functools.partial(
      roofline.train,
      language(spec),
      schedule,
      dict(mesh.shape),
      B,
      T,
      config.learner.grad_accum_steps,
      adapters=budget.adapters(config, spec),
    ),
    bytes_per_device((held_actor(config, spec, mesh), buffer(config, rules, mesh))),
    micro_batches=config.learner.grad_accum_steps,
  )


def embedded(
  config: Config, spec: ModelSpec, mesh: Mesh, prompts: int
) -> pictured.Seen:
  """The pictures of so many prompts as the learner has them, placed."""
  _, _, base = learner_state(config, spec, mesh)
  seen = pictured.abstract(gallery_of(config, spec), prompts, spec, base)
  return place(seen, sharding.layout_of_rows(seen, mesh))


def tower(
  config: Config, rules: Rules, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> Program:
  """The pictures of a block of prompts through the tower, once for their responses."""
  params, opt, base = learner_state(config, spec, mesh)
  pixels = pixels_of(config, spec, mesh, pictured.BLOCK * sharding.row_shards(mesh))
  weights = {frozen.TOWER: (base or params)[frozen.TOWER]}
  rest = {name: w for name, w in params.items() if name != frozen.TOWER}
  return Program(
    jax.jit(sequence.embedded, static_argnames=('spec', 'schedule')),
    (weights, pixels),
    {'spec': spec, 'schedule': schedule},
    functools.partial(
      roofline.tower, spec, dict(mesh.shape), *pixels.pixels_PZE.shape[:2]
    ),
    bytes_per_device(
      (rest, opt, held_actor(config, spec, mesh), buffer(config, rules, mesh))
    ),
  )


def pixels_of(config: Config, spec: ModelSpec, mesh: Mesh, prompts: int) -> Pictures:
  """The pictures of so many prompts, placed."""
  held = gallery_of(config, spec)
  assert held is not None, 'only models that see are asked'
  pixels = jax.eval_shape(lambda: held.empty(prompts))
  return place(pixels, sharding.layout_of_rows(pixels, mesh))


def score(
  config: Config, rules: Rules, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> Program:
  """The log-probabilities of one micro-batch, packed, without a gradient."""
  B = config.minibatch_rows // config.learner.grad_accum_steps
  T = config.row_length
  function = functools.partial(
    scoring.packed_logprobs,
    micro_batches=1,
    spec=spec,
    schedule=schedule,
    temperature=config.sampler.temperature,
    chunk=config.logprobs.chunk,
  )
  params, opt, base = learner_state(config, spec, mesh)
  rows = sharding.over_rows(mesh)
  tokens_BT, wanted_BT = (
    jax.ShapeDtypeStruct((B, T), dtype, sharding=rows) for dtype in ('int32', 'bool')
  )
  seen = embedded(config, spec, mesh, max(1, B // config.sampler.group_size))
  return Program(
    jax.jit(function),
    (lora.attach(base, params), tokens_BT, wanted_BT),
    {} if seen is None else {'pictures': seen},
    functools.partial(roofline.score, language(spec), dict(mesh.shape), B, T),
    bytes_per_device((opt, actor(spec, mesh), buffer(config, rules, mesh))),
  )


def slots_of(
  config: Config, spec: ModelSpec, mesh: Mesh
) -> tuple[decode_lib.Slots, int]:
  """(slots of the sampler, bytes of their cache on one device)."""
  S, T = config.sampler.max_num_seqs, config.row_length
  slots = jax.eval_shape(
    lambda: decode_lib.empty(spec, S, T, config.sampler.cache_segments)
  )
  slots = place(slots, decode_lib.slot_shardings(slots, mesh))
  return slots, bytes_per_device(slots.cache)


def prefill(
  config: Config, rules: Rules, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> Program:
  """Prompts into free slots."""
  R = min(config.sampler.prefill_batch_size, config.sampler.max_num_seqs)
  width = config.prompts.max_prompt_tokens
  slots, cache = slots_of(config, spec, mesh)
  like = jax.ShapeDtypeStruct
  # As many prompts as responses, as in an evaluation of one response per prompt.
  prompts = like((R, width), jnp.int32), like((R,), jnp.int32)
  kinds = ('int32', 'int32', 'int32', 'uint32', 'int32')  # from, slot, row, uid, new
  responses = [like((R,), kind) for kind in kinds]
  seen = [pixels_of(config, spec, mesh, R)] if spec.vision else []

  def cost(linked: float) -> roofline.Cost:
    text = roofline.prefill(language(spec), dict(mesh.shape), R, width, linked)
    if not seen:
      return text
    patches = seen[0].pixels_PZE.shape[1]
    of_pictures = roofline.tower(spec, dict(mesh.shape), R, patches, 0)
    return roofline.Cost(*(sum(both) for both in zip(text, of_pictures, strict=True)))

  return Program(
    decode_lib.admit,
    (actor(spec, mesh), slots, *prompts, *responses, *seen),
    {'spec': spec},
    cost,
    bytes_per_device((learner_state(config, spec, mesh), buffer(config, rules, mesh))),
    cache,
  )


def decode(
  config: Config, rules: Rules, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> Program:
  """One dispatch of the sampler: `sampler.tokens_per_dispatch` tokens per slot."""
  n, T = config.sampler.tokens_per_dispatch, config.row_length
  slots, cache = slots_of(config, spec, mesh)
  key = jax.eval_shape(lambda: jax.random.key(0))
  S, shape = config.sampler.max_num_seqs, dict(mesh.shape)
  return Program(
    decode_lib.run,
    (actor(spec, mesh), slots, key, config.sampler.temperature, n, 0),
    {'spec': spec, 'eos': (0,), 'live': len(slots.cache[0])},
    lambda linked: roofline.decode(language(spec), shape, S, T, cache, linked),
    bytes_per_device((learner_state(config, spec, mesh), buffer(config, rules, mesh))),
    cache,
    n,
  )


Make = Callable[[Config, Rules, ModelSpec, Schedule, Mesh], Program]
PROGRAMS: dict[str, Make] = {
  'train step': train_step,
  'log-prob pass': score,
  'prefill': prefill,
  'decode': decode,
}


def programs_of(spec: ModelSpec) -> dict[str, Make]:
  """The programs of a run of this model, by name."""
  return PROGRAMS | ({'tower': tower} if spec.vision else {})


UNIT = {  # of which each cost is
  'train step': 'update',
  'log-prob pass': 'micro-batch',
  'prefill': 'batch of prompts',
  'decode': 'token per slot',
  'tower': 'block of prompts',
}
