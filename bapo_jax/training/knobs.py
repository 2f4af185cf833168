"""Knobs of learner, warm start, evaluation, metrics and checkpoints."""

from typing import Literal

import pydantic

from bapo_jax.knobs import Auto, LocalPath, Section, knob
from bapo_jax.rollout.knobs import COLDEST


class LearnerConfig(Section):
  """Optimiser updates per rollout batch."""

  epochs: int = knob(1, 'Visits of a batch.', least=1, most=1024)
  minibatches: Auto[int] = knob(8, 'Optimiser updates per visit.', least=1, most=65536)
  grad_accum_steps: Auto[int] = knob(
    2, 'Largest number of micro-batches per minibatch.', least=1, most=65536
  )
  pack: bool = knob(True, 'Packs rows, and skips rows without an advantage.')
  share_prompts: Auto[int] = knob(
    1,
    'Responses of a group that share one computation of their prompt, a divisor of '
    'sampler.group_size; 1: each response has its own; None: the fastest by count, 1 '
    'for a model with windows.',
    least=1,
    most=256,
    needs='learner.pack',
  )
  max_consecutive_skips: int = knob(
    64, 'Consecutive non-finite updates after which the run stops.', least=1
  )
  bounds_scope: Literal['minibatch', 'micro_batch'] = knob(
    'minibatch',
    'Tokens of one bound search; micro_batch saves a forward pass.',
    needs=('clip.whole_minibatch', 'accumulates'),
  )
  bounds_pass: Auto[Literal['stored', 'again']] = knob(
    None,
    'Bounds over several micro-batches: stored keeps the activations of all; again '
    'runs an extra forward pass; None: the least computation within the memory.',
    needs=('accumulates', 'bounds_of_all'),
  )
  recompute_logprobs: Auto[Literal['on', 'off']] = knob(
    None,
    "The learner's log-probabilities replace the sampler's; None: on if model.compute "
    'is tf32 or bfloat16, the actor is not quantised (sampler.actor_dtype) and the '
    'loss rule does not weigh the difference itself. With rollout.records: on computes '
    'all of them once, with the first weights; None: off.',
  )


class TeacherConfig(Section):
  """A frozen model whose log-probabilities of the responses the learner reads."""

  path: LocalPath = knob(
    '',
    "Directory or hub:owner/name of a text model with the policy's tokenizer; empty: "
    'none.',
  )
  weight: float = knob(
    1.0,
    'Factor on log p(teacher) - log mu, which is added to the advantage of each '
    'sampled token: on-policy distillation.',
    least=0,
    most=1000,
    needs='teacher.path',
  )
  reward: bool = knob(
    True,
    'Adds the advantage of the reward; off: only the teacher gives advantages.',
    needs='teacher.path',
  )


TOWER_HEADS = 2


class TowerConfig(Section):
  """The vision tower of the embedded policy.

  The last layer attends to whole pictures, the other layers to windows.
  """

  layers: int = knob(0, 'Layers; 0: the policy is text-only.', least=0, most=1024)
  width: int = knob(
    32, 'Width of the tower.', least=4, most=65536, needs='sft.tower.layers'
  )
  ffn: int = knob(
    96, 'Feed-forward width.', least=1, most=1 << 20, needs='sft.tower.layers'
  )

  @pydantic.model_validator(mode='after')
  def _fits(self):
    if self.width % (4 * TOWER_HEADS):
      raise ValueError(f'width={self.width} must be a multiple of {4 * TOWER_HEADS}')
    return self


