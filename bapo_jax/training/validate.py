"""What does not fit together in a config, said before anything is loaded or compiled.

1. `check` binds the rules' knobs, and everything below it is called from there;
2. `check_update`, `check_numbers`, `check_sources` each raise one sentence.
"""

import math
from collections.abc import Callable

import numpy as np

from bapo_jax import sharding
from bapo_jax.algorithms import advantage, batch_rules, clip, loss, replay_buffer
from bapo_jax.data import prompts, sources
from bapo_jax.models import attention, hf_weights, transformer
from bapo_jax.rewards import rewards
from bapo_jax.rollout import columns
from bapo_jax.training import evaluate, learner
from bapo_jax.types import SOURCES, Batch, bind_rule

# The smallest value of each count.
MINIMUM = {
  'prompts.count': 1,
  'sampler.group': 2,
  'sampler.new': 1,
  'sampler.slots': 1,
  'sampler.refill': 1,
  'sampler.chunk': 1,
  'sampler.segments': 1,
  'sampler.late': 0,
  'logprob.chunk': 1,
  'learner.epochs': 1,
  'learner.minibatches': 1,
  'learner.slices': 1,
  'learner.give_up': 1,
  'batch.refills': 0,
  'rollout.refresh_every': 1,
  'rollout.max_age': 0,
  'buffer.capacity': 1,
  'buffer.max_age': 1,
  'buffer.max_reuse': 1,
  'buffer.recheck': 0,
  'buffer.every': 1,
  'evaluate.every': 1,
  'evaluate.group': 1,
  'rewards.workers': 1,
  'rewards.memory_mb': 512,
  'rewards.recycle': 1,
  'checkpoint.every': 1,
  'checkpoint.keep': 1,
  'checkpoint.best': 0,
}


# Knobs of a slot's section that are not a rule's own.
BESIDE_RULES = ('aggregate', 'kl', 'refills', 'weights')


def check(config, devices=None) -> dict[str, Callable]:
  """The rules with their knobs bound, once the numbers are known to fit together.

  Args:
    devices: the mesh of a plan, which loads nothing; None for that of this host.

  Raises:
    ValueError: in one sentence, before anything is loaded or compiled.
  """
  slots = {'batch': batch_rules, 'advantage': advantage, 'clip': clip, 'loss': loss}
  rules = {}
  for section, module in slots.items():
    knobs = config[section].to_dict()
    for knob in BESIDE_RULES:
      knobs.pop(knob, None)
    rules[section] = bind_rule(module.RULES, section, knobs.pop('rule'), knobs)
  rules['band'] = check_band(config)
  check_batch(config)
  check_update(config, rules)
  rewards.check(config.rewards.rule, config.rewards.shaping, config.sampler.new)
  evaluate.check(config.evaluate.group, config.evaluate.k, **config.evaluate.sampling)
  if config.model.remat not in transformer.REMAT:
    raise ValueError(
      f'model.remat={config.model.remat!r} is none of {sorted(transformer.REMAT)}'
    )
  for knob in ('dtype', 'compute'):
    if config.model[knob] not in ('float32', 'bfloat16'):
      raise ValueError(
        f'model.{knob}={config.model[knob]!r}: choose float32 or bfloat16'
      )
  check_numbers(config)
  if devices is None:
    check_sources(config)
    path, spec = config.model.path, transformer.ModelSpec
    if path:
      spec = hf_weights.spec(hf_weights.here(path), compute=config.model.compute)
    columns.check_length(spec.positions, config.prompts.width, config.sampler.new)
    devices = sharding.make(**config.mesh)
  platform = devices.devices.flat[0].platform
  attention.resolve(config.model.attention, platform, config.model.compute)
  shards = sharding.row_shards(devices)
  learner.check(
    config.prompts.count,
    config.learner.minibatches,
    config.learner.slices,
    config.sampler.group,
    shards,
    batch_rules.seats(config.batch.rule, config.prompts.count, config.batch)
    - config.prompts.count,
  )
  for knob in ('slots', 'refill'):
    if config.sampler[knob] % shards:
      raise ValueError(
        f'sampler.{knob}={config.sampler[knob]} rows do not divide over {shards} '
        'device shards (mesh.data x mesh.fsdp)'
      )
  return rules


def check_update(config, rules) -> None:
  """Raises ValueError where clip rule, loss rule and learner do not fit together."""
  one = np.ones((1, 1), np.float32)
  row = Batch(one > 0, one > 0, 0 * one, 0 * one, one[0], np.zeros(1, np.int32))
  # Ranges are checked by using them.
  rules['loss'](0 * one, row, lambda ratio_BT: rules['clip'](ratio_BT, row))
  loss.row_scale(row.mask_BT, config.loss.aggregate, 1)
  if not 0 <= config.loss.kl < math.inf:
    raise ValueError(f'loss.kl={config.loss.kl}: must be 0 or more, and finite')
  if config.loss.rule in loss.FREE and config.clip.rule != 'unclipped':
    raise ValueError(
      f'clip.rule={config.clip.rule!r}: loss.rule={config.loss.rule!r} has no clip '
      "that it could set; choose clip.rule='unclipped'"
    )
  if config.learner.search not in learner.BOUNDS_SCOPES:
    raise ValueError(
      f'learner.search={config.learner.search!r}: choose one of {learner.BOUNDS_SCOPES}'
    )


