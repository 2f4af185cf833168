"""One page about a run: what happened, in words, curves, tables and samples.

1. numbers: means over steps, the rest of the wall time;
2. figures: curves.png and phases.png;
3. words: report.md for people, report.json for programs.
"""

import itertools
import json
import math
import pathlib
import re

import numpy as np

from bapo_jax.runtime import metrics

BLUE, ORANGE, GREY = '#0072B2', '#D55E00', '#777777'  # told apart by colour-blind eyes


PANELS = (  # title, vertical axis, stage, quantities
  ('Reward of the sampled responses', 'mean reward', 'rollout', 'reward'),
  ('Accuracy on held-out problems', 'accuracy ± standard error', 'eval', 'accuracy'),
  ('Entropy of the policy', 'nats per token', 'loss', 'entropy'),
  ('Positive share', 'share of the gradient', 'clip', 'share share_start'),
  ('Clip bounds', 'probability ratio', 'clip', 'high low'),
  ('Tokens clipped', 'share', 'clip', 'fraction_positive fraction_negative fraction'),
  ('Gradient norm', 'norm', 'learner', 'grad_norm'),
  ('Response length', 'tokens', 'rollout', 'length_right length_wrong length'),
)
LABELS = dict(share='bounds used', share_start='start bounds', fraction='all tokens')
LABELS |= dict(fraction_positive='A > 0', fraction_negative='A < 0')
LABELS |= dict(length='all', length_right='right', length_wrong='wrong')
MAIN = """
  rollout/reward rollout/accuracy rollout/length rollout/length_right rollout/length_wrong
  rollout/truncated rollout/tokens_per_s rollout/logp_diff batch/filled batch/learnable
  batch/age clip/share_start clip/share clip/low clip/high clip/moved clip/target_met
  clip/fraction loss/entropy loss/kl learner/grad_norm time/step
"""


def series(rows, name):
  """(steps, values) of the rows in which the metric is there and finite."""
  pairs = [(r['step'], r[name]) for r in rows if math.isfinite(r.get(name, math.nan))]
  step_N, value_N = np.asarray(pairs, float).reshape(-1, 2).T
  return step_N, value_N


def mean(rows, name) -> float:
  """Mean over the rows that have the metric; nan where none has."""
  _, value_N = series(rows, name)
  return float(value_N.mean()) if len(value_N) else math.nan


