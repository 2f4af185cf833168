"""Groups of responses that a run has kept, read back from its workdir.

1. the good shelf of a checkpoint, with every token's log-probability,
2. then the responses of the newest evaluation by then, which are text;
3. `ratios` asks the checkpoint's policy what it makes of the tokens today.
"""

import functools
import glob
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax import types
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models import logprobs, transformer
from bapo_jax.tools import export
from bapo_jax.training import checkpoint, rules, setup
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.types import AdvantageRule


class Response(NamedTuple):
  """One response to the prompt of a group."""

  text: str
  correct: bool
  reward: float
  advantage: float
  pieces: list[str] | None  # its tokens, each as text; None: not kept
  logp: np.ndarray | None  # f32  log mu of each, nats


class RecordedGroup(NamedTuple):
  """A group as it was kept."""

  where: str  # what kept it
  prompt: str
  answer: str  # '' where it was not kept
  responses: list[Response]
  arrays: types.Groups | None  # of this group alone; None: not kept


def last(workdir: str, which: str) -> float:
  """The last step that may be shown beside this checkpoint; any beside the newest."""
  newest = which == 'newest'
  return math.inf if newest else checkpoint.choose(workdir, which) or math.inf


def read(workdir: str, which: str = 'newest') -> list[RecordedGroup]:
  """All groups that a run has kept; those with probabilities first.

  Args:
    which: of the checkpoints; see checkpoint.choose.

  Raises:
    ValueError: there are none.
  """
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    raise ValueError(f'--workdir={workdir} holds no run; train there first')
  with open(path) as file:
    config = config_lib.from_json(json.load(file))
  rule = rules.bind(config).advantage
  step, until = checkpoint.choose(workdir, which), last(workdir, which)
  found = [*_buffered(workdir, step, config, rule), *_evaluated(workdir, until, rule)]
  if not found:
    raise ValueError(
      f'--workdir={workdir} has no group recorded yet: the first evaluation records '
      'its responses, and a checkpoint its shelf where batch.rule is adapted'
    )
  return found


def _buffered(
  workdir: str, step: int | None, config: Config, rule: AdvantageRule
) -> Iterator[RecordedGroup]:
  """The good shelf of the checkpoint `step`, newest group first."""
  if step is None or not config.batch.uses_buffer:
    return
  array = checkpoint.read_params(workdir, step, part='buffer/reusable')
  groups = types.Groups(*map(array, types.Groups._fields))
  tokenizer = setup.load_tokenizer(config)
  for p in np.argsort(-groups.completed_step_P, kind='stable'):
    if groups.completed_step_P[p] >= 0:
      where = f'step {groups.completed_step_P[p]}, good shelf of step {step}'
      yield _of_arrays(tokenizer, types.take(groups, [p]), rule, where)


def _of_arrays(tokenizer, group: types.Groups, rule, where: str) -> RecordedGroup:
  tokens_GT, response_mask_GT, logp_GT = (x[0] for x in group[1:4])
  adv_G = np.asarray(rule(group.reward_PG))[0]
  (prompt,) = tokenizer.backend.batch_decode(
    [tokens_GT[0, : response_mask_GT[0].argmax()]]
  )
  responses = []
  for g, text in enumerate(
    tokenizer_lib.decode_responses(tokenizer, tokens_GT, response_mask_GT)
  ):
    ids = tokens_GT[g, response_mask_GT[g]]
    responses.append(
      Response(
        text,
        bool(group.correct_PG[0, g]),
        float(group.reward_PG[0, g]),
        float(adv_G[g]),
        tokenizer.backend.batch_decode([[i] for i in ids]),
        logp_GT[g, response_mask_GT[g]],
      )
    )
  return RecordedGroup(
    f'problem {group.id_P[0]}, {where}', prompt, '', responses, group
  )


def _evaluated(workdir: str, until: float, rule) -> Iterator[RecordedGroup]:
  """The responses of the newest evaluation up to a step, by problem."""
  files = glob.glob(os.path.join(workdir, 'eval', '*.json'))
  found = ((int(m[1]), f) for f in files if (m := re.search(r'(\d+)\.json$', f)))
  steps = {step: file for step, file in found if step <= until}
  if not steps:
    return
  with open(steps[max(steps)]) as file:
    samples = json.load(file)['samples']
  for problem, of_one in itertools.groupby(samples, lambda s: s['problem']):
    of_one = list(of_one)
    reward_PG = np.asarray([[sample['correct'] for sample in of_one]], np.float32)
    # A group of one has no others to be compared with.
    adv_PG = np.asarray(rule(reward_PG)) if len(of_one) > 1 else 0 * reward_PG
    responses = [
      Response(s['response'], s['correct'], reward_PG[0, g], adv_PG[0, g], None, None)
      for g, s in enumerate(of_one)
    ]
    where = f'evaluation at step {max(steps)}'
    yield RecordedGroup(where, problem, of_one[0]['answer'], responses, None)


def ratios(
  config, workdir: str, which: str = 'newest'
) -> Callable[[RecordedGroup], list[np.ndarray]]:
  """From a group to pi / mu of every chosen token, an array a response.

  pi is the policy of the checkpoint, mu the policy that chose the token. The
  weights are read now and the first group compiles.

  Raises:
    ValueError: the config is of another model than the run's.
  """
  export.check_config(config, workdir)
  spec = setup.spec_of(config, setup.load_tokenizer(config))
  array = checkpoint.read_params(workdir, checkpoint.choose(workdir, which))
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
    tokens_GT, response_mask_GT, logp_GT = (x[0] for x in group.arrays[1:4])
    ratio_GT = np.exp(np.asarray(score(params, jnp.asarray(tokens_GT))[0]) - logp_GT)
    return [row[mask] for row, mask in zip(ratio_GT, response_mask_GT, strict=True)]

  return of_group
