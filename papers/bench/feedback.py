"""The checks, tests and words of protocol 3, computed from its stored results.

1. `DIFFERENCES` defines every comparison of ../protocol3.md, its margin and the checks
   without which it shows nothing;
2. `checks` computes C2 to C6;
3. `word` turns a difference by seed into a word of the protocol;
4. `tables` has the verdicts, the checks and the arms of one experiment for its page.

Results are read as lab.experiments.read_runs gives them: run -> result.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from bapo_jax.algorithms import clip
from bapo_jax.runtime import markdown
from bapo_jax.training.evaluate import mean_and_error
from lab.evidence import PREMISE_ABSENT, relation
from lab.experiments import Result, run_name
from lab.outcomes import OUTCOMES, Cell, cells, contrast, friedman, holm
from papers.bench import bounds
from papers.bench.experiments import partner

Results = Mapping[str, Result]
FLIPS = 999_999  # random sign flips; all of them where there are fewer
SIGNIFICANT = 0.05
SEEN, OPPOSITE = 'seen', 'opposite'
NO_EFFECT, UNDECIDED = 'no effect of size', 'undecided'
RATES = ('lr0.0006', 'lr0.0008')
SEARCHING: dict[str, bounds.Search] = {
  'yoked': 'recipe',
  'yoked_s1': 'balanced',
  'yoked_depths': 'recipe',
}
FIXED = {  # experiment -> lower bound of an arm -> its arms, by upper bound
  'yoked': (
    ('low80_high120', 'low80_high200'),
    ('low95_high120', 'low95_high200'),
  ),
  'yoked_s1': (
    ('low80_high120', 'low80_high300'),
    ('low90_high120', 'low90_high300'),
  ),
}
MARGIN = {'yoked': 0.02, 'yoked_s1': 0.01, 'yoked_depths': 0.0}


class Difference(NamedTuple):
  """A comparison: the mean over the cells `plus`, less the mean over `minus`."""

  name: str
  text: str
  experiment: str
  plus: tuple[Cell, ...]
  minus: tuple[Cell, ...]
  claimed: int = 1  # the sign that is claimed; 0 for none
  checks: tuple[str, ...] = ()
  family: str = ''  # comparisons of one family share Holm's correction


def at(arms: Sequence[str], levels: Sequence[str]) -> tuple[Cell, ...]:
  """Returns the cells of some arms at some levels; () of levels for no factor."""
  return (
    tuple((arm, level) for arm in arms for level in levels)
    if levels
    else tuple((arm,) for arm in arms)
  )


def legs(experiment: str, levels: Sequence[str], family: str) -> list[Difference]:
  """Returns H3 and H4: the main effects of the two bounds."""
  low, high = FIXED[experiment]
  columns = [*zip(low, high, strict=True)]
  make = functools.partial(Difference, experiment=experiment, family=family)
  return [
    make(
      'H3',
      'a higher lower bound',
      plus=at(high, levels),
      minus=at(low, levels),
      checks=('C3',),
    ),
    make(
      'H4',
      'a higher upper bound',
      plus=at(columns[1], levels),
      minus=at(columns[0], levels),
      claimed=0,
      checks=('C3',),
    ),
  ]


R, B, D = 'yoked', 'yoked_s1', 'yoked_depths'
DIFFERENCES = (
  Difference(
    'H1',
    '`recipe` less `yoked`: feedback',
    R,
    at(('recipe',), RATES),
    at(('yoked',), RATES),
    checks=('C4', 'C6'),
  ),
  Difference(
    'H2',
    '`recipe` less [.95, 2.0], its wide end',
    R,
    at(('recipe',), RATES),
    at(('low95_high200',), RATES),
    checks=('C2',),
    family='R',
  ),
  *legs(R, RATES, 'R'),
  Difference(
    'H5',
    '`yoked` less `coin`: the schedule',
    R,
    at(('yoked',), RATES),
    at(('coin',), RATES),
    claimed=0,
    checks=('C2', 'C5', 'C6'),
    family='R',
  ),
  Difference(
    'H1',
    '`balanced` less `yoked`: feedback',
    B,
    at(('balanced',), ()),
    at(('yoked',), ()),
    checks=('C4', 'C6'),
  ),
  *legs(B, (), ''),
  *(
    Difference(
      'H7',
      f'`recipe` less {text}, at {depth}',
      D,
      at(('recipe',), (depth,)),
      at((other,), (depth,)),
      checks=checks,
      family='D',
    )
    for depth in ('depth4', 'depth16')
    for other, text, checks in (
      ('yoked', '`yoked`: feedback', ('C6',)),
      ('low80_high120', '[.8, 1.2]', ()),
    )
  ),
)


class Tested(NamedTuple):
  """A difference with its test."""

  mean: float
  interval: tuple[float, float]  # 95 %
  inner: tuple[float, float]  # 90 %, for TOST
  p: float  # of sign flips, before any correction
  values_S: np.ndarray  # by seed


def by_seed(difference: Difference, results: Results, outcome: str) -> np.ndarray:
  """Returns the difference of the means over the cells, for each seed that has all."""
  total_S = contrast(results, difference.plus, difference.minus, outcome)
  return total_S / len(difference.plus)


def tested(values_S: np.ndarray) -> Tested:
  """Tests whether the mean of differences by seed is 0."""
  values_S = np.round(values_S, 12)  # equal sums of signs are equal
  flips = stats.permutation_test(
    (values_S,),
    np.mean,
    permutation_type='samples',
    n_resamples=FLIPS,
    vectorized=True,
    batch=20_000,
    rng=np.random.default_rng(0),
  )
  return Tested(
    float(values_S.mean()),
    t_interval(values_S, 0.95),
    t_interval(values_S, 0.90),
    float(flips.pvalue),
    values_S,
  )


def t_interval(values_S: np.ndarray, level: float) -> tuple[float, float]:
  """Returns the t interval of the mean."""
  test = stats.ttest_1samp(values_S, 0.0)
  low, high = test.confidence_interval(level)
  return float(low), float(high)


def word(test: Tested, p: float, margin: float, claimed: int) -> str:
  """Returns the protocol's word for a difference; p is corrected where it should be."""
  inside = margin > 0 and -margin < test.inner[0] and test.inner[1] < margin
  if p < SIGNIFICANT:
    as_claimed = not claimed or claimed * test.mean > 0
    return (SEEN if as_claimed else OPPOSITE) + ', inside the margin' * inside
  return NO_EFFECT if inside else UNDECIDED


