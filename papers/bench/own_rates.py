"""The checks, tests and words of protocol 5, computed from its stored results.

1. `planned` defines every comparison of ../protocol5.md, `checks` its checks;
2. `verdicts` gives each comparison its word once its seeds are complete;
3. `reading` is the line of the protocol's last table that follows from T1 and T2;
4. `of_rates` and `of_arms` show stage 1 and what is reported without a test.

The results of both settings can be one: their cells are (arm, setting).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bapo_jax.runtime import markdown
from bapo_jax.training.evaluate import mean_and_error
from lab import experiments
from lab.entry import GOAL, stable_range, until
from lab.evidence import relation
from lab.experiments import Result
from lab.outcomes import OUTCOMES, cells, friedman, kendall
from papers.bench import differences, rates
from papers.bench.differences import (
  SIGNIFICANT,
  Check,
  Difference,
  Results,
  Verdict,
  at,
  by_seed,
)

S1, S2 = 's1', 's2'
MARGIN = {(S1, 'area'): 0.02, (S2, 'area'): 0.03}
FEWEST = {S1: 12, S2: 16}  # seeds of a verdict
CEILING = 0.95  # C4
LARGE = 0.05  # of T2, in the protocol's last table
RIVALS = ('cispo', 'tis', 'sapo', 'decoupled', 'dppo_tv')
COMMON = ('grpo_common', 'gspo_common')  # at protocol 2's rate, in S1
RESAMPLES = 2000


def planned(ranked_first: Mapping[str, str]) -> list[Difference]:
  """Returns the comparisons T1 to T5 in their order.

  Args:
    ranked_first: setting -> the fixed arm with the best accuracy in stage 1.
  """

  def less(name: str, plus: str, minus: str, setting: str, family: str) -> Difference:
    text = f'{setting.upper()}: `{plus}` less `{minus}`'
    sides = (at((arm,), (setting,)) for arm in (plus, minus))
    return Difference(name, text, setting, *sides, family=family)

  first = Difference(
    'T1',
    'S2: mean of [.95, 1.2] and [.95, 2.0] less `grpo`',
    S2,
    at(rates.LOWER[1:], (S2,)),
    at(('grpo',), (S2,)),
  )
  lead = Difference(
    'T3',
    'S1: `gspo` less `grpo` at 6e-4, less the same at own rates',
    S1,
    at(('gspo_common', 'grpo'), (S1,)),
    at(('grpo_common', 'gspo'), (S1,)),
    summed=2,
  )
  compared = [first]
  compared += [less('T2', arm, 'grpo', S1, 'T2') for arm in ('gspo', 'vespo')]
  compared.append(lead)
  for setting, arm in ranked_first.items():
    compared += [less('T4', x, arm, setting, 'T4') for x in ('balanced', 'recipe')]
  for setting in ranked_first:
    compared += [
      less('T5', x, 'grpo', setting, f'T5 {setting}')._replace(claimed=0)
      for x in RIVALS
    ]
  return [x._replace(checks=needed(x)) for x in compared]


def needed(x: Difference) -> tuple[str, ...]:
  """Returns the checks of a comparison: all of its setting; T1 needs no order, C3."""
  names = ('C2', 'C4') if x.name == 'T1' else ('C2', 'C3', 'C4')
  return tuple(f'{name} {x.experiment}' for name in names)


def arms_of(setting: str) -> tuple[str, ...]:
  """Returns the arms that have an own rate, and in S1 those at the common rate."""
  return (*rates.OWN[setting], *(COMMON if setting == S1 else ()))


def pooled(own: Mapping[str, Results], arms: Sequence[str] = ()) -> dict[str, Result]:
  """Returns the results of settings as one, with the setting as their level.

  Args:
    own: setting -> results of its second stage.
    arms: seeds without one of these are left out; () for all arms of the setting.
  """
  together = {}
  for setting, results in own.items():
    of_cells = [
      cells(results).get((arm,), {}).keys() for arm in arms or arms_of(setting)
    ]
    seeds = set.intersection(*map(set, of_cells))
    for name, result in results.items():
      if result['seed'] in seeds:
        together[f'{setting} {name}'] = {**result, 'levels': {'setting': setting}}
  return together


def inside(setting: str, stage_1: Results) -> Check:
  """C1: every own rate is the best of stage 1, and not at an edge of what was tried."""
  holds, ends = True, []
  by_arm = rates.means(stage_1, setting)
  for arm, own in rates.OWN[setting].items():
    of_rate = by_arm[arm]
    holds &= own == rates.best(of_rate) and rates.to_add(of_rate) is None
    if own in (rates.LADDER[0], rates.LADDER[-1]):
      ends.append(arm)
  return holds, f'at an end of the ladder: {", ".join(ends) or "none"}'


def means(results: Results, setting: str, outcome: str) -> dict[str, float]:
  """Returns arm -> mean of an outcome over the seeds of a setting."""
  compute = OUTCOMES[outcome][1]
  return {
    arm: float(np.mean([compute(run) for run in of_seeds.values()]))
    for (arm, where), of_seeds in cells(results).items()
    if where == setting
  }


def checks(
  results: Results, stage_1: Mapping[str, Results]
) -> dict[str, tuple[str, Check]]:
  """Returns check -> (sentence, (whether it holds, figures)).

  Args:
    results: from `pooled`.
    stage_1: setting -> results of its first stage.
  """
  by_name: dict[str, tuple[str, Check]] = {}
  for setting, tried in stage_1.items():
    before = means(results, setting, 'before')['grpo']
    final = means(results, setting, 'final')
    best = max(final, key=lambda arm: final[arm])
    arms = [*rates.OWN[setting]]
    p = friedman(results, at(arms, (setting,)), 'area')
    by_name |= {
      f'C1 {setting}': ('own rates are inside those tried', inside(setting, tried)),
      f'C2 {setting}': (
        '`grpo` ends above its start',
        (final['grpo'] > before, f'{before:.3f} to {final["grpo"]:.3f}'),
      ),
      f'C3 {setting}': (
        'the arms differ at their own rates (Friedman)',
        (p < SIGNIFICANT, f'{len(arms)} arms, p {relation(p)}'),
      ),
      f'C4 {setting}': (
        f'the best arm ends below {CEILING}',
        (final[best] < CEILING, f'`{best}`, {final[best]:.3f}'),
      ),
    }
  return by_name


def ranked_first(stage_1: Mapping[str, Results]) -> dict[str, str]:
  """Returns setting -> the fixed arm that is best at its own rate in stage 1."""
  first = {}
  for setting, results in stage_1.items():
    by_arm = rates.means(results, setting)
    first[setting] = max(rates.LOWER, key=lambda arm: max(by_arm[arm].values()))
  return first


def verdicts(
  own: Mapping[str, Results],
  stage_1: Mapping[str, Results],
  holds: Mapping[str, bool],
) -> list[Verdict]:
  """Returns the comparisons of the given settings that have FEWEST seeds.

  T1 takes every seed that has its three arms, the others those that have all arms. T4
  is corrected over both settings, so it waits for both.
  """
  compared = planned(ranked_first(stage_1))
  judged: list[Verdict] = []
  for names in ({'T1'}, {'T2', 'T3', 'T5'} | ({'T4'} if len(own) > 1 else set())):
    results = pooled(own, rates.LOWER if names == {'T1'} else ())
    complete = [x for x in compared if x.name in names and enough(x, results)]
    judged += differences.judged(complete, results, MARGIN, holds)
  return judged


def enough(x: Difference, results: Results) -> bool:
  """Returns whether FEWEST seeds have all cells of a comparison."""
  of_cells = cells(results)
  seeds = [of_cells.get(cell, {}).keys() for cell in (*x.plus, *x.minus)]
  return len(set.intersection(*map(set, seeds))) >= FEWEST.get(x.experiment, 0)


def reading(judged: Sequence[Verdict]) -> str:
  """Returns what the protocol's last table says of T1 and T2; '' before both."""
  first = [x for x in judged if x.difference.name == 'T1']
  second = [x for x in judged if x.difference.name == 'T2']
  if not (first and second):
    return ''
  if first[0].word.startswith(differences.SEEN):
    return 'a lower bound of .95 helps at the best rate'
  if first[0].word.startswith(differences.OPPOSITE):
    return 'cutting early costs accuracy where training is stable'
  if first[0].word != differences.NO_EFFECT:
    return f'T1 is {first[0].word}: no third look without another protocol'
  if all(x.test.mean < LARGE for x in second):
    return 'bounds are a remedy for a rate that is too large'
  if any(x.word.startswith(differences.SEEN) and x.test.mean > LARGE for x in second):
    return 'weight responses, not tokens; bounds do not matter'
  return 'T1 has no effect of size, and T2 is undecided'


