"""What a run compiles, with abstract arguments where they will lie.

1. `described` is the model of a config, from its config.json alone;
2. `PROGRAMS` make the train step, the log-probabilities, prefill and decode as the run
   itself calls them, for any mesh, of devices that are there or not.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax import sharding, types
from bapo_jax.data import tokenizer
from bapo_jax.models import attention, logprobs, transformer
from bapo_jax.rollout import decode as decode_lib
from bapo_jax.tools.plan import roofline
from bapo_jax.training import binding, setup

# The dtypes of a Batch, by field; all others are float32.
KINDS = {'tokens': jnp.int32, 'mask': jnp.bool_, 'source': jnp.int32}


class Program(NamedTuple):
  """What is compiled."""

  function: Callable  # jitted
  args: tuple  # abstract, placed
  knobs: dict  # static
  cost: Callable  # bytes its collectives bring to a device -> roofline.Cost
  beside: float  # bytes a device holds meanwhile that are no arguments
  cache: float = 0.0  # bytes of the arguments that are keys and values
  runs: int = 1  # steps of one call: costs are of one step


def described(config) -> transformer.ModelSpec:
  """The model that the config names, its attention that of a TPU.

  Raises:
    ValueError: the model's directory has no config.json.
  """
  path = config.model.path
  if path and not os.path.isfile(os.path.join(path, 'config.json')):
    raise ValueError(
      f'--config.model.path={path} has no config.json; a plan needs no other file'
    )
  reader = None if path else tokenizer.load(**config.text)
  spec = setup.spec_of(config, reader)
  kind = attention.resolve(spec.attention, 'tpu', spec.compute)
  return dataclasses.replace(spec, attention=kind)


def place(tree, shardings):
  """The abstract tree with a sharding on every leaf."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
  )


def held(tree) -> float:
  """Bytes on one device of what is placed in the abstract tree."""
  placed = (x for x in jax.tree.leaves(tree) if getattr(x, 'sharding', None))
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in placed
  )


def learner_state(config, spec, grid):
  """(params, opt) where the learner keeps them."""
  params = transformer.abstract(spec)
  opt = jax.eval_shape(binding.optimizer(config).init, params)
  return place((params, opt), sharding.shardings((params, opt), grid))


def actor(spec, grid):
  """The weights as decoding reads them."""
  params = jax.eval_shape(
    lambda tree: transformer.cast(tree, spec.compute), transformer.abstract(spec)
  )
  return place(params, sharding.shardings(params, grid, 'decode'))


def shelves(config, grid):
  """The replay buffer, whole on every device."""
  made = jax.eval_shape(functools.partial(binding.empty_shelves, config))
  return place(made, jax.tree.map(lambda _: sharding.replicated(grid), made))


def rows_of(config) -> tuple[int, int]:
  """(rows of a minibatch, tokens in a row)."""
  rows = binding.seats(config) // config.learner.minibatches * config.sampler.group
  return rows, config.prompts.width + config.sampler.new


def train_step(config, rules, spec, grid) -> Program:
  """One optimiser update on one minibatch."""
  B, T = rows_of(config)
  size = {'B': B, 'T': T, '1': 1}
  fields = []
  for field in types.Batch._fields:  # the name says the axes
    name, _, axes = field.rpartition('_')
    shape = tuple(size[axis] for axis in axes)
    kind = KINDS.get(name, jnp.float32)
    fields.append(jax.ShapeDtypeStruct(shape, kind, sharding=sharding.over_rows(grid)))
  params, opt = learner_state(config, spec, grid)
  return Program(
    binding.learning(config, rules, spec),
    (params, opt, types.Batch(*fields)),
    {},
    functools.partial(
      roofline.train, spec, dict(grid.shape), B, T, config.learner.slices
    ),
    held((actor(spec, grid), shelves(config, grid))),
  )


def score(config, rules, spec, grid) -> Program:
  """The log-probabilities of one slice, without a gradient."""
  del rules
  B, T = rows_of(config)
  B //= config.learner.slices
  function = functools.partial(
    logprobs.sequence_logprobs,
    spec=spec,
    temperature=config.sampler.temperature,
    chunk=config.logprob.chunk,
  )
  params, opt = learner_state(config, spec, grid)
  tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=sharding.over_rows(grid))
  return Program(
    jax.jit(function),
    (params, tokens_BT),
    {},
    functools.partial(roofline.score, spec, dict(grid.shape), B, T),
    held((opt, actor(spec, grid), shelves(config, grid))),
  )


def slots_of(config, spec, grid):
  """(slots of the sampler, bytes of their cache on one device)."""
  S, (_, T) = config.sampler.slots, rows_of(config)
  slots = jax.eval_shape(lambda: decode_lib.empty(spec, S, T, config.sampler.segments))
  slots = place(slots, decode_lib.slot_shardings(slots, grid))
  return slots, held(slots.cache)


def prefill(config, rules, spec, grid) -> Program:
  """Prompts into free slots."""
  del rules
  R, width = min(config.sampler.refill, config.sampler.slots), config.prompts.width
  slots, cache = slots_of(config, spec, grid)
  like = jax.ShapeDtypeStruct
  # As many prompts as responses: what an evaluation of one response each asks for.
  prompts = like((R, width), jnp.int32), like((R,), jnp.int32)
  names = [like((R,), kind) for kind in ('int32', 'int32', 'int32', 'uint32', 'int32')]
  return Program(
    decode_lib.admit,
    (actor(spec, grid), slots, *prompts, *names),
    {'spec': spec},
    functools.partial(roofline.prefill, spec, dict(grid.shape), R, width),
    held((learner_state(config, spec, grid), shelves(config, grid))),
    cache,
  )


def decode(config, rules, spec, grid) -> Program:
  """One dispatch of the sampler: `sampler.chunk` tokens in every slot."""
  del rules
  n, (_, T) = config.sampler.chunk, rows_of(config)
  slots, cache = slots_of(config, spec, grid)
  key = jax.eval_shape(lambda: jax.random.key(0))
  S, shape = config.sampler.slots, dict(grid.shape)
  return Program(
    decode_lib.run,
    (actor(spec, grid), slots, key, config.sampler.temperature, n, 0),
    {'spec': spec, 'eos': (0,), 'live': len(slots.cache[0])},
    lambda linked: roofline.decode(spec, shape, S, T, cache, linked),
    held((learner_state(config, spec, grid), shelves(config, grid))),
    cache,
    n,
  )


PROGRAMS = {
  'train step': train_step,
  'log-prob pass': score,
  'prefill': prefill,
  'decode': decode,
}

# What the cost of each is the cost of.
UNIT = {
  'train step': 'update',
  'log-prob pass': 'slice',
  'prefill': 'refill',
  'decode': 'token a slot',
}