@functools.cache
def path(search: bounds.Search) -> list[tuple[float, float]]:
  """Returns the bounds at each point of a search's path, as results store them."""
  if search == 'recipe':
    k = clip.PublicCode()
    lows, highs = clip.clamped(k.low, k.low_step), clip.clamped(k.high, k.high_step)
    points = [(low, highs[0]) for low in lows]
    points += [(lows[-1], high) for high in highs[1:]]
  else:
    rule = bounds.SEARCHES['balanced']
    assert isinstance(rule, clip.Balanced)
    lows = clip.points(rule.low, rule.low_step)
    highs = clip.points(rule.high, rule.high_step)
    points = [(lows[0], high) for high in highs]
    points += [(low, highs[-1]) for low in lows[1:]]
  return [(float(str(low)), float(str(high))) for low, high in points]


def column(result: Result, name: str) -> np.ndarray:
  """Returns a column of a result's updates."""
  return np.asarray(result['updates'][name])


def evidence_of(result: Result) -> np.ndarray:
  """Marks the updates [U] whose tokens gave the search evidence."""
  return column(result, 'no_evidence') == 0


def applied_point(result: Result, search: bounds.Search) -> np.ndarray:
  """Returns the point [U] of the search's path at which the applied bounds are."""
  index = {point: i for i, point in enumerate(path(search))}
  pairs = zip(
    column(result, 'low').tolist(), column(result, 'high').tolist(), strict=True
  )
  return np.asarray([index[pair] for pair in pairs])


