"""Defines the config of a run: typed, frozen, validated once, before JAX is imported.

A config file returns an ml_collections ConfigDict, and arguments such as
--config.clip.rule=fixed override its values. Knobs that are left None are derived.
"""

import ast
import hashlib
import importlib.util
import inspect
import json
import math
import re
import typing
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from ml_collections import ConfigDict
from pydantic.fields import FieldInfo

from bapo_jax import knobs, own_code
from bapo_jax.algorithms import knobs as rules
from bapo_jax.data.knobs import (
  EMBEDDED,
  MADE,
  ProblemsConfig,
  PromptsConfig,
  TokenizerConfig,
)
from bapo_jax.knobs import Section, knob
from bapo_jax.models import knobs as models
from bapo_jax.rewards.knobs import RewardsConfig
from bapo_jax.rollout.knobs import RolloutConfig, SamplerConfig
from bapo_jax.training import foreign_names
from bapo_jax.training import knobs as train

OVERRIDE = re.compile(r'--?(no)?config\.([^=]*)(?:=(.*))?', re.DOTALL)
TRUTH = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
LONGEST = 10_000  # characters of a tuple
BY_PROGRAM = ('code', 'derived', 'problems.whole')  # knobs that the program sets


class Config(Section):
  """All knobs of a run; the sections are in the order in which a run uses them."""

  title: str = knob('trial, tiny', 'Heading of the first screen and of the report.')
  seed: int = knob(0, 'Seed of prompts, sampling and new adapters.', least=0)
  steps: int = knob(80, 'Learner steps.', least=1)
  responses: float = knob(
    math.inf, 'Training responses after which the run ends.', above=0, infinite=True
  )
  code: tuple[str, ...] = knob(
    (), 'Files of own functions, each with the digest of its text; set by the program.'
  )
  derived: tuple[str, ...] = knob(
    (), 'Knobs that the config file leaves None, so that a new run derives them.'
  )
  cache: str = knob(
    'auto',
    'Folder of warm starts and compiled programs that runs share; auto: bapo_jax in '
    "the user's cache, ~/.cache; empty: none.",
  )
  mesh: models.MeshConfig = knob(models.MeshConfig, 'The device mesh.')
  model: models.ModelConfig = knob(models.ModelConfig, 'The policy.')
  lora: models.LoraConfig = knob(models.LoraConfig, 'Low-rank adapters.')
  logprobs: models.LogprobsConfig = knob(models.LogprobsConfig, 'Log-probabilities.')
  tokenizer: TokenizerConfig = knob(TokenizerConfig, 'Tokenizer and template.')
  problems: ProblemsConfig = knob(ProblemsConfig, 'Data.')
  prompts: PromptsConfig = knob(PromptsConfig, 'Prompts.')
  sampler: SamplerConfig = knob(SamplerConfig, 'Decoding.')
  rewards: RewardsConfig = knob(RewardsConfig, 'Verifiers and rewards.')
  rollout: RolloutConfig = knob(RolloutConfig, 'Rollouts.')
  buffer: rules.BufferConfig = knob(rules.BufferConfig, 'Replay buffer.')
  batch: rules.BatchConfig = knob(rules.BatchConfig, 'Batch rules.')
  advantage: rules.AdvantageConfig = knob(rules.AdvantageConfig, 'Advantage rules.')
  clip: rules.ClipConfig = knob(rules.ClipConfig, 'Clip rules.')
  mask: rules.MaskConfig = knob(rules.MaskConfig, 'Mask rules.')
  loss: rules.LossConfig = knob(rules.LossConfig, 'Loss rules.')
  learner: train.LearnerConfig = knob(train.LearnerConfig, 'Updates.')
  optimizer: train.OptimizerConfig = knob(train.OptimizerConfig, 'AdamW.')
  sft: train.SftConfig = knob(train.SftConfig, 'Warm start.')
  evaluate: train.EvaluateConfig = knob(train.EvaluateConfig, 'Evaluation.')
  metrics: train.MetricsConfig = knob(train.MetricsConfig, 'Metrics.')
  checkpoint: train.CheckpointConfig = knob(train.CheckpointConfig, 'Checkpoints.')

  @property
  def row_length(self) -> int:
    """T, the number of tokens of a row: prompt and response at their longest."""
    return self.prompts.max_prompt_tokens + self.sampler.max_new_tokens

  @property
  def seats(self) -> int:
    """The number of groups in a batch."""
    return self.batch.active.seats(self.prompts.count)

  @property
  def sources(self) -> tuple[rules.Source, ...]:
    """The sources that the rows of a batch may have."""
    rule = self.batch.active
    may_occur: dict[rules.Source, bool] = {
      'fresh': True,
      'reevaluated': rule.reevaluates and self.buffer.reevaluate > 0,
      'reused': rule.uses_buffer,
    }
    return tuple(source for source, may in may_occur.items() if may)

  @property
  def minibatch_rows(self) -> int:
    """B, the number of rows in a minibatch."""
    return self.seats // self.learner.minibatches * self.sampler.group_size

  @property
  def micro_batch_rows(self) -> int:
    """The number of rows in a micro-batch, if all of them have full length."""
    return -(-self.minibatch_rows // self.learner.grad_accum_steps)

  @property
  def places(self) -> int:
    """The largest number of groups that are submitted and not yet trained on."""
    rounds = self.batch.extra_rounds + 1
    return self.prompts.count * (self.rollout.max_off_policy_steps * rounds + 1)

  @property
  def updates_per_step(self) -> int:
    """The number of optimiser updates per learner step."""
    return self.learner.epochs * self.learner.minibatches

  def with_values(self, **sections: dict[str, Any]) -> 'Config':
    """Returns a copy with other values: with_values(prompts={'count': 1})."""
    changed = {k: getattr(self, k).model_copy(update=v) for k, v in sections.items()}
    return self.model_copy(update=changed)


def fingerprint(values: dict[str, Any]) -> str:
  """Returns twelve hexadecimal digits that change with any value.

  Of the values of a config, `cache` is left out, because it affects no result.
  """
  values = {name: value for name, value in values.items() if name != 'cache'}
  text = json.dumps(values, sort_keys=True, default=list).encode()
  return hashlib.sha256(text).hexdigest()[:12]


def from_json(values: dict[str, Any]) -> Config:
  """Restores the config from config.json, where tuples are lists.

  Raises ValueError if another version of the program wrote it.
  """
  return Config.model_validate_json(json.dumps(values))


def parse(values: dict[str, Any]) -> Config:
  """Returns the validated config with these values.

  Raises ValueError if a knob is out of range or knobs do not fit together.
  """
  config = knobs.validate(Config, values)
  tokenizer = config.tokenizer.beside(config.model.path)
  whole = bool(own_code.placed(config.rewards.rule))
  config = config.with_values(problems={'whole': whole})
  config = config.model_copy(update={'tokenizer': tokenizer, 'code': code(config)})
  rules.check_clip(config.clip, config.loss)
  for conflict in (*_conflicts(config), *_contradictions(config)):
    raise ValueError(conflict)
  if not config.model.path:
    check_positions(config, models.POSITIONS)
  return config


def code(config: Config) -> tuple[str, ...]:
  """Returns 'file digest' of every own function that the config names."""
  texts = [x for _, _, x in knobs.fields(config) if isinstance(x, str)]
  places = {place for text in texts for place in own_code.placed(text)}
  return tuple(sorted({f'{own_code.file_of(x)} {own_code.digest(x)}' for x in places}))


def _conflicts(config: Config) -> Iterator[str]:
  """Yields a sentence for each conflict between knobs."""
  count, seats = config.prompts.count, config.seats
  group_size, longest = config.sampler.group_size, config.sampler.max_new_tokens
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
      f'buffer.capacity={config.buffer.capacity} holds fewer groups than a batch '
      f'replays (prompts.count={count} x batch.replay.replay_ratio='
      f'{config.batch.replay.replay_ratio} = {replayed}); give {replayed} or more'
    )
  if (cache := config.rewards.shaping.overlong_cache) > longest:
    limit = f'sampler.max_new_tokens={longest} tokens'
    yield f'rewards.shaping.overlong_cache={cache} is too large: give 1 to {limit}'
  if config.problems.source in MADE and count > (train := config.problems.train):
    yield (
      f'prompts.count={count} exceeds problems.train={train}, the number of '
      'generated training problems; lower prompts.count or raise problems.train'
    )
  if (
    config.sampler.actor_dtype != 'compute'
    and config.learner.recompute_logprobs == 'on'
    and (lag := config.rollout.weight_sync_interval - 1 + config.rollout.depth)
    and (config.rollout.depth or not config.lora.rank)
  ):
    yield (
      "learner.recompute_logprobs='on' needs the weights that a quantised actor "
      f'(sampler.actor_dtype={config.sampler.actor_dtype!r}) was made of, which the '
      f'learner replaces up to {lag} steps before it trains (rollout.'
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
  if seats % config.learner.minibatches:
    beside = f' and {replayed} replayed' if replayed else ''
    yield (
      f'prompts.count={count}{beside} groups do not divide into learner.minibatches='
      f'{config.learner.minibatches} equal parts; give a divisor of {seats}'
    )


def _contradictions(config: Config) -> Iterator[str]:
  """Yields a sentence for each set of knobs with which a rule has nothing to use."""
  k, batch, sources = config.clip.balanced, config.batch, config.sources
  occurring = f'with batch.rule={batch.rule!r} rows are {", ".join(sources)}'
  if config.clip.rule == 'balanced' and set(k.sources).isdisjoint(sources):
    yield (
      f'clip.balanced.sources={k.sources} leaves the search without rows, because '
      f'{occurring}; add one of these sources, or choose another batch.rule'
    )
  if not any(getattr(batch.weights, source) for source in sources):
    given = ', '.join(f'batch.weights.{source}=0' for source in sources)
    yield (
      f'{given} leaves no row with an advantage, because {occurring}; set one of these '
      'weights above 0'
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


def _empty_band(thresholds: rules.ThresholdsConfig, group_size: int) -> Iterator[str]:
  """Yields a sentence if no number of right responses makes a group reusable.

  An upper end below 1 / group_size is accepted: it says that no group is reusable.
  """
  if thresholds.rule == 'fixed':
    low, high = ((c, c) for c in thresholds.fixed.reusable)
    knob, value = 'fixed.reusable', f'{thresholds.fixed.reusable}'
  elif thresholds.rule == 'moving':
    low, high = thresholds.moving.low, thresholds.moving.high
    knob, value = 'moving.low', f'{low} with high={high}'
  else:
    return

  def between(ends: rules.Range, rate: float) -> float:
    return group_size * (ends[0] + rate * (ends[1] - ends[0]))

  if group_size * max(high) < 1:
    return
  bands = [(between(low, i / 100), between(high, i / 100)) for i in range(101)]
  slack = rules.SLACK
  counts = range(1, group_size)  # a group with one verdict has no advantage
  if not any(a - slack <= n <= b + slack for a, b in bands for n in counts):
    yield (
      f'buffer.thresholds.{knob}={value} contains no pass rate of '
      f'sampler.group_size={group_size} responses, such as {group_size // 2}/'
      f'{group_size}; widen the range, or choose an upper end below 1/{group_size} to '
      'reuse no group'
    )


def check_positions(config: Config, positions: int) -> None:
  """Raises ValueError if a row has more tokens than the model has positions."""
  prompt, new = config.prompts.max_prompt_tokens, config.sampler.max_new_tokens
  if prompt + new > positions:
    raise ValueError(
      f'prompts.max_prompt_tokens={prompt} and sampler.max_new_tokens={new}: prompt '
      f"{prompt} + response {new} tokens exceed the model's {positions} positions; "
      'lower one of the two knobs'
    )


def defaults() -> ConfigDict:
  """Returns all knobs at their defaults, for the get_config of a config file."""
  return ConfigDict(Config().model_dump())


def load(file: str) -> dict[str, Any]:
  """Returns the values that a config file sets, as nested dicts.

  `file` is a path, or path:variant to pass the variant to the file's get_config.
  Raises ValueError if the file cannot be read or raises an error.
  """
  path, _, variant = file.partition(':')
  try:
    spec = importlib.util.spec_from_file_location('config', path)
    if spec is None or spec.loader is None:
      raise OSError(f'not a file that ends in .py: {path!r}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, 'get_config'):
      raise ValueError('no function get_config; define one that returns a ConfigDict')
    _check_variant(module, path, variant)
    config = module.get_config(*filter(None, [variant]))
    if not isinstance(config, ConfigDict):
      raise TypeError(f'get_config() returns {config!r:.60}, not a ConfigDict')
    return config.to_dict()
  except (ValueError, OSError) as error:
    raise ValueError(f'--config={file}: {error}') from None
  except (Exception, SystemExit) as error:  # a user's file may raise anything
    raise ValueError(f'--config={file}: {own_code.described(error, path)}') from None


def _check_variant(module: ModuleType, path: str, variant: str) -> None:
  """Raises ValueError if a config file does not have the variant; '' is none."""
  names = list(getattr(module, 'VARIANTS', ()))
  takes_variant = bool(inspect.signature(module.get_config).parameters)
  if variant and not takes_variant:
    raise ValueError(f'this file has no variants; give --config={path}')
  if variant and names and variant not in names:
    raise ValueError(f'no variant {variant!r}; choose one of {names}')


def overrides(
  given: list[str], values: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
  """Parses arguments such as --config.steps=10; the last value of a knob wins.

  Args:
    given: the arguments.
    values: nested values of the config file, which may name own functions.

  Raises ValueError for an unknown knob, or a value that does not have the knob's type.
  """
  known = {name: field for name, field, _ in knobs.fields(Config())}
  parsed = [match.groups() for arg in given if (match := OVERRIDE.fullmatch(arg))]
  parsed.sort(key=lambda groups: '.own.' in groups[1])  # known once the rules are
  found = {}
  for no, name, text in parsed:
    if '.own.' in name and name not in known:
      known |= _own_knobs(merged(values, found))
    if name not in known:
      advice = foreign_names.advice(name, known)
      raise ValueError(f'no knob --config.{knobs.shorten(name)}; {advice}')
    if name in BY_PROGRAM:
      raise ValueError(f'{name} is set by the program; remove --config.{name}')
    kind = known[name].annotation
    if text is None and kind is bool:
      text = 'false' if no else 'true'
    try:
      found[name] = _from_text(kind, text)
    except (ValueError, LookupError, SyntaxError, RecursionError, MemoryError):
      wanted, text = knobs.expected(known[name]), text or ''
      text = knobs.shorten(text if text.isprintable() else repr(text))
      raise ValueError(f'{name}={text}: give {wanted}') from None
  return found


def merged(values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a copy of nested values with the values of dotted names replaced.

  Raises ValueError if a section is not a mapping.
  """
  changed = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
  for name, value in found.items():
    head, _, tail = name.partition('.')
    if tail and not isinstance(changed.get(head, {}), Mapping):
      raise ValueError(f'{head}={changed[head]!r} is a section; set its knobs instead')
    changed[head] = merged(changed.get(head, {}), {tail: value}) if tail else value
  return changed


def _own_knobs(
  values: Mapping[str, Any], section: type[Section] = Config, path: str = ''
) -> dict[str, FieldInfo]:
  """Returns the knobs of the own functions that these values of a section name."""
  found = {}
  for name, field in section.model_fields.items():
    kind, given, dotted = field.annotation, values.get(name), f'{path}{name}'
    if not (isinstance(kind, type) and issubclass(kind, Section) and given):
      continue
    found |= _own_knobs(given, kind, f'{dotted}.')
    if issubclass(kind, own_code.Slot):
      rules = {k: given[k] for k in kind.places if k in given}
      if any(own_code.placed(str(rule)) for rule in rules.values()):
        slot = knobs.validate(kind, rules, dotted)
        found |= {x: f for x, f, _ in knobs.fields(slot, dotted) if '.own.' in x}
  return found


def changed(config: Config) -> dict[str, tuple[Any, Any]]:
  """Returns the knobs that differ from their defaults: name -> (value, default).

  Leaves out the title, derived knobs, and what the program itself adds to a config.
  """
  found, skipped = {}, {'title', *config.derived, *by_program(config.model_dump())}
  for name, field, value in knobs.fields(config):
    default = field.get_default(call_default_factory=True)
    if value != default and name not in skipped:
      found[name] = value, default
  return found


def by_program(values: Mapping[str, Any]) -> set[str]:
  """Returns the knobs of nested values that the program fills in: no user set them."""
  filled = values['tokenizer']['path'] in ('', values['model']['path'] or EMBEDDED)
  return {*BY_PROGRAM, *['tokenizer.path'] * filled}


def decided(values: dict[str, Any]) -> dict[str, Any]:
  """Removes the knobs that are None, and lists their names in `derived`.

  Raises ValueError if a knob that cannot be derived is None.
  """
  names: list[str] = []

  def without_none(section: dict[str, Any], prefix: str = '') -> dict[str, Any]:
    found = {}
    for key, value in section.items():
      if isinstance(value, dict):
        found[key] = without_none(value, f'{prefix}{key}.')
      elif value is None:
        names.append(prefix + key)
      else:
        found[key] = value
    return found

  found = without_none(values)
  if missing := [name for name in names if name not in train.DERIVABLE]:
    wanted = ', '.join(f'--config.{name}=...' for name in missing)
    raise ValueError(f'the config file leaves required knobs open: give {wanted}')
  return found | {'derived': tuple(names)} if names else found


def _from_text(kind: Any, text: str | None) -> Any:
  """Parses a knob's value of the type `kind`, without checking its range."""
  if text is None:
    raise ValueError('no value')
  if kind is bool:
    return TRUTH[text.lower()]
  if kind in (int, float):
    return kind(text)
  if typing.get_origin(kind) is not tuple:
    return text
  if text.isidentifier():  # a string without its quotes
    return (text,)
  if len(text) > LONGEST:
    raise ValueError(f'{len(text)} characters')
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # Python only warns of '1if'; make it an error
    value = ast.literal_eval(text)
  inner, *rest = typing.get_args(kind)
  if isinstance(value, list):
    return tuple(value)
  single = rest == [...] and typing.get_origin(inner) is not tuple
  return (value,) if single and not isinstance(value, tuple) else value