def fifths(rows):
  """The first and the last fifth of the training steps, one step at least."""
  rows = [r for r in rows if any(name.startswith('rollout/') for name in r)]
  n = max(1, len(rows) // 5)
  return rows[:n], rows[-n:]


def running_mean(value_N, width: int):
  """Mean over a centred window of `width` (odd), which narrows at both ends."""
  sum_N = np.concatenate([[0.0], np.cumsum(value_N)])
  i = np.arange(len(value_N))
  half = np.minimum(width // 2, np.minimum(i, len(value_N) - 1 - i))
  return (sum_N[i + half + 1] - sum_N[i - half]) / (2 * half + 1)


def length_ratio(rows) -> float:
  """Mean wrong length over mean right length; nan where either is missing."""
  right = mean(rows, 'rollout/length_right')
  return mean(rows, 'rollout/length_wrong') / right if right else math.nan


def with_rest(phases, wall_s: float) -> dict[str, float]:
  """The phases, longest first, and under 'other' what they leave of the wall time."""
  named = {k: float(v) for k, v in phases.items() if k != 'other'}
  named = dict(sorted(named.items(), key=lambda item: -item[1]))
  return {**named, 'other': max(0.0, wall_s - sum(named.values()))}


def plain(tree):
  """Plain Python values; a number that is not finite becomes None, JSON's null."""
  if isinstance(tree, dict):
    return {k: plain(v) for k, v in tree.items()}
  if hasattr(tree, 'item'):  # a NumPy or JAX scalar
    tree = tree.item()
  return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _figure(width: float, height: float):
  from matplotlib import figure  # slow to import; without pyplot a figure is Agg's

  fig = figure.Figure(figsize=(width, height), dpi=150, layout='constrained')
  fig.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
  return fig


def _dress(ax, title):
  ax.set_title(title, loc='left', fontsize=11, fontweight='bold')
  ax.spines[['top', 'right']].set_visible(False)
  ax.tick_params(labelsize=9)


def _curve(ax, step_N, value_N, **line):
  """The raw series thin and pale, its running mean strong; few points are dotted."""
  width = len(value_N) // 20 | 1
  if width > 1:
    ax.plot(step_N, value_N, color=line['color'], linewidth=0.7, alpha=0.45)
  if len(value_N) <= 20:
    line |= {'marker': 'o', 'markersize': 4}
  ax.plot(step_N, running_mean(value_N, width), linewidth=1.8, **line)


def _errors(ax, rows, **line):
  """Evaluations: few points, each with its standard error where it has one."""
  step_N, value_N = series(rows, 'eval/accuracy')
  error = dict(zip(*series(rows, 'eval/stderr'), strict=True))
  error_N = [error.get(s, 0.0) for s in step_N]
  ax.errorbar(
    step_N, value_N, error_N, linewidth=1.5, marker='o', ms=4, capsize=3, **line
  )


def _panel(ax, rows, target, title, unit, stage, quantities):
  names = [f'{stage}/{quantity}' for quantity in quantities.split()]
  _dress(ax, title)
  for name, colour in zip(names, (BLUE, ORANGE, GREY), strict=False):
    step_N, value_N = series(rows, name)
    if name == 'eval/accuracy' and len(value_N):
      _errors(ax, rows, color=colour)
    elif len(value_N):
      label = name.split('/')[1]
      _curve(ax, step_N, value_N, color=colour, label=LABELS.get(label, label))
  if not ax.has_data():
    ax.text(0.5, 0.5, 'not recorded', color=GREY, ha='center', transform=ax.transAxes)
    ax.set(xticks=[], yticks=[])
    return
  if 'learner/grad_norm' in names and value_N.min() > 0:
    # one spike of 100 would flatten the rest of a linear axis
    ax.set_yscale('log' if value_N.max() > 30 * np.median(value_N) else 'linear')
  if 'clip/share' in names and target is not None:
    ax.axhline(target, color='black', linewidth=1, linestyle='--', label='target')
  ax.set_xlabel('step', fontsize=9)
  ax.set_ylabel(unit, fontsize=9)
  ax.grid(color='0.9', linewidth=0.8)
  ax.xaxis.get_major_locator().set_params(integer=True)
  above = dict(loc='lower right', bbox_to_anchor=(1, 0.99), borderaxespad=0.2)
  if len(names) > 1:  # above the axes, where the legend can hide no curve
    ax.legend(**above, ncols=4, fontsize=8, frameon=False, handlelength=1.2)


def draw_curves(path, rows, target=None):
  """Eight panels over the steps, as one PNG."""
  fig = _figure(11, 13)
  steps = [r['step'] for r in rows] or [0]
  margin = max(1, 0.03 * (max(steps) - min(steps)))
  for ax, panel in zip(fig.subplots(4, 2).flat, PANELS, strict=True):
    _panel(ax, rows, target, *panel)
    if ax.get_xlabel():  # all panels over the same steps
      ax.set_xlim(min(steps) - margin, max(steps) + margin)
  fig.savefig(path)


def draw_phases(path, phases, wall_s: float):
  """Horizontal bars of the wall time; `phases` as `with_rest` gives them."""
  fig = _figure(8, 1.0 + 0.35 * len(phases))
  ax = fig.subplots()
  percent = [100 * s / wall_s for s in phases.values()]
  colours = [GREY if name == 'other' else BLUE for name in phases]
  bars = ax.barh(list(phases), percent, color=colours, height=0.7)
  text = [f'{100 * s / wall_s:.1f} %  ({duration(s)})' for s in phases.values()]
  ax.bar_label(bars, text, padding=4, fontsize=9)
  _dress(ax, 'Wall time by phase')
  ax.set_xlabel('percent of the wall time', fontsize=9)
  ax.set_xlim(0, max(1.0, *percent) * 1.3)  # room for the labels
  ax.invert_yaxis()
  fig.savefig(path)


def duration(s: float) -> str:
  """'1 h 02 min', '3 min 05 s' or '4.2 s'."""
  if s < 60:
    return f'{s:.1f} s'
  m, s = divmod(round(s), 60)
  return f'{m} min {s:02d} s' if m < 60 else f'{m // 60} h {m % 60:02d} min'


def summary(before, after, steps, wall_s, peak_rss_bytes) -> str:
  """What happened, in words."""
  change = after['accuracy'] - before['accuracy']
  clear = abs(change) > 2 * math.hypot(before['stderr'], after['stderr'])
  was, now = (f'{e["accuracy"]:.3f} ± {e["stderr"]:.3f}' for e in (before, after))
  n = ' and '.join(dict.fromkeys(str(e['n']) for e in (before, after)))
  return (
    f'Accuracy went from {was} to {now} on {n} held-out problems (± is one standard '
    f'error): a change of {change:+.3f}, which is '
    f'{"more than" if clear else "within"} two standard errors of the difference'
    f'{"" if clear else ", so it may be chance"}. The run took {steps} steps, '
    f'{duration(wall_s)} of wall time and {peak_rss_bytes / 2**30:.2f} GiB of memory '
    'at its peak.'
  )


def fence(text: str, limit: int = 1500) -> str:
  """`text` as a code block that no backticks inside it can close; the middle is cut."""
  if len(text) > limit:
    half = limit // 2
    cut = f'[... {len(text) - 2 * half} characters left out ...]'
    text = f'{text[:half]}\n{cut}\n{text[-half:]}'
  ticks = '`' * max([3, *(len(run) + 1 for run in re.findall('`+', text))])
  return f'{ticks}text\n{text}\n{ticks}'


def _sample_blocks(before, after):
  for i, pair in enumerate(itertools.zip_longest(before, after), 1):
    yield f'### Sample {i}'
    asked = None
    for when, sample in zip(('Before', 'After'), pair, strict=True):
      if sample is None:
        continue
      if sample['problem'] != asked:
        asked = sample['problem']
        yield f'Problem (answer: `{sample["answer"]}`)'
        yield fence(asked)
      yield f'{when}: **{"right" if sample["correct"] else "wrong"}**'
      yield fence(sample['response'])


def _change_table(rows):
  first, last = fifths(rows)
  yield '| metric | first fifth | last fifth | meaning |\n|:--|--:|--:|:--|'
  for name in MAIN.split():
    if len(series(rows, name)[0]):
      meaning = metrics.GLOSSARY[name].replace('|', '\\|')  # | would end the cell
      a, b = mean(first, name), mean(last, name)
      yield f'| `{name}` | {a:.4g} | {b:.4g} | {meaning} |'


def _phase_table(phases, wall_s):
  yield '| phase | seconds | percent of wall |\n|:--|--:|--:|'
  for name, s in {**phases, '**wall**': wall_s}.items():
    yield f'| {name} | {s:.1f} | {100 * s / wall_s:.1f} |'


def write(
  workdir,
  *,
  title: str,
  config_text: str,
  config_hash: str,
  eval_before: dict,
  eval_after: dict,
  samples_before: list[dict],
  samples_after: list[dict],
  phases: dict[str, float],
  wall_s: float,
  peak_rss_bytes: int,
  steps: int,
  target: float | None = None,
) -> pathlib.Path:
  """Writes curves.png, phases.png, report.md and report.json; returns report.md's path.

  Args:
    workdir: holds metrics.jsonl.
    eval_before, eval_after: accuracy, stderr, n.
    samples_before, samples_after: dicts of problem, answer, response, correct.
    phases: name -> seconds; what they leave of wall_s is shown as 'other'.
    target: the positive share aimed at, drawn as a line.
  """
  workdir = pathlib.Path(workdir)
  rows = metrics.read(workdir)
  full = with_rest(phases, wall_s)
  draw_curves(workdir / 'curves.png', rows, target)
  draw_phases(workdir / 'phases.png', full, wall_s)
  blocks = [
    f'# {title}',
    summary(eval_before, eval_after, steps, wall_s, peak_rss_bytes),
    '![Curves over the training steps](curves.png)',
    '## Where the time went',
    '![Wall time by phase](phases.png)',
    '\n'.join(_phase_table(full, wall_s)),
    '## First fifth against last fifth of the steps',
    '\n'.join(_change_table(rows)),
    '## Responses before and after',
    *_sample_blocks(samples_before, samples_after),
    f'## Config `{config_hash}`',
    fence(config_text, limit=len(config_text)),
  ]
  (workdir / 'report.md').write_text('\n\n'.join(blocks) + '\n', encoding='utf-8')
  first, last = fifths(rows)
  ratios = {'first_fifth': length_ratio(first), 'last_fifth': length_ratio(last)}
  facts = dict(eval_before=eval_before, eval_after=eval_after, wall_s=wall_s)
  facts |= dict(peak_rss_bytes=peak_rss_bytes, phases=phases, steps=steps)
  facts |= dict(clip_moved_fraction=mean(rows, 'clip/moved'), length_ratio=ratios)
  last_row = rows[-1] if rows else {}
  facts |= dict(config_hash=config_hash, responses=last_row.get('rollout/responses'))
  text = json.dumps(plain(facts), indent=2, allow_nan=False)
  (workdir / 'report.json').write_text(text + '\n')
  return workdir / 'report.md'
