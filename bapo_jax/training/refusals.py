"""Refuses configs that cannot work: every refusal is one sentence, with the way out.

1. `of_config` judges the knobs alone, before any file is read, and again once the
   program has decided the knobs that are None;
2. `of_inputs` judges them with the model, the tokenizer and the problems, and calls a
   user's rules as a step does.

A start raises the first refusal; --mode=check prints all.
"""

import functools
import importlib.util
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import custom_code
from bapo_jax.algorithms import loss, replay_buffer
from bapo_jax.algorithms.advantage import GroupCentred
from bapo_jax.algorithms.batch_rules import BatchRule
from bapo_jax.algorithms.clip import Balanced, ClipRule, constant
from bapo_jax.algorithms.loss import LossRule
from bapo_jax.algorithms.replay_buffer import (
  SLACK,
  FixedThresholds,
  MovingThresholds,
  ThresholdRule,
)
from bapo_jax.data import conversation, pictures, sources
from bapo_jax.data.row import Row
from bapo_jax.learner import learner
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.rewards import gold
from bapo_jax.rewards.shaping import Standard
from bapo_jax.training import sft
from bapo_jax.training.inputs import Inputs, open_teacher
from bapo_jax.training.schema import PARTS, Config
from bapo_jax.types import (
  Bounds,
  agree,
  empty_groups,
  take,
)

LENGTHS = ('prompts.max_prompt_tokens', 'sampler.max_new_tokens')


class Refusal(NamedTuple):
  """A reason why a config cannot work."""

  knobs: tuple[str, ...]  # which it is about
  text: str  # one sentence, with the way out


class Refused(ValueError):
  """The refusals of a run; as a string, the first of them."""

  def __init__(self, refusals: list[Refusal]):
    super().__init__(refusals[0].text)
    self.refusals = refusals


def judge(refusals: Iterator[Refusal]) -> None:
  """Raises Refused if there is a refusal."""
  if refused := [*refusals]:
    raise Refused(refused)


def of_config(config: Config) -> Iterator[Refusal]:
  """Yields a refusal for each reason why a config cannot work on any machine.

  A function of JUDGES waits until the program has decided all knobs that it is about.
  """
  undecided = config.undecided
  for find, names in JUDGES.items():
    if not set(names) & set(undecided):
      yield from (Refusal(names, text) for text in find(config))


def _clip(config: Config) -> Iterator[str]:
  """Yields a sentence for each reason why a clip rule does not fit a loss rule.

  Both rules declare their use of bounds. A bound search balances the gradient only if
  raising a bound adds or removes tokens and changes the weight of no other token.
  """
  clip = config.clip
  loss = config.loss
  name = f'clip.rule={clip.rule!r}'
  if loss.bounds == 'ignored' and clip.gives == 'bounds':
    yield (
      f'{name} has no effect, because loss.rule={loss.rule!r} ignores clip bounds; '
      "choose clip.rule='unclipped'"
    )
  if clip.searches == 'nothing':
    return
  if loss.bounds == 'limit':
    yield (
      f'{name} needs bounds that only cut tokens, but the bounds of loss.rule='
      f"{loss.rule!r} also change the weights of tokens; choose clip.rule='fixed' or "
      "'unclipped', or another loss.rule"
    )
  surrogate = clip.searches == 'surrogate'
  if isinstance(clip, Balanced) and clip.contribution == 'surrogate':
    name = "clip.contribution='surrogate'"
    surrogate = True
    if clip.reused_high < math.inf:
      yield (
        f'{name} ignores clip.reused_high={clip.reused_high}; set reused_high=inf or '
        "contribution='gradient'"
      )
  if surrogate and not (loss.clips_surrogate and loss.aggregate == 'token'):
    yield (
      f'{name} balances the clipped surrogate, summed over tokens, but '
      f'loss.rule={loss.rule!r} with loss.aggregate={loss.aggregate!r} maximises '
      "another objective; choose loss.rule='clipped' and loss.aggregate='token', or "
      "clip.rule='balanced' with contribution='gradient'"
    )
  if isinstance(clip, Balanced) and clip.weight != 'one' and not loss.clips_surrogate:
    yield (
      f'clip.weight={clip.weight!r} is defined for the clipped loss only (Eq. 8), but '
      f"loss.rule={loss.rule!r}; choose weight='one' or loss.rule='clipped'"
    )


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
  if config.rollout.depth and config.batch.extra_rounds:
    yield (
      f'batch.rule={config.batch.rule!r} samples up to batch.max_extra_rounds='
      f'{config.batch.extra_rounds} more rounds if a step has too few groups, but '
      f'rollout.depth={config.rollout.depth} samples before that step; set '
      'rollout.depth=0 or batch.max_extra_rounds=0'
    )
  if config.mesh.rollout and not config.rollout.depth:
    yield (
      f'mesh.rollout={config.mesh.rollout} devices and the others would wait for each '
      'other with rollout.depth=0; set rollout.depth=1 or more, or mesh.rollout=0'
    )


