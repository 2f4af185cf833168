"""Draws the weight of every rule over the probability and the ratio of a token.

  python -m lab.rule_maps        writes docs/rule_maps.png

A panel per rule and sign of the advantage: the weight of grad log pi of a token that
is a response of its own, for pi from 0.001 to 1 and ratios pi / mu from 1/8 to 8. Where
mu would be above 1 a panel is empty. Rules that read the whole minibatch have no map.
"""

import pathlib
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import loss
from lab import rule_curves
from lab.microscope import Rule
from lab.microscope_page import RULES

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PATH = pathlib.Path(__file__).parents[1] / 'docs' / 'rule_maps.png'
POINTS = 61
PROBABILITY = np.geomspace(1e-3, 1, POINTS)
RATIO = np.geomspace(1 / 8, 8, POINTS)
LIMIT = 3.0  # of the colours
DRAWN = tuple(name for name, rule in RULES.items() if not rule.whole_batch)


def weights(rule: Rule, sign: int) -> np.ndarray:
  """Returns the weight [R, P] for an advantage of `sign`; nan where mu is above 1."""
  p_RP, ratio_RP = np.meshgrid(PROBABILITY, RATIO)
  possible_RP = p_RP <= ratio_RP
  adv_B = np.full(possible_RP.sum(), float(sign), np.float32)
  tokens = ratio_RP[possible_RP], p_RP[possible_RP], adv_B
  logp_B1, batch = rule_curves.single(*tokens)
  slots = (rule.loss, rule.clip, rule.mask)
  find = loss.finder(slots, logp_B1, batch, jnp.ones(len(adv_B)))
  _, bounds = rule.loss(logp_B1, batch, find)
  found_RP = np.full(p_RP.shape, np.nan)
  found = np.asarray(loss.weights(rule.loss, logp_B1, batch, bounds))[:, 0]
  found_RP[possible_RP] = found
  return found_RP


def draw() -> 'Figure':
  """Returns the figure: two panels per rule, left for A > 0 and right for A < 0."""
  from matplotlib.cm import ScalarMappable
  from matplotlib.colors import Normalize
  from matplotlib.figure import Figure

  norm = Normalize(-LIMIT, LIMIT)
  columns = 4  # rules per row
  rows = -(-len(DRAWN) // columns)
  figure = Figure(figsize=(15, 1.9 * rows), layout='constrained')
  axes = figure.subplots(rows, 2 * columns, sharex=True, sharey=True)
  for ax in axes.flat[2 * len(DRAWN) :]:
    ax.set_axis_off()
  for i, name in enumerate(DRAWN):
    for j, sign in enumerate((1, -1)):
      ax = axes.flat[2 * i + j]
      ax.pcolormesh(
        PROBABILITY, RATIO, weights(RULES[name], sign), norm=norm, cmap='RdBu'
      )
      ax.set(xscale='log', yscale='log')
      ax.set_yticks((0.2, 1, 5), ('0.2', '1', '5'), minor=False)
      ax.minorticks_off()
      ax.set_title(f'{name}, A {"><"[j]} 0', fontsize=8)
  figure.supxlabel('probability of the token under the current policy')
  figure.supylabel('ratio')
  scale = ScalarMappable(norm, 'RdBu')
  figure.colorbar(scale, ax=axes, label='weight of grad log pi', shrink=0.5)
  return figure


if __name__ == '__main__':
  draw().savefig(PATH, dpi=80, metadata={'Software': None})
