"""From a config to a trainer and its state at step 0.

1. `check_available` refuses what is not there, `read` opens tokenizer and problems;
2. `make_trainer` puts everything that is fixed into one value;
3. `initial_state` makes what changes; `start` does all of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.algorithms import replay_buffer
from bapo_jax.data import pictured_problems, prompts, sources
from bapo_jax.data.gallery import Gallery
from bapo_jax.data.prompts import Problems
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner import learner, pictured, scoring
from bapo_jax.learner import optimizer as optimizer_lib
from bapo_jax.learner.learner import TrainStep
from bapo_jax.learner.objective import Objective
from bapo_jax.learner.pictured import Seen
from bapo_jax.learner.scoring import Recompute
from bapo_jax.models import attention, hf_directory, hf_weights, lora
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rewards import gold
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime import hub_names
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.training import budget, frozen, policy, rules
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import Batch, Groups, ReplayBuffer, Rules, Tree


class Material(NamedTuple):
  """What a run reads before it makes anything."""

  tokenizer: Tokenizer
  problems: Problems
  held_out: Problems


def check_available(config: Config, *, decided: bool = True) -> None:
  """Raises one ValueError that names all that is wanted and not to be had.

  Problems are made and files are read, all of them: what is wrong is then known, and
  every answer is one that its verifier can use.

  Args:
    decided: False where verifier and lengths are derived later: they are not checked.
  """
  problems, path = config.problems, config.model.path
  lacks = hf_directory.missing(path) if path else []
  check = gold.check(config.rewards.rule) if decided else None
  seen = policy.sees(config)
  absent = [
    x for k in sources.SPLITS for x in sources.missing(problems, k, check, seen)
  ]
  if lacks and (absent or not hub_names.parse(path)):
    absent.insert(
      0, f'--config.model.path={path} (no {", ".join(lacks)}){hf_directory.hint(path)}'
    )
  if absent:
    raise ValueError(
      f'not found: {"; ".join(absent)}. Download the model (`hf download <name> '
      '--local-dir <directory>`) and the data (jsonl or parquet), or point these knobs '
      'to where they are'
    )
  if not path:
    sources.sft_problems(problems)
  for knob in sources.SPLITS:
    sources.download(problems, knob, check, seen)
  if lacks:  # downloaded only when nothing else is wanting
    hf_directory.find(path, 'model.path')
  if path:
    directory = hf_directory.here(path)
    spec = hf_weights.spec(directory, compute=config.model.compute)
    hf_weights.check(directory, spec)
    if decided:
      config_lib.check_positions(config, spec.positions)


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """The device mesh.

  Raises:
    ValueError: devices, kernel or rows do not fit.
  """
  mesh = sharding.make(**config.mesh.model_dump(), devices=devices)
  platform = mesh.devices.flat[0].platform
  attention.resolve(config.model.attention, platform, config.model.compute)
  config_lib.check_shards(config, sharding.row_shards(mesh))
  return mesh


def read(config: Config, workdir: str) -> Material:
  """Tokenizer, training problems and held-out problems.

  Raises:
    ValueError: one of them is not to be had, or tokens are beyond the vocabulary.
  """
  tokenizer = policy.load_tokenizer(config)
  policy.check_vocabulary(config, tokenizer)
  vision = policy.spec_of(config, tokenizer).vision
  knobs = config.prompts, config.problems
  if vision is None:
    return Material(tokenizer, *prompts.load(tokenizer, workdir, *knobs))
  return Material(tokenizer, *pictured_problems.load(tokenizer, *knobs, vision))


def make_verifier(config: Config) -> Verifier:
  """Builds the verifier; worker processes start here, where the rule needs any."""
  return Verifier(**config.rewards.model_dump(exclude={'shaping'}))


def make_engine(
  config: Config,
  spec: ModelSpec,
  tokenizer: Tokenizer,
  mesh: Mesh,
  gallery: Gallery | None = None,
) -> RolloutEngine:
  """The engine of training; `gallery` has the pictures of its problems."""
  return RolloutEngine(
    spec,
    max_prompt_tokens=config.prompts.max_prompt_tokens,
    eos=tokenizer.eos,
    mesh=mesh if mesh.size > 1 else None,
    gallery=gallery,
    **config.sampler.model_dump(),
  )


def optimizer(config: Config) -> optax.GradientTransformation:
  """AdamW, with float32 weights of its own where the parameters are less.

  Adapters are float32 in any case; model.dtype is then that of the frozen weights.
  """
  master = config.model.dtype != 'float32' and not config.lora.rank
  return optimizer_lib.adamw(master=master, **config.optimizer.model_dump())


def make_train_step(
  config: Config, rules: Rules, spec: ModelSpec, schedule: Schedule = Schedule()
) -> jax.stages.Wrapped:
  """One optimiser update, jitted; parameters and optimiser state are donated.

  Frozen weights, which stay, are its keyword `base`.
  """
  objective = Objective(
    clip_rule=rules.clip,
    loss_rule=rules.loss,
    spec=spec,
    schedule=schedule,
    temperature=config.sampler.temperature,
    chunk=config.logprobs.chunk,
    pack=config.learner.pack,
    grad_accum_steps=config.learner.grad_accum_steps,
    bounds_scope=config.learner.bounds_scope,
    aggregate=config.loss.aggregate,
    length=config.sampler.max_new_tokens,
    kl=config.loss.kl,
    kl_direction=config.loss.kl_direction,
  )
  step = functools.partial(
    learner.learn, tx=optimizer(config), objective=objective, record=True
  )
  return jax.jit(step, donate_argnums=(0, 1))


def abstract_batch(config: Config, mesh: Mesh, pictures: Seen = None) -> Batch:
  """A minibatch of the run as shapes, placed on the mesh.

  Args:
    pictures: of its prompts, as `pictured.abstract` gives them.
  """
  size = {'B': config.minibatch_rows, 'T': config.row_length}
  kinds = {'tokens': jnp.int32, 'source': jnp.int32}
  kinds |= {'loss_mask': jnp.bool_, 'on_policy': jnp.bool_}
  fields: list[Any] = []
  for field in Batch._fields[:-1]:  # the name says the axes
    name, _, axes = field.rpartition('_')
    shape = tuple(size[axis] for axis in axes)
    kind = kinds.get(name, jnp.float32)
    rows = sharding.over_rows(mesh)
    fields.append(jax.ShapeDtypeStruct(shape, kind, sharding=rows))
  if pictures is not None:
    place = functools.partial(sharding.layout_of_rows, mesh=mesh)
    pictures = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      pictures,
      place(pictures),
    )
  return Batch(*fields, pictures=pictures)


def compile_train_step(t: Trainer, s: TrainState) -> TrainStep:
  """The train step, compiled for the state's arrays."""
  step = make_train_step(t.config, t.rules, t.spec, t.schedule)
  with sharding.current(t.mesh):
    groups = t.config.minibatch_rows // t.config.sampler.group_size
    pictures = pictured.abstract(t.engine.gallery, groups, t.spec, t.base)
    batch = abstract_batch(t.config, t.mesh, pictures)
    compiled = step.lower(s.params, s.opt, batch, base=t.base).compile()
  return functools.partial(compiled, base=t.base)


