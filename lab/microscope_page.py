"""Measures rules under the microscope and writes papers/bench/microscope.md.

  python -m lab.microscope_page              measures what is not stored, writes both
  python -m lab.microscope_page --write      writes the page from stored results

One run per seed: a warm start, then UPDATES real updates. pi is the last policy and mu
the one of k updates before. For every rule and k, `measure` computes the expected
update and how it relates to the true gradient of the accuracy J:

- cosine: the angle between the expected update and grad J; 1 is the right direction;
- alignment at n responses: E[g . u] / sqrt(E |g|^2), u = grad J / |grad J|, of the
  update g of one minibatch: the cosine with its noise, since E |g|^2 counts both. It is
  exact, except for rules whose bounds depend on the minibatch: these are sampled at
  each n, beside GRPO on the same minibatches, whose exact moments correct the means;
- on policy: the cosine with the expected update of GRPO on fresh data, whose advantage
  is divided by the standard deviation of the group and so is not along grad J;
- size: the norm of the expected update over that of GRPO on fresh data;
- entropy: the change of a response's entropy for a step of length 1, nats.
"""

import functools
import json
import math
import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

from bapo_jax.algorithms import clip, knobs, loss, masks
from bapo_jax.runtime import files, markdown
from lab import microscope, sweep
from lab.microscope import GROUP, GRPO, Rule, Tables, Task

FOLDER = pathlib.Path(__file__).parents[1] / 'papers' / 'bench'
SEEDS = (0, 1, 2, 3)
STALENESS = (0, 1, 4, 16, 64)  # updates between mu and pi
UPDATES, LR, WARM = 64, 5e-4, 300
# Minibatches of each size, for rules that read the whole minibatch.
MINIBATCHES = {16: 2048, 64: 512, 256: 128, 1024: 48}


def fixed(low: float, high: float, dual: float = math.inf) -> Any:
  """Returns the clip rule with these bounds."""
  k = knobs.FixedClip(low=low, high=high, dual=dual)
  return functools.partial(clip.fixed, k=k)


def balanced(target: float) -> Rule:
  """Returns Balanced PO with this target share."""
  k = knobs.BalancedClip(target=target)
  return Rule(clip=functools.partial(clip.balanced, k=k), whole_batch=True)


def free(objective: Any, mask: Any = masks.nothing, whole_batch: bool = False) -> Rule:
  """Returns a rule without clip bounds."""
  return Rule(objective, clip.unclipped, mask, whole_batch=whole_batch)