def _packages(config: Config) -> Iterator[str]:
  """Yields a sentence for each package that is missing."""
  for name, package in {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}.items():
    if getattr(config.metrics, name) and importlib.util.find_spec(package) is None:
      yield f'metrics.{name}=True needs {package}: give False, or pip install {package}'


def _sizes(config: Config) -> Iterator[str]:
  """Yields a sentence for each size that does not fit the prompts of a step."""
  count = config.prompts.count
  seats = config.seats
  replayed = seats - count
  if config.batch.rule == 'replay' and config.buffer.capacity < replayed:
    yield (
      f'buffer.capacity={config.buffer.capacity} is less than the groups that a batch '
      f'replays (prompts.count={count} x batch.replay_ratio={replayed // count} = '
      f'{replayed}); give {replayed} or more'
    )
  if seats % config.learner.minibatches:
    beside = f' and {replayed} replayed' if replayed else ''
    yield (
      f'prompts.count={count}{beside} groups do not divide into learner.minibatches='
      f'{config.learner.minibatches} equal parts; give a divisor of {seats}'
    )


def _lengths(config: Config) -> Iterator[str]:
  """Yields a sentence for each length that does not fit the others."""
  longest = config.sampler.max_new_tokens
  shaping = config.rewards.shaping
  if isinstance(shaping, Standard) and shaping.overlong_cache > longest:
    yield (
      f'rewards.shaping.overlong_cache={shaping.overlong_cache} is too large: give '
      f'at most sampler.max_new_tokens={longest} tokens'
    )


def _contradictions(config: Config) -> Iterator[str]:
  """Yields a sentence for each set of knobs with which a rule has nothing to use."""
  clip = config.clip
  batch = config.batch
  sources = config.sources
  occurring = f'with batch.rule={batch.rule!r} rows are {", ".join(sources)}'
  if isinstance(clip, Balanced) and set(clip.sources).isdisjoint(sources):
    yield (
      f'clip.sources={clip.sources} leaves the search without rows, because '
      f'{occurring}; add one of these sources, or choose another batch.rule'
    )
  if not any(getattr(batch.weights, source) for source in sources):
    given = ', '.join(f'batch.weights.{source}=0' for source in sources)
    yield (
      f'{given} leaves no row with an advantage, because {occurring}; set one of these '
      'weights above 0'
    )
  teacher = config.teacher
  if (
    teacher.path
    and not teacher.weight
    and not (teacher.reward and config.loss.reference)
  ):
    yield (
      f'teacher.path={teacher.path} has no effect on advantages with teacher.weight=0; '
      'raise it, or keep teacher.reward=True and set loss.reference'
    )
  if (
    teacher.path and not teacher.reward and batch.rule in ('learnable_only', 'adapted')
  ):
    yield (
      f'batch.rule={batch.rule!r} drops groups with one verdict, which also teach if '
      "teacher.reward=False; choose batch.rule='fresh_only' or 'replay'"
    )
  thresholds = config.buffer.thresholds
  if thresholds.rule == 'everything' and 'reevaluated' in sources:
    yield (
      f'batch.rule={batch.rule!r} re-evaluates hard problems, but '
      "buffer.thresholds.rule='everything' makes no problem hard; choose another "
      "threshold rule, batch.rule='replay', or buffer.reevaluate=0"
    )
  if thresholds.rule == 'threshold_free' and config.sampler.group_size % 2:
    yield (
      "buffer.thresholds.rule='threshold_free' keeps groups that are half right, but "
      f'sampler.group_size={config.sampler.group_size} is odd; give an even size, or '
      'another rule'
    )
  if 'reused' in sources:
    yield from _empty_band(thresholds, config.sampler.group_size)


def _verifier(config: Config) -> Iterator[str]:
  """Yields a sentence for each reason why a verifier does not fit other rules."""
  rule = config.advantage
  if config.rewards.custom.steps and rule.custom and rule.reads == 'rewards':
    yield (
      f'advantage.rule={rule.rule} reads one reward per response, but rewards.rule='
      f"{config.rewards.rule} returns steps; declare reads='groups' and return adv_PGT"
    )


