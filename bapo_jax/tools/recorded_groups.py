"""Groups of responses that a run recorded, read back from its workdir.

1. `read` returns what the newest recorded step trained on, then the reusable groups of
   a checkpoint's replay buffer, both with the log-probability of every token, then the
   responses of the newest evaluation, as text;
2. `ratios` compares the policy of the checkpoint with the one that sampled the tokens.
"""

import functools
import glob
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jaxtyping import Bool, Float32

from bapo_jax import types
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import logprobs, transformer
from bapo_jax.runtime.workdir import read_config
from bapo_jax.tools import export
from bapo_jax.training import (
  checkpoint,
  evaluate,
  policy,
  rules,
  step_record,
  weights,
)
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.types import AdvantageRule, Groups


class Response(NamedTuple):
  """One response to the prompt of a group."""

  text: str
  correct: bool
  reward: float
  advantage: float
  pieces: list[str] | None  # its tokens, each as text; None: text only is recorded
  logp_T: Float32[np.ndarray, ' T'] | None  # log mu of each token, nats
  ratio_T: Float32[np.ndarray, ' T'] | None = (
    None  # clipped in its update; None: not in one
  )
  cut_T: Bool[np.ndarray, ' T'] | None = None  # True: the update's bounds cut it
  length: int | None = None  # tokens; None: not recorded


class OfUpdate(NamedTuple):
  """The optimiser update that a recorded group was in."""

  number: int  # in its step, from 1
  low: float
  high: float


class RecordedGroup(NamedTuple):
  """A group as it was recorded."""

  source: str  # where it was recorded, in words
  prompt: str
  answer: str  # '' where it was not recorded
  responses: list[Response]
  arrays: Groups | None  # of this group alone; None: not of the replay buffer
  step: int | None = None  # learner steps done with the one that trained on it
  update: OfUpdate | None = None
  pictures: tuple[str, ...] = ()  # their files, where they are recorded


def last_step(workdir: str, which: str) -> float:
  """The last step to show beside a checkpoint; beside the newest there is no limit."""
  newest = which == 'newest'
  return math.inf if newest else checkpoint.choose(workdir, which) or math.inf


def read(workdir: str, which: str = 'newest') -> list[RecordedGroup]:
  """All groups that a run recorded; those with probabilities first.

  Args:
    which: newest, best or a step; see checkpoint.choose.

  Raises:
    ValueError: none is recorded.
  """
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    raise ValueError(f'--workdir={workdir} holds no run; train there first')
  try:
    config = config_lib.from_json(read_config(path))
  except pydantic.ValidationError as error:
    raise ValueError(f'{path} holds no config of this version: {error}') from error
  rule = rules.bind(config).advantage
  step, until = checkpoint.choose(workdir, which), last_step(workdir, which)
  found = [
    *trained(workdir, step_record.newest(workdir, until)),
    *_buffered(workdir, step, config, rule),
    *_evaluated(workdir, until, rule),
  ]
  if not found:
    raise ValueError(
      f'--workdir={workdir} has no group recorded yet: the first evaluation records '
      'its responses, and the first checkpoint what its step trained on'
    )
  return found


def trained(workdir: str, step: int | None) -> list[RecordedGroup]:
  """What a step trained on, as far as it is recorded; [] for None.

  Raises:
    ValueError: nothing is recorded of this step.
  """
  if step is None:
    return []
  return [_of_record(workdir, row) for row in step_record.read(workdir, step)]


def _of_record(workdir: str, row: dict[str, Any]) -> RecordedGroup:
  """A group from its line in groups/<step>.jsonl."""
  responses = [
    Response(
      r['response'],
      r['correct'],
      _number(r['reward']),
      _number(r['advantage']),
      r['pieces'],
      _numbers(r['sampler_logp']),
      _numbers(r['ratio']),
      None if r['cut'] is None else np.asarray(r['cut'], bool),
      r['tokens'],
    )
    for r in row['responses']
  ]
  update = None
  source = f'problem {row["id"]}, trained on in step {row["step"]}, {row["source"]}'
  if row['update'] is not None:
    update = OfUpdate(row['update'], _number(row['low']), _number(row['high']))
  return RecordedGroup(
    source,
    row['prompt'],
    row['answer'],
    responses,
    None,
    row['step'],
    update,
    _pictures(workdir, row),
  )


def _pictures(workdir: str, row: dict[str, Any]) -> tuple[str, ...]:
  """The files of the pictures of a recorded row."""
  return tuple(os.path.join(workdir, name) for name in row.get('pictures', ()))


def _number(value: float | None) -> float:
  return math.nan if value is None else value


def _numbers(values: list[float | None] | None) -> Float32[np.ndarray, ' T'] | None:
  return None if values is None else np.asarray([*map(_number, values)], np.float32)


