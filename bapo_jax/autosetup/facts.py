"""Gathers the facts from which knobs are derived: model, problems, tokens, devices.

1. `gather` reads all of them once, and writes nothing;
2. `Facts` passes them to the rules of derive.py, which are functions of them.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.data import prompts, sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.rewards import gold
from bapo_jax.rewards.knobs import RewardsConfig, ShapingConfig
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.training import budget, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Model

DRAWN = 200  # right answers that are verified against themselves, evenly drawn
Lengths = tuple[list[int], list[int]]  # tokens of training and of held-out prompts


class Verified(NamedTuple):
  """Right answers, verified as if a response had given them."""

  right: int
  tried: int
  wrong: str = ''  # one that is not found right, and why; '': none


class Facts(NamedTuple):
  """What is known before a run is decided."""

  spec: ModelSpec
  tokenizer: Tokenizer  # with any template
  training: Sequence[Row]
  held_out: Sequence[Row]
  lengths: Callable[[str], Lengths]  # of the prompts in this template
  verified: Callable[[str], Verified]  # of the right answers by this rule
  devices: Sequence[jax.Device]
  memory: float  # bytes that a run may use on a device
  mesh: Mesh | None = None  # of the run; None: not decided yet
  schedule: Schedule | None = None  # likewise

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
    """The number of weights of the model, for a sentence."""
    n = self.parameters
    return f'{n / 1e9:.3g} B' if n >= 1e9 else f'{n / 1e6:.3g} M'

  @property
  def cpu(self) -> bool:
    """Whether the devices are the cores of a host."""
    return self.devices[0].platform == 'cpu'


def gather(
  config: Config,
  model: Model,
  mesh: Mesh | None = None,
  schedule: Schedule | None = None,
) -> Facts:
  """Reads problems and devices; what is not here was downloaded before.

  Args:
    mesh, schedule: of the run; None if they are not decided yet.

  Raises:
    ValueError: a source of problems is damaged.
  """
  # The verifier's own knobs: rule and shaping change nothing that is read here.
  rewards = config.rewards.model_copy(
    update={'rule': 'exact', 'shaping': ShapingConfig()}
  )
  sources_ = [getattr(config.problems, knob) for knob in sources.SPLITS]
  paths = [x for source in sources_ for x in source.split(',') if os.path.isfile(x)]
  versions = tuple((os.path.getsize(x), os.stat(x).st_mtime_ns) for x in paths)
  directory = resolve.tokenizer_directory(config, model.directory)
  read = _read(directory, config.problems, rewards, versions, model.spec.vision)
  return Facts(
    spec=model.spec,
    tokenizer=model.tokenizer,
    **read,
    devices=jax.devices(),
    memory=budget.limit(sharding.make() if mesh is None else mesh),
    mesh=mesh,
    schedule=schedule,
  )


@functools.lru_cache(maxsize=1)  # a check asks again for what was derived from
def _read(
  directory: str,
  problems: ProblemsConfig,
  rewards: RewardsConfig,
  versions: tuple[tuple[int, int], ...],
  vision: VisionSpec | None,
) -> dict[str, Any]:
  """Reads the problems, and makes the functions that measure them."""
  del versions  # of the files, a part of the cache's key
  backend = tokenizer_lib.load(directory, '{problem}')
  # Repeated problems are logged when a run loads them to train.
  training, held_out = (sources.load(problems, k, quiet=True) for k in sources.SPLITS)

  @functools.cache
  def lengths(template: str) -> Lengths:
    reader = backend._replace(template=template)
    tokens = [len(prompt.tokens) for prompt in prompts.encode(reader, rows, vision)]
    return tokens[: len(training)], tokens[len(training) :]

  rows = [*training, *held_out]
  check = functools.cache(functools.partial(verified, rows, rewards))
  return {
    'training': training,
    'held_out': held_out,
    'lengths': lengths,
    'verified': check,
  }


def verified(rows: Sequence[Row], rewards: RewardsConfig, rule: str) -> Verified:
  """Verifies DRAWN right answers against themselves, as if responses had given them.

  Args:
    rule: verifier of the rows that name none.
  """
  drawn = rows[:: max(1, -(-len(rows) // DRAWN))]
  drawn = [row for row in drawn if (row.verifier or rule) != 'countdown']
  verifier = Verifier(rewards.model_copy(update={'rule': 'exact'}))
  try:
    texts = [gold.stating(row.verifier or rule, row.answer) for row in drawn]
    rules = [row.verifier or rule for row in drawn]
    pending = verifier.submit([row.answer for row in drawn], texts, rules)
    verdicts = pending.result()
  finally:
    verifier.close()
  wrong = [(r, v) for r, v in zip(drawn, verdicts, strict=True) if v.right is not True]
  example = f'{wrong[0][0].answer[:40]!r}: {wrong[0][1].reason}' if wrong else ''
  return Verified(len(drawn) - len(wrong), len(drawn), example)