def _score(
  config: Config, spec: ModelSpec, schedule: Schedule
) -> Callable[[Tree, Groups, Seen], Array]:
  """The log-probabilities of groups, a micro-batch of rows at a time."""
  return functools.partial(
    scoring.score,
    rows=config.micro_batch_rows,
    spec=spec,
    schedule=schedule,
    temperature=config.sampler.temperature,
    chunk=config.logprobs.chunk,
  )


def _proximal(
  config: Config, spec: ModelSpec, schedule: Schedule, mesh: Mesh, base: Tree
) -> Callable[[Tree, Groups, Seen], Array] | None:
  """Scores a batch by the weights of the step's start, where the loss rule asks."""
  if not config.loss.needs_proximal:
    return None
  score = sharding.under(mesh, jax.jit(_score(config, spec, schedule)))
  return lambda params, groups, seen: score(lora.attach(base, params), groups, seen)


def _recompute(
  config: Config, spec: ModelSpec, schedule: Schedule, mesh: Mesh
) -> Recompute | None:
  """Replaces the sampler's log-probabilities, where the config asks."""
  weighs_sampler = config.loss.weighs_sampler
  if not config.learner.recomputes(config.model.compute, weighs_sampler):
    return None
  recompute = functools.partial(scoring.recompute, score=_score(config, spec, schedule))
  return sharding.under(mesh, jax.jit(recompute))


