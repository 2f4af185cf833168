"""The checks, tests and words of protocol 3, computed from its stored results.

1. `DIFFERENCES` defines every comparison of ../protocol3.md, and the checks without
   which it shows nothing;
2. `checks` computes C2 to C6;
3. `verdicts` gives every comparison its word, see differences.py;
4. `tables` has the verdicts, the checks and the arms of one experiment for its page.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from bapo_jax.algorithms import clip
from bapo_jax.runtime import markdown
from bapo_jax.training.evaluate import mean_and_error
from lab.evidence import relation
from lab.experiments import Result, run_name
from lab.outcomes import OUTCOMES, cells, friedman
from papers.bench import bounds
from papers.bench.differences import (
  SIGNIFICANT,
  Check,
  Difference,
  Results,
  Verdict,
  at,
  by_seed,
  check_table,
  judged,
  mean_and_interval,
  table,
  tested,
)
from papers.bench.experiments import partner

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


def interaction(experiment: str, levels: Sequence[str]) -> Difference:
  """Returns the interaction of the two bounds, (d - c) - (b - a)."""
  (a, b), (c, d) = FIXED[experiment]
  text = 'the effect of a higher upper bound at the higher lower bound, less that at '
  text += 'the lower one'
  plus, minus = (at(arms, levels) for arms in ((d, a), (c, b)))
  return Difference('Interaction', text, experiment, plus, minus, summed=2)


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


def relation_to_own(run: Result, point_U: np.ndarray, search: bounds.Search) -> float:
  """Returns kappa of the states at these points and those of the run's own search."""
  evidence_U = evidence_of(run)
  chosen_U = column(run, 'choice')
  return kappa(*(wide(x[evidence_U], search) for x in (point_U, chosen_U)))


def with_partners(results: Results, name: str, level: str = '') -> np.ndarray:
  """Returns kappa of what each run of `yoked` applied, its partner's, [runs]."""
  search = SEARCHING[name]
  return np.asarray(
    [
      relation_to_own(run, applied_point(run, search), search)
      for run in of_arm(results, 'yoked', level)
    ]
  )


def with_others(results: Results, name: str, level: str = '') -> np.ndarray:
  """Returns kappa of what any other donor would have given each run of `yoked`, [runs].

  Mean over the donors, but for those with which neither state ever changes.
  """
  search = SEARCHING[name]
  donors = [
    (donor, applied_point(donor, search)) for donor in of_arm(results, search, level)
  ]
  means = []
  for run in of_arm(results, 'yoked', level):
    others = np.asarray(
      [
        relation_to_own(run, from_donor(donor, run, point_U), search)
        for donor, point_U in donors
        if donor['levels'] == run['levels']
        and donor['seed'] not in (run['seed'], partner(run['seed']))
      ]
    )
    means.append(others[~np.isnan(others)].mean())
  return np.asarray(means)


