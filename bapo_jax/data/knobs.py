"""Knobs of the tokenizer, the problems and the prompts."""

from typing import Literal

import pydantic
from pydantic import SerializeAsAny

from bapo_jax.custom_code import CustomKnobs, CustomSection, custom_knobs
from bapo_jax.knobs import LocalPath, Section, knob

MADE = ('synthetic', 'countdown', 'drawn')  # sources that generate problems from a seed


class TokenizerConfig(Section):
  """The tokenizer of problems and responses."""

  path: LocalPath = knob(
    '',
    "Directory with tokenizer.json, or hub:owner/name; '': the model's tokenizer.",
  )
  template: str = knob(
    '{problem}\n', "Prompt with {problem}; prefix 'chat:' to use the chat template."
  )

  @pydantic.model_validator(mode='after')
  def _has_problem(self):
    if '{problem}' not in self.template:
      raise ValueError(f'template={self.template[:60]!r} must contain {{problem}}')
    return self

  def with_model(self, model_path: str) -> 'TokenizerConfig':
    """Returns these knobs; an empty `path` becomes the path of the model."""
    return self.model_copy(update={'path': self.path or model_path})


class CountdownConfig(Section):
  """Countdown problems generated from the seed."""

  numbers: tuple[int, ...] = knob(
    (3, 4), 'Choices of how many numbers a problem has.', least=2, most=6
  )
  largest: int = knob(99, 'Largest number.', least=5, most=10_000)
  target: int = knob(999, 'Largest target.', least=10, most=1_000_000)
  wording: Literal['sentence', 'short'] = knob(
    'sentence', 'English, or the short form for the embedded policy.'
  )

  @pydantic.model_validator(mode='after')
  def _some_numbers(self):
    if not self.numbers:
      raise ValueError('numbers=() is empty; give one or more counts, such as (3,)')
    return self


class DrawnConfig(Section):
  """Problems whose pictures are drawn from the seed."""

  kind: Literal['bars', 'dots', 'lengths', 'dials', 'mixed', 'blank'] = knob(
    'bars',
    'What a picture shows; mixed: a random kind per problem; blank: nothing, to '
    'measure in an evaluation whether pictures are read.',
  )
  shown: int = knob(3, 'Quantities that a picture shows.', least=2, most=4)
  terms: int = knob(2, 'Quantities that a problem asks for.', least=1, most=4)
  sides: tuple[int, ...] = knob(
    (56,), 'Choices of the side of a square picture, in pixels.', least=56, most=1024
  )
  wording: Literal['sentence', 'short'] = knob(
    'short', 'English, or the short form for the embedded policy.'
  )

  @pydantic.model_validator(mode='after')
  def _fits(self):
    if self.terms > self.shown:
      raise ValueError(f'terms={self.terms} must be at most shown={self.shown}')
    if not self.sides:
      raise ValueError('sides=() is empty; give sides in pixels, such as (56,)')
    return self


class PairConfig(Section):
  """Synthetic problems of the family `pair`."""

  hard: float = knob(
    0.0,
    'Share of hard problems, whose numbers do not occur in the warm start.',
    least=0,
    below=1,
  )
  stops: bool = knob(
    True,
    'Worked solutions stop at the solution, so wrong responses are longer; off: worked '
    'solutions try every candidate, so all responses are equally long.',
    needs='embedded',
  )
  answer: Literal['x', 'all'] = knob(
    'x', 'The answer: x, or all: the digits of the reduced a, the reduced b and x.'
  )


class CustomRows(CustomKnobs):
  """Base of the knobs of custom functions that return problems."""


class ProblemsConfig(CustomSection):
  """Training and held-out problems."""

  path_fields = ('source', 'test_source')

  source: LocalPath = knob(
    'synthetic',
    'Training problems: synthetic, countdown, drawn (with pictures), files '
    '(a.jsonl,b.parquet), hub:owner/name:split (owner/name@revision pins a version) or '
    'tfds:name:split; or path/to/file.py:function, which returns a list of rows.',
  )
  test_source: LocalPath = knob(
    'synthetic', 'Held-out problems; same choices as source.'
  )
  custom: SerializeAsAny[CustomRows] = custom_knobs(CustomRows)
  whole: bool = knob(
    False,
    'Keeps all fields of a row, and accepts rows without an answer; set by the program '
    'for custom reward functions.',
  )
  family: Literal['trial', 'chain', 'pair'] = knob(
    'trial',
    'Family of the synthetic problems.',
    needs='synthetic',
  )
  level: int = knob(
    3, 'Difficulty of the synthetic problems.', least=1, most=4, needs='synthetic'
  )
  seed: int = knob(0, 'Seed of the generated problems.', least=0, needs='generates')
  train: int = knob(
    2048, 'Generated training problems.', least=1, most=50_000, needs='generates'
  )
  test: int = knob(
    512, 'Generated held-out problems.', least=1, most=50_000, needs='generates'
  )
  pair: PairConfig = knob(
    PairConfig,
    'Problems of the family pair.',
    needs=('synthetic', "problems.family == 'pair'"),
  )
  countdown: CountdownConfig = knob(
    CountdownConfig, 'Countdown problems.', needs='countdown'
  )
  drawn: DrawnConfig = knob(
    DrawnConfig, 'Problems with pictures drawn from the seed.', needs='drawn'
  )
  duplicates: Literal['drop', 'keep'] = knob(
    'drop',
    'Repeated problems: drop all but the first, or keep all; logged either way.',
    needs='repeats',
  )
  overlap: Literal['keep', 'drop'] = knob(
    'keep',
    'Training problems that are also held out: keep or drop.',
    needs='overlaps',
  )
  changed: Literal['refuse', 'accept'] = knob(
    'refuse', 'Resume with other problems: refuse, or accept and empty the buffer.'
  )

  @property
  def count(self) -> int:
    """Returns the number of generated problems, training and held-out."""
    return self.train + self.test

  @pydantic.model_validator(mode='after')
  def _sources(self):
    for name in ('source', 'test_source'):
      if not getattr(self, name):
        raise ValueError(
          f"{name}='' is empty; give synthetic, countdown, drawn, a file, "
          'hub:owner/name:split or tfds:name:split'
        )
    if self.test_source == 'synthetic' != self.source:
      raise ValueError(
        f"test_source='synthetic' does not match problems.source={self.source!r}; "
        'set problems.test_source to held-out problems of the same kind'
      )
    return self


class PromptsConfig(Section):
  """Number and length of prompts."""

  count: int = knob(64, 'Prompts per learner step.', least=1, most=65536)
  max_prompt_tokens: int = knob(17, 'Longest prompt, in tokens.', least=1, most=1 << 20)
  overlong: Literal['drop', 'refuse'] = knob(
    'drop', 'Training prompts over the limit: drop and count, or refuse to start.'
  )
