"""The learner's side of a job: batch, shelves and updates with their knobs bound.

With setup.py, which binds the rest, and validate.py the only reader of ConfigDict.
"""

import functools
from collections.abc import Callable

import jax

from bapo_jax import sharding
from bapo_jax.algorithms import batch_rules, loss, replay_buffer
from bapo_jax.training import learner
from bapo_jax.types import SOURCES


def choosing(config, rules) -> Callable:
  """The batch rule, jitted, with its number of seats."""
  rule = jax.jit(rules['batch'], static_argnums=5)
  return lambda *args: rule(*args, seats(config))


def seats(config) -> int:
  """Groups in a batch."""
  return batch_rules.seats(config.batch.rule, config.prompts.count, config.batch)


def refills(config) -> int:
  """Rounds of prompts that a step may ask beside its first."""
  return (
    config.batch.refills if config.batch.rule in batch_rules.WITH_EXTRA_ROUNDS else 0
  )


def empty_shelves(config, band=replay_buffer.fixed):
  """The shelves before the first step; without room where no rule looks at them."""
  capacity = (
    0 if config.batch.rule in batch_rules.WITHOUT_BUFFER else config.buffer.capacity
  )
  length = config.prompts.width + config.sampler.new
  return replay_buffer.init(capacity, config.sampler.group, length, band)


def filing(config, rules) -> Callable:
  """buffer.shelve with its knobs; nothing is filed where no rule would look."""
  if config.batch.rule in batch_rules.WITHOUT_BUFFER:
    return lambda shelves, *_: (shelves, {})
  knobs = {k: config.buffer[k] for k in ('max_age', 'max_reuse')}

  def shelve(*args):
    shelves, counts = replay_buffer.insert(*args, band=rules['band'], **knobs)
    return shelves, {name: int(n) for name, n in counts.items()}

  return shelve


def updating(config, rules, spec, devices) -> Callable:
  """learner.update with its knobs; the single update is compiled once."""
  score = None
  if config.loss.rule in loss.PROXIMAL:
    parts = config.learner.minibatches * config.learner.slices
    score = functools.partial(learner.score, parts=parts, **scored(config, spec))
    score = sharding.under(devices, jax.jit(score))
  return functools.partial(
    learner.update,
    learn=sharding.under(devices, learning(config, rules, spec)),
    advantage_rule=rules['advantage'],
    epochs=config.learner.epochs,
    minibatches=config.learner.minibatches,
    proximal=score,
    weights=tuple(float(config.batch.weights[source]) for source in SOURCES),
    place=lambda batch: jax.device_put(batch, sharding.over_rows(devices)),
  )


def optimizer(config):
  """With float32 weights of its own where the parameters are less."""
  return learner.optimizer(
    master=config.model.dtype != 'float32', **config.optimizer.to_dict()
  )


def scored(config, spec) -> dict:
  """How tokens are scored: the same in an update and for the proximal policy."""
  return dict(
    spec=spec, temperature=config.sampler.temperature, chunk=config.logprob.chunk
  )


def learning(config, rules, spec):
  """(params, opt, batch) -> (params, opt, metrics): one optimiser update, jitted."""
  learn = functools.partial(
    learner.learn,
    tx=optimizer(config),
    clip_rule=rules['clip'],
    loss_rule=rules['loss'],
    slices=config.learner.slices,
    search=config.learner.search,
    aggregate=config.loss.aggregate,
    kl=config.loss.kl,
    length=config.sampler.new,
    **scored(config, spec),
  )
  return jax.jit(learn, donate_argnums=(0, 1))
