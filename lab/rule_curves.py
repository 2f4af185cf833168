"""Weighs tokens by a loss rule: single tokens on a grid, and the tokens of a recording.

1. `single` makes a batch of responses of one token, of any ratio and probability;
2. `curve` computes the gain and the weight of such tokens under bounds, such as
   `constant` bounds; `draw` plots the weight over the ratio;
3. `recorded` reads the tokens of a recorded step or of notebooks/2_batch.npz.
"""

import itertools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

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
  old_BT = logp_BT - log_ratio_BT
  mask_BT = jnp.ones(logp_BT.shape, bool)
  prox_BT = old_BT + moved * log_ratio_BT
  source_B = jnp.zeros(len(logp_BT), jnp.int32)
  return logp_BT, batch_of(mask_BT, old_BT, prox_BT, adv_N[:, None], source_B)


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
  if path.suffix == '.npz':  # as `notebooks.make batch` writes it
    saved = np.load(path)
    mask_BT = saved['loss_mask_BT']
    token_N = saved['tokens_BT'][mask_BT]
    logp_BT = np.zeros(mask_BT.shape, np.float32)
    logp_BT[mask_BT] = saved['logp_NV'][np.arange(len(token_N)), token_N]
    old_BT = saved['behavior_logp_BT']
    adv_BT = saved['adv_B'][:, None]
    source_B = np.zeros(len(adv_BT), np.int32)
  elif path.suffix == '.jsonl' and path.stem.isdecimal():
    rows = computed(step_record.read(str(path.parents[1]), int(path.stem)))
    if not rows:
      raise ValueError(f'{path}: no recorded response has an advantage; {WAY_OUT}')
    mask_BT, old_BT, logp_BT, source_B = arrays(rows)
    adv_BT = padded(
      [
        row.get('advantages') or [row['advantage']] * len(row['sampler_logp'])
        for _, _, row in rows
      ]
    )
  else:
    raise ValueError(f'{path} is no recorded batch; {WAY_OUT}')
  return jnp.asarray(logp_BT), batch_of(mask_BT, old_BT, old_BT, adv_BT, source_B)


Row = dict[str, Any]


def computed(groups: Sequence[Row]) -> list[tuple[int, Row, Row]]:
  """Returns (number, group, response) of the recorded responses with an advantage.

  The learner computed the log-probabilities of no other response.
  """
  rows = [(group, response) for group in groups for response in group['responses']]
  return [
    (i, group, response)
    for i, (group, response) in enumerate(rows)
    if response['learner_logp'] and response['taught']
  ]


def arrays(
  rows: Sequence[tuple[int, Row, Row]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Returns (mask_BT, old_BT, logp_BT, source_B) of `computed` responses."""
  responses = [response for *_, response in rows]
  mask_BT = padded([x.get('mask', [1] * len(x['sampler_logp'])) for x in responses]) > 0
  old_BT = padded([x['sampler_logp'] for x in responses])
  logp_BT = padded([x['learner_logp'] for x in responses])
  source_B = np.asarray([SOURCES.index(group['source']) for _, group, _ in rows])
  return mask_BT, old_BT, logp_BT, source_B


def padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
  """Returns rows of numbers as f32 [B, T], with 0 after the end of each."""
  return np.asarray([*itertools.zip_longest(*rows, fillvalue=0)], np.float32).T


def batch_of(*arrays: ArrayLike) -> Batch:
  """Returns a batch of (mask_BT, old_BT, prox_BT, adv_BT or adv_B1, source_B)."""
  mask_BT, old_BT, prox_BT, adv_BT, source_B = map(jnp.asarray, arrays)
  return Batch(
    tokens_BT=jnp.zeros(mask_BT.shape, jnp.int32),  # no rule reads tokens
    loss_mask_BT=mask_BT,
    behavior_logp_BT=old_BT,
    prox_BT=prox_BT,
    adv_BT=jnp.broadcast_to(adv_BT, mask_BT.shape),
    source_B=source_B,
    on_policy_BT=jnp.zeros(mask_BT.shape, bool),
  )
