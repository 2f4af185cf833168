"""Builds the trainer of a run, with its rules and programs, and its state at step 0."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.stages import Wrapped

from bapo_jax import sharding
from bapo_jax.algorithms import replay_buffer
from bapo_jax.data import prompt_rules, prompts, records
from bapo_jax.data.gallery import Gallery
from bapo_jax.data.prompts import Problems
from bapo_jax.data.records import Record
from bapo_jax.learner import learner, pictured, scoring
from bapo_jax.learner import optimizer as optimizer_lib
from bapo_jax.learner.objective import Objective
from bapo_jax.learner.pictured import Embedder, Seen
from bapo_jax.models import lora, transformer
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.layers import Schedule
from bapo_jax.models.packing import Unit
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rewards import rewards
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.rollout import Verification
from bapo_jax.runtime.ahead import Call
from bapo_jax.runtime.link import Link
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.training import policy, refusals
from bapo_jax.training.config import Config
from bapo_jax.training.recorded_sampler import RecordedSampler
from bapo_jax.training.remote_sampler import Links, RemoteSampler
from bapo_jax.training.resolve import Resolved, resolve
from bapo_jax.training.sampler import LocalSampler, ThreadSampler
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import Batch, ReplayBuffer, Routes, Tree, empty_groups


class Material(NamedTuple):
  """The problems of a run, tokenized."""

  problems: Problems  # of problems.source
  held_out: Problems
  record: Record | None = None  # of rollout.records

  @property
  def training(self) -> Problems:
    """The problems that the run trains on."""
    return self.problems if self.record is None else self.record.problems


def tabulate(r: Resolved) -> Material:
  """Tokenizes the training and the held-out problems, and reads recorded rollouts.

  Raises ValueError if a prompt is too long, too few problems are left, or a custom rule
  cannot choose among them.
  """
  config = r.config
  record = None
  if config.rollout.records:
    record = records.read(
      config.rollout.records,
      r.tokenizer,
      count=config.prompts.count,
      group_size=config.sampler.group_size,
      length=config.row_length,
      vocab=r.spec.vocab,
      scored=recomputes(config),
    )
    # A record may have longer responses behind short prompts, but the bin of a unit has
    # room for the maximum of each: rows would overlap.
    unit = unit_of(config)
    longest = max(len(x.tokens) for group in record.groups for x in group.responses)
    if unit.rows > 1 and longest > unit.response:
      raise ValueError(
        f'rollout.records has a response of {longest} tokens, more than sampler.'
        f'max_new_tokens={unit.response}, on which learner.share_prompts={unit.rows} '
        'counts; raise sampler.max_new_tokens, or set learner.share_prompts=1'
      )
  problems, held_out = prompts.load(
    r.tokenizer, config.prompts, config.problems, r.data, r.spec.vision
  )
  if not config.rollout.given:
    rows = [row._replace(solutions=()) for row in problems.rows]
    problems = problems._replace(rows=rows)
  refusals.judge(refusals.of_prompts(config, len(problems.id_N)))
  return Material(problems, held_out, record)


def make_verifier(config: Config) -> Verifier:
  """Builds the verifier; starts the processes that rule and environment need."""
  return Verifier(config.rewards.verification, config.environment)


def make_engine(r: Resolved, gallery: Gallery | None = None) -> RolloutEngine:
  """Builds the engine of training; `gallery` has the training problems' pictures."""
  return RolloutEngine(
    r.spec,
    max_prompt_tokens=r.config.prompts.max_prompt_tokens,
    eos=r.tokenizer.eos,
    mesh=r.mesh,
    gallery=gallery,
    **r.config.sampler.model_dump(exclude={'actor_dtype'}),  # part of the spec
  )


def optimizer(config: Config) -> optax.GradientTransformation:
  """Returns the optimiser, with float32 master weights if the parameters are narrower.

  Adapters are always float32; with adapters, model.dtype is for the frozen weights.
  """
  master = config.model.dtype != 'float32' and not config.lora.rank
  updates = config.steps * config.updates_per_step
  return optimizer_lib.make(config.optimizer, updates, master)