def check_band(config) -> Callable:
  """The band rule with its knobs bound; ValueError where it makes none."""
  knobs = config.buffer.band.to_dict()
  band = bind_rule(
    replay_buffer.THRESHOLD_RULES, 'buffer.band', knobs.pop('rule'), knobs
  )
  for rate in (0.0, 1.0):  # ranges are checked by using them
    band(rate, config.sampler.group)
  return band


def check_batch(config) -> None:
  """Raises ValueError where weights, or what is replayed, make no sense."""
  for source, weight in config.batch.weights.items():
    if source not in SOURCES:
      raise ValueError(f'batch.weights.{source}: the sources are {SOURCES}')
    if not 0 <= weight < math.inf:
      raise ValueError(
        f'batch.weights.{source}={weight}: must be 0 or more, and finite'
      )
  if config.batch.rule == 'replay':
    older = config.batch.replay.get('older', 1)
    need = older * config.prompts.count
    if older < 1:
      raise ValueError(f'batch.replay.older={older}: replay what? give 1 or more')
    if config.buffer.capacity < need:
      raise ValueError(
        f'buffer.capacity={config.buffer.capacity} holds fewer groups than a batch '
        f'replays, prompts.count={config.prompts.count} x batch.replay.older={older} '
        f'= {need}; give that much'
      )


def check_numbers(config) -> None:
  """Raises ValueError where a number alone, or two of them, make no sense."""
  for name, least in MINIMUM.items():
    section, knob = name.split('.')
    if config[section][knob] < least:
      raise ValueError(
        f'{name}={config[section][knob]} is too small; give at least {least}'
      )
  check_flight(config)
  if config.sampler.temperature <= 0:
    raise ValueError(
      f'sampler.temperature={config.sampler.temperature} must be above 0'
    )
  for knob in ('deadline', 'batch_deadline'):
    if config.rewards[knob] <= 0:
      raise ValueError(f'rewards.{knob}={config.rewards[knob]} seconds must be above 0')
  if config.buffer.recheck > config.buffer.capacity:
    raise ValueError(
      f'buffer.recheck={config.buffer.recheck} is more than '
      f'buffer.capacity={config.buffer.capacity}'
    )


def check_flight(config) -> None:
  """Raises ValueError where a partial rollout could not end or could not begin."""
  knobs = config.rollout
  if knobs.cache not in ('refresh', 'keep'):
    raise ValueError(f"rollout.cache={knobs.cache!r}: choose 'refresh' or 'keep'")
  if knobs.budget < 1:
    raise ValueError(
      f'rollout.budget={knobs.budget} tokens a slot write nothing; give 1 or more, or '
      'inf for no budget'
    )
  if knobs.budget < math.inf and not knobs.max_age:
    raise ValueError(
      f'rollout.budget={knobs.budget} leaves responses unfinished, but '
      'rollout.max_age=0 forbids it; give max_age=1 or more, or budget=inf'
    )


def check_sources(config) -> None:
  """Raises one ValueError that names all that is wanted and cannot be had.

  Problems are made and files are read, all of them: what is wrong is then known.
  """
  for name, choices in prompts.CHOICES.items():
    section, knob = name.split('.')
    if config[section][knob] not in choices:
      raise ValueError(f'{name}={config[section][knob]!r}: choose one of {choices}')
  problems = config.problems.to_dict()
  wanted = {knob: problems[knob] for knob in sources.SPLITS}
  if wanted['test_source'] == 'synthetic' != wanted['source']:
    raise ValueError(
      f"problems.test_source='synthetic' beside problems.source={wanted['source']!r}: "
      'say on what problems to test; the embedded ones are not of that kind'
    )
  path = config.model.path
  lacks = hf_weights.missing(path) if path else []
  lost = [x for item in wanted.items() for x in sources.check(*item, problems)]
  if lacks and (lost or not hf_weights.on_hub(path)):
    lost.insert(0, f'--config.model.path={path} (no {", ".join(lacks)})')
  if lost:
    raise ValueError(
      f'not found: {"; ".join(lost)}. Download the model (`hf download <name> '
      '--local-dir <directory>`) and the data (jsonl or parquet), or point these knobs '
      'to where they are'
    )
  if not path:
    sources.worked(problems)
  for knob, source in wanted.items():
    sources.find(knob, source)
  if lacks:  # downloaded only when nothing else is wanting
    hf_weights.find(path, 'model.path')
