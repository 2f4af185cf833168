"""Defines the config of a run: typed, frozen, validated once, before JAX is imported.

1. `Config` consists of the sections of all folders, in the order of the flow;
2. `parse` validates plain values, every knob by itself and then their combinations, and
   raises one sentence;
3. configs/*.py are ml_collections ConfigDicts of the same values (`plain`), so that
   every knob is an override: --config.clip.rule=fixed.
"""

import hashlib
import importlib.util
import json
import math
from typing import Any

from bapo_jax import knobs
from bapo_jax.algorithms.knobs import (
  AdvantageConfig,
  BatchConfig,
  BufferConfig,
  ClipConfig,
  LossConfig,
  check_clip,
)
from bapo_jax.data.knobs import MADE, ProblemsConfig, PromptsConfig, TokenizerConfig
from bapo_jax.knobs import Section, knob
from bapo_jax.models import knobs as models
from bapo_jax.rewards.knobs import RewardsConfig
from bapo_jax.rollout.knobs import RolloutConfig, SamplerConfig
from bapo_jax.training.knobs import (
  CheckpointConfig,
  EvaluateConfig,
  LearnerConfig,
  MetricsConfig,
  OptimizerConfig,
  SftConfig,
)

WORDED = ('countdown', 'drawn')  # made problems in English or in a short form
PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}  # by their knob