def _empty_band(thresholds: ThresholdRule, group_size: int) -> Iterator[str]:
  """Yields a sentence if no number of right responses makes a group reusable.

  An upper end below 1 / group_size is accepted: it makes no group reusable on purpose.
  """
  if isinstance(thresholds, FixedThresholds):
    low, high = ((c, c) for c in thresholds.reusable)
    text = f'reusable={thresholds.reusable}'
  elif isinstance(thresholds, MovingThresholds):
    low = thresholds.low
    high = thresholds.high
    text = f'low={low} with high={high}'
  else:
    return

  if group_size * max(high) < 1:
    return
  lows, highs = (group_size * np.linspace(*ends, 101) for ends in (low, high))
  counts = np.arange(1, group_size)[:, None]  # one verdict alone gives no advantage
  if not ((lows - SLACK <= counts) & (counts <= highs + SLACK)).any():
    yield (
      f'buffer.thresholds.{text} contains no pass rate of '
      f'sampler.group_size={group_size} responses, such as {group_size // 2}/'
      f'{group_size}; widen the range, or choose an upper end below 1/{group_size} to '
      'reuse no group'
    )


def _too_long(config: Config, positions: int) -> Iterator[str]:
  """Yields a sentence if a row has more tokens than the model has positions."""
  prompt = config.prompts.max_prompt_tokens
  new = config.sampler.max_new_tokens
  if prompt + new > positions:
    yield (
      f'prompts.max_prompt_tokens={prompt} and sampler.max_new_tokens={new}: prompt '
      f"{prompt} + response {new} tokens exceed the model's {positions} positions; "
      'lower one of the two knobs'
    )


# What judges the knobs, and the knobs that it is about.
JUDGES: dict[Callable[[Config], Iterator[str]], tuple[str, ...]] = {
  _clip: ('clip.rule', 'loss.rule'),
  _sampling: ('rollout.depth', 'sampler.actor_dtype', 'batch.rule', 'mesh.rollout'),
  _packages: ('metrics.tensorboard', 'metrics.wandb'),
  _sizes: ('prompts.count', 'learner.minibatches'),
  _lengths: LENGTHS,
  _verifier: ('rewards.rule', 'advantage.rule', 'problems.source'),
  _contradictions: ('batch.rule', 'clip.sources', 'buffer.thresholds', 'teacher.path'),
}


def of_inputs(config: Config, inputs: Inputs) -> Iterator[Refusal]:
  """Yields a refusal for each reason why a config does not fit its files."""
  directory, tokenizer, spec = inputs.model
  # JAX would clamp a token id beyond the embedding.
  ids = tokenizer.backend.get_vocab()
  last = max(ids, key=ids.__getitem__, default='')
  worst = max([*tokenizer.eos, ids.get(last, 0)])
  if worst >= spec.vocab:
    what = f'token {last[:40]!r}' if worst == ids.get(last) else 'an end token'
    yield Refusal(
      ('tokenizer.path', 'model.path'),
      f'tokenizer.path={tokenizer.backend.name_or_path}: {what} has the id {worst}, '
      f'but the model has {spec.vocab} tokens, 0 to {spec.vocab - 1}; give the '
      f'tokenizer of model.path={config.model.path}, or remove that token from the '
      'files of the tokenizer',
    )
  yield from (Refusal(LENGTHS, x) for x in _too_long(config, spec.positions))
  if sft.has_weights(directory):
    yield from _raised('model.path', hf_weights.check, directory, spec)
  else:
    yield from _raised(
      'problems.source', sources.imitated, config.problems, inputs.data
    )
  if config.rollout.environment:
    role = config.rollout.custom.role
    yield from _raised('rollout.environment', conversation.between, tokenizer, role)
  yield from _raised('teacher.path', open_teacher, config, inputs.model)
  yield from _raised('rewards.rule', _check_rows, config, inputs)
  yield from of_custom_rules(config)


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


def _raised(
  knob: str, function: Callable[..., Any], *arguments: Any
) -> Iterator[Refusal]:
  """Calls a function; yields the ValueError that it raises, if any, as a refusal."""
  try:
    function(*arguments)
  except ValueError as error:
    yield Refusal((knob,), str(error))


