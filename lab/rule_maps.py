"""Draws the weight of every rule over the probability and the ratio of a token.

  python -m lab.rule_maps        writes docs/rule_maps.png

A panel per rule and sign of the advantage: the weight of grad log pi of a token that
is a response of its own, for pi from 0.001 to 1 and ratios pi / mu from 1/8 to 8. Where
mu would be above 1 a panel is empty. Rules that read the whole minibatch have no map.

`draw_recorded` draws what rules cut of a recorded batch: the region, and the tokens.
"""

import itertools
import pathlib
from collections.abc import Mapping

import numpy as np
from jax import Array
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from bapo_jax.training.config import Config
from bapo_jax.types import Batch, Bounds, ClipFunction, Weigh
from lab import microscope, plots, rule_curves
from lab.counterfactual import Applied, Recorded
from lab.microscope import Rule
from lab.microscope_rules import RULES
from lab.plots import BLUE, ORANGE

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
  adv_N = np.full(possible_RP.sum(), float(sign), np.float32)
  tokens = rule_curves.single(ratio_RP[possible_RP], p_RP[possible_RP], adv_N)
  found_RP = np.full(p_RP.shape, np.nan)
  weight_B1 = microscope.unscaled(rule, *tokens)
  found_RP[possible_RP] = weight_B1[:, 0]
  return found_RP


def cut_mass(recorded: Recorded, applied: Applied, sign: int) -> tuple[float, float]:
  """Returns the part of a recorded batch that a rule cuts, for one sign of A.

  The first number is the share of the tokens of the sign, the second their share of
  |r A|, the mass in the unclipped gradient.
  """
  mine_BT = recorded.loss_mask_BT & (np.sign(applied.adv_BT) == sign)
  mass_N = (applied.ratio_BT * np.abs(applied.adv_BT))[mine_BT]
  cut_N = applied.cut_BT[mine_BT] > 0
  if not len(cut_N):
    return 0.0, 0.0
  return cut_N.mean(), mass_N[cut_N].sum() / mass_N.sum()


def cut_regions(config: Config, applied: Applied) -> dict[int, np.ndarray]:
  """Returns sign -> where such a token would be cut, bool [R, P].

  Bounds that a search found in the batch stay the same for all tokens. Empty for rules
  that decide by response or over the batch.
  """
  if config.loss.rule == 'sequence' or config.mask.rule in ('m2po', 'opsm'):
    return {}
  bounds = applied.bounds._replace(keep_BT=None)

  def searched(ratio_BT: Array, batch: Batch, weigh: Weigh) -> Bounds:
    return bounds

  clip: ClipFunction = config.clip if bounds.low.ndim else searched
  rule = Rule(config.loss, clip, config.mask)
  return {sign: weights(rule, sign) == 0 for sign in (1, -1)}


def draw_recorded(
  recorded: Recorded,
  applied: Mapping[str, Applied],
  configs: Mapping[str, Config],
  columns: int,
) -> Figure:
  """Returns a figure with a panel per rule: tokens by probability and ratio.

  Blue is for tokens with A > 0 and orange for A < 0: shaded where the rule cuts such
  tokens, dots for those that it cuts, grey for the others. A token beyond the axes is
  drawn at their edge. The titles have the shares of the tokens cut, and of their mass
  in the unclipped gradient.
  """
  figure, axes = _panels(len(applied), columns, 2.9, 2.6, 9)
  p_BT, mask_BT = np.exp(recorded.logp_BT).clip(PROBABILITY[0]), recorded.loss_mask_BT
  for ax, (name, one) in zip(axes, applied.items(), strict=True):
    ratio_BT = one.ratio_BT.clip(RATIO[0], RATIO[-1])
    ax.plot(p_BT[mask_BT], ratio_BT[mask_BT], '.', ms=2, color='#AAAAAA')
    texts, regions = [], cut_regions(configs[name], one)
    for sign, colour in ((1, BLUE), (-1, ORANGE)):
      if sign in regions:
        shade = np.ma.masked_where(~regions[sign], np.ones(regions[sign].shape))
        ax.pcolormesh(
          PROBABILITY, RATIO, shade, cmap=ListedColormap([colour]), alpha=0.18
        )
      cut_BT = mask_BT & (one.cut_BT > 0) & (np.sign(one.adv_BT) == sign)
      ax.plot(p_BT[cut_BT], ratio_BT[cut_BT], '.', ms=2, color=colour)
      tokens, mass = cut_mass(recorded, one, sign)
      texts.append(f'{"+" if sign > 0 else "-"} {tokens:.1%} ({mass:.1%})')
    _dress(ax, f'{name}\ncut {",  ".join(texts)}')
    # With a margin for the dots at the edge.
    ax.set(xlim=(PROBABILITY[0] / 1.2, 1.2), ylim=(RATIO[0] / 1.2, RATIO[-1] * 1.2))
  return figure


def _panels(
  count: int, columns: int, width: float, height: float, fontsize: float | str
) -> tuple[Figure, list[Axes]]:
  """Returns a figure and its panels; sizes are those of a panel, in inches."""
  rows = -(-count // columns)
  figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
  axes = [*figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat]
  for ax in axes[count:]:
    ax.set_axis_off()
  for ax in axes[:count][-columns:]:  # the last of each column
    ax.tick_params(labelbottom=True)
  figure.supxlabel(
    'probability of the token under the current policy', fontsize=fontsize
  )
  figure.supylabel('ratio', fontsize=fontsize)
  return figure, axes[:count]


def _dress(ax: Axes, title: str) -> None:
  ax.set(xscale='log', yscale='log')
  ax.set_yticks((0.2, 1, 5), ('0.2', '1', '5'), minor=False)
  ax.minorticks_off()
  ax.set_title(title, fontsize=8)


def draw() -> Figure:
  """Returns the figure: two panels per rule, left for A > 0 and right for A < 0."""
  norm = Normalize(-LIMIT, LIMIT)
  drawn = [*itertools.product(DRAWN, (('>', 1), ('<', -1)))]
  figure, axes = _panels(len(drawn), 8, 15 / 8, 1.9, 'large')
  for ax, (name, (relation, sign)) in zip(axes, drawn, strict=True):
    weight_RP = weights(RULES[name], sign)
    ax.pcolormesh(PROBABILITY, RATIO, weight_RP, norm=norm, cmap='RdBu')
    _dress(ax, f'{name}, A {relation} 0')
  scale = ScalarMappable(norm, 'RdBu')
  figure.colorbar(scale, ax=figure.axes, label='weight of grad log pi', shrink=0.5)
  return figure


if __name__ == '__main__':
  plots.save(draw(), PATH, 80)
