"""Reads the groups of responses that a run recorded in its workdir.

Groups that a step trained on have values for every token; groups of an evaluation have
only text.
"""

import itertools
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32

from bapo_jax.run import step_record
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import checkpoint, evaluate, rules
from bapo_jax.training import config as config_lib
from bapo_jax.types import AdvantageRule


class Response(NamedTuple):
  """One response to the prompt of a group; None marks values that were not recorded."""

  text: str
  correct: bool
  reward: float
  advantage: float
  pieces: list[str] | None = None  # its tokens as strings
  logp_T: Float32[np.ndarray, ' T'] | None = None  # log mu of each token, nats
  ratio_T: Float32[np.ndarray, ' T'] | None = None  # clipped by the update
  cut_T: Bool[np.ndarray, ' T'] | None = None  # True: the bounds cut the token
  length: int | None = None  # tokens


class RecordedGroup(NamedTuple):
  """The responses to one prompt."""

  source: str  # where it was recorded, in words
  prompt: str
  answer: str
  responses: list[Response]
  pictures: tuple[str, ...] = ()  # paths
  step: int | None = None  # number of the learner step, from 1; None: an evaluation
  # The update that used the group: number in its step, from 1, and both bounds.
  update: tuple[int, float, float] | None = None


def read(workdir: str, which: str = 'newest') -> list[RecordedGroup]:
  """Reads all groups of the newest recorded step and the newest evaluation.

  Ignores everything recorded after the checkpoint `which`; see checkpoint.choose.

  Raises:
    ValueError: the workdir has no run, or no recorded group.
  """
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    raise ValueError(f'--workdir={workdir} has no run; train there first')
  config = config_lib.from_json(read_config(path))
  until = checkpoint.choose(workdir, which) if which != 'newest' else None
  until = until or math.inf
  found = trained(workdir, step_record.newest(workdir, until))
  found += evaluated(workdir, until, rules.bind(config).advantage)
  if not found:
    raise ValueError(
      f'--workdir={workdir} has no recorded group yet; an evaluation records some'
    )
  return found


def trained(workdir: str, step: int | None) -> list[RecordedGroup]:
  """Reads the groups that a step trained on; [] for None, ValueError if unrecorded."""
  rows = [] if step is None else step_record.read(workdir, step)
  return [_of_record(workdir, row) for row in rows]


def _of_record(workdir: str, row: dict[str, Any]) -> RecordedGroup:
  """Parses a line of groups/<step>.jsonl, where null stands for nan."""

  def array(values: list | None, dtype: type = np.float32) -> Any:
    return None if values is None else np.asarray(values, dtype)

  def number(value: float | None) -> float:
    return math.nan if value is None else value

  responses = [
    Response(
      r['response'],
      r['correct'],
      number(r['reward']),
      number(r['advantage']),
      r['pieces'],
      array(r['sampler_logp']),
      array(r['ratio']),
      array(r['cut'], bool),
      r['tokens'],
    )
    for r in row['responses']
  ]
  update = None
  if row['update'] is not None:
    update = row['update'], number(row['low']), number(row['high'])
  source = f'problem {row["id"]}, trained on in step {row["step"]}, {row["source"]}'
  prompt, answer, pictures = row['prompt'], row['answer'], _pictures(workdir, row)
  return RecordedGroup(source, prompt, answer, responses, pictures, row['step'], update)


def _pictures(workdir: str, row: dict[str, Any]) -> tuple[str, ...]:
  return tuple(os.path.join(workdir, name) for name in row.get('pictures', ()))


def evaluated(workdir: str, until: float, rule: AdvantageRule) -> list[RecordedGroup]:
  """Reads the responses of the newest evaluation up to a step, grouped by problem."""
  names = (path.stem for path in pathlib.Path(workdir, 'eval').glob('*.json'))
  steps = (int(name) for name in names if name.isdecimal())
  step = max((step for step in steps if step <= until), default=None)
  if step is None:
    return []
  groups = []
  # Also by id: problems with the same text may have different verifiers.
  for (_, problem), rows in itertools.groupby(
    evaluate.read_recorded(workdir, step)['samples'],
    lambda sample: (sample.get('id'), sample['problem']),
  ):
    samples = list(rows)
    reward_PG = np.asarray([[s['correct'] for s in samples]], np.float32)
    adv_PG = np.zeros_like(reward_PG)
    if len(samples) > 1:  # a single response has no advantage
      adv_PG = np.asarray(rule(jnp.asarray(reward_PG)))
    responses = [
      Response(s['response'], s['correct'], reward, adv)
      for s, reward, adv in zip(samples, reward_PG[0], adv_PG[0], strict=True)
    ]
    source, answer = f'evaluation at step {step}', samples[0]['answer']
    pictures = _pictures(workdir, samples[0])
    groups.append(RecordedGroup(source, problem, answer, responses, pictures))
  return groups