def wide(point_U: np.ndarray, search: bounds.Search) -> np.ndarray:
  """Marks the updates in the wide state: the end of `recipe`'s path, or past half."""
  last = len(path(search)) - 1
  return point_U == last if search == 'recipe' else 2 * point_U > last


def kappa(one_U: np.ndarray, other_U: np.ndarray) -> float:
  """Returns Cohen's kappa of two states; nan where both never change."""
  chance = one_U.mean() * other_U.mean() + (1 - one_U.mean()) * (1 - other_U.mean())
  agree = (one_U == other_U).mean()
  return float((agree - chance) / (1 - chance)) if chance < 1 else math.nan


def of_arm(results: Results, arm: str, level: str = '') -> list[Result]:
  """Returns the results of an arm, at one level or at all."""
  return [
    x
    for x in results.values()
    if x['arm'] == arm and level in ('', *x['levels'].values())
  ]


def wide_share(runs: Sequence[Result], of_evidence: bool) -> float:
  """Returns the share of the updates whose bounds are the wide end of `recipe`."""
  shares = []
  for run in runs:
    wide_U = wide(applied_point(run, 'recipe'), 'recipe')
    shares.append(wide_U[evidence_of(run)].mean() if of_evidence else wide_U.mean())
  return float(np.mean(shares))


Check = tuple[bool, str]  # whether it holds, and the figures that decide


def states(results: Results) -> Check:
  """C2: `recipe` has two states, and neither is rare."""
  last = len(path('recipe')) - 1
  holds, texts = True, []
  for rate in RATES:
    runs = of_arm(results, 'recipe', rate)
    point_U = np.concatenate([column(x, 'choice')[evidence_of(x)] for x in runs])
    two = float(np.isin(point_U, (0, last)).mean())
    share = wide_share(runs, of_evidence=True)
    holds &= two >= 0.95 and 0.2 <= share <= 0.8
    texts.append(f'{two:.1%} in two states, {share:.2f} wide at {rate[2:]}')
  return holds, '; '.join(texts)


def friedman_of(results: Results, name: str) -> dict[str, float]:
  """Returns level, or '' without a factor -> p of Friedman's test of the fixed arms."""
  fixed = [arm for pair in FIXED[name] for arm in pair]
  if name != R:
    return {'': friedman(results, at(fixed, ()), 'area')}
  return {rate: friedman(results, at(fixed, (rate,)), 'area') for rate in RATES}


def differ(results: Results, name: str) -> Check:
  """C3: the four fixed arms differ, at one rate at least; see `where_they_differ`."""
  p_values = friedman_of(results, name)
  texts = [f'p {relation(p)}{f" at {x[2:]}" if x else ""}' for x, p in p_values.items()]
  return min(p_values.values()) < SIGNIFICANT, '; '.join(texts)


def where_they_differ(x: Difference, results: Results) -> Difference:
  """Returns a main effect of R at the rates alone at which the fixed arms differ."""
  if x.experiment != R or 'C3' not in x.checks:
    return x
  kept = {rate for rate, p in friedman_of(results, R).items() if p < SIGNIFICANT}
  if not kept:
    return x
  plus, minus = (
    tuple(cell for cell in side if cell[1] in kept) for side in (x.plus, x.minus)
  )
  return x._replace(plus=plus, minus=minus)


def unrelated(results: Results, name: str) -> Check:
  """C4: the bounds of `yoked` are not those that its own search would have chosen."""
  search = SEARCHING[name]
  values = []
  for run in of_arm(results, 'yoked'):
    evidence_U = evidence_of(run)
    chosen_U = wide(column(run, 'choice')[evidence_U], search)
    values.append(kappa(wide(applied_point(run, search)[evidence_U], search), chosen_U))
  mean = float(np.nanmean(values))
  return (
    mean < 0.2,
    f'kappa {mean:.3f}, from {np.nanmin(values):.3f} to {np.nanmax(values):.3f}',
  )


