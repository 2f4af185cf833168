"""Refuses configs that cannot work: every refusal is one sentence, with the way out.

1. `of_config` judges the knobs alone, before any file is read;
2. `of_inputs` judges them with the model, the tokenizer and the problems, and traces a
   user's rules.

A start raises the first refusal; --mode=check prints all.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax import custom_code
from bapo_jax.algorithms import replay_buffer
from bapo_jax.algorithms.clip import Balanced, ClipRule, Unclipped
from bapo_jax.algorithms.loss import LossRule
from bapo_jax.algorithms.replay_buffer import (
  SLACK,
  FixedThresholds,
  MovingThresholds,
  ThresholdRule,
)
from bapo_jax.data import conversation, pictures, sources
from bapo_jax.data.knobs import MADE
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.knobs import Range
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.knobs import POSITIONS
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.parts import Part
from bapo_jax.rewards import gold
from bapo_jax.rewards.shaping import Standard
from bapo_jax.training.inputs import Inputs, open_teacher
from bapo_jax.training.schema import Config
from bapo_jax.types import Batch, Bounds, empty_groups


class Refused(ValueError):
  """The refusals of a run; as a string, the first of them."""

  def __init__(self, sentences: list[str]):
    super().__init__(sentences[0])
    self.sentences = sentences


def judge(sentences: Iterator[str]) -> None:
  """Raises Refused if there is a sentence."""
  if refused := [*sentences]:
    raise Refused(refused)


def of_config(config: Config) -> Iterator[str]:
  """Yields a sentence for each reason why a config cannot work on any machine."""
  yield from _clip(config.clip, config.loss)
  yield from _conflicts(config)
  yield from _contradictions(config)
  if not config.model.path:
    yield from of_positions(config, POSITIONS)


def _clip(clip: ClipRule, loss: LossRule) -> Iterator[str]:
  """Yields a sentence for each reason why a clip rule does not fit a loss rule.

  Both rules declare their use of bounds. A bound search balances the gradient only if
  raising a bound adds or removes tokens and changes the weight of no other token.
  """
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


def _conflicts(config: Config) -> Iterator[str]:
  """Yields a sentence for each conflict between knobs."""
  count = config.prompts.count
  seats = config.seats
  group_size = config.sampler.group_size
  longest = config.sampler.max_new_tokens
  yield from _sampling(config)
  if not config.model.path and config.model.experts and config.model.tower.layers:
    yield (
      f'model.tower.layers={config.model.tower.layers} conflicts with model.experts='
      f'{config.model.experts}: models with experts are text-only; set one of them to 0'
    )
  for name, package in {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}.items():
    if getattr(config.metrics, name) and importlib.util.find_spec(package) is None:
      yield f'metrics.{name}=True needs {package}: give False, or pip install {package}'
  if config.buffer.thresholds.rule == 'threshold_free' and group_size % 2:
    yield (
      "buffer.thresholds.rule='threshold_free' keeps groups that are half right, but "
      f'sampler.group_size={group_size} is odd; give an even size, or another rule'
    )
  replayed = seats - count
  if config.batch.rule == 'replay' and config.buffer.capacity < replayed:
    yield (
      f'buffer.capacity={config.buffer.capacity} is less than the groups that a batch '
      f'replays (prompts.count={count} x batch.replay_ratio={replayed // count} = '
      f'{replayed}); give {replayed} or more'
    )
  shaping = config.rewards.shaping
  if isinstance(shaping, Standard) and shaping.overlong_cache > longest:
    yield (
      f'rewards.shaping.overlong_cache={shaping.overlong_cache} is too large: give '
      f'at most sampler.max_new_tokens={longest} tokens'
    )
  if config.problems.source in MADE and count > (train := config.problems.train):
    yield (
      f'prompts.count={count} exceeds problems.train={train}, the number of '
      'generated training problems; lower prompts.count or raise problems.train'
    )
  if seats % config.learner.minibatches:
    beside = f' and {replayed} replayed' if replayed else ''
    yield (
      f'prompts.count={count}{beside} groups do not divide into learner.minibatches='
      f'{config.learner.minibatches} equal parts; give a divisor of {seats}'
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
  rule = config.advantage
  if config.rewards.custom.steps and rule.custom and rule.reads == 'rewards':
    yield (
      f'advantage.rule={rule.rule} reads one reward per response, but rewards.rule='
      f"{config.rewards.rule} returns steps; declare reads='groups' and return adv_PGT"
    )
  thresholds = config.buffer.thresholds
  if thresholds.rule == 'everything' and 'reevaluated' in sources:
    yield (
      f'batch.rule={batch.rule!r} re-evaluates hard problems, but '
      "buffer.thresholds.rule='everything' makes no problem hard; choose another "
      "threshold rule, batch.rule='replay', or buffer.reevaluate=0"
    )
  if 'reused' in sources:
    yield from _empty_band(thresholds, config.sampler.group_size)
  if 'countdown' in config.rewards.rule.split(','):
    for name in ('source', 'test_source'):
      if (source := getattr(config.problems, name)) in MADE and source != 'countdown':
        yield (
          "rewards.rule='countdown' reads numbers and a target from the right answer, "
          f'but that of problems.{name}={source!r} is a number; choose '
          "rewards.rule='aime'"
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

  def between(ends: Range, rate: float) -> float:
    return group_size * (ends[0] + rate * (ends[1] - ends[0]))

  if group_size * max(high) < 1:
    return
  bands = [(between(low, i / 100), between(high, i / 100)) for i in range(101)]
  counts = range(1, group_size)  # a group with one verdict has no advantage
  if not any(a - SLACK <= n <= b + SLACK for a, b in bands for n in counts):
    yield (
      f'buffer.thresholds.{text} contains no pass rate of '
      f'sampler.group_size={group_size} responses, such as {group_size // 2}/'
      f'{group_size}; widen the range, or choose an upper end below 1/{group_size} to '
      'reuse no group'
    )


def of_positions(config: Config, positions: int) -> Iterator[str]:
  """Yields a sentence if a row has more tokens than the model has positions."""
  prompt = config.prompts.max_prompt_tokens
  new = config.sampler.max_new_tokens
  if prompt + new > positions:
    yield (
      f'prompts.max_prompt_tokens={prompt} and sampler.max_new_tokens={new}: prompt '
      f"{prompt} + response {new} tokens exceed the model's {positions} positions; "
      'lower one of the two knobs'
    )


def of_inputs(config: Config, inputs: Inputs) -> Iterator[str]:
  """Yields a sentence for each reason why a config does not fit its files."""
  directory, tokenizer, spec = inputs.model
  yield from _vocabulary(config, tokenizer, spec)
  if directory:
    yield from of_positions(config, spec.positions)
    yield from _raised(hf_weights.check, directory, spec)
  else:
    yield from _raised(sources.sft_problems, config.problems, inputs.data)
  if config.rollout.environment:
    role = config.rollout.custom.role
    yield from _raised(conversation.between, tokenizer, role)
  yield from _raised(open_teacher, config, inputs.model)
  yield from _raised(_check_rows, config, inputs)
  yield from of_custom_rules(config)


def _check_rows(config: Config, inputs: Inputs) -> None:
  """Raises a ValueError for a row whose answer or pictures cannot be used."""
  has_vision = inputs.model.spec.vision is not None
  check = gold.check(config.rewards.rule)

  def check_row(row: Row) -> None:
    check(row)
    pictures.check_row(row, has_vision=has_vision)

  sources.check(config.problems, inputs.data, check_row)
  for knob in sources.SPLITS:  # generated rows are all alike
    pictures.check_row(inputs.data.of(knob)[0], has_vision=has_vision)


def _raised(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
  """Calls a function; yields the message of the ValueError that it raises, if any."""
  try:
    function(*arguments)
  except ValueError as error:
    yield str(error)


def _vocabulary(config: Config, tokenizer: Tokenizer, spec: ModelSpec) -> Iterator[str]:
  """Yields a sentence for token ids beyond the embedding, which JAX would clamp."""
  ids = tokenizer.backend.get_vocab()
  last = max(ids, key=ids.__getitem__, default='')
  worst = max([*tokenizer.eos, ids.get(last, 0)])
  if worst >= spec.vocab:
    what = f'token {last[:40]!r}' if worst == ids.get(last) else 'an end token'
    yield (
      f'tokenizer.path={config.tokenizer.path}: {what} has the id {worst}, but the '
      f'model has {spec.vocab} tokens, 0 to {spec.vocab - 1}; give the tokenizer of '
      f"model.path={config.model.path}, or remove that token from the tokenizer's files"
    )


def of_custom_rules(config: Config) -> Iterator[str]:
  """Traces every custom rule once on small shapes.

  Yields a sentence for each rule that raises an error, or returns a value of the
  wrong type or shape, and for a loss that ignores the bounds or has the wrong sign.
  """
  if not config.code:  # the arrays below would compile a program each
    return
  B, T, P = 4, 8, 2
  G = config.sampler.group_size
  seats = config.batch.seats(P)
  f32, i32, flags = (jnp.zeros((B, T), kind) for kind in (jnp.float32, jnp.int32, bool))
  batch = Batch(i32, flags, f32, f32, f32, i32[:, 0], flags, i32[:, 0])
  none = Unclipped()(f32, batch, lambda _: f32)
  steps = bool(config.rewards.custom.steps)
  groups = empty_groups(P, G, T, steps)
  reward_PG = jnp.zeros((P, G))
  flag_PG = reward_PG > 0
  by_group = config.advantage.reads == 'groups'
  given, adv = (groups, groups.behavior_logp_PGT) if by_group else 2 * (reward_PG,)
  called: list[Array] = []

  def find(ratio_BT: Array) -> Bounds:
    called.append(ratio_BT)
    return none

  def filled() -> Any:
    buffer = replay_buffer.init(P, G, T, config.buffer.thresholds, steps)
    return config.batch(groups, groups, buffer, 0, jax.random.key(0), seats=seats)

  shaping: Any = config.rewards.shaping
  earned = reward_PG, flag_PG.astype(jnp.int32), flag_PG, flag_PG
  chosen = empty_groups(seats, G, T, steps), jnp.zeros(seats, jnp.int32)
  trials: list[tuple[str, Part, Callable[[], Any], Any]] = [
    ('loss', config.loss, lambda: config.loss(f32, batch, find), (f32, none)),
    ('clip', config.clip, lambda: config.clip(f32, batch, lambda _: f32), none),
    ('mask', config.mask, lambda: config.mask(f32, batch), flags),
    ('advantage', config.advantage, lambda: config.advantage(given), adv),
    ('batch', config.batch, filled, chosen),
    ('rewards.shaping', shaping, lambda: shaping(*earned), (reward_PG, flag_PG)),
  ]
  for name, part, call, wanted in trials:
    if not part.custom:
      continue
    rule = f'{name}.rule={part.rule}'
    try:
      result = jax.eval_shape(call)
    except Exception as error:  # a user's function may raise anything
      reason = custom_code.described(error, custom_code.file_of(part.rule))
      yield f'{rule} raises {reason}'
      continue
    if misfit := _misfit(result, wanted):
      yield f'{rule} returns {misfit}'
    elif name == 'loss' and not called:
      yield (
        f'{rule} never calls `find`, so no clip rule has an effect; return '
        '(gain_BT, find(ratio_BT)), and declare bounds="ignored" if it ignores bounds'
      )
    elif name == 'loss':
      yield from (*_unused_bounds(config, f32, batch, none), *_sign(config, batch))


def _unused_bounds(
  config: Config, logp_BT: Array, batch: Batch, bounds: Bounds
) -> Iterator[str]:
  """Yields a sentence if a clip rule gives bounds on which the gain does not depend."""
  if config.clip.gives != 'bounds' or config.loss.bounds == 'ignored':
    return
  gain = jax.make_jaxpr(lambda bounds: config.loss(logp_BT, batch, lambda _: bounds)[0])
  function = gain(bounds)
  known = {id(x) for x in function.jaxpr.invars}
  for equation in function.jaxpr.eqns:
    if known.intersection(map(id, equation.invars)):
      known.update(map(id, equation.outvars))
  if not known.intersection(map(id, function.jaxpr.outvars)):
    yield (
      f'loss.rule={config.loss.rule} does not use the bounds that `find` returns, so '
      f"clip.rule={config.clip.rule!r} has no effect; choose clip.rule='unclipped'"
    )


def _sign(config: Config, batch: Batch) -> Iterator[str]:
  """Yields a sentence if the gradient of a loss rule makes tokens with A > 0 rarer."""
  logp_BT = batch.behavior_logp_BT - 1.0
  up = batch._replace(
    loss_mask_BT=~batch.loss_mask_BT,
    behavior_logp_BT=logp_BT,  # of both policies: all ratios are 1
    prox_BT=logp_BT,
    adv_BT=jnp.ones_like(batch.adv_BT),
  )
  none = Unclipped()(logp_BT, up, lambda _: logp_BT)
  weight = jax.grad(lambda logp_BT: config.loss(logp_BT, up, lambda _: none)[0].sum())
  if jax.jit(weight)(logp_BT).sum() < 0:
    yield (
      f'loss.rule={config.loss.rule} lowers the probability of tokens with a positive '
      'advantage; return the gain, which is maximised, and not a loss'
    )


def _misfit(found: Any, wanted: Any) -> str:
  """Describes how a result differs from the wanted type and shape; '' if it fits."""
  if wanted is None:
    return ''
  if isinstance(wanted, Array):
    shape = getattr(found, 'shape', None)
    return '' if shape == wanted.shape else f'{_said(found)}, not {_said(wanted)}'
  if isinstance(wanted, Bounds):
    fits = isinstance(found, Bounds)
    return '' if fits else f'{_said(found)}, not Bounds (see clip.constant)'
  if not isinstance(found, type(wanted)) or len(found) != len(wanted):
    return f'{_said(found)}, not {_said(wanted)}'
  return next(filter(None, map(_misfit, found, wanted)), '')


def _said(value: Any) -> str:
  """Describes the type and the shape of a value, for an error message."""
  if (shape := getattr(value, 'shape', None)) is not None:
    return f'an array of shape {tuple(shape)}'
  if type(value) is tuple:
    return f'({", ".join(map(_said, value))})'
  return type(value).__name__
