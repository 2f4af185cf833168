"""Refuses configs that cannot work: every refusal is one sentence, with the way out.

1. `of_config` judges the knobs alone, before any file is read, and again once the
   program has decided the knobs that are None. A rule of the loop refuses for itself;
2. `of_inputs` judges them with the model, the tokenizer and the problems, and calls a
   user's rules as a step does (`example`);
3. `of_prompts` does so with a rule that chooses prompts, once the problems are counted.

A start raises the first refusal; --mode=check prints all.
"""

import functools
import importlib.util
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import custom_code
from bapo_jax.algorithms import loss, replay_buffer
from bapo_jax.algorithms.advantage import GroupCentred
from bapo_jax.algorithms.clip import constant
from bapo_jax.data import conversation, pictures, prompt_rules, sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner import learner
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.rewards import gold
from bapo_jax.training import sft
from bapo_jax.training.inputs import Inputs, open_teacher
from bapo_jax.training.schema import PARTS, Config
from bapo_jax.types import Bounds, History, agree, empty_groups, take


class Refused(ValueError):
  """The refusals of a run; as a string, the first of them."""

  def __init__(self, refusals: list[str]):
    super().__init__(refusals[0])
    self.refusals = refusals


def judge(refusals: Iterator[str]) -> None:
  """Raises Refused if there is a refusal."""
  if refused := [*refusals]:
    raise Refused(refused)


def of_config(config: Config) -> Iterator[str]:
  """Yields a refusal for each reason why a config cannot work on any machine.

  Where a knob is None, its reader yields nothing: the config is judged again once the
  program has decided it.
  """
  # Enough to try an optimiser, whose state is counted when sizes are chosen.
  early = {'learning_rate': lambda count: 1e-3}
  for part in PARTS:
    rule = operator.attrgetter(part)(config)
    yield from rule.refuses(config)
    if rule.custom and early.keys() >= {*rule.arguments}:
      yield from _tried(part, rule, early)
  for judge in JUDGES:
    yield from judge(config)


def _sampling(config: Config) -> Iterator[str]:
  """Yields a sentence for each conflict between sampling ahead and other knobs."""
  if (
    config.sampler.actor_dtype != 'compute'
    and config.learner.recompute_logprobs == 'on'
    and (lag := config.rollout.weight_sync_interval - 1 + config.rollout.depth)
    and (config.rollout.depth or not config.lora.rank)
  ):
    yield (
      "learner.recompute_logprobs='on' needs the unquantised weights of the actor "
      f'(sampler.actor_dtype={config.sampler.actor_dtype!r}), but the learner trains '
      f'up to {lag} steps later, and has replaced them by then (rollout.'
      f'weight_sync_interval={config.rollout.weight_sync_interval}, rollout.depth='
      f"{config.rollout.depth}); set recompute_logprobs='off' to use the "
      'log-probabilities of the actor, or weight_sync_interval=1 and depth=0'
    )
  if config.mesh.rollout and not config.rollout.depth:
    yield (
      f'mesh.rollout={config.mesh.rollout} devices and the others would wait for each '
      'other with rollout.depth=0; set rollout.depth=1 or more, or mesh.rollout=0'
    )
  if config.sampler.stop and config.sampler.done_check_lag:
    yield (
      f'sampler.done_check_lag={config.sampler.done_check_lag} decodes ahead of the '
      f'search for sampler.stop={config.sampler.stop}, which needs the tokens of each '
      'dispatch; set sampler.done_check_lag=0'
    )


def _shared_prompts(config: Config) -> Iterator[str]:
  """Yields a sentence if responses cannot share prompts as they are asked to."""
  rows = config.learner.share_prompts or 1
  if config.sampler.group_size % rows:
    yield (
      f'learner.share_prompts={rows} does not divide sampler.group_size='
      f'{config.sampler.group_size}; give a divisor, or 1'
    )


def _packages(config: Config) -> Iterator[str]:
  """Yields a sentence for each package that is missing."""
  for name, package in {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}.items():
    if getattr(config.metrics, name) and importlib.util.find_spec(package) is None:
      yield f'metrics.{name}=True needs {package}: give False, or pip install {package}'