def same_mixture(results: Results) -> Check:
  """C5: `coin` is wide about as often as `recipe`."""
  holds, texts = True, []
  for rate in RATES:
    of_coin = wide_share(of_arm(results, 'coin', rate), of_evidence=False)
    of_recipe = wide_share(of_arm(results, 'recipe', rate), of_evidence=True)
    holds &= abs(of_coin - of_recipe) <= 0.1
    texts.append(f'{of_coin:.2f} and {of_recipe:.2f} at {rate[2:]}')
  return holds, '; '.join(texts)


def replayed(results: Results, name: str) -> Check:
  """C6: every update of `yoked` had the bounds of its donor."""
  wrong = total = 0
  for run in of_arm(results, 'yoked'):
    donor = run_name(SEARCHING[name], run['levels'], partner(run['seed']))
    for bound in ('low', 'high'):
      wrong += int((column(run, bound) != donated(results[donor], run, bound)).sum())
    total += len(column(run, 'number'))
  return wrong == 0, f'{wrong} of {total:,} updates differ'


def donated(donor: Result, run: Result, bound: str) -> np.ndarray:
  """Returns the bound [U] of a donor at its first update with evidence, from U on.

  After its last update with evidence, that one.
  """
  evidence_U = evidence_of(donor)
  number_U = column(donor, 'number')[evidence_U]
  index_U = np.searchsorted(number_U, column(run, 'number'))
  return column(donor, bound)[evidence_U][np.minimum(index_U, len(number_U) - 1)]


def checks(results: Results, name: str) -> dict[str, tuple[str, Check]]:
  """Returns check -> (sentence, (whether it holds, figures)) of an experiment."""
  by_name: dict[str, tuple[str, Check]] = {}
  if name == R:
    by_name['C2'] = '`recipe` has two states, neither rare', states(results)
  if name in FIXED:
    by_name['C3'] = 'the four fixed arms differ (Friedman)', differ(results, name)
    by_name['C4'] = '`yoked` and its own search are unrelated', unrelated(results, name)
  if name == R:
    by_name['C5'] = '`coin` and `recipe` are wide as often', same_mixture(results)
  by_name['C6'] = '`yoked` applied the bounds of its donor', replayed(results, name)
  return by_name


class Verdict(NamedTuple):
  """A comparison of the protocol with its test and its word."""

  difference: Difference
  test: Tested
  adjusted: float  # p after Holm's correction in its family
  word: str


def verdicts(results: Results, name: str) -> list[Verdict]:
  """Returns the comparisons of an experiment in the order of the protocol."""
  holds = {check: result[0] for check, (_, result) in checks(results, name).items()}
  planned = [x for x in DIFFERENCES if x.experiment == name]
  compared = [where_they_differ(x, results) for x in planned]
  tests = [tested(by_seed(x, results, 'area')) for x in compared]
  adjusted = [test.p for test in tests]
  for family in {x.family for x in compared} - {''}:
    members = [i for i, x in enumerate(compared) if x.family == family]
    corrected = holm([tests[i].p for i in members])
    for i, p in zip(members, corrected, strict=True):
      adjusted[i] = p
  judged = []
  for x, test, p in zip(compared, tests, adjusted, strict=True):
    term = word(test, p, MARGIN[name], x.claimed)
    if not all(holds[check] for check in x.checks):
      term = PREMISE_ABSENT
    judged.append(Verdict(x, test, p, term))
  return judged


def tables(results: Results, name: str) -> str:
  """Returns the verdicts, the checks and the arms of an experiment as Markdown."""
  rows = []
  for verdict in verdicts(results, name):
    x, test = verdict.difference, verdict.test
    (low, high), inner = test.interval, test.inner
    rows.append(
      (
        f'{x.name}: {x.text}',
        f'**{verdict.word}**',
        f'{test.mean:+.3f}',
        f'{low:+.3f} to {high:+.3f}',
        f'{inner[0]:+.3f} to {inner[1]:+.3f}',
        relation(verdict.adjusted).removeprefix('= '),
        f'{int((test.values_S > 0).sum())} of {len(test.values_S)}',
      )
    )
  header = ['difference', 'word', 'mean', '95 % interval', '90 % interval']
  of_tests = markdown.table(rows, [*header, 'p', 'seeds above 0'], 'llrrrrr')
  rows = [
    (check, text, figures, 'yes' if holds else 'no')
    for check, (text, (holds, figures)) in checks(results, name).items()
  ]
  of_checks = markdown.table(rows, ('check', '', 'found', 'holds'), 'llll')
  return '\n\n'.join(
    (of_tests, of_checks, untested(results, name), arms(results, name))
  )


