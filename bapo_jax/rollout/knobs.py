"""Knobs of sampling and of rollouts."""

import math
from typing import Annotated, Literal

import pydantic
from pydantic import SerializeAsAny

from bapo_jax.custom_code import CustomSection, custom_knobs
from bapo_jax.knobs import Auto, LocalPath, Section, knob
from bapo_jax.rewards.knobs import CustomEnvironment, EnvironmentRule

# Lowest temperature of sampling. Logits of 32 divided by it have float32 rounding
# errors of 0.001, so log-probabilities are off by up to 0.002 nats. The error grows as
# 1 / temperature; below 1e-37 the quotients overflow, and log-probabilities are nan.
COLDEST = 1e-3


class SamplerConfig(Section):
  """Knobs of decoding."""

  group_size: int = knob(8, 'Responses per prompt.', least=2, most=4096)
  max_new_tokens: Auto[int] = knob(
    40,
    'Maximum number of tokens of a response, end token included.',
    least=1,
    most=1 << 20,
  )
  temperature: float = knob(
    1.0,
    'Divides the logits; at 0.001, float32 rounds log-probabilities by 0.002 nats.',
    least=COLDEST,
    most=1000,
  )
  max_num_seqs: Auto[int] = knob(512, 'Number of decode slots.', least=1, most=1 << 20)
  prefill_batch_size: Auto[int] = knob(
    512, 'Responses admitted at once.', least=1, most=1 << 20
  )
  tokens_per_dispatch: Auto[int] = knob(10, 'Tokens per slot and dispatch.', least=1)
  cache_segments: Auto[int] = knob(
    1,
    'Parts of the KV cache; attention skips parts that no slot has reached. The '
    'kernels of GPUs and TPUs skip the free columns of each slot and need no parts.',
    least=1,
    most=1024,
  )
  actor_dtype: Literal['compute', 'int8', 'float8_e4m3fn'] = knob(
    'compute',
    "Type of the layers' weights in the actor, the copy that samples. compute: "
    'model.compute; others: one byte per weight and a scale per output channel.',
  )
  done_check_lag: Auto[int] = knob(
    0,
    'Dispatches ahead of the check for ended responses; 1 keeps an accelerator busy.',
    least=0,
    most=1024,
  )
  stop: tuple[Annotated[str, pydantic.StringConstraints(min_length=1)], ...] = knob(
    (),
    'Strings that end a turn, with the token that completes one, as an end token does.',
  )

  @property
  def cut_length(self) -> int | None:
    """Returns the length from which a response without an end token is truncated.

    None: at any length, because nothing but an end token ends a response earlier.
    """
    return self.max_new_tokens if self.stop else None


class RolloutConfig(CustomSection):
  """Knobs of conversations, and of the age of weights and of responses."""

  path_fields = ('environment',)

  environment: EnvironmentRule = knob(
    '',
    'Answers every turn of the policy, which then goes on; limits are those of '
    "rewards.timeout, workers and deadline. '': responses have one turn.",
  )
  custom: SerializeAsAny[CustomEnvironment] = custom_knobs(CustomEnvironment)
  max_turns: int = knob(
    4,
    'Most turns of a response; sampler.max_new_tokens counts all turns and answers.',
    least=2,
    most=1024,
    needs='rollout.environment',
  )
  given: int = knob(
    0,
    "Seats of each group that take `solutions` of the problem's row, if these have at "
    'most sampler.max_new_tokens, in place of sampled responses: mixed-policy GRPO.',
    least=0,
    most=4095,
  )
  records: LocalPath = knob(
    '',
    'Recorded groups to train on in place of sampling: .jsonl files, patterns or '
    'workdirs, separated by commas; empty: none.',
  )
  depth: int = knob(
    0,
    'Learner steps by which sampling runs ahead of training: step s trains on groups '
    'that the weights of step s - depth sampled. With mesh.rollout, both run at once.',
    least=0,
    most=1024,
  )
  weight_sync_interval: int = knob(
    1, 'Learner steps between two copies of the weights to the actor.', least=1
  )
  max_off_policy_steps: int = knob(
    0,
    'Learner steps a response may stay unfinished; 0: synchronous.',
    least=0,
    most=1024,
    needs='unfinished',
  )
  max_tokens_per_step: float = knob(
    math.inf,
    'Token budget per slot and step; unfinished responses continue in the next step.',
    least=1,
    infinite=True,
  )
  cache: Literal['refresh', 'keep'] = knob(
    'refresh',
    'KV cache of unfinished responses: recompute for new weights, or keep.',
    needs=('rollout.max_off_policy_steps', 'unfinished'),
  )

  @pydantic.model_validator(mode='after')
  def _can_end(self) -> 'RolloutConfig':
    if self.max_tokens_per_step < math.inf and not self.max_off_policy_steps:
      raise ValueError(
        f'max_tokens_per_step={self.max_tokens_per_step:g} leaves responses '
        'unfinished, but max_off_policy_steps=0 requires them to finish; set '
        'max_off_policy_steps=1 or more, or max_tokens_per_step=inf'
      )
    return self
