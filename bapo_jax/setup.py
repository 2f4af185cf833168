"""From a config to a run: the only reader of ConfigDict.

1. `check` finds what does not fit together before anything is loaded or compiled;
2. `start` loads text, problems and weights, and makes the first `Run`;
3. `assemble` binds every knob into the functions of a `Job`.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable

import jax
import numpy as np

from bapo_jax import (
  advantage,
  attention,
  batch,
  buffer,
  checkpoint,
  clip,
  evaluate,
  learner,
  mesh,
  model,
  prompts,
  rewards,
  rollout,
  sampler,
  text,
  train,
  warmstart,
  weights,
)
from bapo_jax.problems import families
from bapo_jax.progress import Clock, timed
from bapo_jax.types import pick

# The smallest value of each count.
LEAST = {
  'prompts.count': 1,
  'sampler.group': 2,
  'sampler.new': 1,
  'sampler.slots': 1,
  'sampler.refill': 1,
  'sampler.chunk': 1,
  'logprob.chunk': 1,
  'learner.epochs': 1,
  'learner.minibatches': 1,
  'learner.slices': 1,
  'rollout.refresh_every': 1,
  'buffer.capacity': 1,
  'buffer.recheck': 0,
  'buffer.every': 1,
  'evaluate.every': 1,
  'evaluate.group': 1,
  'checkpoint.every': 1,
  'checkpoint.keep': 1,
}


def check(config, devices=None) -> dict[str, Callable]:
  """The three rules with their knobs bound, once the numbers are known to fit together.

  Args:
    devices: the mesh of a plan, which loads nothing; None for that of this host.

  Raises:
    ValueError: in one sentence, before anything is loaded or compiled.
  """
  slots = {'batch': batch, 'advantage': advantage, 'clip': clip}
  rules = {}
  for section, module in slots.items():
    knobs = config[section].to_dict()
    rules[section] = pick(module.RULES, section, knobs.pop('rule'), knobs)
  ones = np.ones((1, 1), np.float32)
  rules['clip'](ones, ones, ones > 0)  # its ranges are checked by using it
  if config.rewards.rule not in rewards.RULES:
    raise ValueError(
      f'rewards.rule: no rule named {config.rewards.rule!r}; choose one of '
      f'{sorted(rewards.RULES)}'
    )
  if config.model.remat not in model.REMAT:
    raise ValueError(
      f'model.remat={config.model.remat!r} is none of {sorted(model.REMAT)}'
    )
  check_numbers(config)
  if devices is None:
    check_sources(config)
    devices = mesh.make(**config.mesh)
  platform = devices.devices.flat[0].platform
  attention.resolve(config.model.attention, platform, config.model.compute)
  shards = mesh.row_shards(devices)
  learner.check(
    config.prompts.count,
    config.learner.minibatches,
    config.learner.slices,
    config.sampler.group,
    shards,
  )
  for knob in ('slots', 'refill'):
    if config.sampler[knob] % shards:
      raise ValueError(
        f'sampler.{knob}={config.sampler[knob]} rows do not divide over {shards} '
        'device shards (mesh.data x mesh.fsdp)'
      )
  return rules


def check_numbers(config) -> None:
  """Raises ValueError where a number alone, or two of them, make no sense."""
  for name, least in LEAST.items():
    section, knob = name.split('.')
    if config[section][knob] < least:
      raise ValueError(
        f'{name}={config[section][knob]} is too small; give at least {least}'
      )
  if config.sampler.temperature <= 0:
    raise ValueError(
      f'sampler.temperature={config.sampler.temperature} must be above 0'
    )
  if config.buffer.recheck > config.buffer.capacity:
    raise ValueError(
      f'buffer.recheck={config.buffer.recheck} is more than '
      f'buffer.capacity={config.buffer.capacity}'
    )


def check_sources(config) -> None:
  """Raises one ValueError that names all that is wanted and cannot be had.

  Embedded problems are made, all of them: whether there are enough is then known.
  """
  p = config.problems
  if p.source == 'synthetic':
    families.generate(p.family, p.level, p.seed, p.train + p.test)
  lost = []
  path = config.model.path
  if path and (lacks := weights.missing(path)):
    lost.append(f'--config.model.path={path} (no {", ".join(lacks)})')
  for knob in ('source', 'test_source'):
    file = config.problems[knob]
    if file != 'synthetic' and not os.path.isfile(file):
      lost.append(f'--config.problems.{knob}={file}')
  if lost:
    raise ValueError(
      f'not found: {"; ".join(lost)}. Download the model (`hf download <name> '
      '--local-dir <directory>`) and the data (jsonl, fields problem and answer), or '
      'point these knobs to where they are'
    )


def start(config, workdir: str, clock: Clock) -> tuple[train.Job, train.Run]:
  """Everything the config asks for, made: what the run does, and the run at step 0.

  Raises:
    ValueError: a knob is out of range or does not fit the others.
  """
  rules = check(config)
  devices = mesh.make(**config.mesh)
  with clock('load'):
    reader, problems = read(config, workdir)
  spec, params = policy(config, workdir, reader, devices, clock)
  job = assemble(config, rules, reader, problems, spec, devices, clock)
  tx = learner.optimizer(**config.optimizer)
  opt = jax.eval_shape(tx.init, params)
  opt = jax.jit(tx.init, out_shardings=mesh.shardings(opt, devices))(params)
  length = config.prompts.width + config.sampler.new
  capacity = 0 if config.batch.rule in batch.SHELFLESS else config.buffer.capacity
  shelves = jax.device_put(
    buffer.start(capacity, config.sampler.group, length), mesh.everywhere(devices)
  )
  return job, train.Run(0, params, opt, job.speak(params), 0, shelves)


def read(config, workdir: str):
  """(text, (training problems, held-out problems))."""
  reader = text.load(**config.text)
  problems = prompts.load(reader, workdir, config.prompts.width, **config.problems)
  return reader, problems


def spec_of(config, reader) -> model.ModelSpec:
  """What config.json of the model's directory says, or the knobs; needs no weights."""
  knobs = config.model.to_dict()
  path = knobs.pop('path')
  if path:
    spec = weights.spec(path, compute=knobs['compute'])
    own = {name: knobs[name] for name in ('attention', 'remat')}
    return dataclasses.replace(spec, **own)
  # Rounded up, as published models do, so that the vocabulary divides over devices.
  vocab = -(-len(reader.tokenizer) // 8) * 8
  return model.ModelSpec(vocab=vocab, **knobs)


def policy(config, workdir: str, reader, devices, clock: Clock):
  """(spec, params): a checkpoint's, or random weights that had their warm start."""
  spec, path = spec_of(config, reader), config.model.path
  if path:
    with clock('load'):
      return spec, weights.load(path, spec, devices)
  like = model.abstract(spec)
  layout = mesh.shardings(like, devices)
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, layout
  )
  recipe = {
    'seed': config.seed,
    'length': config.prompts.width + config.sampler.new,
    **{name: config[name].to_dict() for name in ('model', 'text', 'problems')},
    'warmstart': config.warmstart.to_dict(),
  }
  digest = fingerprint(recipe)
  kept = os.path.join(workdir, 'warmstart', digest)
  if os.path.isdir(kept):
    return spec, checkpoint.restore_params(kept, like)
  family = {k: config.problems[k] for k in ('family', 'level', 'train', 'test')}
  with clock('warm start'):
    params = mesh.under(devices, warmstart.fit)(
      reader,
      spec,
      devices,
      recipe['length'],
      **family,
      problem_seed=config.problems.seed,
      seed=config.seed,
      **config.warmstart,
    )
  checkpoint.save_params(kept, params)
  return spec, params