def untested(results: Results, name: str) -> str:
  """Returns a table of differences that the protocol reports without a test.

  These are the comparisons by pairs of partners, at each level alone, on the seeds of
  each kind of processor and at the end of the run; and the interaction of the bounds.
  """
  planned = [x for x in DIFFERENCES if x.experiment == name]
  levels = sorted({level for x in planned for _, *rest in x.plus for level in rest})
  processor = {run['seed']: run.get('processor', '') for run in results.values()}
  kinds = sorted(set(processor.values()), key=[*processor.values()].count, reverse=True)
  if name in FIXED:
    (a, b), (c, d) = FIXED[name]
    text = 'the effect of a higher upper bound at the higher lower bound, less that at '
    plus, minus = (at(arms, levels) for arms in ((d, a), (c, b)))
    text += 'the lower one'
    planned.append(Difference('Interaction', text, name, plus, minus))
  rows = []
  for x in planned:
    parts = {'pairs of seeds': by_seed(x, results, 'area').reshape(-1, 2).mean(1)}
    for level in levels if len(levels) > 1 and name == R else ():
      plus, minus = (
        tuple(cell for cell in side if level in cell) for side in (x.plus, x.minus)
      )
      alone = x._replace(plus=plus, minus=minus)
      parts[f'at {level[2:]}'] = by_seed(alone, results, 'area')
    for kind in kinds if len(kinds) > 1 else ():
      some = {run: y for run, y in results.items() if processor[y['seed']] == kind}
      values_S = by_seed(x, some, 'area')
      parts[f'{len(values_S)} seeds of one processor'] = values_S
    parts['at the end'] = by_seed(x, results, 'final')
    rows.append((f'{x.name}: {x.text}', *map(_mean_and_interval, parts.values())))
  header = ['without a test: mean, 95 % interval', *parts]
  return markdown.table(rows, header, 'l' + 'r' * len(parts))


def _mean_and_interval(values_S: np.ndarray) -> str:
  low, high = t_interval(values_S, 0.95)
  return f'{values_S.mean():+.3f} ({low:+.3f} to {high:+.3f})'


def arms(results: Results, name: str) -> str:
  """Returns a table of what the protocol reports without a test, by cell."""
  first = 'first evaluation'
  columns = ('area', 'final', 'collapsed', 'entropy', 'share')
  rows = []
  for cell, of_seeds in cells(results).items():
    runs = [*of_seeds.values()]
    values = [[OUTCOMES[x][1](run) for run in runs] for x in columns]
    values.insert(2, [run['evaluations'][1][1] for run in runs])
    numbers = [
      f'{mean:.3f} ± {error:.3f}' for mean, error in map(mean_and_error, values)
    ]
    rows.append((', '.join(cell), str(len(runs)), *numbers, *thirds(runs, name)))
  headings = [OUTCOMES[x][0] for x in columns]
  headings.insert(2, first)
  header = ['arm', 'seeds', *headings, 'chosen wide, by thirds of the run']
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def thirds(runs: Sequence[Result], name: str) -> list[str]:
  """Returns how often the arm's own search chose the wide state: first third, ..."""
  search = SEARCHING[name]
  shares = []
  for run in runs:
    evidence_U = evidence_of(run)
    parts = np.array_split(wide(column(run, 'choice'), search)[evidence_U], 3)
    shares.append([part.mean() if len(part) else math.nan for part in parts])
  return [', '.join(f'{x:.2f}' for x in np.nanmean(shares, 0))]
