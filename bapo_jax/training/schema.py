"""The config of a run: every knob, in the order in which a run uses them."""

import math
from typing import Any

from bapo_jax import custom_code
from bapo_jax.algorithms.advantage import Advantage, GroupRelative
from bapo_jax.algorithms.batch_rules import Batching, FreshOnly
from bapo_jax.algorithms.clip import Balanced, Clip
from bapo_jax.algorithms.loss import Clipped, Loss
from bapo_jax.algorithms.masks import Mask, NoMask
from bapo_jax.algorithms.replay_buffer import Buffer
from bapo_jax.data.knobs import ProblemsConfig, TokenizerConfig
from bapo_jax.data.prompt_rules import Prompting, Shuffled
from bapo_jax.knobs import Auto, LocalPath, Section, fields, knob
from bapo_jax.learner.optimizer import AdamW, Optimizer
from bapo_jax.models import knobs as models
from bapo_jax.parts import Part, parts
from bapo_jax.rewards.knobs import Environment
from bapo_jax.rewards.shaping import RewardsConfig
from bapo_jax.rollout.knobs import RolloutConfig, SamplerConfig
from bapo_jax.training import knobs as train
from bapo_jax.types import SOURCES, Source, Unsampled


class Config(Section):
  """All knobs of a run; the sections are in the order in which a run uses them."""

  title: str = knob('trial, tiny', 'Heading of the first screen and of the report.')
  seed: int = knob(0, 'Seed of prompts, sampling and new adapters.', least=0)
  steps: Auto[int] = knob(80, 'Learner steps.', least=1)
  responses: float = knob(
    math.inf, 'Training responses after which the run ends.', above=0, infinite=True
  )
  cache: Auto[LocalPath] = knob(
    None,
    'Folder of embedded policies and compiled programs that runs share; None: bapo_jax '
    "in the user's cache, ~/.cache; empty: none.",
  )
  mesh: models.MeshConfig = knob(models.MeshConfig, 'The device mesh.')
  model: models.ModelConfig = knob(models.ModelConfig, 'The policy.')
  lora: models.LoraConfig = knob(models.LoraConfig, 'Low-rank adapters.')
  logprobs: models.LogprobsConfig = knob(models.LogprobsConfig, 'Log-probabilities.')
  tokenizer: TokenizerConfig = knob(TokenizerConfig, 'Tokenizer and template.')
  problems: ProblemsConfig = knob(ProblemsConfig, 'Data.')
  prompts: Prompting = knob(Shuffled, 'Prompts.')
  sampler: SamplerConfig = knob(SamplerConfig, 'Decoding.')
  rewards: RewardsConfig = knob(RewardsConfig, 'Verifiers and rewards.')
  rollout: RolloutConfig = knob(RolloutConfig, 'Rollouts.')
  buffer: Buffer = knob(Buffer, 'Replay buffer.', needs='batch.uses_buffer')
  batch: Batching = knob(FreshOnly, 'Batch rule.')
  advantage: Advantage = knob(GroupRelative, 'Advantage rule.')
  clip: Clip = knob(Balanced, 'Clip rule.')
  mask: Mask = knob(NoMask, 'Mask rule.')
  loss: Loss = knob(Clipped, 'Loss rule.')
  teacher: train.TeacherConfig = knob(train.TeacherConfig, 'Teacher.')
  learner: train.LearnerConfig = knob(train.LearnerConfig, 'Updates.')
  optimizer: Optimizer = knob(AdamW, 'Optimiser.')
  sft: train.SftConfig = knob(train.SftConfig, 'The embedded policy.', needs='embedded')
  evaluate: train.EvaluateConfig = knob(train.EvaluateConfig, 'Evaluation.')
  metrics: train.MetricsConfig = knob(train.MetricsConfig, 'Metrics.')
  checkpoint: train.CheckpointConfig = knob(train.CheckpointConfig, 'Checkpoints.')

  @property
  def called(self) -> list[str]:
    """The user's functions that score or answer responses."""
    return custom_code.paths_in(f'{self.rewards.rule},{self.rollout.environment}')

  @property
  def undecided(self) -> list[str]:
    """The knobs that are None: the program decides them, see autosetup/derive.py."""
    return [name for name, _, value in fields(self) if value is None]

  @property
  def code(self) -> dict[str, str]:
    """Knob -> 'file digest' of each custom function that it names."""
    named = {}
    for name, _, value in fields(self):
      paths = custom_code.paths_in(value) if isinstance(value, str) else ()
      # Not a title that ends in .py, nor a function that the package names.
      functions = [path for path in paths if ':' in path and not path.endswith('.py')]
      digests = {f'{custom_code.file_of(x)} {custom_code.digest(x)}' for x in functions}
      if digests:
        named[name] = ', '.join(sorted(digests))
    return named

  @property
  def row_length(self) -> int:
    """T, the number of tokens of a row: prompt and response at their longest."""
    return self.prompts.max_prompt_tokens + self.sampler.max_new_tokens

  @property
  def seats(self) -> int:
    """The number of groups in a batch."""
    return self.batch.seats(self.prompts.count)

  @property
  def sources(self) -> tuple[Source, ...]:
    """The sources that the rows of a batch may have."""
    may_occur: dict[Source, bool] = {
      'fresh': True,
      'reevaluated': self.batch.reevaluates and self.buffer.reevaluate > 0,
      'reused': self.batch.uses_buffer,
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
  def environment(self) -> Environment | None:
    """The environment of rollouts, with the limits of reward functions."""
    k = self.rollout
    if not k.environment:
      return None
    limits = {'timeout', 'parallel', 'workers', 'deadline', 'batch_deadline'}
    rule = {'rule': k.environment, 'custom': k.custom, 'max_turns': k.max_turns}
    return Environment(**self.rewards.model_dump(include=limits), **rule)

  @property
  def updates_per_step(self) -> int:
    """The number of optimiser updates per learner step."""
    return self.learner.epochs * self.learner.minibatches

  @property
  def credit(self) -> dict[str, Any]:
    """The arguments of `learner.advantages` that are the same in all steps."""
    factors = self.batch.weights
    teacher = self.teacher.weight if self.teacher.path else 0.0
    return {
      'advantage_rule': self.advantage if self.teacher.reward else None,
      'weights': tuple(getattr(factors, source) for source in SOURCES),
      'teacher': teacher + self.loss.reference_in_reward,
    }

  @property
  def unsampled(self) -> Unsampled:
    """The tokens that no policy sampled, and that the run trains on."""
    if self.rollout.given:
      return 'given'
    return 'messages' if self.rollout.environment and self.loss.imitation else ''

  def with_values(self, **sections: dict[str, Any]) -> 'Config':
    """Returns a copy with other values: with_values(prompts={'count': 1})."""
    changed = {}
    for name, values in sections.items():
      section = getattr(self, name)
      if isinstance(section, Part) and 'rule' in values:  # of another class
        plain = section.rules.restarted(section.model_dump(), values['rule'])
        section = section.rules.validate(plain)
      changed[name] = section.model_copy(update=values)
    return self.model_copy(update=changed)


PARTS = dict(parts(Config()))  # dotted name -> the rules of the part
# Knobs that decide which other knobs exist.
CHOICES = {f'{name}.rule' for name in PARTS} | {
  'rewards.rule',
  'rollout.environment',
  'problems.source',
  'problems.test_source',
}