def make_train_step(
  config: Config, spec: ModelSpec, schedule: Schedule = Schedule()
) -> jax.stages.Wrapped:
  """Jits one optimiser update; parameters and optimiser state are donated.

  Frozen weights are passed as the keyword `base`.
  """
  objective = Objective(
    clip_rule=config.clip,
    mask_rule=config.mask,
    loss_rule=config.loss,
    spec=spec,
    schedule=schedule,
    temperature=config.sampler.temperature,
    pack=config.learner.pack,
    unit=unit_of(config),
    grad_accum_steps=config.learner.grad_accum_steps,
    bounds_scope=config.learner.bounds_scope,
    length=config.sampler.max_new_tokens,
  )
  step = functools.partial(learner.learn, tx=optimizer(config), objective=objective)
  return jax.jit(step, donate_argnums=(0, 1))


def unit_of(config: Config) -> Unit:
  """Returns the rows that share a prompt."""
  rows = config.learner.share_prompts if config.learner.pack else 1
  return Unit(rows, config.sampler.max_new_tokens)


def abstract_batch(
  config: Config, mesh: Mesh, pictures: Seen = None, routes: Routes | None = None
) -> Batch:
  """Returns the shapes of a minibatch of the run, placed on the mesh.

  `pictures` are shapes from `Embedder.abstract`, or None without pictures.
  """
  G = config.sampler.group_size
  P = config.minibatch_rows // G

  def empty() -> Batch:
    groups = empty_groups(P, G, config.row_length, False, routes)
    scored = config.teacher.path or config.loss.reference
    reference_PGT = groups.behavior_logp_PGT if scored else None
    return learner.flatten(
      groups,
      groups.id_P,
      None,
      reference_PGT=reference_PGT,
      unsampled=config.unsampled,
    )

  return sharding.abstract_rows(empty, mesh)._replace(pictures=pictures)


def train_program(t: Trainer, params: Tree, opt: Tree) -> Call:
  """Returns the train step for the arrays of a state; they may be abstract."""
  step = make_train_step(t.config, t.spec, t.schedule)
  groups = t.config.minibatch_rows // t.config.sampler.group_size
  pictures = t.pictures.abstract(groups) if t.pictures else None
  batch = abstract_batch(t.config, t.mesh, pictures, t.spec.routes)
  return Call(t.mesh, step, params, opt, batch, base=t.base)


@functools.cache  # one program for the trainers that compile and that run it
def _scorers(
  rows: int, spec: ModelSpec, schedule: Schedule, temperature: float, unit: Unit
) -> tuple[Wrapped, Wrapped]:
  """Jits `scoring.score` and `scoring.recompute`."""
  knobs = dict(
    rows=rows, spec=spec, schedule=schedule, temperature=temperature, unit=unit
  )
  score = functools.partial(scoring.score, **knobs)
  return jax.jit(score), jax.jit(functools.partial(scoring.recompute, score=score))


def make_trainer(
  r: Resolved,
  data: Material,
  verifier: Verifier,
  timer: PhaseTimer,
  base: Tree = None,
  teacher: Tree = None,
) -> Trainer:
  """Builds everything that is fixed for a run; base and teacher are frozen weights."""
  config = r.config
  spec = r.spec
  mesh = r.mesh
  train_step = sharding.under(mesh, make_train_step(config, spec, r.schedule))
  gallery, held_out = pictured.galleries(data.training, data.held_out, spec)
  temperature = config.sampler.temperature
  rows = config.micro_batch_rows
  score, _ = _scorers(rows, spec, r.schedule, temperature, unit_of(config))
  at_start = sharding.under(mesh, score)
  reference = None
  if teacher is not None:
    of_teacher = (r.teacher or r.model).spec
    unit = unit_of(config)
    reference, _ = _scorers(rows, of_teacher, r.schedule, temperature, unit)
  engine = make_engine(r, gallery)
  pictures = Embedder(gallery, spec, mesh, base, r.schedule) if gallery else None
  if data.record is not None:
    sampler = _recorded_sampler(r, data.record, timer)
  elif r.remote:
    sampler = RemoteSampler(links(r), mesh, timer)
  elif r.rollout_mesh is None:
    sampler = _local_sampler(r, data, verifier, timer, engine, pictures)
  else:
    sampler = ThreadSampler(rollout_sampler(r, data, verifier), mesh, timer)
  return Trainer(
    config=config,
    spec=spec,
    schedule=r.schedule,
    mesh=mesh,
    tokenizer=r.tokenizer,
    problems=data.training,
    held_out=data.held_out,
    engine=engine,
    verifier=verifier,
    train_step=functools.partial(train_step, base=base),
    proximal=(lambda params, *rows: at_start(lora.attach(base, params), *rows))
    if config.loss.needs_proximal
    else None,
    sampler=sampler,
    timer=timer,
    base=base,
    teacher=teacher,
    reference=reference,
    pictures=pictures,
    held_out_gallery=held_out,
  )