UNCAPPED = functools.partial(loss.tis, k=knobs.TisLoss(cap=math.inf))
RULES = {
  'GRPO': GRPO,
  'clip-higher': Rule(clip=fixed(0.8, 1.28)),
  'dual clip': Rule(clip=fixed(0.8, 1.2, 3.0)),
  'balanced .42': balanced(0.42),
  'balanced .50': balanced(0.5),
  'unclipped': free(loss.clipped),
  'REINFORCE': free(loss.reinforce),
  'TIS': free(loss.tis),
  'CISPO': Rule(loss.cispo, fixed(0.0, 1.2)),
  'GSPO': Rule(loss.sequence, fixed(0.9997, 1.0004)),
  'SAPO': free(loss.sapo),
  'VESPO': free(loss.vespo),
  'ASPO': Rule(loss.aspo, fixed(0.8, 1.2)),
  'FIPO': Rule(loss.fipo, fixed(0.8, 1.2)),
  'DCPO': Rule(clip=clip.dcpo),
  'DPPO-TV': free(UNCAPPED, masks.dppo_tv),
  'DPPO-KL': free(UNCAPPED, masks.dppo_kl),
  'IcePop': free(UNCAPPED, masks.icepop),
  'KPop': free(UNCAPPED, masks.kpop),
  'M2PO': free(loss.clipped, masks.m2po, whole_batch=True),
  'OPSM': Rule(clip=fixed(0.8, 1.2), mask=masks.opsm),
}
# The fixed bounds among which the best is taken, to compare with a search.
GRID = {
  f'[{low:g}, {high:g}]': Rule(clip=fixed(low, high))
  for low in (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
  for high in (1.1, 1.2, 1.28, 1.5, 2.0, 3.0, math.inf)
}


def measure(seed: int, path: pathlib.Path, commit: str, echo: Any = print) -> None:
  """Writes staleness -> rule -> figures of a seed; skips what `path` has."""
  found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
  if all(str(k) in found for k in STALENESS):
    return
  task = microscope.enumerate_task()
  kept = microscope.train(
    microscope.warm_start(task, WARM, seed), task, UPDATES, lr=LR, seed=seed
  )
  logp_NT = microscope.table(kept[-1], task)
  slopes_KP = microscope.slopes(kept[-1], task)
  truth_P = microscope.true_gradient(slopes_KP, logp_NT, task)
  spread_P = microscope.entropy_gradient(slopes_KP, logp_NT, task)
  inner_NTT = microscope.inner(task, slopes_KP)
  fresh = Tables(logp_NT, logp_NT)
  on_policy = microscope.moments([GRPO], task, fresh, slopes_KP, inner_NTT)
  on_policy_P = on_policy.mean_RP[0]
  size = math.sqrt(microscope.dot(on_policy_P, on_policy_P))
  found |= {'commit': commit, 'accuracy': float(microscope.accuracy(logp_NT, task))}
  for k in STALENESS:
    if str(k) in found:
      continue
    tables = Tables(logp_NT, microscope.table(kept[-1 - k], task))
    rows: dict[str, Any] = {}
    for name, (update_P, alignment) in updates(
      task, tables, (slopes_KP, inner_NTT), truth_P, seed
    ).items():
      length = math.sqrt(microscope.dot(update_P, update_P)) or math.nan
      rows[name] = {
        'cosine': microscope.cosine(update_P, truth_P),
        'on policy': microscope.cosine(update_P, on_policy_P),
        'size': length / size,
        'entropy': microscope.dot(update_P, spread_P) / length,
        'alignment': alignment,
      }
    found[str(k)] = {
      'spread of log r': _spread(tables, task),
      'accuracy of mu': float(microscope.accuracy(tables.logq_NT, task)),
      'rules': rows,
    }
    files.write(path, json.dumps(found, indent=1) + '\n')
    echo(f'seed {seed}, {k} updates old: {len(rows)} rules', flush=True)


def updates(
  task: Task, tables: Tables, slopes: tuple[Array, Array], truth_P: Array, seed: int
) -> dict[str, tuple[Array, dict[str, float]]]:
  """Returns rule -> (expected update, alignment by number of responses).

  `slopes` are those of the policy and their inner products.
  """
  slopes_KP, _ = slopes
  exact = {n: rule for n, rule in (RULES | GRID).items() if not rule.whole_batch}
  read = {name: rule for name, rule in RULES.items() if rule.whole_batch}
  unit_P = truth_P / jnp.linalg.norm(truth_P)
  moments = microscope.moments(list(exact.values()), task, tables, *slopes)
  found, squares = {}, {}
  for name, update_P, square in zip(exact, *moments, strict=True):
    signal = microscope.dot(update_P, update_P)
    squares[name] = {
      n: signal + max(0.0, square - signal) * GROUP / n for n in MINIBATCHES
    }
    along = microscope.dot(update_P, unit_P)
    found[name] = update_P, {str(n): _ratio(along, x) for n, x in squares[name].items()}
  known_P, aligned = found['GRPO'][0], {name: {} for name in read}
  for n, count in MINIBATCHES.items():
    # GRPO on the same minibatches has known moments and the same heavy tail: very large
    # ratios of tokens with A < 0, which no bound of a search cuts.
    rules, unit_VP = [GRPO, *read.values()], unit_P[None]
    draw = functools.partial(microscope.sampled, rules, task, tables, slopes_KP)
    first, *others = draw(unit_VP, n, count, seed)
    known = microscope.dot(known_P, unit_P)
    drawn_P = microscope.gradient(slopes_KP, task, first.weight_NT)
    for name, each in zip(read, others, strict=True):
      along, slope = controlled(each.along_MV[:, 0], first.along_MV[:, 0], known)
      square, _ = controlled(each.square_M, first.square_M, squares['GRPO'][n])
      aligned[name][str(n)] = _ratio(along, max(square, along**2))
      update_P = microscope.gradient(slopes_KP, task, each.weight_NT)
      found[name] = update_P - slope * (drawn_P - known_P), aligned[name]
  return found


def controlled(y_M: np.ndarray, x_M: np.ndarray, mean: float) -> tuple[float, float]:
  """Returns (the mean of y, b): the mean of y - b (x - mean), b of least variance."""
  spread = float(x_M.var())
  slope = float(((x_M - x_M.mean()) * (y_M - y_M.mean())).mean()) / (spread or math.inf)
  return float(y_M.mean()) - slope * (float(x_M.mean()) - mean), slope


def _ratio(along: float, square: float) -> float:
  return float(along / math.sqrt(square)) if square else math.nan


def _spread(tables: Tables, task: Task) -> float:
  """Returns the standard deviation of log r over the tokens of mu, nats."""
  share_NT = tables.seen(task)[:, None] * task.mask_NT
  gap_NT = tables.logp_NT - tables.logq_NT
  mean = (share_NT * gap_NT).sum() / share_NT.sum()
  return float(jnp.sqrt((share_NT * (gap_NT - mean) ** 2).sum() / share_NT.sum()))


def over_seeds(runs: list[dict[str, Any]], *path: str) -> tuple[float, float]:
  """Returns (mean, half of the 95 % t interval) over seeds of a figure."""
  values = []
  for run in runs:
    value: Any = run
    for key in path:
      value = value[key]
    values.append(value)
  return interval(np.asarray(values, float))


def interval(values: np.ndarray) -> tuple[float, float]:
  """Returns the mean and half of its 95 % t interval; 0 for a single value."""
  if len(values) < 2:
    return float(values.mean()), 0.0
  found = stats.ttest_1samp(values, 0).confidence_interval()
  return float(values.mean()), float(found.high - found.low) / 2


def contest(
  runs: list[dict[str, Any]], k: int, n: int, rule: str
) -> tuple[str, float, float]:
  """Compares a rule with the best fixed bounds; returns (bounds, gap, half interval).

  The best bounds have the largest mean alignment over the seeds, at this staleness and
  batch size: chosen with hindsight, which favours them.
  """

  def values(name: str) -> np.ndarray:
    return np.asarray([r[str(k)]['rules'][name]['alignment'][str(n)] for r in runs])

  best = max(GRID, key=lambda name: values(name).mean())
  return best, *interval(values(rule) - values(best))


def page(runs: list[dict[str, Any]]) -> str:
  """Returns the page: a table of cosines, one of alignment, and the contest."""
  rows = {}
  for what, n in (('cosine', None), ('alignment', '16'), ('alignment', '1024')):
    table = []
    for name in RULES:
      cells = []
      for k in STALENESS:
        tail = [what] if n is None else [what, n]
        mean, half = over_seeds(runs, str(k), 'rules', name, *tail)
        cells.append(f'{mean:.3f} ± {half:.3f}')
      table.append((name, *cells))
    head = ('rule', *(f'k = {k}' for k in STALENESS))
    rows[what, n] = markdown.table(table, head, 'l' + 'r' * len(STALENESS))
  spread = ', '.join(
    f'{over_seeds(runs, str(k), "spread of log r")[0]:.3f}' for k in STALENESS
  )
  contests = []
  for k in STALENESS:
    for n in MINIBATCHES:
      cells = []
      for rule in ('balanced .42', 'balanced .50'):
        best, gap, half = contest(runs, k, n, rule)
        cells.append(f'{gap:+.3f} ± {half:.3f}')
      contests.append((str(k), str(n), best, *cells))
  found = markdown.table(
    contests,
    ('k', 'responses', 'best fixed bounds', 'balanced .42 less best', '.50 less best'),
    'rrlrr',
  )
  return '\n\n'.join(
    [
      '# The microscope: rules against the true gradient',
      f'Written by `python -m lab.microscope_page`; {len(runs)} seeds, means with 95 % '
      't intervals over seeds. Definitions: [lab/microscope_page.py]'
      '(../../lab/microscope_page.py). The policy has '
      f'{microscope.transformer.count(microscope.SPEC):,} parameters, and every one of '
      f'its {microscope.SYMBOLS**microscope.POSITIONS:,} responses to '
      f'{microscope.PROMPTS} prompts is enumerated. k is the number of updates between '
      f'the policy that sampled and the policy that learns; the standard deviation of '
      f'log r is {spread}.',
      '![cosine and alignment against staleness](figures/microscope.png)',
      '## Cosine of the expected update and the true gradient',
      rows['cosine', None],
      '## Alignment of one minibatch of 16 responses',
      rows['alignment', '16'],
      '## Alignment of one minibatch of 1024 responses',
      rows['alignment', '1024'],
      '## A search against the best fixed bounds',
      'The best of 35 pairs of fixed bounds, chosen with hindsight at each staleness '
      'and batch size.',
      found,
    ]
  )


def draw(runs: list[dict[str, Any]]) -> Any:
  """Returns a figure: a panel per quantity, a line per rule over staleness."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13, 4.6), layout='constrained')
  axes = figure.subplots(1, 3, sharey=False)
  styles = ('-', '--', ':')
  panels = (
    ('cosine of the expected update with grad J', ['cosine']),
    ('alignment of 16 responses', ['alignment', '16']),
    ('alignment of 1024 responses', ['alignment', '1024']),
  )
  x = np.arange(len(STALENESS))
  for axis, (title, path) in zip(axes, panels, strict=True):
    for i, name in enumerate(RULES):
      y = [over_seeds(runs, str(k), 'rules', name, *path)[0] for k in STALENESS]
      axis.plot(x, y, styles[i // 10], color=f'C{i % 10}', label=name, linewidth=1.4)
    axis.set_title(title, fontsize=10)
    axis.set_xticks(x, [str(k) for k in STALENESS])
    axis.set_xlabel('updates between mu and pi')
  axes[-1].legend(fontsize=7, loc='center left', bbox_to_anchor=(1.0, 0.5))
  return figure


def main(*flags: str) -> None:
  """Measures if asked to, then writes page and figure."""
  results = FOLDER / 'results' / 'microscope'
  results.mkdir(parents=True, exist_ok=True)
  (FOLDER / 'figures').mkdir(exist_ok=True)
  if '--write' not in flags:
    commit = sweep.commit()
    for seed in SEEDS:
      measure(seed, results / f'{seed}.json', commit)
  runs = [json.loads((results / f'{seed}.json').read_text()) for seed in SEEDS]
  (FOLDER / 'microscope.md').write_text(page(runs) + '\n')
  draw(runs).savefig(FOLDER / 'figures' / 'microscope.png', dpi=110)


if __name__ == '__main__':
  main(*sys.argv[1:])