def make_trainer(
  config: Config,
  material: Material,
  spec: ModelSpec,
  mesh: Mesh,
  verifier: Verifier,
  timer: PhaseTimer,
  base: Tree = None,
) -> Trainer:
  """Everything that is fixed for a run."""
  bound, schedule = rules.bind(config), budget.choose_schedule(config, spec, mesh)
  train_step = sharding.under(mesh, make_train_step(config, bound, spec, schedule))
  gallery, held_out = pictured.galleries(material.problems, material.held_out, spec)
  return Trainer(
    config=config,
    rules=bound,
    spec=spec,
    schedule=schedule,
    mesh=mesh,
    tokenizer=material.tokenizer,
    problems=material.problems,
    held_out=material.held_out,
    engine=make_engine(config, spec, material.tokenizer, mesh, gallery),
    verifier=verifier,
    train_step=functools.partial(train_step, base=base),
    proximal=_proximal(config, spec, schedule, mesh, base),
    recompute=_recompute(config, spec, schedule, mesh),
    timer=timer,
    base=base,
    pictures=pictured.embedder(gallery, spec, mesh, base, schedule),
    held_out_gallery=held_out,
  )


def empty_buffer(config: Config, bound: Rules) -> ReplayBuffer:
  """The replay buffer before the first step; without rows where no rule looks at it."""
  capacity = config.buffer.capacity if config.batch.uses_buffer else 0
  G = config.sampler.group_size
  return replay_buffer.init(capacity, G, config.row_length, bound.thresholds)


def initial_state(t: Trainer, params: Tree) -> TrainState:
  """The state at step 0."""
  tx = optimizer(t.config)
  layout = sharding.shardings(jax.eval_shape(tx.init, params), t.mesh)
  make = functools.partial(empty_buffer, t.config, t.rules)
  rows = sharding.layout_of_rows(jax.eval_shape(make), t.mesh)
  buffer = jax.jit(make, out_shardings=rows)()
  partial = t.config.rollout.max_off_policy_steps > 0
  return TrainState(
    params=params,
    opt=jax.jit(tx.init, out_shardings=layout)(params),
    actor=None,
    actor_adapters=t.adapters(params),
    buffer=buffer,
    partial=PartialRollouts(t.engine, t.config.places) if partial else None,
  )


def start(
  config: Config,
  workdir: str,
  timer: PhaseTimer,
  verifier: Verifier | None = None,
  material: Material | None = None,
) -> tuple[Trainer, TrainState]:
  """Trainer and state at step 0; reads and builds what is not given."""
  mesh = make_mesh(config)
  with timer('load'):
    material = material or read(config, workdir)
  spec = policy.spec_of(config, material.tokenizer)
  schedule = budget.choose_schedule(config, spec, mesh)
  budget.check(budget.count(config, spec, schedule, mesh), budget.capacity(mesh))
  spec, weights = policy.load(config, workdir, material.tokenizer, mesh, timer)
  base, params = frozen.trained(config, spec, weights, mesh)
  if warning := sharding.kv_replication_warning(mesh, spec.kv_heads):
    log(warning)
  verifier = verifier or make_verifier(config)
  t = make_trainer(config, material, spec, mesh, verifier, timer, base)
  return t, initial_state(t, params)