def _sizes(config: Config) -> Iterator[str]:
  """Yields a sentence for each size that does not fit the prompts of a step."""
  count = config.prompts.count
  minibatches = config.learner.minibatches
  if count is None or minibatches is None:
    return
  seats = config.seats
  replayed = seats - count
  if seats % minibatches:
    beside = f' and {replayed} replayed' if replayed else ''
    yield (
      f'prompts.count={count}{beside} groups do not divide into learner.minibatches='
      f'{minibatches} equal parts; give a divisor of {seats}'
    )


def _teacher(config: Config) -> Iterator[str]:
  """Yields a sentence for a teacher without an effect."""
  teacher = config.teacher
  adds = teacher.weight or (teacher.reward and config.loss.reference)
  if teacher.path and not adds:
    yield (
      f'teacher.path={teacher.path} has no effect on advantages with teacher.weight=0; '
      'raise it, or keep teacher.reward=True and set loss.reference'
    )


def _given(config: Config) -> Iterator[str]:
  """Yields a sentence for each conflict of given responses with other knobs."""
  given = config.rollout.given
  size = config.sampler.group_size
  if given >= size:
    yield (
      f'rollout.given={given} leaves no seat of sampler.group_size={size} to the '
      f'policy; give at most {size - 1}'
    )
  if given and config.batch.uses_buffer:
    yield (
      f'rollout.given={given} would count given responses in the pass rates by which '
      f'batch.rule={config.batch.rule!r} replays groups; choose batch.rule='
      "'fresh_only' or 'learnable_only'"
    )


def _records(config: Config) -> Iterator[str]:
  """Yields a sentence for each knob of sampling that recorded rollouts do not have."""
  records = config.rollout.records
  if not records:
    return
  for name, off in OF_SAMPLING.items():
    value = operator.attrgetter(name)(config)
    if value != off:
      yield (
        f'{name}={value} is for sampling, which rollout.records={records} replaces; '
        f'set {name}={off}'
      )
  if config.rewards.custom.steps:
    yield (
      f'rewards.rule={config.rewards.rule} rewards steps, which rollout.records='
      f'{records} does not; give a rule that rewards whole responses'
    )
  if 'reevaluated' in config.sources:
    yield (
      f'batch.rule={config.batch.rule!r} samples hard problems again, and rollout.'
      f'records={records} replaces sampling; set buffer.reevaluate=0'
    )


# Knobs of sampling in training alone -> the values with which they do nothing.
OF_SAMPLING = {
  'prompts.rule': 'shuffled',
  'rollout.depth': 0,
  'rollout.weight_sync_interval': 1,
  'rollout.given': 0,
  'rollout.max_off_policy_steps': 0,
  'mesh.rollout': 0,
}
JUDGES = (
  _sampling,
  _shared_prompts,
  _packages,
  _sizes,
  _teacher,
  _given,
  _records,
)


def of_inputs(config: Config, inputs: Inputs) -> Iterator[str]:
  """Yields a refusal for each reason why a config does not fit its files."""
  directory, tokenizer, spec = inputs.model
  # JAX would clamp a token id beyond the embedding.
  ids = tokenizer.backend.get_vocab()
  last = max(ids, key=ids.__getitem__, default='')
  worst = max([*tokenizer.eos, ids.get(last, 0)])
  if worst >= spec.vocab:
    what = f'token {last[:40]!r}' if worst == ids.get(last) else 'an end token'
    yield (
      f'tokenizer.path={tokenizer.backend.name_or_path}: {what} has the id {worst}, '
      f'but the model has {spec.vocab} tokens, 0 to {spec.vocab - 1}; give the '
      f'tokenizer of model.path={config.model.path}, or remove that token from the '
      'files of the tokenizer'
    )
  prompt = config.prompts.max_prompt_tokens
  new = config.sampler.max_new_tokens
  if config.row_length > spec.positions:
    yield (
      f'prompts.max_prompt_tokens={prompt} and sampler.max_new_tokens={new}: prompt '
      f"{prompt} + response {new} tokens exceed the model's {spec.positions} "
      'positions; lower one of the two knobs'
    )
  rows = config.learner.share_prompts or 1
  if rows > 1 and spec.widest_window:
    yield (
      f'learner.share_prompts={rows}: layers of model.path={config.model.path} attend '
      f'to the last {spec.widest_window} columns, which would not be those of a shared '
      'prompt and its response; give 1'
    )
  if sft.has_weights(directory):
    yield from _raised(hf_weights.check, directory, spec)
  else:
    yield from _raised(sources.imitated, config.problems, inputs.data)
  yield from _raised(_check_stop, tokenizer, config.sampler.stop)
  if config.rollout.given:
    yield from _raised(_check_given, config, inputs)
  if config.rollout.environment:
    role = config.rollout.custom.role
    yield from _raised(conversation.between, tokenizer, role)
  yield from _raised(open_teacher, config, inputs.model)
  yield from _raised(_check_rows, config, inputs)
  yield from of_custom_rules(config)


