"""Knobs of the tokenizer and the problems."""

from typing import Any, Literal

import pydantic
from pydantic import SerializeAsAny

from bapo_jax import custom_code
from bapo_jax.custom_code import CustomKnobs, CustomSection, custom_knobs
from bapo_jax.data import sets
from bapo_jax.data.synthetic import synthetic
from bapo_jax.knobs import Auto, LocalPath, Section, knob

SYNTHETIC = custom_code.register(synthetic, 'synthetic')


class TokenizerConfig(Section):
  """The tokenizer of problems and responses."""

  path: LocalPath = knob(
    '',
    "Directory with tokenizer.json, or hub:owner/name; '': the model's tokenizer.",
  )
  template: Auto[str] = knob(
    '{problem}\n', "Prompt with {problem}; prefix 'chat:' to use the chat template."
  )

  @pydantic.model_validator(mode='after')
  def _has_problem(self):
    if self.template is not None and '{problem}' not in self.template:
      raise ValueError(f'template={self.template[:60]!r} must contain {{problem}}')
    return self


class CustomRows(CustomKnobs):
  """Base of the knobs of functions that return the problems of a split."""

  arguments = ('split',)


class Columns(Section):
  """Columns of the files; '' is the column of the layout that the first row has."""

  problem: str = knob('', "Column with the problem; '': that of the layout.")
  answer: str = knob('', "Column with the right answer; '': that of the layout.")
  verifier: str = knob(
    '', "Column that names a data set or verifier; '': that of the layout."
  )
  pictures: str = knob('', "Column with the pictures; '': images or image.")


class ProblemsConfig(CustomSection):
  """Training and held-out problems."""

  path_fields = ('source', 'test_source')

  source: LocalPath = knob(
    SYNTHETIC,
    'Training problems: synthetic, files (a.jsonl,b.parquet), hub:owner/name:split '
    '(owner/name@revision pins a version), tfds:name:split, or '
    "path/to/file.py:function, which is called with 'train' and returns the rows.",
  )
  test_source: LocalPath = knob(
    SYNTHETIC,
    "Held-out problems; same choices as source. A function is called with 'test'. "
    'aime24=a.jsonl,aime25=b.jsonl,c.jsonl names sets, which are also evaluated apart; '
    'all problems of all sets are evaluated.',
  )
  custom: SerializeAsAny[CustomRows] = custom_knobs(CustomRows)
  columns: Columns = knob(Columns, 'Columns of the rows.')
  duplicates: Literal['drop', 'keep'] = knob(
    'drop',
    'Repeated problems: drop all but the first, or keep all; logged either way.',
  )
  overlap: Literal['keep', 'drop'] = knob(
    'keep',
    'Training problems that are also held out: keep or drop.',
  )
  changed: Literal['refuse', 'accept'] = knob(
    'refuse',
    'Resume with other problems: refuse, or accept and empty buffer and history.',
  )

  @classmethod
  def custom_type(cls, values: Any) -> type[CustomKnobs]:
    """Returns the section of the functions; refuses wrong names of held-out sets."""
    sets.parse(str(values.get('test_source', '')))
    return super().custom_type(values)

  @pydantic.model_validator(mode='after')
  def _sources(self):
    for name in ('source', 'test_source'):
      if not getattr(self, name):
        raise ValueError(
          f"{name}='' is empty; give synthetic, a file, hub:owner/name:split, "
          'tfds:name:split or path/to/file.py:function'
        )
    if self.test_source == SYNTHETIC != self.source:
      raise ValueError(
        f"test_source='synthetic' does not match problems.source={self.source!r}; "
        'set problems.test_source to held-out problems of the same kind'
      )
    return self
