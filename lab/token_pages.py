"""Writes HTML for notebooks: responses coloured by token, and a slider over frames.

1. `coloured` shows recorded responses twice, each token in the colour of its weight in
   the gradient under one of two rules;
2. `slider` shows one of several prepared frames, without a kernel; `picture` makes a
   frame of a figure.

The HTML has its styles and its script in attributes, and loads nothing.
"""

import base64
import html
import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lab.counterfactual import Applied, Recorded
from lab.plots import BLUE, ORANGE

LEAST = 0.12  # opacity of the smallest weight
CUT = 'border:1px dashed #777;text-decoration:line-through'


def coloured(
  recorded: Recorded, applied: Mapping[str, Applied], rows: Sequence[int]
) -> str:
  """Returns HTML of responses, once per rule.

  Blue tokens are pushed up and orange tokens down, the stronger the larger their weight
  relative to the largest weight of all rules; struck tokens with a dashed border are
  cut. A tooltip has the token's numbers.

  Args:
    rows: the responses, as indices into the rows of the record.
  """
  largest = max(float(np.abs(one.weight_BT[rows]).max()) for one in applied.values())
  samples = (
    (f'background:{_rgba(BLUE, 0.8)}', 'pushed up'),
    (f'background:{_rgba(ORANGE, 0.8)}', 'pushed down'),
    (CUT, 'cut'),
  )
  legend = [f'<span style="{style}">{text}</span>' for style, text in samples]
  parts = [f'<p>{" &nbsp; ".join(legend)}</p>']
  one = next(iter(applied.values()))
  for b in rows:
    adv_N = one.adv_BT[b, recorded.loss_mask_BT[b]]
    ends = dict.fromkeys((f'{adv_N.min():+.2f}', f'{adv_N.max():+.2f}'))
    parts.append(
      f'<p style="margin:12px 0 2px"><b>response {b}</b>, A = {" to ".join(ends)}, '
      f'{len(adv_N)} tokens</p>'
    )
    for name, rule in applied.items():
      spans = [
        _token(recorded, rule, b, t, largest) for t in range(len(recorded.pieces[b]))
      ]
      cut = int((rule.cut_BT[b] > 0).sum())
      parts.append(
        f'<div style="margin:2px 0 6px"><i>{html.escape(name)}</i>, {cut} cut:<br>'
        f'<span style="font-family:monospace;line-height:1.7">{"".join(spans)}</span>'
        '</div>'
      )
  return f'<div>{"".join(parts)}</div>'


def _token(recorded: Recorded, rule: Applied, b: int, t: int, largest: float) -> str:
  text = html.escape(recorded.pieces[b][t]).replace('\n', '↵<br>')
  if not recorded.loss_mask_BT[b, t]:
    return f'<span style="color:#999">{text}</span>'
  weight = float(rule.weight_BT[b, t])
  p, q = np.exp([recorded.logp_BT[b, t], recorded.behavior_logp_BT[b, t]])
  size = abs(weight) / largest if largest else 0.0
  tip = f'sampled at {q:.3f}, now {p:.3f}, ratio {p / q:.2f}, '
  if np.ptp(rule.adv_BT[b, recorded.loss_mask_BT[b]]):
    tip += f'A = {rule.adv_BT[b, t]:+.2f}, '
  if rule.cut_BT[b, t]:
    style = CUT
    tip += 'cut'
  else:
    opacity = LEAST + (1 - LEAST) * size if weight else 0
    style = f'background:{_rgba(BLUE if weight > 0 else ORANGE, opacity)}'
    tip += f'weight {size:.0%} of the largest'
  return f'<span title="{tip}" style="{style}">{text}</span>'


def _rgba(colour: str, opacity: float) -> str:
  red, green, blue = bytes.fromhex(colour[1:])
  return f'rgba({red},{green},{blue},{opacity:.2f})'


def slider(title: str, frames: Mapping[str, str], first: int = 0) -> str:
  """Returns HTML with a slider that shows one of the frames.

  Args:
    title: what the slider changes.
    frames: label -> HTML, in the order of the slider.
    first: the frame that is shown before the slider moves, and where no script runs.
  """
  shown = [
    f'<div style="display:{"block" if i == first else "none"}">'
    f'<p style="margin:4px 0"><b>{html.escape(title)}: {html.escape(label)}</b></p>'
    f'{frame}</div>'
    for i, (label, frame) in enumerate(frames.items())
  ]
  # The frames are the children of the element after the input.
  script = (
    'var f=this.nextElementSibling.children;'
    "for(var i=0;i<f.length;i++)f[i].style.display=i==this.value?'block':'none'"
  )
  return (
    f'<div><input type="range" min="0" max="{len(frames) - 1}" value="{first}" '
    f'aria-label="{html.escape(title)}" style="width:320px" oninput="{script}">'
    f'<div>{"".join(shown)}</div></div>'
  )


def picture(figure: Figure, dpi: int) -> str:
  """Returns a figure as an HTML image that contains its data."""
  with io.BytesIO() as file:
    figure.savefig(file, format='png', dpi=dpi, metadata={'Software': None})
    data = base64.b64encode(file.getvalue()).decode()
  return f'<img alt="" src="data:image/png;base64,{data}">'