def abstract_trainer(
  r: Resolved, data: Material, verifier: Verifier, timer: PhaseTimer
) -> tuple[Trainer, Tree, Tree]:
  """Builds the trainer for weights that are not loaded; returns (it, params, opt)."""
  weights = transformer.abstract(r.spec)
  base, params = jax.eval_shape(functools.partial(policy.divide, r), weights)
  opt = jax.eval_shape(optimizer(r.config).init, params)
  # Placed as in training.
  placed = sharding.shardings((params, base), r.mesh)
  params, base = sharding.abstract((params, base), placed)
  opt = sharding.abstract(opt, sharding.like(params, opt, r.mesh))
  teacher = teacher_of(r, params, base, abstract=True)
  return make_trainer(r, data, verifier, timer, base, teacher), params, opt


def teacher_of(r: Resolved, params: Tree, base: Tree, abstract: bool = False) -> Tree:
  """Returns the weights that `loss.reference` and the advantages refer to, or None.

  Without teacher.path these are the first weights of the run: a copy of `params`, or
  the frozen weights that adapters adapt. `abstract` weights have shapes alone.
  """
  if r.teacher is not None:
    if not abstract:
      return hf_weights.load(r.teacher.directory, r.teacher.spec, r.mesh)
    weights = transformer.abstract(r.teacher.spec)
    return sharding.abstract(weights, sharding.shardings(weights, r.mesh))
  if not r.config.loss.reference:
    return None
  if r.config.lora.rank:
    return base
  copy = jax.ShapeDtypeStruct.update if abstract else jnp.copy
  return lora.attach(base, jax.tree.map(copy, params))


def reference_program(t: Trainer) -> Iterator[Call]:
  """Yields the program that scores a batch with the teacher, if there is one."""
  if t.reference is None:
    return
  make = functools.partial(
    empty_groups,
    t.config.seats,
    t.config.sampler.group_size,
    t.config.row_length,
    t.verifier.steps,
    t.spec.routes,
  )
  groups = sharding.abstract_rows(make, t.mesh)
  pictures = t.pictures.abstract(t.config.seats) if t.pictures else None
  yield Call(t.mesh, t.reference, t.teacher, groups, pictures)


def rollout_sampler(r: Resolved, data: Material, verifier: Verifier) -> LocalSampler:
  """Builds the sampler of the devices that do not train."""
  mesh = r.rollout_mesh
  assert mesh is not None
  gallery, _ = pictured.galleries(data.problems, data.held_out, r.spec)
  engine = dataclasses.replace(make_engine(r, gallery), mesh=mesh)
  # Without frozen weights: an actor has all weights.
  pictures = Embedder(gallery, r.spec, mesh, None, r.schedule) if gallery else None
  return _local_sampler(r, data, verifier, PhaseTimer(), engine, pictures)


def _local_sampler(
  r: Resolved,
  data: Material,
  verifier: Verifier,
  timer: PhaseTimer,
  engine: RolloutEngine,
  pictures: Embedder | None,
) -> LocalSampler:
  config = r.config
  shape = functools.partial(
    rewards.shaped,
    eos=r.tokenizer.eos,
    longest=config.sampler.max_new_tokens,
    shaping=config.rewards.shaping,
    cut_length=config.sampler.cut_length,
  )
  temperature = config.sampler.temperature
  unit = unit_of(config)
  _, recompute = _scorers(
    config.micro_batch_rows, r.spec, r.schedule, temperature, unit
  )
  return LocalSampler(
    engine=engine,
    verification=Verification(data.problems, r.tokenizer, verifier, timer, shape),
    seed=config.seed,
    count=config.prompts.count,
    places=config.places,
    knobs=config.rollout,
    score=recompute if recomputes(config) else None,
    pictures=pictures,
  )