class Config(Section):
  """All knobs of a run; sections in the order of the flow."""

  title: str = knob('trial, tiny', 'Heading of the first screen and of the report.')
  seed: int = knob(0, 'Seed of weights, prompts and sampling.', least=0)
  steps: int = knob(80, 'Learner steps.', least=1)
  responses: float = knob(
    math.inf,
    'Sampled training responses after which the run ends.',
    above=0,
    infinite=True,
  )
  derived: tuple[str, ...] = knob(
    (), 'Knobs that a new run derives: those that the config file leaves None.'
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
  buffer: BufferConfig = knob(BufferConfig, 'Replay buffer.')
  batch: BatchConfig = knob(BatchConfig, 'Batch rules.')
  advantage: AdvantageConfig = knob(AdvantageConfig, 'Advantage rules.')
  clip: ClipConfig = knob(ClipConfig, 'Clip rules.')
  loss: LossConfig = knob(LossConfig, 'Loss rules.')
  learner: LearnerConfig = knob(LearnerConfig, 'Updates.')
  optimizer: OptimizerConfig = knob(OptimizerConfig, 'AdamW.')
  sft: SftConfig = knob(SftConfig, 'Warm start.')
  evaluate: EvaluateConfig = knob(EvaluateConfig, 'Evaluation.')
  metrics: MetricsConfig = knob(MetricsConfig, 'Metrics.')
  checkpoint: CheckpointConfig = knob(CheckpointConfig, 'Checkpoints.')

  @property
  def row_length(self) -> int:
    """T, the tokens of a row."""
    return self.prompts.max_prompt_tokens + self.sampler.max_new_tokens

  @property
  def seats(self) -> int:
    """The number of groups in a batch."""
    return self.batch.seats(self.prompts.count)

  @property
  def minibatch_rows(self) -> int:
    """B, the rows of a minibatch."""
    return self.seats // self.learner.minibatches * self.sampler.group_size

  @property
  def micro_batch_rows(self) -> int:
    """The rows of a micro-batch, if all of them have full length."""
    return -(-self.minibatch_rows // self.learner.grad_accum_steps)

  @property
  def places(self) -> int:
    """The largest number of groups that are submitted and not yet trained on."""
    rounds = self.batch.extra_rounds + 1
    return self.prompts.count * (self.rollout.max_off_policy_steps * rounds + 1)

  @property
  def updates_per_step(self) -> int:
    """The optimiser updates per learner step."""
    return self.learner.epochs * self.learner.minibatches

  def with_values(self, **sections: dict[str, Any]) -> 'Config':
    """Returns a copy with other values: with_values(prompts={'count': 1})."""
    changed = {
      name: getattr(self, name).model_copy(update=values)
      for name, values in sections.items()
    }
    return self.model_copy(update=changed)


def plain(config: Config) -> dict[str, Any]:
  """Returns the config as nested dicts, the form of ConfigDict and JSON."""
  return config.model_dump()


def fingerprint(values: dict[str, Any]) -> str:
  """Returns twelve hexadecimal digits that change with any value."""
  text = json.dumps(values, sort_keys=True, default=list).encode()
  return hashlib.sha256(text).hexdigest()[:12]


def from_json(values: dict[str, Any]) -> Config:
  """Restores the config from config.json, where tuples are lists.

  Raises:
    ValueError: another version of the program wrote it.
  """
  return Config.model_validate_json(json.dumps(values))


def parse(values: dict[str, Any]) -> Config:
  """The config of these values, once every knob and what must fit together is checked.

  Raises:
    ValueError: one sentence.
  """
  config = knobs.validate(Config, values)
  tokenizer = config.tokenizer.beside(config.model.path)
  config = config.model_copy(update={'tokenizer': tokenizer})
  for check in (_packages, _rules, _rewards, _problems, _batch, _elements):
    check(config)
  if not config.model.path:
    check_positions(config, models.POSITIONS)
  return config


def _packages(config: Config) -> None:
  """Raises ValueError if a package for metrics is not installed."""
  for name, package in PACKAGES.items():
    if getattr(config.metrics, name) and importlib.util.find_spec(package) is None:
      raise ValueError(
        f'metrics.{name}=True: give False, or pip install {package}, which it needs'
      )


def _rules(config: Config) -> None:
  """Raises ValueError if rules do not fit together."""
  check_clip(config.clip, config.loss)
  if (
    config.buffer.thresholds.rule == 'threshold_free' and config.sampler.group_size % 2
  ):
    raise ValueError(
      "buffer.thresholds.rule='threshold_free' keeps groups that are half right, and "
      f'sampler.group_size={config.sampler.group_size} is odd; give an even one, or '
      'another rule'
    )
  replayed = config.seats - config.prompts.count
  if config.batch.rule == 'replay' and config.buffer.capacity < replayed:
    raise ValueError(
      f'buffer.capacity={config.buffer.capacity} holds fewer groups than a batch '
      f'replays, prompts.count={config.prompts.count} x batch.replay.replay_ratio='
      f'{config.batch.replay.replay_ratio} = {replayed}; give {replayed} or more'
    )


def _rewards(config: Config) -> None:
  """Raises ValueError if the overlong penalty begins before the response."""
  cache, longest = config.rewards.shaping.overlong_cache, config.sampler.max_new_tokens
  if cache > longest:
    limit = f'sampler.max_new_tokens={longest} tokens'
    raise ValueError(f'rewards.shaping.overlong_cache={cache}: give 1 to {limit}')


def _problems(config: Config) -> None:
  """Raises ValueError if made problems are too few, or unreadable."""
  problems, count = config.problems, config.prompts.count
  if problems.source in MADE and count > problems.train:
    raise ValueError(
      f'prompts.count={count} exceeds problems.train={problems.train}, the number of '
      'generated training problems; lower prompts.count or raise problems.train'
    )
  source = problems.source if problems.source in WORDED else WORDED[0]
  wording, made = getattr(problems, source).wording, problems.source == source
  if made and not config.model.path and wording != 'short':
    raise ValueError(
      f'problems.{source}.wording={wording!r} has letters that the tokenizer of the '
      "embedded policy (model.path='') lacks; give wording='short', or a model.path"
    )


def _batch(config: Config) -> None:
  """Raises ValueError unless a batch divides into minibatches."""
  prompts, minibatches = config.prompts.count, config.learner.minibatches
  replayed = config.seats - prompts
  beside = f' and {replayed} replayed' if replayed else ''
  if config.seats % minibatches:
    raise ValueError(
      f'prompts.count={prompts}{beside} groups do not divide into learner.minibatches='
      f'{minibatches} equal parts; use a divisor of {config.seats}'
    )


def check_positions(config: Config, positions: int) -> None:
  """Raises ValueError if a row is longer than the model's positions."""
  prompt, new = config.prompts.max_prompt_tokens, config.sampler.max_new_tokens
  if prompt + new > positions:
    raise ValueError(
      f'prompts.max_prompt_tokens={prompt} and sampler.max_new_tokens={new}: prompt '
      f"{prompt} + response {new} tokens exceed the model's {positions} positions; "
      'lower one of them'
    )


def check_shards(config: Config, shards: int) -> None:
  """Raises ValueError unless rows divide over the mesh.

  Args:
    shards: pieces that a batch axis is cut into, mesh.data x mesh.fsdp.
  """
  if config.minibatch_rows % shards:
    raise ValueError(
      f'a minibatch has {config.minibatch_rows} responses, which do not divide over '
      f'{shards} device shards (mesh.data x mesh.fsdp); change prompts.count or '
      'learner.minibatches'
    )
  for name in ('max_num_seqs', 'prefill_batch_size'):
    if getattr(config.sampler, name) % shards:
      raise ValueError(
        f'sampler.{name}={getattr(config.sampler, name)} rows do not divide over '
        f'{shards} device shards (mesh.data x mesh.fsdp); give a multiple of {shards}'
      )


def _rows(config: Config) -> dict[str, int]:
  """Returns how many rows of T tokens a run stores at once, by their knobs."""
  c, G = config, config.sampler.group_size
  return {
    'responses in decoding (prompts.count x sampler.group_size)': c.places * G,
    'responses in a batch (prompts.count x sampler.group_size)': c.seats * G,
    'the KV cache of the decode slots (sampler.max_num_seqs)': c.sampler.max_num_seqs,
    'the replay buffer (buffer.capacity x sampler.group_size)': (
      c.buffer.capacity * G if c.batch.uses_buffer else 0
    ),
    'a warm-start batch (sft.batch)': (
      c.sft.batch if c.sft.clean + c.sft.noisy and not c.model.path else 0
    ),
    'evaluation (problems.test x evaluate.group_size)': (
      c.problems.test * c.evaluate.group_size if c.problems.test_source in MADE else 0
    ),
  }


def _elements(config: Config) -> None:
  """Raises ValueError if an array of rows has more elements than int32 can index."""
  T = config.row_length
  for name, rows in _rows(config).items():
    if rows * T > knobs.LARGEST:
      raise ValueError(
        f'{name}: {rows} rows x {T} tokens are too many for one array; give at most '
        f'{knobs.LARGEST // T} rows'
      )
