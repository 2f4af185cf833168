"""What a run's knobs are derived from: model, problems, tokens and devices.

1. `gather` reads all of it once, and writes nothing;
2. `Facts` hands it to the rules of derive.py, which are functions of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from bapo_jax import sharding
from bapo_jax.data import sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rewards import gold
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.training import policy, remat, setup
from bapo_jax.training.config import Config

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
  chat: bool  # the tokenizer has a chat template
  training: Sequence[Row]
  held_out: Sequence[Row]
  lengths: Callable[[str], Lengths]  # of the prompts in this template
  verified: Callable[[str], Verified]  # of the right answers by this rule
  devices: Sequence[jax.Device]
  memory: float  # bytes that a run may use on a device

  @property
  def rows(self) -> list[Row]:
    """Training and held-out problems."""
    return [*self.training, *self.held_out]

  @property
  def parameters(self) -> int:
    """Weights of the model."""
    return transformer.count(self.spec)

  @property
  def cpu(self) -> bool:
    """Whether the devices are the cores of a host."""
    return self.devices[0].platform == 'cpu'


def gather(config: Config) -> Facts:
  """Reads model, problems and devices; what is not at hand is downloaded.

  Raises:
    ValueError: one sentence, where something is missing or broken.
  """
  setup.check_available(config, decided=False)
  backend = opened(config)
  training, held_out = (sources.rows(config.problems, k) for k in sources.SPLITS)

  @functools.cache
  def lengths(template: str) -> Lengths:
    rows = [*training, *held_out]
    encoded = tokenizer_lib.encode_prompts(
      backend._replace(template=template),
      [row.problem for row in rows],
      [row.system for row in rows],
    )
    found = [len(ids) for ids in encoded]
    return found[: len(training)], found[len(training) :]

  return Facts(
    spec=policy.spec_of(config, None),
    chat=bool(backend.backend.chat_template),
    training=training,
    held_out=held_out,
    lengths=lengths,
    verified=functools.cache(
      functools.partial(verified, [*training, *held_out], config)
    ),
    devices=jax.devices(),
    memory=remat.limit(sharding.make()),
  )


def opened(config: Config) -> Tokenizer:
  """The tokenizer; with the config's template, unless that is derived.

  Raises:
    ValueError: it is not to be had, or has no place for the template.
  """
  if 'tokenizer.template' not in config.derived:
    return policy.load_tokenizer(config)
  return tokenizer_lib.load(policy.tokenizer_directory(config), '{problem}')


def verified(rows: Sequence[Row], config: Config, rule: str) -> Verified:
  """Whether right answers are right: DRAWN of them, each given by a response.

  Args:
    rule: of the rows that name no verifier.
  """
  drawn = rows[:: max(1, -(-len(rows) // DRAWN))]
  drawn = [row for row in drawn if (row.verifier or rule) != 'countdown']
  knobs = config.rewards.model_dump(exclude={'shaping', 'rule'})
  verifier = Verifier('exact', **knobs)
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
