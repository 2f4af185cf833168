"""Groups of responses that a run recorded, read back from its workdir.

1. `read` returns what the newest recorded step trained on, then the reusable groups of
   a checkpoint's replay buffer, both with the log-probability of every token, then the
   responses of the newest evaluation, as text;
2. `ratios` compares the policy of the checkpoint with the one that sampled the tokens,
   with the pictures that `gallery_of` finds.
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
from bapo_jax.data import prompts
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.gallery import Gallery
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner import pictured, scoring
from bapo_jax.models import transformer
from bapo_jax.run import step_record
from bapo_jax.runtime import picture_files
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import read_config
from bapo_jax.tools import export
from bapo_jax.training import (
  build,
  checkpoint,
  evaluate,
  policy,
  resolve,
  rules,
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
  # Clipped in its update; None: not in one.
  ratio_T: Float32[np.ndarray, ' T'] | None = None
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
  config = _config_of(workdir)
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


def _config_of(workdir: str) -> Config:
  """The config of the run there; raises ValueError."""
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    raise ValueError(f'--workdir={workdir} holds no run; train there first')
  try:
    return config_lib.from_json(read_config(path))
  except pydantic.ValidationError as error:
    raise ValueError(f'{path} holds no config of this version: {error}') from error


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
  """The reusable groups in the checkpoint of `step`, newest group first.

  Their pictures are written beside those that the run has recorded.
  """
  if step is None or not config.batch.uses_buffer:
    return
  array = weights.read_params(workdir, step, part='buffer/reusable')
  arrays: list[Any] = [array(name) for name in Groups._fields]  # on the host
  groups = Groups(*arrays)
  _, tokenizer, spec = resolve.open_model(config)
  length_P = np.asarray(groups.response_mask_PGT)[:, 0].argmax(1)
  tokens_PT = groups.tokens_PGT[:, 0]
  prompt_P = tokenizer_lib.decode_prompts(
    tokenizer, tokens_PT, length_P, spec.image_token
  )
  completed_step_P = np.asarray(groups.completed_step_P)
  order = np.argsort(-completed_step_P, kind='stable')
  order = order[completed_step_P[order] >= 0]
  files = {}
  try:
    if len(order) and (gallery := gallery_of(workdir, step)):
      rows = {p: gallery.rows[int(groups.id_P[p])] for p in order}
      files = {p: picture_files.write(workdir, x.pictures) for p, x in rows.items()}
  except (OSError, ValueError) as error:  # texts and probabilities are there without
    log(f'The pictures of the replay buffer are not named: {error}')
  for p in order:
    source = f'step {completed_step_P[p]}, replay buffer of step {step}'
    group = _of_arrays(tokenizer, prompt_P[p], types.take(groups, [p]), rule, source)
    yield group._replace(pictures=_pictures(workdir, {'pictures': files.get(p, ())}))


@functools.lru_cache(maxsize=1)  # named on a page, and read where its ratios are
def gallery_of(workdir: str, step: int) -> Gallery | None:
  """The pictures of the training problems of a run; None where it has none.

  Raises:
    ValueError: they cannot be read, or are not those of the checkpoint.
  """
  config = _config_of(workdir)
  model = resolve.open_model(config)
  if model.spec.vision is None:
    return None
  material = build.read(config, model, workdir)
  before = checkpoint.meta_of(workdir, step)['problems'][0]
  if (now := prompts.fingerprint(material.problems)) != before:
    raise ValueError(
      f'problems.source={config.problems.source} has other problems or pictures than '
      f'at step {step} (fingerprints, {before} then, {now} now); bring those back'
    )
  return pictured.galleries(material.problems, material.held_out, model.spec)[0]


def _of_arrays(
  tokenizer: Tokenizer, prompt: str, group: Groups, rule: AdvantageRule, source: str
) -> RecordedGroup:
  """One group of arrays as text."""
  tokens_GT, response_mask_GT, logp_GT = (np.asarray(x[0]) for x in group[1:4])
  adv_G = np.asarray(rule(group.reward_PG))[0]
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
    source, first = f'evaluation at step {max(steps)}', of_one[0]
    group = RecordedGroup(source, problem, first['answer'], responses, None)
    yield group._replace(pictures=_pictures(workdir, first))


def ratios(
  config: Config, workdir: str, which: str = 'newest'
) -> Callable[[RecordedGroup], list[np.ndarray]]:
  """From a group to pi / mu of every token of its responses, [T] per response.

  pi is the policy of the checkpoint, mu the policy that sampled the token. The weights
  are read now; the first group compiles.

  Raises:
    ValueError: the config is of another model than the run's, or its problems have
      pictures that are not at hand.
  """
  export.check_config(config, workdir)
  model = resolve.open_model(config)
  spec = model.spec
  step = checkpoint.choose(workdir, which)
  assert step is not None, 'groups with tokens come from a checkpoint'
  gallery = gallery_of(workdir, step)
  array = policy.reader(config, model, workdir, step)
  names = transformer.describe(spec)
  params = transformer.unflatten({name: jnp.asarray(array(name)) for name in names})
  score = jax.jit(
    functools.partial(
      scoring.score,
      rows=config.micro_batch_rows,
      spec=spec,
      temperature=config.sampler.temperature,
      chunk=config.logprobs.chunk,
    )
  )

  def of_group(group: RecordedGroup) -> list[np.ndarray]:
    held = group.arrays
    assert held is not None
    seen = None if gallery is None else gallery.of(held.id_P)
    ratio_PGT = np.exp(np.asarray(score(params, held, seen)) - held.behavior_logp_PGT)
    rows = zip(ratio_PGT[0], np.asarray(held.response_mask_PGT[0]), strict=True)
    return [ratio_T[mask_T] for ratio_T, mask_T in rows]

  return of_group