def _buffered(
  workdir: str, step: int | None, config: Config, rule: AdvantageRule
) -> Iterator[RecordedGroup]:
  """The reusable groups in the checkpoint of `step`, newest group first."""
  if step is None or not config.batch.uses_buffer:
    return
  array = weights.read_params(workdir, step, part='buffer/reusable')
  arrays: list[Any] = [array(name) for name in Groups._fields]  # on the host
  groups = Groups(*arrays)
  tokenizer = policy.load_tokenizer(config)
  completed_step_P = np.asarray(groups.completed_step_P)
  for p in np.argsort(-completed_step_P, kind='stable'):
    if completed_step_P[p] >= 0:
      source = f'step {completed_step_P[p]}, replay buffer of step {step}'
      yield _of_arrays(tokenizer, types.take(groups, [p]), rule, source)


def _of_arrays(
  tokenizer: Tokenizer, group: Groups, rule: AdvantageRule, source: str
) -> RecordedGroup:
  """One group of arrays as text."""
  tokens_GT, response_mask_GT, logp_GT = (np.asarray(x[0]) for x in group[1:4])
  adv_G = np.asarray(rule(group.reward_PG))[0]
  prompt_length = response_mask_GT[0].argmax()
  (prompt,) = tokenizer.backend.batch_decode([tokens_GT[0, :prompt_length]])
  texts = tokenizer_lib.decode_responses(tokenizer, tokens_GT, response_mask_GT)
  responses = [
    Response(
      text,
      bool(group.correct_PG[0, g]),
      float(group.reward_PG[0, g]),
      float(adv_G[g]),
      tokenizer.backend.batch_decode([[i] for i in tokens_GT[g, response_mask_GT[g]]]),
      logp_GT[g, response_mask_GT[g]],
    )
    for g, text in enumerate(texts)
  ]
  name = f'problem {group.id_P[0]}, {source}'
  return RecordedGroup(name, prompt, '', responses, group)


def _evaluated(
  workdir: str, until: float, rule: AdvantageRule
) -> Iterator[RecordedGroup]:
  """The responses of the newest evaluation up to a step, by problem."""
  files = glob.glob(os.path.join(workdir, 'eval', '*.json'))
  found = (int(m[1]) for f in files if (m := re.search(r'(\d+)\.json$', f)))
  steps = [step for step in found if step <= until]
  if not steps:
    return
  samples = evaluate.read_recorded(workdir, max(steps))['samples']
  # By its id too: problems of one text may have verifiers of their own.
  for (_, problem), group in itertools.groupby(
    samples, lambda s: (s.get('id'), s['problem'])
  ):
    of_one = list(group)
    reward_PG = np.asarray([[sample['correct'] for sample in of_one]], np.float32)
    # A group of one has no others to be compared with.
    adv_PG = (
      np.asarray(rule(jnp.asarray(reward_PG))) if len(of_one) > 1 else 0 * reward_PG
    )
    responses = [
      Response(s['response'], s['correct'], reward_PG[0, g], adv_PG[0, g], None, None)
      for g, s in enumerate(of_one)
    ]
    source = f'evaluation at step {max(steps)}'
    pictures = _pictures(workdir, of_one[0])
    yield RecordedGroup(
      source, problem, of_one[0]['answer'], responses, None, pictures=pictures
    )


def ratios(
  config: Config, workdir: str, which: str = 'newest'
) -> Callable[[RecordedGroup], list[np.ndarray]]:
  """From a group to pi / mu of every token of its responses, [T] per response.

  pi is the policy of the checkpoint, mu the policy that sampled the token. The weights
  are read now; the first group compiles.

  Raises:
    ValueError: the config is of another model than the run's.
  """
  export.check_config(config, workdir)
  spec = policy.spec_of(config, policy.load_tokenizer(config))
  step = checkpoint.choose(workdir, which)
  assert step is not None, 'groups with tokens come from a checkpoint'
  array = policy.reader(config, workdir, step)
  names = transformer.describe(spec)
  params = transformer.unflatten({name: jnp.asarray(array(name)) for name in names})
  score = jax.jit(
    functools.partial(
      logprobs.sequence_logprobs,
      spec=spec,
      temperature=config.sampler.temperature,
      chunk=config.logprobs.chunk,
    )
  )

  def of_group(group: RecordedGroup) -> list[np.ndarray]:
    assert group.arrays is not None
    tokens_GT, response_mask_GT, logp_GT = (np.asarray(x[0]) for x in group.arrays[1:4])
    ratio_GT = np.exp(np.asarray(score(params, jnp.asarray(tokens_GT))[0]) - logp_GT)
    return [row[mask] for row, mask in zip(ratio_GT, response_mask_GT, strict=True)]

  return of_group