def assemble(config, rules, reader, problems, spec, devices, clock: Clock) -> train.Job:
  """Binds the knobs."""
  training, held_out = problems
  shelfless = config.batch.rule in batch.SHELFLESS
  filing = {k: config.buffer[k] for k in ('hard', 'good', 'max_age')}
  sample = sampling(config, reader, spec, devices, clock)
  # A clock of its own: seconds of an evaluation are 'eval', whatever it did in them.
  try_out = sampling(config, reader, spec, devices, Clock())

  def shelve(shelves, tried, now):
    return shelves if shelfless else buffer.shelve(shelves, tried, now, **filing)

  def recheck(step):
    due = step % config.buffer.every == 0 and not shelfless
    return config.buffer.recheck if due else 0

  def keys(step):
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), step), 4)

  def test(params, step):
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1)
    speaker = sampler.speaker(params, spec, devices)
    group = config.evaluate.group
    return evaluate.evaluate(
      speaker, held_out, reader, key, rollout=try_out, group=group, step=step
    )

  return train.Job(
    steps=config.steps,
    ask=lambda step: prompts.ask(training, step, config.seed, config.prompts.count),
    again=lambda ids: prompts.again(training, ids),
    rollout=functools.partial(_ask_group, sample, training, config.sampler.group),
    speak=functools.partial(sampler.speaker, spec=spec, mesh=devices),
    stale=lambda step: step % config.rollout.refresh_every == 0,
    recheck=recheck,
    batch_rule=timed(clock, 'batch', jax.jit(rules['batch'])),
    update=timed(clock, 'update', updating(config, rules, spec, devices)),
    shelve=timed(clock, 'shelve', shelve),
    describe=timed(clock, 'log', functools.partial(train.describe, eos=reader.eos)),
    keys=keys,
    evaluate=test,
    spec=spec,
  )


def sampling(config, reader, spec, devices, clock: Clock) -> Callable:
  """rollout with all its knobs but the group."""
  return functools.partial(
    rollout.rollout,
    text=reader,
    clock=clock,
    verify=functools.partial(rewards.verify, rule=rewards.RULES[config.rewards.rule]),
    spec=spec,
    mesh=devices if devices.size > 1 else None,
    **{k: v for k, v in config.sampler.items() if k != 'group'},
  )


def _ask_group(sample, problems, group, params, prompts, key, *, step, born):
  return sample(params, problems, prompts, key, group=group, step=step, born=born)


def updating(config, rules, spec, devices) -> Callable:
  """learner.update with its knobs; the single update is compiled once."""
  return functools.partial(
    learner.update,
    learn=mesh.under(devices, learning(config, rules, spec)),
    advantage_rule=rules['advantage'],
    epochs=config.learner.epochs,
    minibatches=config.learner.minibatches,
    place=lambda batch: jax.device_put(batch, mesh.over_rows(devices)),
  )


def learning(config, rules, spec):
  """(params, opt, batch) -> (params, opt, metrics): one optimiser update, jitted."""
  learn = functools.partial(
    learner.learn,
    tx=learner.optimizer(**config.optimizer),
    clip_rule=rules['clip'],
    spec=spec,
    temperature=config.sampler.temperature,
    chunk=config.logprob.chunk,
    slices=config.learner.slices,
  )
  return jax.jit(learn, donate_argnums=(0, 1))


def fingerprint(recipe: dict) -> str:
  """Twelve hexadecimal digits that change when any value does."""
  text = json.dumps(recipe, sort_keys=True, default=list)
  return hashlib.sha256(text.encode()).hexdigest()[:12]
