"""Weighs tokens by a loss rule: single tokens on a grid, and the tokens of a recording.

1. `single` makes a batch of responses of one token, of any ratio and probability;
2. `curve` computes the gain and the weight of such tokens under bounds, such as
   `constant` bounds; `draw` plots the weight over the ratio;
3. `recorded` reads the tokens of a recorded step or of notebooks/2_batch.npz.
"""

import math
import os
import pathlib
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import clip, loss, masks
from bapo_jax.run import step_record
from bapo_jax.types import SOURCES, Batch, Bounds, LossFunction, MaskFunction
from lab.plots import BLUE, GREY, ORANGE

if TYPE_CHECKING:
  from matplotlib.axes import Axes

WAY_OUT = (
  'give the file groups/<step>.jsonl of a workdir, or an .npz file like '
  'notebooks/2_batch.npz'
)


def single(
  ratio_N: np.ndarray, probability_N: np.ndarray, adv_N: np.ndarray, moved: float = 0.0
) -> tuple[Array, Batch]:
  """Returns (logp_BT, batch) of N responses of one token each.

  Args:
    ratio_N: pi / mu of the token.
    probability_N: pi(token).
    adv_N: the advantage of the response.
    moved: log prox - log mu, as a share of log pi - log mu: 0 for prox = mu.
  """
  logp_BT, log_ratio_BT = (
    jnp.log(jnp.asarray(x))[:, None] for x in (probability_N, ratio_N)
  )
  old_BT, mask_BT = logp_BT - log_ratio_BT, jnp.ones(logp_BT.shape, bool)
  zero_BT = jnp.zeros(logp_BT.shape, jnp.int32)
  prox_BT = old_BT + moved * log_ratio_BT
  adv_B, source_B = jnp.asarray(adv_N), zero_BT[:, 0]
  batch = Batch(zero_BT, mask_BT, old_BT, prox_BT, adv_B, source_B, ~mask_BT)
  return logp_BT, batch


def curve(
  rule: LossFunction, logp_BT: Array, batch: Batch, bounds: Bounds
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (gain_N, weight_N) of responses of one token; see `single`."""
  gain_BT, _ = loss.gain(rule, logp_BT, batch, lambda _: bounds)
  weight_BT = loss.weights(rule, logp_BT, batch, bounds)
  return np.asarray(gain_BT)[:, 0], np.asarray(weight_BT)[:, 0]


def constant(low: float = 0.0, high: float = math.inf) -> Bounds:
  """Returns constant clip bounds; none by default."""
  return clip.constant(low, high, math.inf)


def draw(
  axis: 'Axes',
  rule: LossFunction,
  bounds: Bounds,
  mask: MaskFunction = masks.NoMask(),
  probability: float = 0.15,
) -> None:
  """Plots the weight over the ratio for an advantage of 1 and of -1.

  Dashed lines are the bounds; `mask` leaves tokens out of the objective, whose weight
  is then 0; `probability` is pi(token).
  """
  ratio_N = np.geomspace(0.25, 4, 641).astype(np.float32)
  probability_N = np.full_like(ratio_N, probability)
  for adv, colour in ((1.0, BLUE), (-1.0, ORANGE)):
    tokens = single(ratio_N, probability_N, np.full_like(ratio_N, adv))
    _, weight_N = curve(rule, *tokens, loss.masked(bounds, mask(*tokens)))
    axis.plot(ratio_N, weight_N, color=colour, lw=1.6, label=f'A = {adv:+.0f}')
  for bound in (bounds.low, bounds.high, bounds.dual):
    if 0.25 < bound < 4:
      axis.axvline(float(bound), color=GREY, linestyle='--', linewidth=1)
  axis.axhline(0, color=GREY, linewidth=0.5)
  axis.set(xscale='log', xlim=(0.25, 4), xlabel='ratio')
  axis.set_xticks([0.25, 0.5, 1, 2, 4], ['1/4', '1/2', '1', '2', '4'])
  axis.minorticks_off()


def recorded(path: str | os.PathLike[str]) -> tuple[Array, Batch]:
  """Returns (logp_BT, batch) of a recorded minibatch, from column 0 of every response.

  Rows without an advantage have no log-probabilities of the learner, and are left out.

  Raises:
    ValueError: the file has no token with an advantage, or is of another kind.
  """
  path = pathlib.Path(path)
  if path.suffix == '.npz':
    return _minibatch(path)
  if path.suffix != '.jsonl' or not path.stem.isdecimal():
    raise ValueError(f'{path} is no recorded batch; {WAY_OUT}')
  rows = [
    (response, SOURCES.index(group['source']))
    for group in step_record.read(str(path.parents[1]), int(path.stem))
    for response in group['responses']
    if response['learner_logp'] and response['taught']
  ]
  if not rows:
    raise ValueError(f'{path}: no recorded response has an advantage; {WAY_OUT}')
  length_B = np.asarray([len(response['sampler_logp']) for response, _ in rows])
  mask_BT = np.arange(length_B.max()) < length_B[:, None]
  logp_BT, old_BT = np.zeros((2, *mask_BT.shape), np.float32)
  logp_BT[mask_BT] = np.concatenate([r['learner_logp'] for r, _ in rows])
  old_BT[mask_BT] = np.concatenate([r['sampler_logp'] for r, _ in rows])
  adv_B = np.asarray([r['advantage'] for r, _ in rows], np.float32)
  return _batch(logp_BT, old_BT, mask_BT, adv_B, np.asarray([s for _, s in rows]))


def _minibatch(path: pathlib.Path) -> tuple[Array, Batch]:
  """Reads the file that `notebooks.make batch` writes."""
  saved = np.load(path)
  mask_BT = saved['loss_mask_BT']
  token_N = saved['tokens_BT'][mask_BT]
  logp_BT = np.zeros(mask_BT.shape, np.float32)
  logp_BT[mask_BT] = saved['logp_NV'][np.arange(len(token_N)), token_N]
  adv_B = saved['adv_B']
  old_BT, source_B = saved['behavior_logp_BT'], np.zeros(len(adv_B))
  return _batch(logp_BT, old_BT, mask_BT, adv_B, source_B)


def _batch(
  logp_BT: np.ndarray,
  old_BT: np.ndarray,
  mask_BT: np.ndarray,
  adv_B: np.ndarray,
  source_B: np.ndarray,
) -> tuple[Array, Batch]:
  """Returns (logp_BT, batch); the proximal policy is the one that sampled."""
  batch = Batch(
    tokens_BT=jnp.zeros(mask_BT.shape, jnp.int32),  # no rule reads tokens
    loss_mask_BT=jnp.asarray(mask_BT),
    behavior_logp_BT=jnp.asarray(old_BT),
    prox_BT=jnp.asarray(old_BT),
    adv_B=jnp.asarray(adv_B),
    source_B=jnp.asarray(source_B, jnp.int32),
    on_policy_BT=jnp.zeros(mask_BT.shape, bool),
  )
  return jnp.asarray(logp_BT), batch