def _check_stop(tokenizer: Tokenizer, stop: Sequence[str]) -> None:
  """Raises a ValueError for a stop string that the policy cannot write."""
  for text in stop:
    try:
      (ids,) = tokenizer_lib.encode(tokenizer, [text])
    except ValueError:  # no token for a character
      ids = []
    if not ids:
      raise ValueError(
        f'sampler.stop: the tokenizer has no tokens for {text!r}, so no turn would end '
        'with it; correct the string'
      )


def _check_given(config: Config, inputs: Inputs) -> None:
  """Raises a ValueError if no problem has a solution, or one cannot be read."""
  sources.check_solutions(config.problems, inputs.data)
  if not any(row.solutions for row in inputs.data.training):
    raise ValueError(
      f'rollout.given={config.rollout.given}: no row of problems.source='
      f'{config.problems.source} has `solutions`; add this field, a list of texts, or '
      'set rollout.given=0'
    )


def _check_rows(config: Config, inputs: Inputs) -> None:
  """Raises a ValueError for a row whose answer or pictures cannot be used."""
  check_pictures = functools.partial(
    pictures.check_row, has_vision=inputs.model.spec.vision is not None
  )
  check = gold.check(config.rewards.rule)

  def check_row(row: Row) -> None:
    check(row)
    check_pictures(row)

  sources.check(config.problems, inputs.data, check_row)


