"""From a config to a run; with validate.py and binding.py the only ConfigDict reader.

1. `start` loads text, problems and weights, and makes the first `Run`;
2. `assemble` binds every knob into the functions of a `Job`.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable

import jax

from bapo_jax import sharding
from bapo_jax.algorithms import batch_rules
from bapo_jax.data import prompts, sources, tokenizer
from bapo_jax.models import hf_weights, transformer
from bapo_jax.rewards import rewards
from bapo_jax.rollout import decode, rollout
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.runtime.progress import PhaseTimer, log, timed
from bapo_jax.training import binding, checkpoint, evaluate, sft, trainer


def start(
  config,
  rules,
  workdir: str,
  clock: PhaseTimer,
  judge: rewards.Verifier | None = None,
  material=None,
) -> tuple[trainer.Trainer, trainer.TrainState]:
  """Everything the config asks for, made: what the run does, and the run at step 0.

  Args:
    rules: what `validate.check(config)` gave.
    judge: what `judging(config)` gave; None for one that nobody else asks.
    material: what `read(config, workdir)` gave; None to read it now.
  """
  devices = sharding.make(**config.mesh)
  with clock('load'):
    reader, problems = material or read(config, workdir)
  spec, params = policy(config, workdir, reader, devices, clock)
  if note := sharding.kv_replication_warning(devices, spec.kv_heads):
    log(note)
  judge = judge or judging(config)
  job = assemble(config, rules, reader, problems, spec, devices, clock, judge)
  tx = binding.optimizer(config)
  opt = jax.eval_shape(tx.init, params)
  opt = jax.jit(tx.init, out_shardings=sharding.shardings(opt, devices))(params)
  shelves = jax.device_put(
    binding.empty_shelves(config, rules['band']), sharding.replicated(devices)
  )
  actor, flight = job.speak(params), in_flight(config, reader, spec, devices)
  with clock('compile'):
    flight.warm_up(actor, job.keys(0)[0], refreshed=config.rollout.max_age > 0)
  kept = flight if config.rollout.max_age else None
  return job, trainer.TrainState(0, params, opt, actor, 0, shelves, flight=kept)


def read(config, workdir: str):
  """(text, (training problems, held-out problems))."""
  reader = tokenizer.load(
    hf_weights.tokenizer(config.text.tokenizer), config.text.template
  )
  asked = config.prompts.to_dict() | config.problems.to_dict()
  asked.pop('changed')  # what experiment.py does about it
  return reader, prompts.load(reader, workdir, **asked)


def spec_of(config, reader) -> transformer.ModelSpec:
  """What the policy is, by its config.json or by the config's own knobs."""
  knobs = config.model.to_dict()
  if path := knobs.pop('path'):
    spec = hf_weights.spec(hf_weights.here(path), compute=knobs['compute'])
    own = {name: knobs[name] for name in ('attention', 'remat', 'dtype')}
    return dataclasses.replace(spec, **own)
  # Rounded up, as published models do, so that the vocabulary divides over devices.
  return transformer.ModelSpec(vocab=-(-len(reader.tokenizer) // 8) * 8, **knobs)


def policy(config, workdir: str, reader, devices, clock: PhaseTimer):
  """(spec, params): a checkpoint's, or random weights that had their warm start."""
  spec = spec_of(config, reader)
  if path := config.model.path:
    with clock('load'):
      return spec, hf_weights.load(hf_weights.here(path), spec, devices)
  # The warm start is float32 in any case: it has no master copy.
  spec, wanted = dataclasses.replace(spec, dtype='float32'), spec
  like = transformer.abstract(spec)
  layout = sharding.shardings(like, devices)
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, layout
  )
  asked = config.problems.to_dict()
  kind = ('countdown',) if asked['source'] == 'countdown' else ('family', 'level')
  recipe = {
    'seed': config.seed,
    'length': config.prompts.width + config.sampler.new,
    'problems': {k: asked[k] for k in (*kind, 'train', 'test', 'seed')},
    **{name: config[name].to_dict() for name in ('model', 'text', 'warmstart')},
  }
  kept = os.path.join(workdir, 'warmstart', fingerprint(recipe))
  settle = jax.jit(functools.partial(transformer.cast, dtype=wanted.dtype))
  if os.path.isdir(kept):
    return wanted, settle(checkpoint.restore_params(kept, like))
  with clock('warm start'):
    params = sharding.under(devices, sft.fit)(
      reader,
      spec,
      devices,
      recipe['length'],
      *sources.worked(asked),
      seed=config.seed,
      **config.warmstart,
    )
  checkpoint.save_params(kept, params)
  return wanted, settle(params)


def assemble(
  config, rules, reader, problems, spec, devices, clock: PhaseTimer, judge
) -> trainer.Trainer:
  """Binds the knobs."""
  training, held_out = problems
  carried = {k: config.rollout[k] for k in ('budget', 'max_age', 'cache')}
  sample = functools.partial(
    sampling(config, reader, spec, devices, clock, judge), shape=shaping(config, reader)
  )

  def recheck(step):
    due = (
      step % config.buffer.every == 0 and config.batch.rule in batch_rules.REEVALUATING
    )
    return config.buffer.recheck if due else 0

  def keys(step):
    root = jax.random.key(config.seed)
    # Fresh responses are numbered through the run: theirs is one key for all steps.
    fresh = jax.random.fold_in(root, 2**31 - 2)
    return fresh, *jax.random.split(jax.random.fold_in(root, step), 3)

  return trainer.Trainer(
    done=lambda run: run.step >= config.steps or run.responses >= config.responses,
    ask=lambda asked: prompts.next_prompts(
      training, asked, config.seed, config.prompts.count
    ),
    again=lambda ids: prompts.prompts_by_id(training, ids),
    rollout=functools.partial(
      _ask_group, sample, training, config.sampler.group, carried
    ),
    speak=functools.partial(decode.sync_actor, spec=spec, mesh=devices),
    stale=lambda step: step % config.rollout.refresh_every == 0,
    recheck=recheck,
    refills=binding.refills(config),
    batch_rule=timed(clock, 'batch', binding.choosing(config, rules)),
    update=timed(clock, 'update', binding.updating(config, rules, spec, devices)),
    shelve=timed(clock, 'shelve', binding.filing(config, rules)),
    describe=timed(clock, 'log', functools.partial(trainer.describe, eos=reader.eos)),
    keys=keys,
    evaluate=evaluating(config, reader, held_out, spec, devices, judge),
    spec=spec,
  )


def judging(config) -> rewards.Verifier:
  """Who says what is right; worker processes start here, where the rule needs any."""
  return rewards.Verifier(**{k: v for k, v in config.rewards.items() if k != 'shaping'})


def sampling(config, reader, spec, devices, clock: PhaseTimer, judge) -> Callable:
  """rollout with all its knobs but the group and the shape of rewards."""
  return functools.partial(
    rollout.rollout,
    text=reader,
    clock=clock,
    verify=judge,
    spec=spec,
    mesh=devices if devices.size > 1 else None,
    **{k: v for k, v in config.sampler.items() if k != 'group'},
  )


def shaping(config, reader) -> Callable:
  """(groups, texts) -> groups with the rewards that the learner sees."""
  return functools.partial(
    rewards.shaped,
    eos=reader.eos,
    rule=config.rewards.rule,
    longest=config.sampler.new,
    **config.rewards.shaping,
  )


def evaluating(config, reader, held_out, spec, devices, judge) -> Callable:
  """(params, step) -> (result, samples), through the door that training uses."""
  # A clock of its own: seconds of an evaluation are 'eval', whatever it did in them.
  try_out = functools.partial(
    sampling(config, reader, spec, devices, PhaseTimer(), judge),
    **config.evaluate.sampling,
  )

  def test(params, step):
    return evaluate.evaluate(
      decode.sync_actor(params, spec, devices),
      held_out,
      reader,
      jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1),
      rollout=try_out,
      judge=judge,
      group=config.evaluate.group,
      ks=config.evaluate.k,
      step=step,
    )

  return test


def _ask_group(
  sample, problems, group, carried, params, prompts, key, *, asked, flight=None, **when
):
  # The same numbers whether or not rollouts are partial, and so the same texts.
  first = asked * len(prompts.id_P) * group
  knobs = when if flight is None else when | carried | {'flight': flight}
  return sample(params, problems, prompts, key, group=group, first=first, **knobs)


def in_flight(config, reader, spec, devices) -> RolloutEngine:
  """Room for the responses of a learner step, and for those it leaves unfinished."""
  unfinished = config.rollout.max_age * (binding.refills(config) + 1)
  return RolloutEngine(
    spec,
    places=config.prompts.count * (unfinished + 1),
    width=config.prompts.width,
    eos=reader.eos,
    mesh=devices if devices.size > 1 else None,
    **config.sampler,
  )


def fingerprint(recipe: dict) -> str:
  """Twelve hexadecimal digits that change when any value does."""
  written = json.dumps(recipe, sort_keys=True, default=list).encode()
  return hashlib.sha256(written).hexdigest()[:12]