def of_rates(stage_1: Results, setting: str) -> str:
  """Returns accuracy against rate for every arm, stage 1, as a table."""
  rows = []
  for arm, of_rate in rates.means(stage_1, setting).items():
    if len(of_rate) < len(rates.TRIED[setting][arm]) or rates.to_add(of_rate):
      continue  # still being tried, and not read
    own = rates.best(of_rate)
    texts = []
    for rate in rates.LADDER:
      text = f'{of_rate[rate]:.3f}' if rate in of_rate else ''
      texts.append(f'**{text}**' if rate == own else text)
    rows.append((arm, *texts, str(stable_range(of_rate))))
  header = ['accuracy, mean over the run, three seeds']
  header += [*(f'{rate:g}' for rate in rates.LADDER), 'stable range']
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def of_arms(results: Results, setting: str) -> str:
  """Returns what is reported of every arm at its own rate without a test, a table.

  Args:
    results: from `pooled`.
  """
  rows = []
  for (arm, where), of_seeds in cells(results).items():
    if where != setting:
      continue
    runs = [*of_seeds.values()]
    columns = ([OUTCOMES[x][1](run) for run in runs] for x in ('area', 'final'))
    shown = [f'{m:.3f} ± {e:.3f}' for m, e in map(mean_and_error, columns)]
    gain = ''
    if arm != 'grpo':
      x = Difference('', '', '', at((arm,), (setting,)), at(('grpo',), (setting,)))
      gain = differences.mean_and_interval(by_seed(x, results))
    reached = [until(run) for run in runs if np.isfinite(until(run))]
    responses = f'{np.mean(reached):,.0f}' if reached else 'never'
    if reached and len(reached) < len(runs):
      responses += f' ({len(reached)} of {len(runs)} runs)'
    entropy = np.mean([OUTCOMES['entropy'][1](run) for run in runs])
    ended = sum(OUTCOMES['collapsed'][1](run) or run['diverged'] for run in runs)
    rate = rates.COMMON if arm in COMMON else rates.OWN[setting][arm]
    row = (arm, f'{rate:g}', str(len(runs)), *shown, gain, responses)
    rows.append((*row, f'{entropy:.3f}', f'{ended:g}'))
  header = ['arm', 'rate', 'seeds', 'accuracy, mean over the run', 'at the end']
  header += ['less `grpo`', f'responses until {GOAL:.2f}', 'entropy', 'collapsed']
  return markdown.table(rows, header, 'l' + 'r' * (len(header) - 1))


