"""Measures rules under the microscope and writes papers/bench/microscope.md.

  python -m lab.microscope_page              measures what is not stored, writes both
  python -m lab.microscope_page --write      writes the page from stored results

One run per seed: a warm start, then UPDATES real updates. pi is the last policy and mu
the one of k updates before. For every rule and k, `measure` computes the expected
update and how it relates to the true gradient of the accuracy J:

- cosine: the angle between the expected update and grad J; 1 is the right direction;
- alignment at n responses: E[g . u] / sqrt(E |g|^2), u = grad J / |grad J|, of the
  update g of one minibatch: the cosine with its noise, since E |g|^2 counts both. A
  rule whose bounds do not depend on the minibatch has it exactly but for E |g|^2 of
  one group, which GROUPS groups estimate; the others are sampled at each n;
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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from bapo_jax.algorithms import clip, knobs, loss, masks
from bapo_jax.runtime import markdown
from bapo_jax.types import Tree
from lab import microscope, sweep
from lab.microscope import GROUP, GRPO, Rule, Tables, Task

FOLDER = pathlib.Path(__file__).parents[1] / 'papers' / 'bench'
SEEDS = (0, 1, 2, 3)
STALENESS = (0, 1, 4, 16, 64)  # updates between mu and pi
UPDATES, LR, WARM = 64, 5e-4, 300
GROUPS = 4096  # groups that estimate the noise of a group
# Minibatches of each size, for rules that read the whole minibatch.
MINIBATCHES = {16: 2048, 64: 1024, 256: 512, 1024: 128}


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
  """Writes staleness -> rule -> figures of a seed, and adds what `path` lacks."""
  found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
  task = microscope.enumerate_task()
  kept = microscope.train(
    microscope.warm_start(task, WARM, seed), task, UPDATES, lr=LR, seed=seed
  )
  params = kept[-1]
  logp_NT = microscope.table(params, task)
  truth = microscope.true_gradient(params, task)
  spread = microscope.entropy_gradient(params, task)
  fresh = Tables(logp_NT, logp_NT)
  on_policy = microscope.gradient(params, task, microscope.expected(GRPO, task, fresh))
  size = math.sqrt(microscope.dot(on_policy, on_policy))
  found['accuracy'] = float(microscope.accuracy(logp_NT, task))
  for k in STALENESS:
    tables = Tables(logp_NT, microscope.table(kept[-1 - k], task))
    at = found.setdefault(str(k), {'rules': {}})
    at.setdefault('commit', commit)
    at['spread of log r'] = _spread(tables, task)
    at['accuracy of mu'] = float(microscope.accuracy(tables.logq_NT, task))
    for name, rule in (RULES | GRID).items():
      if name in at['rules']:
        continue
      update, alignment = _aligned(rule, task, tables, params, truth, seed)
      length = math.sqrt(microscope.dot(update, update)) or math.nan
      at['rules'][name] = {
        'cosine': microscope.cosine(update, truth),
        'on policy': microscope.cosine(update, on_policy),
        'size': length / size,
        'entropy': microscope.dot(update, spread) / length,
        'alignment': alignment,
      }
    path.write_text(json.dumps(found, indent=1) + '\n')
    echo(f'seed {seed}, {k} updates old: {len(at["rules"])} rules', flush=True)


def _aligned(
  rule: Rule, task: Task, tables: Tables, params: Tree, truth: Tree, seed: int
) -> tuple[Tree, dict[str, float]]:
  """Returns (expected update, alignment by number of responses)."""
  unit = jax.tree.map(lambda x: x[None] / optax.tree.norm(truth), truth)
  draw = functools.partial(microscope.sampled, rule, task, tables, params, unit)
  if rule.whole_batch:
    draws = {n: draw(n, count, seed) for n, count in MINIBATCHES.items()}
    update = microscope.gradient(params, task, draws[max(draws)].weight_NT)
    return update, {
      str(n): _ratio(d.along_MV.mean(), d.square_M.mean()) for n, d in draws.items()
    }
  update = microscope.gradient(params, task, microscope.expected(rule, task, tables))
  signal = microscope.dot(update, update)
  noise = max(0.0, float(draw(GROUP, GROUPS, seed).square_M.mean()) - signal)
  along = microscope.dot(update, truth) / float(optax.tree.norm(truth))
  return update, {
    str(n): _ratio(along, signal + noise * GROUP / n) for n in MINIBATCHES
  }


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