def unrelated(results: Results, name: str) -> Check:
  """C4: the bounds of `yoked` are not those that its own search would have chosen."""
  kappa_N = with_partners(results, name)
  known_N = kappa_N[~np.isnan(kappa_N)]
  return (
    bool(known_N.mean() < 0.2),
    f'kappa {known_N.mean():.3f}, from {known_N.min():.3f} to {known_N.max():.3f}, in '
    f'{len(known_N)} of {len(kappa_N)} runs',
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
  return from_donor(donor, run, column(donor, bound))


def from_donor(donor: Result, run: Result, value_U: np.ndarray) -> np.ndarray:
  """Returns the donor's values for the updates of a run; see `donated`."""
  evidence_U = evidence_of(donor)
  number_U = column(donor, 'number')[evidence_U]
  index_U = np.searchsorted(number_U, column(run, 'number'))
  return value_U[evidence_U][np.minimum(index_U, len(number_U) - 1)]


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


def verdicts(results: Results, name: str) -> list[Verdict]:
  """Returns the comparisons of an experiment in the order of the protocol."""
  holds = {check: result[0] for check, (_, result) in checks(results, name).items()}
  planned = [x for x in DIFFERENCES if x.experiment == name]
  compared = [where_they_differ(x, results) for x in planned]
  return judged(compared, results, {(name, 'area'): MARGIN[name]}, holds)


def tables(results: Results, name: str) -> str:
  """Returns the verdicts, the checks and the arms of an experiment as Markdown."""
  of_tests = table(verdicts(results, name))
  of_checks = check_table(checks(results, name))
  parts = [of_tests, of_checks, trend_table(results, name), untested(results, name)]
  if name == R:
    parts.append(between_rates(results))
  if name == B:
    parts.append(by_step(results))
  return '\n\n'.join((*parts, arms(results, name)))


def trend_table(results: Results, name: str) -> str:
  """Returns how much of the kappa of C4 is a trend that runs of a search share.

  The bounds of a donor that is no partner follow such a trend as well.
  """
  rows = []
  levels = {level for x in of_arm(results, 'yoked') for level in x['levels'].values()}
  for level in sorted(levels) or ['']:
    partner_N = with_partners(results, name, level)
    other_N = with_others(results, name, level)
    known = (partner_N, other_N, partner_N - other_N)
    means = (f'{np.nanmean(kappa_N):.3f}' for kappa_N in known)
    number = f'{(~np.isnan(partner_N)).sum()} of {len(partner_N)}'
    rows.append((level or 'all', *means, number))
  header = ['kappa of the bounds that `yoked` has and its own search', 'partner']
  header += ['any other donor', 'partner less others', 'runs whose states change']
  return markdown.table(rows, header, 'lrrrr')


def between_rates(results: Results) -> str:
  """Returns the difference of feedback's effect between the two rates of R."""
  slow, fast = RATES
  plus = ('recipe', fast), ('yoked', slow)
  minus = ('recipe', slow), ('yoked', fast)
  x = Difference('H1', '', R, plus, minus, summed=2)
  effect = mean_and_interval(by_seed(x, results))
  return f'Without a test: H1 at {fast[2:]} less H1 at {slow[2:]} is {effect}.'


def by_step(results: Results) -> str:
  """Returns the effects of the bounds of B at every evaluation."""
  whole = next(iter(results.values()))['evaluations']
  effects = [x for x in DIFFERENCES if x.experiment == B and x.name in ('H3', 'H4')]
  rows = []
  for x in effects:
    values = (
      by_seed(x, {name: until(run, i) for name, run in results.items()}, 'final')
      for i in range(1, len(whole))
    )
    texts = (
      f'{mean_and_interval(value_S)}, p {relation(tested(value_S).p)}'
      for value_S in values
    )
    rows.append((f'{x.name}: {x.text}', *texts))
  header = ['accuracy, without a test', *(f'step {row[0]:g}' for row in whole[1:])]
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def until(result: Result, last: int) -> Result:
  """Returns a result whose last evaluation is the one of this number."""
  over = len(result['evaluations']) <= last
  kept = {'evaluations': result['evaluations'][: last + 1]}
  return {**result, **kept, 'diverged': result['diverged'] and over}


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
    planned.append(interaction(name, levels))
  rows = []
  for x in planned:
    parts = {'pairs of seeds': by_seed(x, results).reshape(-1, 2).mean(1)}
    for level in levels if len(levels) > 1 and name == R else ():
      plus, minus = (
        tuple(cell for cell in side if level in cell) for side in (x.plus, x.minus)
      )
      alone = x._replace(plus=plus, minus=minus)
      parts[f'at {level[2:]}'] = by_seed(alone, results)
    for kind in kinds if len(kinds) > 1 else ():
      some = {run: y for run, y in results.items() if processor[y['seed']] == kind}
      values_S = by_seed(x, some)
      parts[f'{len(values_S)} seeds of one processor'] = values_S
    parts['at the end'] = by_seed(x, results, 'final')
    rows.append((f'{x.name}: {x.text}', *map(mean_and_interval, parts.values())))
  header = ['without a test: mean, 95 % interval', *parts]
  return markdown.table(rows, header, 'l' + 'r' * len(parts))


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
