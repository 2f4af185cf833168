"""What other rules would have done with the tokens that a step was trained on.

1. `read` takes the newest recorded step of a workdir: rows of tokens with their
   log-probabilities under the policy that sampled them and before their update;
2. `apply` gives the bounds, and the weight of every token in the gradient, under the
   advantage, clip and loss rules of any config; `staler` moves the policy further away
   from the one that sampled;
3. `summary` is the line of a table, `moved_by` the tokens that one rule moves and
   another does not, as text.

All recorded rows are taken as one minibatch, though the step had them in several: each
with the ratios of its own update. Rows that were not computed, those of groups without
an advantage, are left out.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import loss
from bapo_jax.run import step_record
from bapo_jax.runtime.workdir import read_config
from bapo_jax.tools import sweep_grid
from bapo_jax.training import config as config_lib
from bapo_jax.training import rules
from bapo_jax.training.config import Config
from bapo_jax.types import SOURCES, Batch, Bounds


class Recorded(NamedTuple):
  """The rows of a recorded step that were computed."""

  config: Config  # of the run
  step: int
  reward_PG: np.ndarray  # of every recorded group
  row_B: np.ndarray  # index of each row into reward_PG, flat
  source_B: np.ndarray
  behavior_logp_BT: np.ndarray  # nats; 0 behind the end of a row
  logp_BT: np.ndarray  # nats, of the policy before the row's update
  loss_mask_BT: np.ndarray
  pieces: list[list[str]]  # the tokens of each row, as text
  prompts: list[str]  # of each row
  ids: list[tuple[list[int], list[int]]] | None  # tokens of prompt and response
  pictured: bool = False  # problems of theirs have pictures


class Applied(NamedTuple):
  """What the rules of a config do with recorded rows."""

  bounds: Bounds
  ratio_BT: np.ndarray  # pi / mu of each token; 1 behind the end of a row
  adv_B: np.ndarray
  weight_BT: np.ndarray  # of each token in the gradient, rows scaled; 0 where cut
  cut_BT: np.ndarray  # True where a token has an advantage and no gradient


class Token(NamedTuple):
  """A token in its place."""

  before: str  # the response up to it
  text: str
  probability: float  # under the policy that sampled it
  ratio: float
  advantage: float


def read(workdir: str) -> Recorded:
  """The newest recorded step.

  Raises:
    ValueError: none is recorded, or none of its rows was computed.
  """
  config = config_lib.from_json(read_config(f'{workdir}/config.json'))
  step = step_record.newest(workdir)
  if step is None:
    raise ValueError(f'{workdir} has no recorded step; its first checkpoint writes one')
  groups = step_record.read(workdir, step)
  rows = [
    (i, group, response)
    for i, (group, response) in enumerate(
      (g, r) for g in groups for r in g['responses']
    )
    if response['learner_logp'] and response['taught']
  ]
  if not rows:
    raise ValueError(f'{workdir}, step {step}: no recorded response has an advantage')
  sampler = [response['sampler_logp'] for _, _, response in rows]
  length_B = np.asarray([len(x) for x in sampler])
  return Recorded(
    config,
    step,
    np.asarray([[r['reward'] for r in g['responses']] for g in groups], np.float32),
    np.asarray([i for i, _, _ in rows]),
    np.asarray([SOURCES.index(group['source']) for _, group, _ in rows]),
    _padded(sampler, length_B.max()),
    _padded([response['learner_logp'] for _, _, response in rows], length_B.max()),
    np.arange(length_B.max()) < length_B[:, None],
    [response['pieces'] for _, _, response in rows],
    [group['prompt'] for _, group, _ in rows],
    [(group['prompt_ids'], response['ids']) for _, group, response in rows]
    if all('prompt_ids' in group for group in groups)  # older records have none
    else None,
    pictured=any(group.get('pictures') for group in groups),
  )


def _padded(rows: list[list[float]], length: int) -> np.ndarray:
  filled = [[*row, *[0.0] * (length - len(row))] for row in rows]
  return np.asarray(filled, np.float32)


def config_of(recorded: Recorded, knobs: Mapping[str, Any]) -> Config:
  """The config of the run with other rules: dotted name -> value.

  Raises:
    ValueError: a knob's value is invalid.
  """
  values = sweep_grid.with_knobs(config_lib.plain(recorded.config), knobs)
  return config_lib.parse(values)


def staler(recorded: Recorded, times: float) -> Recorded:
  """The rows with the log-ratio of every token this many times as large.

  0 is the policy that sampled them, 1 the recorded one.
  """
  moved_BT = recorded.logp_BT - recorded.behavior_logp_BT
  return recorded._replace(logp_BT=recorded.behavior_logp_BT + times * moved_BT)


def apply(recorded: Recorded, config: Config) -> Applied:
  """Bounds and weights under the rules of a config."""
  bound = rules.bind(config)
  adv_PG = bound.advantage(jnp.asarray(recorded.reward_PG))
  logp_BT = jnp.asarray(recorded.logp_BT)
  batch = _batch(recorded, adv_PG.reshape(-1)[recorded.row_B])
  scale_B = loss.row_scale(
    batch.loss_mask_BT, config.loss.aggregate, config.sampler.max_new_tokens
  )
  weigh = loss.weigher(bound.loss, logp_BT, batch, scale_B)
  find = functools.partial(bound.clip, batch=batch, weigh=weigh)
  _, bounds = bound.loss(logp_BT, batch, find)
  weight_BT = loss.weights(bound.loss, logp_BT, batch, bounds) * scale_B[:, None]
  teaches_BT = batch.loss_mask_BT & (batch.adv_B != 0)[:, None]
  return Applied(
    bounds,
    np.asarray(loss.ratio(logp_BT, batch)),
    np.asarray(batch.adv_B),
    np.asarray(weight_BT),
    np.asarray(teaches_BT & (weight_BT == 0)),
  )


def _batch(recorded: Recorded, adv_B: Array) -> Batch:
  """The rows as a minibatch; its proximal policy is the one that sampled."""
  behavior_logp_BT = jnp.asarray(recorded.behavior_logp_BT)
  return Batch(
    tokens_BT=jnp.zeros(behavior_logp_BT.shape, jnp.int32),
    loss_mask_BT=jnp.asarray(recorded.loss_mask_BT),
    behavior_logp_BT=behavior_logp_BT,
    prox_BT=behavior_logp_BT,
    adv_B=adv_B,
    source_B=jnp.asarray(recorded.source_B, jnp.int32),
    on_policy_BT=jnp.asarray(recorded.loss_mask_BT),
  )


def summary(recorded: Recorded, applied: Applied) -> dict[str, float]:
  """Bounds, positive share, and the share of the tokens of either sign that are cut."""
  mask_BT, weight_BT = recorded.loss_mask_BT, applied.weight_BT
  adv_BT = np.where(mask_BT, applied.adv_B[:, None], 0)
  size = np.abs(weight_BT).sum()
  return {
    'low': float(applied.bounds.low),
    'high': float(applied.bounds.high),
    'share': float(np.maximum(weight_BT, 0).sum() / size) if size else np.nan,
    'cut_positive': float(applied.cut_BT[adv_BT > 0].mean()),
    'cut_negative': float(applied.cut_BT[adv_BT < 0].mean()),
    'norm': float(np.sqrt((weight_BT**2).sum())),
  }


def moved_by(recorded: Recorded, one: Applied, other: Applied) -> Iterator[Token]:
  """The tokens that `one` moves and `other` cuts, those far from ratio 1 first."""
  found_BT = other.cut_BT & (one.weight_BT != 0)
  distance_BT = np.abs(recorded.logp_BT - recorded.behavior_logp_BT)
  places = sorted(np.argwhere(found_BT).tolist(), key=lambda bt: -distance_BT[*bt])
  for b, t in places:
    pieces = recorded.pieces[b]
    yield Token(
      ''.join(pieces[:t]),
      pieces[t],
      float(np.exp(recorded.behavior_logp_BT[b, t])),
      float(one.ratio_BT[b, t]),
      float(one.adv_B[b]),
    )
