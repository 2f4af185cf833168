"""Gathers the facts from which knobs are derived: model, problems, tokens, devices.

1. `gather` reads all facts once, and writes nothing;
2. `Facts` passes them to the rules of derive.py.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from bapo_jax import sharding
from bapo_jax.data import prompts
from bapo_jax.data.row import Row
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rewards import gold, verifiers
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rewards.score import Sample
from bapo_jax.rewards.shaping import RewardsConfig
from bapo_jax.training import budget
from bapo_jax.training.config import Config
from bapo_jax.training.inputs import Inputs

DRAWN = 200  # right answers that are verified against themselves, evenly drawn
Number = tuple[int, str]  # the value of a knob, and the reason for it
Name = tuple[str, str]
Lengths = tuple[list[int], list[int]]  # tokens of training and of held-out prompts


class Verified(NamedTuple):
  """The result of verifying right answers as if they were responses."""

  right: int
  tried: int
  wrong: str = ''  # the first answer that fails, and why; '' if none fails


class Facts(NamedTuple):
  """The facts that are known before the knobs of a run are derived."""

  spec: ModelSpec
  tokenizer: Tokenizer  # with any template
  data: Data  # all rows as they were read
  split: Callable[[], tuple[Sequence[Row], Sequence[Row]]]  # see `training`
  lengths: Callable[[str], Lengths]  # of the prompts with a given template
  verified: Callable[[str], Verified]  # result for the right answers with a given rule
  devices: Sequence[jax.Device]
  memory: float  # bytes that a run may use on a device

  @property
  def training(self) -> Sequence[Row]:
    """The training problems, without held-out ones if problems.overlap=drop."""
    return self.split()[0]

  @property
  def held_out(self) -> Sequence[Row]:
    """The held-out problems."""
    return self.split()[1]

  @property
  def rows(self) -> list[Row]:
    """Training and held-out problems."""
    return [*self.training, *self.held_out]

  @property
  def chat(self) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(self.tokenizer.backend.chat_template)

  @property
  def parameters(self) -> int:
    """The number of weights of the model."""
    return transformer.count(self.spec)

  @property
  def size(self) -> str:
    """The number of weights of the model, formatted: '135 M'."""
    n = self.parameters
    return f'{n / 1e9:.3g} B' if n >= 1e9 else f'{n / 1e6:.3g} M'

  @property
  def cpu(self) -> bool:
    """Whether the devices are CPUs, not accelerators."""
    return self.devices[0].platform == 'cpu'


def gather(config: Config, inputs: Inputs) -> Facts:
  """Gathers the facts from what was read and from the devices, if a rule asks."""
  spec = inputs.model.spec

  @functools.cache
  def split():
    # Repeats and overlap are logged later, when a run tabulates its problems.
    return prompts.split(config.problems, inputs.data, quiet=True)

  @functools.cache
  def lengths(template):
    reader = inputs.model.tokenizer._replace(template=template)
    read = [*itertools.chain(*split())]
    if template == '{problem}':  # the problems alone, without their system messages
      read = [row._replace(system='', history=()) for row in read]
    encoded = prompts.encode(reader, read, spec.vision)
    tokens = [len(prompt.tokens) for prompt in encoded]
    n = len(split()[0])
    return tokens[:n], tokens[n:]

  rewards = config.rewards.model_copy(update={'rule': 'exact'})  # each row names a rule

  @functools.cache
  def check(rule):
    return verified([*itertools.chain(*split())], rewards, rule)

  axes = config.mesh.model_dump()
  # All devices, until the program has decided how they are divided.
  mesh = sharding.make() if None in axes.values() else sharding.make(**axes)
  return Facts(
    spec,
    inputs.model.tokenizer,
    inputs.data,
    split,
    lengths,
    check,
    jax.devices(),
    budget.limit(mesh),
  )


# Built-in verifiers that read a response that only states the answer.
STATED = set(verifiers.RULES) - {'countdown'}


def verified(rows: Sequence[Row], rewards: RewardsConfig, rule: str) -> Verified:
  """Verifies up to DRAWN right answers; `rule` verifies rows without a verifier."""
  samples = []
  for row in rows[:: max(1, -(-len(rows) // DRAWN))]:
    name = row.verifier or rule
    if name in STATED:
      samples.append(Sample(gold.stating(name, row.answer), row.answer, name))
  with contextlib.closing(Verifier(rewards.verification)) as verifier:
    verdicts = verifier.submit(samples).result()
  wrong = [
    f'{sample.answer[:40]!r}: {verdict.reason}'
    for sample, verdict in zip(samples, verdicts, strict=True)
    if verdict.right is not True
  ]
  return Verified(len(samples) - len(wrong), len(samples), *wrong[:1])