def _raised(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
  """Calls a function; yields the ValueError that it raises, if any, as a refusal."""
  try:
    function(*arguments)
  except ValueError as error:
    yield str(error)


def of_custom_rules(config: Config) -> Iterator[str]:
  """Calls every custom rule as a step does, on two groups of short responses.

  Yields a refusal for each rule that raises an error, that returns another type, shape
  or range than types.py declares, or that has no effect.
  """
  for part in PARTS:
    rule = operator.attrgetter(part)(config)
    # A run without custom rules makes no example, whose arrays compile programs.
    if rule.custom and rule.returns:
      yield from _tried(part, rule, example(config))


def of_prompts(config: Config, problems: int) -> Iterator[str]:
  """Calls a custom rule that chooses prompts, on as many problems as the run has.

  The rule chooses the first prompts, and those after a step in which every other
  problem had 0 to 4 right responses of 4. Yields at most one refusal.
  """
  rule = config.prompts
  if not rule.custom:
    return
  start = prompt_rules.no_history(problems)
  id_N = np.arange(problems, dtype=np.int32)
  tries_N = id_N % 2 * 4
  right_N = id_N % (tries_N + 1)
  later = History(tries_N, right_N, tries_N // 4 - 1, start.waiting_N)
  for history in (start, later):
    history = prompt_rules.read_only(history)
    values = {'history': history, 'key': (config.seed, 0), 'count': rule.count}
    for refusal in _tried('prompts', rule, values):
      yield refusal
      return


def _tried(part: str, rule: Any, values: dict[str, Any]) -> Iterator[str]:
  """Calls a custom rule with these values; yields what is wrong with it, if so."""
  if fault := _fault(rule, values):
    yield f'{part}.rule={rule.rule} {fault}'


def example(config: Config) -> dict[str, Any]:
  """Returns a value for every argument and every result of a rule, by its name."""
  G = config.sampler.group_size
  steps = bool(config.rewards.custom.steps)
  ones_PGT = jnp.ones((2, G, 7))
  # One response is right, so the rewards of the second group are equal.
  groups = empty_groups(2, G, 7, steps)._replace(
    response_mask_PGT=ones_PGT > 0,
    behavior_logp_PGT=-ones_PGT,
    reward_PG=jnp.eye(2, G, G - 1),
    completed_step_P=jnp.zeros(2, int),
  )
  batch = learner.flatten(groups, groups.completed_step_P, GroupCentred())
  # The policy has moved in the direction of A, but not in all tokens.
  logp_BT = jnp.sign(batch.adv_BT) * jnp.linspace(-0.3, 0.9, 7)[None] - 1
  buffer = replay_buffer.init(2 * config.batch.uses_buffer, G, 7, steps=steps)
  bounds = constant(0.81, 1.23, 1.24)
  by_group = config.advantage.reads == 'groups'
  right_PG = groups.reward_PG > 0

  def find(ratio_BT: Array) -> Bounds:
    agree(ratio_BT=ratio_BT, logp_BT=logp_BT)
    return bounds

  return {
    # of loss, clip and mask rules
    'logp_BT': logp_BT,
    'batch': batch,
    'find': find,
    'ratio_BT': -logp_BT,  # ratios are positive
    'weigh': functools.partial(loss.weights, loss.Clipped(), logp_BT, batch),
    'gain_BT': logp_BT,
    'found': bounds,
    'clip': config.clip,
    'bounds': bounds._replace(keep_BT=batch.loss_mask_BT),
    'keep_BT': batch.loss_mask_BT,
    # of advantage and shaping rules
    'reward_PG': groups if by_group else groups.reward_PG,
    'adv_PG': ones_PGT if by_group else groups.reward_PG,
    'earned_PG': groups.reward_PG,
    'length_PG': groups.response_mask_PGT.sum(2),
    'truncated_PG': right_PG,
    'formatted_PG': ~right_PG,
    'teaches_PG': right_PG,
    # of batch and threshold rules
    'fresh': groups,
    'reevaluated': take(groups, slice(2 * config.batch.reevaluates)),
    'buffer': buffer,
    'now': jnp.int32(1),
    'key': jax.random.key(0),
    'seats': 2,
    'groups': groups,
    'source_P': groups.completed_step_P,
    'rate': jnp.float32(0.5),
    'G': G,
    'thresholds': buffer.thresholds,
  }


def _fault(rule: Any, values: dict[str, Any]) -> str:
  """Calls a rule; says what is wrong, or returns ''."""
  arguments = [values[name] for name in rule.arguments]
  # Functions and sizes are no arguments of a compiled program.
  static = [i for i, x in enumerate(arguments) if callable(x) or isinstance(x, int)]
  try:
    call = jax.jit(rule, static_argnums=static) if rule.traced else rule
    result = call(*arguments)
    if rule.returns:
      result = jax.tree.map(jnp.asarray, result)
      if misfit := _misfit(result, operator.itemgetter(*rule.returns)(values)):
        return f'returns {misfit}'
      if any(np.isnan(x).any() for x in jax.tree.leaves(result)):
        return 'returns nan for two groups, one of which has equal rewards'
    return rule.fault(result, values)
  except (Exception, SystemExit) as error:  # a user's function may raise anything
    return f'raises {custom_code.described(error, rule.rule)}'


def _misfit(result: Any, wanted: Any) -> str:
  """Describes how a result differs from the wanted type and shape; '' if it fits."""
  if type(result) is Bounds is type(wanted):  # a bound has one of several shapes
    result = result.keep_BT
    wanted = result if result is None else wanted.keep_BT
  nested = isinstance(wanted, tuple) and type(result) is type(wanted)
  if nested and len(result) == len(wanted):
    return next(filter(None, map(_misfit, result, wanted)), '')
  said = _said(result)
  needed = _said(wanted)
  return '' if said == needed else f'{said}, not {needed}'


def _said(value: Any) -> str:
  """Describes the type and the shape of a value, for an error message."""
  if isinstance(value, Array):
    return f'{value.dtype}{[*value.shape]}'
  if type(value) is tuple:
    return f'({", ".join(map(_said, value))})'
  return type(value).__name__