def of_custom_rules(config: Config) -> Iterator[Refusal]:
  """Calls every custom rule as a step does, on two groups of short responses.

  Yields a refusal for each rule that raises an error, that returns another type, shape
  or range than types.py declares, or that has no effect.
  """
  if not any(operator.attrgetter(name)(config).custom for name in PARTS):
    return  # the arrays below would compile a program each
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
  seats = groups, groups.completed_step_P
  batch = learner.flatten(*seats, GroupCentred())
  # The policy has moved in the direction of A, but not in all tokens.
  logp_BT = jnp.sign(batch.adv_BT) * jnp.linspace(-0.3, 0.9, 7)[None] - 1
  again = take(groups, slice(2 * config.batch.reevaluates))
  buffer = replay_buffer.init(2 * config.batch.uses_buffer, G, 7, steps=steps)
  given = adv = reward_PG = groups.reward_PG
  if config.advantage.reads == 'groups':
    given, adv = groups, ones_PGT
  flag_PG = reward_PG > 0
  earned = reward_PG, groups.response_mask_PGT.sum(2), flag_PG, ~flag_PG
  bounds = constant(0.81, 1.23, 1.24)

  def find(ratio_BT: Array) -> Bounds:
    agree(ratio_BT=ratio_BT, logp_BT=logp_BT)
    return bounds

  # Slot -> the rule, its traced arguments, the others, and a result of the right type.
  trials = {
    'loss': (config.loss, (logp_BT, batch), (find,), (logp_BT, bounds)),
    'clip': (
      config.clip,
      (-logp_BT, batch),  # ratios are positive
      (functools.partial(loss.weights, loss.Clipped(), logp_BT, batch),),
      bounds._replace(keep_BT=batch.loss_mask_BT),
    ),
    'mask': (config.mask, (logp_BT, batch), (), batch.loss_mask_BT),
    'advantage': (config.advantage, (given,), (), adv),
    'batch': (
      config.batch,
      (groups, again, buffer, 1, jax.random.key(0)),
      (2,),
      seats,
    ),
    'buffer.thresholds': (config.buffer.thresholds, (0.5,), (G,), buffer.thresholds),
    'rewards.shaping': (config.rewards.shaping, (), earned, (reward_PG, flag_PG)),
  }
  for slot, (rule, *trial) in trials.items():
    fault = rule.custom and _fault(config, rule, *trial)
    if fault:
      knob = f'{slot}.rule'
      yield Refusal((knob,), f'{knob}={rule.rule} {fault}')


def _fault(config: Config, rule: Any, traced: Any, others: Any, wanted: Any) -> str:
  """Calls a rule, compiled if an argument is traced; says what is wrong, or ''."""
  arguments = *traced, *others
  static = range(len(traced), len(arguments))
  try:
    call = jax.jit(rule, static_argnums=static) if traced else rule
    result = jax.tree.map(jnp.asarray, call(*arguments))
    if misfit := _misfit(result, wanted):
      return f'returns {misfit}'
    if any(np.isnan(x).any() for x in jax.tree.leaves(result)):
      return 'returns nan for two groups, one of which has equal rewards'
    if isinstance(rule, LossRule):
      return _of_loss(config, traced, wanted[1], result[1])
    if isinstance(rule, BatchRule):
      groups, source_P = result
      last_P = np.where(groups.completed_step_P < 0, -1, 2)
      if ((source_P < -1) | (source_P > last_P)).any():
        return f'returns source_P={source_P}; give -1 for empty groups, else 0, 1 or 2'
    if isinstance(rule, ThresholdRule) and max(result) > result.reusable_max > 0:
      return f'returns {[*map(int, result)]}; the last must be the largest, or 0'
    if not isinstance(rule, ClipRule):
      return ''
    # A bound has no axes, or an axis B, or the axes of the ratios.
    _, low, *upper = np.broadcast_arrays(traced[0], *result[:4])
    if (low > upper[0]).any():
      return f'returns low={low.max():.4g} above high={upper[0].min():.4g}; swap them'
    gives = 'nothing' if result.keep_BT is None else 'mask'
    if (low > 0).any() or not np.isinf(upper).all():
      gives = 'bounds'
    if rule.gives in ('bounds', gives):
      return ''
    return f'declares gives={rule.gives!r}, but returns {gives}; change one of the two'
  except (Exception, SystemExit) as error:  # a user's function may raise anything
    return f'raises {custom_code.described(error, rule.rule)}'


def _of_loss(config: Config, traced: Any, given: Bounds, bounds: Bounds) -> str:
  """Says what is wrong with the gradient, or with bounds other than the given ones."""
  logp_BT, batch = traced
  weigh = jax.jit(functools.partial(loss.weights, config.loss))
  weight_BT = weigh(logp_BT, batch, given)
  old_BT = batch.behavior_logp_BT
  if (bounds.high != given.high).any():
    return (
      'does not return the bounds of `find`, so no clip rule has an effect; return '
      '(gain_BT, find(ratio_BT)), and declare bounds="ignored" if it ignores bounds'
    )
  free_BT = weigh(logp_BT, batch, constant(0.1, math.inf, math.inf))
  if not np.isfinite(weight_BT).all() or not free_BT.any():
    return 'has a gradient of 0 or nan; return a gain that depends on logp_BT'
  reads = config.clip.gives == 'bounds' and config.loss.bounds != 'ignored'
  if reads and jnp.array_equal(weight_BT, free_BT):
    return (
      'does not use the bounds that `find` returns, so clip.rule='
      f"{config.clip.rule!r} has no effect; choose clip.rule='unclipped'"
    )
  # All ratios and advantages are 1.
  if weigh(old_BT, batch._replace(adv_BT=-old_BT), given).sum() < 0:
    return (
      'lowers the probability of tokens with a positive advantage; return the gain, '
      'which is maximised, and not a loss'
    )
  return ''


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
