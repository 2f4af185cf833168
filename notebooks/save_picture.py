"""Writes docs/two_rules.png, the picture of the README, from the notebooks' data.

  python -m notebooks.save_picture

Left: the tokens of 2_batch.npz under the clip rules `fixed` and `balanced`. Right: the
seats of each batch of 3_history.npz by their source.
"""

import pathlib

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bapo_jax.algorithms import clip, loss
from bapo_jax.types import SOURCES
from lab import rule_curves

HERE = pathlib.Path(__file__).parent
FILE = HERE.parent / 'docs' / 'two_rules.png'
POSITIVE, NEGATIVE, GREY = '#0072B2', '#D55E00', '#777777'
COLOURS = ('#0072B2', '#D55E00', '#009E73')  # of SOURCES
TARGET = 0.457  # above this batch's share at the starting bounds, so that bounds move


def draw_bounds(axis: Axes) -> None:
  """Ratio and advantage of each token; the bounds of two clip rules."""
  logp_BT, batch = rule_curves.recorded(HERE / '2_batch.npz')
  ratio_BT = loss.ratio(logp_BT, batch)
  scale_B = loss.row_scale(batch.loss_mask_BT, 'token', 1)
  data = ratio_BT, batch, loss.weigher(loss.Clipped(), logp_BT, batch, scale_B)
  adv_BT = jnp.broadcast_to(batch.adv_B[:, None], ratio_BT.shape)
  for sign, colour in ((1, POSITIVE), (-1, NEGATIVE)):
    kind_BT = batch.loss_mask_BT & (sign * adv_BT > 0)
    x_N, y_N = ratio_BT[kind_BT], adv_BT[kind_BT]
    axis.plot(x_N, y_N, '.', color=colour, ms=5, alpha=0.35, markeredgewidth=0)
  rules = (
    ('fixed', ':', clip.Fixed()(*data)),
    ('balanced', '--', clip.Balanced(target=TARGET)(*data)),
  )
  for name, style, bounds in rules:
    ends = f'{float(bounds.low):.2f} .. {float(bounds.high):.2f}'
    for bound, label in ((bounds.low, f'{name}: {ends}'), (bounds.high, None)):
      axis.axvline(float(bound), color='black', ls=style, lw=1.2, label=label)
  axis.set(xscale='log', xlim=(0.25, 4.5), xlabel='ratio of new to old probability')
  axis.set_xticks([0.25, 0.5, 1, 2, 4], ['1/4', '1/2', '1', '2', '4'])
  axis.minorticks_off()
  axis.set(ylabel='advantage', title='Clip rule: bounds on one stale minibatch')
  axis.legend(loc='lower right', fontsize=8)


def draw_seats(axis: Axes) -> None:
  """The seats of each batch, stacked by source."""
  source_SP = np.load(HERE / '3_history.npz')['source_SP']
  steps = np.arange(len(source_SP))
  base_S = np.zeros(len(steps))
  seats = [(source_SP == i).sum(1) for i in range(len(SOURCES))]
  for seats_S, colour, name in zip(seats, COLOURS, SOURCES, strict=True):
    axis.bar(steps, seats_S, 1, base_S, color=colour, label=name)
    base_S = base_S + seats_S
  empty_S = source_SP.shape[1] - base_S
  axis.bar(steps, empty_S, 1, base_S, color='#BBBBBB', label='empty')
  axis.set(xlabel='learner step', ylabel='groups in the batch', xlim=(-0.5, steps[-1]))
  axis.set(title='Batch rule: seats of a short run, by source')
  axis.legend(loc='lower left', fontsize=8, ncol=2)


def main() -> None:
  """Writes the file."""
  plt.switch_backend('agg')
  fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout='constrained')
  draw_bounds(axes[0])
  draw_seats(axes[1])
  fig.savefig(FILE, dpi=100)
  print(f'{FILE}: {FILE.stat().st_size} bytes')


if __name__ == '__main__':
  main()