def links(r: Resolved) -> Links:
  """Returns the links from the processes that train to those that sample, and back."""
  assert r.rollout_mesh is not None
  return Links(Link(r.mesh, r.rollout_mesh), Link(r.rollout_mesh, r.mesh))


def recomputes(config: Config) -> bool:
  """Returns whether the learner recomputes the sampler's log-probabilities."""
  when = config.learner.recompute_logprobs
  if when is not None or config.rollout.records:
    return when == 'on'
  weighs = config.loss.weighs_sampler or config.mask.weighs_sampler
  narrow = config.model.compute != 'float32' and not weighs
  # A quantised actor is another policy than the learner's, and a rounding error is not:
  # its responses keep the log-probabilities of the policy that sampled them.
  return narrow and config.sampler.actor_dtype == 'compute'


def empty_buffer(config: Config, spec: ModelSpec) -> ReplayBuffer:
  """Returns an empty replay buffer, without rows if no rule reads it."""
  return replay_buffer.init(
    config.buffer.capacity if config.batch.uses_buffer else 0,
    config.sampler.group_size,
    config.row_length,
    config.buffer.thresholds,
    steps=bool(config.rewards.custom.steps),
    routes=spec.routes,
  )


def build(
  r: Resolved, data: Material, verifier: Verifier, timer: PhaseTimer
) -> tuple[Trainer, TrainState]:
  """Loads the weights; returns the trainer and its state at step 0."""
  base, params = policy.divide(r, policy.load(r, timer))
  if r.spec.kv_heads % (tensor := r.mesh.shape['tensor']):
    log(
      f'{r.spec.kv_heads} key/value heads do not divide over mesh.tensor={tensor}: '
      'every device stores the weights and the cache of all heads'
    )
  with timer('load'):
    teacher = teacher_of(r, params, base)
  t = make_trainer(r, data, verifier, timer, base, teacher)
  if isinstance(t.sampler, RecordedSampler) and recomputes(t.config):
    temperature = t.config.sampler.temperature
    unit = unit_of(t.config)
    rows = t.config.micro_batch_rows
    score, _ = _scorers(rows, t.spec, t.schedule, temperature, unit)
    score = functools.partial(sharding.under(t.mesh, score), t.weights(params))
    with timer('score'):
      t = dataclasses.replace(t, sampler=t.sampler.scored(score))
  tx = optimizer(t.config)
  layout = sharding.like(params, jax.eval_shape(tx.init, params), t.mesh)
  make = functools.partial(empty_buffer, t.config, t.spec)
  rows = sharding.layout_of_rows(jax.eval_shape(make), t.mesh)
  return t, TrainState(
    params=params,
    opt=jax.jit(tx.init, out_shardings=layout)(params),
    actor=None,
    actor_adapters=t.adapters(params),
    buffer=jax.jit(make, out_shardings=rows)(),
    history=prompt_rules.no_history(len(t.problems.id_N)),
  )


def _recorded_sampler(
  r: Resolved, record: Record, timer: PhaseTimer
) -> RecordedSampler:
  config = r.config
  empty = functools.partial(
    empty_groups,
    group=config.sampler.group_size,
    length=config.row_length,
    routes=r.spec.routes,
  )
  count = config.prompts.count
  return RecordedSampler(record, config.seed, count, empty, r.mesh, timer)


def start(
  config: Config, timer: PhaseTimer, verifier: Verifier | None = None
) -> tuple[Trainer, TrainState]:
  """Resolves a config, reads the problems and builds the run, for notebooks.

  The config must leave no knob to be derived. The caller closes the verifier.
  """
  r = resolve(config)
  with timer('load'):
    data = tabulate(r)
  return build(r, data, verifier or make_verifier(config), timer)