def orders(one: Results, other: Results) -> str:
  """Returns Kendall's tau between two orders of the arms that both results have.

  The interval is that of a bootstrap over the seeds of both.
  """
  areas = [
    {cell[0]: [OUTCOMES['area'][1](x) for x in y.values()] for cell, y in of.items()}
    for of in (cells(one), cells(other))
  ]
  shared = [arm for arm in areas[0] if arm in areas[1]]
  one_AS, other_AS = (np.asarray([of[arm] for arm in shared]) for of in areas)
  rng = np.random.default_rng(0)

  def resampled(value_AS: np.ndarray) -> dict[str, float]:
    seeds_S = rng.integers(value_AS.shape[1], size=value_AS.shape[1])
    return dict(zip(shared, value_AS[:, seeds_S].mean(1), strict=True))

  taus = [kendall(resampled(one_AS), resampled(other_AS)) for _ in range(RESAMPLES)]
  low, high = np.percentile(taus, (2.5, 97.5))
  one_A, other_A = (
    dict(zip(shared, x.mean(1), strict=True)) for x in (one_AS, other_AS)
  )
  tau = kendall(one_A, other_A)
  text = f"Kendall's tau of the order of {len(shared)} arms at 6e-4 and at own rates: "
  return f'{text}{tau:.2f} ({low:.2f} to {high:.2f}).'


def stored(experiment: str) -> dict[str, Result]:
  """Reads the results of an experiment of the bench."""
  return experiments.read_runs(f'{rates.RESULTS}/{experiment}')


def section(results: Results, setting: str) -> str:
  """Returns the part of the page about a setting's second stage.

  The words of both settings stand in that of S1, which is the last to be complete.
  """
  complete = (S1, S2) if setting == S1 else (S2,)
  stage_1 = {x: stored(f'rates_{x}') for x in complete}
  own = {x: results if x == setting else stored(f'own_{x}') for x in complete}
  whole = pooled(own)
  checked = checks(whole, stage_1)
  judged = verdicts(own, stage_1, {name: x[1][0] for name, x in checked.items()})
  parts = [differences.table(judged), differences.check_table(checked)]
  if sentence := reading(judged):
    parts.append(f'By the table of the protocol: {sentence}.')
  parts.append(of_arms(whole, setting))
  if setting == S1:
    at_common = {**stored('s1'), **stored('rivals')}
    at_own = {name: x for name, x in results.items() if x['arm'] in rates.ARMS}
    parts.append(orders(at_common, at_own))
  return '\n\n'.join(parts)
