"""Applies other rules to the tokens that a recorded step was trained on.

1. `read` loads the newest recorded step of a workdir: rows of tokens with their
   log-probabilities under the policy that sampled them and before their update.
2. `apply` computes the bounds, and every token's weight in the gradient, under the
   advantage, clip and loss rules of any config; `staler` moves the policy further from
   the one that sampled.
3. `summary` gives the numbers of a table row, `moved_by` lists the tokens that one rule
   moves and another cuts.

All recorded rows are treated as one minibatch, though the step had several, each with
its own ratios. Rows without an advantage were never computed and are left out.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import loss
from bapo_jax.run import step_record
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import config as config_lib
from bapo_jax.training import rules
from bapo_jax.training.config import Config
from bapo_jax.types import SOURCES, Batch, Bounds
from lab.experiments import Knobs, with_knobs


class Recorded(NamedTuple):
  """The computed rows of a recorded step; B rows of at most T response tokens."""

  config: Config  # of the run
  step: int
  reward_PG: np.ndarray  # f32, of every recorded group
  row_B: np.ndarray  # int, index of each row into reward_PG, flattened
  source_B: np.ndarray  # int, index into SOURCES
  behavior_logp_BT: np.ndarray  # f32, nats; 0 after the end of a row
  logp_BT: np.ndarray  # f32, nats, under the policy before the row's update
  loss_mask_BT: np.ndarray  # bool
  pieces: list[list[str]]  # the tokens of each row as text
  ids: list[tuple[list[int], list[int]]] | None  # tokens of prompt and response
  pictured: bool = False  # whether the problems have pictures


class Applied(NamedTuple):
  """The effect of a config's rules on recorded rows."""

  bounds: Bounds
  ratio_BT: np.ndarray  # f32, pi / mu of each token; 1 after the end of a row
  adv_B: np.ndarray  # f32
  weight_BT: np.ndarray  # f32, in the gradient, rows scaled; 0 if cut
  cut_BT: np.ndarray  # bool, a token with an advantage and no gradient


class Token(NamedTuple):
  """A token in its context."""

  before: str  # the response up to the token
  text: str
  probability: float  # under the policy that sampled it
  ratio: float
  advantage: float


def read(workdir: str) -> Recorded:
  """Returns the newest recorded step.

  Raises:
    ValueError: no step is recorded, or no recorded row was computed.
  """
  config = config_lib.from_json(read_config(f'{workdir}/config.json'))
  step = step_record.newest(workdir)
  if step is None:
    raise ValueError(f'{workdir} has no recorded step; its first checkpoint writes one')
  groups = step_record.read(workdir, step)
  responses = [(group, response) for group in groups for response in group['responses']]
  # A row has log-probabilities of the learner only if it had an advantage.
  rows = [
    (i, group, response)
    for i, (group, response) in enumerate(responses)
    if response['learner_logp'] and response['taught']
  ]
  if not rows:
    raise ValueError(f'{workdir}, step {step}: no recorded response has an advantage')
  length_B = np.asarray([len(response['sampler_logp']) for _, _, response in rows])
  mask_BT = np.arange(length_B.max()) < length_B[:, None]

  def padded(name: str) -> np.ndarray:
    logp_BT = np.zeros(mask_BT.shape, np.float32)
    logp_BT[mask_BT] = np.concatenate([response[name] for _, _, response in rows])
    return logp_BT

  recorded_ids = all('prompt_ids' in group for group in groups)  # not in old records
  return Recorded(
    config,
    step,
    np.asarray([[r['reward'] for r in g['responses']] for g in groups], np.float32),
    np.asarray([i for i, _, _ in rows]),
    np.asarray([SOURCES.index(group['source']) for _, group, _ in rows]),
    padded('sampler_logp'),
    padded('learner_logp'),
    mask_BT,
    [response['pieces'] for _, _, response in rows],
    [(g['prompt_ids'], r['ids']) for _, g, r in rows] if recorded_ids else None,
    pictured=any(group.get('pictures') for group in groups),
  )


def config_of(recorded: Recorded, knobs: Knobs) -> Config:
  """Returns the config of the run with some knobs changed.

  Raises:
    ValueError: a value of a knob is invalid.
  """
  values = with_knobs(config_lib.plain(recorded.config), knobs)
  return config_lib.parse(values)


def staler(recorded: Recorded, times: float) -> Recorded:
  """Returns the rows with every token's log-ratio multiplied.

  Args:
    times: 0 gives the policy that sampled, 1 the recorded policy.
  """
  moved_BT = recorded.logp_BT - recorded.behavior_logp_BT
  return recorded._replace(logp_BT=recorded.behavior_logp_BT + times * moved_BT)


def apply(recorded: Recorded, config: Config) -> Applied:
  """Returns bounds and weights under the rules of a config."""
  bound = rules.bind(config)
  adv_PG = bound.advantage(jnp.asarray(recorded.reward_PG))
  logp_BT, old_BT = (
    jnp.asarray(recorded.logp_BT),
    jnp.asarray(recorded.behavior_logp_BT),
  )
  mask_BT = jnp.asarray(recorded.loss_mask_BT)
  batch = Batch(
    tokens_BT=jnp.zeros(mask_BT.shape, jnp.int32),  # no rule reads tokens
    loss_mask_BT=mask_BT,
    behavior_logp_BT=old_BT,
    prox_BT=old_BT,
    adv_B=adv_PG.reshape(-1)[recorded.row_B],
    source_B=jnp.asarray(recorded.source_B, jnp.int32),
    on_policy_BT=mask_BT,
  )
  scale_B = loss.row_scale(
    mask_BT, config.loss.aggregate, config.sampler.max_new_tokens
  )
  weigh = loss.weigher(bound.loss, logp_BT, batch, scale_B)
  find = functools.partial(bound.clip, batch=batch, weigh=weigh)
  _, bounds = bound.loss(logp_BT, batch, find)
  weight_BT = loss.weights(bound.loss, logp_BT, batch, bounds) * scale_B[:, None]
  teaches_BT = mask_BT & (batch.adv_B != 0)[:, None]
  return Applied(
    bounds,
    np.asarray(loss.ratio(logp_BT, batch)),
    np.asarray(batch.adv_B),
    np.asarray(weight_BT),
    np.asarray(teaches_BT & (weight_BT == 0)),
  )


def summary(recorded: Recorded, applied: Applied) -> dict[str, float]:
  """Returns bounds, positive share, shares of tokens cut by sign, and gradient norm."""
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
  """Yields tokens that `one` moves and `other` cuts, the largest log-ratios first."""
  freed_BT = other.cut_BT & (one.weight_BT != 0)
  distance_BT = np.abs(recorded.logp_BT - recorded.behavior_logp_BT)
  places = sorted(np.argwhere(freed_BT).tolist(), key=lambda bt: -distance_BT[*bt])
  for b, t in places:
    pieces = recorded.pieces[b]
    yield Token(
      ''.join(pieces[:t]),
      pieces[t],
      float(np.exp(recorded.behavior_logp_BT[b, t])),
      float(one.ratio_BT[b, t]),
      float(one.adv_B[b]),
    )
