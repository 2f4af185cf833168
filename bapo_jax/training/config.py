"""Defines the config of a run: typed, frozen, validated once, before JAX is imported.

A config file returns an ml_collections ConfigDict, and arguments such as
--config.clip.rule=fixed override its values. Knobs that are left None are derived.
"""

import ast
import difflib
import hashlib
import importlib.util
import json
import math
import re
import typing
import warnings
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from bapo_jax import knobs
from bapo_jax.algorithms import knobs as rules
from bapo_jax.data.knobs import MADE, ProblemsConfig, PromptsConfig, TokenizerConfig
from bapo_jax.knobs import Section, knob
from bapo_jax.models import knobs as models
from bapo_jax.rewards.knobs import RewardsConfig
from bapo_jax.rollout.knobs import RolloutConfig, SamplerConfig
from bapo_jax.training import knobs as train

OVERRIDE = re.compile(r'--?(no)?config\.([^=]*)(?:=(.*))?', re.DOTALL)
TRUTH = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
LONGEST = 10_000  # characters of a tuple


class Config(Section):
  """All knobs of a run; the sections are in the order in which a run uses them."""

  title: str = knob('trial, tiny', 'Heading of the first screen and of the report.')
  seed: int = knob(0, 'Seed of weights, prompts and sampling.', least=0)
  steps: int = knob(80, 'Learner steps.', least=1)
  responses: float = knob(
    math.inf, 'Training responses after which the run ends.', above=0, infinite=True
  )
  derived: tuple[str, ...] = knob(
    (), 'Knobs that the config file leaves None, so that a new run derives them.'
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
    return self.batch.seats(self.prompts.count)

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
  """Returns twelve hexadecimal digits that change with any value."""
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
  config = config.model_copy(update={'tokenizer': tokenizer})
  rules.check_clip(config.clip, config.loss)
  for conflict in _conflicts(config):
    raise ValueError(conflict)
  if not config.model.path:
    check_positions(config, models.POSITIONS)
  return config


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
  if seats % config.learner.minibatches:
    beside = f' and {replayed} replayed' if replayed else ''
    yield (
      f'prompts.count={count}{beside} groups do not divide into learner.minibatches='
      f'{config.learner.minibatches} equal parts; give a divisor of {seats}'
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


def load(file: str) -> dict[str, Any]:
  """Returns the values that a config file sets, as nested dicts.

  `file` is a path, or path:variant to pass the variant to the file's get_config.
  Raises ValueError if the file cannot be read or raises an error.
  """
  path, *variant = file.split(':', 1)
  try:
    spec = importlib.util.spec_from_file_location('config', path)
    if spec is None or spec.loader is None:
      raise OSError(f'not a file that ends in .py: {path!r}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*variant)
    if not isinstance(config, ConfigDict):
      raise TypeError(f'get_config() returns {config!r:.60}, not a ConfigDict')
    return config.to_dict()
  except (ValueError, OSError) as error:
    raise ValueError(f'--config={file}: {error}') from None
  except (Exception, SystemExit) as error:  # a user's file may raise anything
    raise ValueError(f'--config={file}: {type(error).__name__}: {error}') from None


def overrides(given: list[str]) -> dict[str, Any]:
  """Parses arguments such as --config.steps=10; the last value of a knob wins.

  Raises ValueError for an unknown knob, or a value that does not have the knob's type.
  """
  known = {name: field for name, field, _ in knobs.fields(Config())}
  found = {}
  for arg in given:
    match = OVERRIDE.fullmatch(arg)
    assert match
    no, name, text = match.groups()
    if name not in known:
      near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
      raise ValueError(f'no knob --config.{name}; the nearest are {", ".join(near)}')
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