class SftConfig(Section):
  """The embedded policy: its sizes, and the warm start that trains it.

  The warm start is supervised: it imitates worked solutions.
  """

  width: int = knob(64, 'Model width D.', least=1, most=65536)
  layers: int = knob(2, 'Layers.', least=1, most=1024)
  heads: int = knob(4, 'Query heads; a multiple of kv_heads.', least=1, most=1024)
  kv_heads: int = knob(2, 'Key/value heads.', least=1, most=1024)
  head_width: int = knob(16, 'Width of a head; even.', least=2, most=1024)
  ffn: int = knob(
    192, 'Feed-forward width, of an expert if there are any.', least=1, most=1 << 20
  )
  experts: int = knob(
    0, 'Experts of every feed-forward layer; 0: none.', least=0, most=1024
  )
  active: int = knob(
    2, 'Experts that a token uses.', least=1, most=64, needs='sft.experts'
  )
  tower: TowerConfig = knob(TowerConfig, 'The vision tower.')
  seed: int = knob(0, 'Seed of the first weights and of the solutions.', least=0)
  clean: int = knob(700, 'Steps on clean solutions.', least=0)
  noisy: int = knob(100, 'Steps on solutions with slips and repeats.', least=0)
  batch: int = knob(96, 'Solutions per step.', least=1, most=65536, needs='warm_start')
  lr: float = knob(3e-3, 'Learning rate.', above=0, most=10, needs='warm_start')
  slip: float = knob(
    0.4, 'Chance that a trial goes wrong.', least=0, most=1, needs='sft.noisy'
  )
  repeat: float = knob(
    0.15, 'Chance that a trial is repeated.', least=0, below=1, needs='sft.noisy'
  )

  @pydantic.model_validator(mode='after')
  def _heads_fit(self):
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads={self.heads} must be a multiple of kv_heads={self.kv_heads}'
      )
    if 0 < self.experts < self.active:
      raise ValueError(
        f'active={self.active} is more than experts={self.experts}; lower active'
      )
    if self.head_width % 2:
      raise ValueError(f'head_width={self.head_width} must be even')
    if self.experts and self.tower.layers:
      raise ValueError(
        f'tower.layers={self.tower.layers} conflicts with experts={self.experts}: '
        'models with experts are text-only; set one of them to 0'
      )
    return self


class EvalSampling(Section):
  """Knobs of sampling in evaluation; training does not truncate distributions."""

  temperature: float = knob(
    1.0, 'Divides the logits; 0: greedy; otherwise at least 0.001.', least=0, most=1000
  )
  top_k: int = knob(
    0,
    'Sample from the k likeliest tokens; 0: from all.',
    least=0,
    needs='evaluate.sampling.temperature',
  )
  top_p: float = knob(
    1.0,
    'Sample from the fewest tokens with this probability.',
    above=0,
    most=1,
    needs='evaluate.sampling.temperature',
  )

  @pydantic.model_validator(mode='after')
  def _warm(self) -> 'EvalSampling':
    if 0 < self.temperature < COLDEST:
      raise ValueError(
        f'temperature={self.temperature:g} is too low to divide logits in float32: '
        f'give 0 for greedy decoding, or {COLDEST:g} to 1000'
      )
    return self


class EvaluateConfig(Section):
  """Evaluation on the held-out problems."""

  every: int = knob(
    25,
    'Learner steps between evaluations; above `steps`: only the first and the last.',
    least=1,
  )
  group_size: int = knob(1, 'Responses per problem.', least=1, most=4096)
  k: tuple[pydantic.PositiveInt, ...] = knob((1,), 'k of pass@k and maj@k.')
  sampling: EvalSampling = knob(EvalSampling, 'Sampling parameters.')

  @pydantic.model_validator(mode='after')
  def _enough(self) -> 'EvaluateConfig':
    if (k := max(self.k, default=0)) > self.group_size:
      raise ValueError(
        f'k={self.k}: pass@{k} needs {k} responses per problem, but evaluate.group_size'
        f'={self.group_size}; raise group_size, or lower k'
      )
    return self


class MetricsConfig(Section):
  """Outputs of metrics in addition to metrics.jsonl."""

  tensorboard: bool = knob(True, 'Event files in <workdir>/tensorboard.')
  wandb: bool = knob(False, 'Weights & Biases.')


class CheckpointConfig(Section):
  """When checkpoints are written, and how many are kept."""

  every: int = knob(10, 'Learner steps between checkpoints.', least=1)
  keep: int = knob(2, 'Newest checkpoints to keep.', least=1)
  best: int = knob(1, 'Best evaluated checkpoints to keep too.', least=0)
  final: Literal['run', 'weights'] = knob(
    'run', 'weights: a finished run stores no optimiser state and cannot be continued.'
  )
