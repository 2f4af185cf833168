"""The pages of the two papers: protocol first, seeds apart, numbers from results."""

import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import processes
import pytest

from lab import claims, experiments, outcomes, sweep
from lab.figures import COLOURS, DRAWN
from lab.outcomes import OUTCOMES

PAPERS = pathlib.Path(__file__).parents[2] / 'papers'
FOLDERS = sorted(path.parent.name for path in PAPERS.glob('*/README.md'))
TUNED = (
  'imbalance',
  'tuning',
  'countdown_tuning',
)  # experiments that choose values, and are no evidence
# Seeds that an experiment has at least, where not 4.
FEWEST = {
  'main': 8,
  's1': 16,
  'rivals': 16,
  'control': 16,
  'recipe_again': 12,
  'quantised': 3,
  'routes_first': 1,  # a measurement, not a comparison
  'countdown': 16,
}
EVERY = pytest.mark.parametrize('folder', FOLDERS)


@EVERY
def test_every_number_of_a_page_comes_from_its_results(folder):
  assert claims.main([str(PAPERS / folder), '--check']) == 0


def test_the_claims_of_the_readmes_are_one_table_with_the_numbers_of_the_pages():
  table = (PAPERS / 'README.md').read_text()
  front = (PAPERS.parent / 'README.md').read_text().replace('](papers/', '](')
  rows = re.findall(r'^\| .* seeds.*\|$', front, re.M)
  assert len(rows) >= 6 and set(rows) <= set(table.splitlines())
  text = ' '.join(path.read_text() for path in PAPERS.glob('*/*.md'))
  pages = ' '.join(re.sub(r'[|()]', ' ', text).replace('-0.000', '+0.000').split())
  quoted = re.findall(r'([+-]\.\d+)[ a-z]* \((\S+) to (\S+)\)', table)
  assert len(quoted) >= 17
  for numbers in quoted:
    mean, low, high = (f'{float(x):+.3f}' for x in numbers)
    assert f'{mean} {low} to {high}' in pages, numbers


def test_the_table_of_all_runs_is_current():
  text = (PAPERS / 'results.csv').read_text()
  assert text == outcomes.results_csv(PAPERS), 'run python -m lab.outcomes'


@EVERY
def test_seeds_of_tuning_and_of_tests_are_disjoint_and_enough(folder):
  module = claims.load(str(PAPERS / folder))
  assert not set(module.TUNING) & set(module.TEST) and len(module.TEST) >= 8
  for name in module.NAMES:
    seeds = module.get_experiment(name).seeds
    if name.startswith('rates_'):  # tuning seeds of protocol 5, used for nothing else
      others = {x for x in module.NAMES if not x.startswith('rates_')}
      used = set().union(*(module.get_experiment(x).seeds for x in others))
      assert len(seeds) == 3 and not set(seeds) & used
    elif name in TUNED:
      assert set(seeds) <= set(module.TUNING) and len(seeds) >= 2
    else:
      assert not set(seeds) & set(module.TUNING)
      assert len(seeds) >= FEWEST.get(name, 4)


PROTOCOL_2 = ('tuning', 's1', 'control', 'recipe_again', 'depths')


def test_protocol_2_keeps_its_seeds_and_problems_apart():
  module = claims.load(str(PAPERS / 'bench'))
  used = {name: module.get_experiment(name) for name in PROTOCOL_2}
  seeds = [seed for made in used.values() for seed in made.seeds]
  assert len(seeds) == len(set(seeds))
  custom = {name: made.values['problems']['custom'] for name, made in used.items()}
  problems = {name: knobs.get('seed', 0) for name, knobs in custom.items()}
  assert problems.pop('tuning') == 0 and set(problems.values()) == {1}


@EVERY
def test_figures_name_arms_and_outcomes_that_exist(folder):
  """Tables and claims: test_every_number_of_a_page_comes_from_its_results."""
  module = claims.load(str(PAPERS / folder))
  assert set(module.SHOWN) == set(module.NAMES)
  for name, shown in module.SHOWN.items():
    for drawn in shown.figures.values():
      assert drawn.kind in DRAWN and drawn.outcome in OUTCOMES, name
      assert set(drawn.arms) <= set(module.get_experiment(name).arms), name
      colours = [COLOURS[arm] for arm in drawn.arms]
      assert len({*colours}) == len(colours), f'{name}: arms of one colour'
  used = {claim.experiment for claim in module.CLAIMS}
  assert not used & set(TUNED), 'a tuning seed is no evidence'


def git(*arguments):
  """The words that git prints; none without a history."""
  call = ['git', *arguments]
  return subprocess.run(call, cwd=PAPERS, capture_output=True, text=True).stdout.split()


def first_commit(*paths):
  """Seconds of the commit that added the oldest of these files; None without any."""
  times = git('log', '--diff-filter=A', '--format=%ct', '--', *paths)
  return min(map(int, times), default=None)


def test_every_result_names_a_commit_of_the_history():
  history = git('log', '--format=%H')
  if not history or git('rev-parse', '--is-shallow-repository') == ['true']:
    pytest.skip('no history here')
  named = [
    (commit, path.name)
    for path in PAPERS.glob('*/results/*.jsonl')
    for commit in re.findall(r'"commit": ?"(\w+)"', path.read_text())
  ]
  assert len(named) > 1000
  assert not [(commit, name) for commit, name in named if commit not in history]


@pytest.mark.parametrize(
  ('protocol', 'governed'),
  [
    # Results were stored in folders named after the papers' numbers, a file per run.
    ('protocol.md', ['2*/results/*', 'b*_*/results/*']),
    ('protocol2.md', [f'bench/results/{x}[./]*' for x in PROTOCOL_2 if x != 'tuning']),
    ('protocol3.md', ['bench/results/yoked*']),
    ('protocol4.md', ['bench/results/routes*']),
    ('protocol5.md', ['bench/results/rates_*', 'bench/results/own_*']),
  ],
)
def test_a_protocol_is_older_than_the_results_that_it_governs(protocol, governed):
  stated, results = first_commit(protocol), first_commit(*governed)
  if stated is None:
    pytest.skip('no history here')
  assert results is None or stated < results


@EVERY
def test_every_finished_experiment_has_a_conclusion_and_its_compute(folder):
  text = (PAPERS / folder / 'README.md').read_text()
  for name in claims.load(str(PAPERS / folder)).NAMES:
    before, after = text.split(f'<!-- results of {name} -->')
    shown = after.split('<!-- end')[0]
    if claims.WAITING in shown:
      continue
    assert re.search(r'; training took \d+ s a run', shown), name
    if name != 'still':  # the baseline of `countdown`, in whose section it is
      assert 'Conclusion: ' in before.split('\n## ')[-1], name


def test_the_papers_settings_are_quoted_from_their_config():
  config = (PAPERS.parent / 'configs' / 'aime.py').read_text()
  for folder in ('balanced_po', 'batch_adaptation'):
    quoted = re.findall(
      r'```python\n(.*?)```', (PAPERS / folder / 'README.md').read_text(), re.S
    )
    assert len(quoted) == 1 and quoted[0] in config


# The smallest figure of each page: its experiment, and the runs of its first seed.
SMALLEST = {'balanced_po': 'entropy', 'batch_adaptation': 'delay', 'bench': 'tuning'}


@pytest.mark.nightly
@EVERY
def test_the_runs_of_the_smallest_figure_train_again_as_the_stored_ones(
  folder, tmp_path
):
  try:
    sweep.commit()
  except ValueError as error:
    pytest.skip(str(error))
  paper, name = PAPERS / folder, SMALLEST[folder]
  made = claims.load(str(paper)).get_experiment(name)
  stored = experiments.read(made, str(paper / 'results' / name))
  for run in (run for run in stored if run.endswith(f'seed{made.seeds[0]}')):
    command = [sys.executable, '-m', 'lab.sweep', f'{paper}/experiments.py:{name}']
    command += [f'--only={run}', f'--results={tmp_path}/results', f'--runs={tmp_path}']
    # One device, and the programs of a user: XLA_FLAGS of the tests ask for eight.
    processes.call(*command, XLA_FLAGS='')
    path = tmp_path / 'results' / name / f'{run}.json'
    assert_alike(json.loads(path.read_text()), stored[run])


def assert_alike(again, stored):
  """Asserts that two results have the same schedule, and that both runs learned.

  Accuracies differ: other code or another processor rounds differently, and then the
  policy samples other responses.
  """
  assert again.keys() >= stored.keys() and not again['diverged']
  for what in ('arm', 'levels', 'seed', 'planned', 'group_size'):
    assert again[what] == stored[what]
  for name, values in stored['steps'].items():
    assert len(again['steps'][name]) == len(values), name
  assert again['steps']['rollout/responses'] == stored['steps']['rollout/responses']
  for result in (again, stored):
    (_, before, error_before, _), *_, (_, after, error_after, _) = result['evaluations']
    assert after - before > 4 * math.hypot(error_before, error_after)
  schedules = ([row[::3] for row in x['evaluations']] for x in (again, stored))
  assert next(schedules) == next(schedules)  # steps and responses


def test_the_rates_of_countdown_are_those_that_its_tuning_chose():
  """By accuracy at the end, mean over the seeds; of equal ones the smaller rate."""
  folder = PAPERS / 'batch_adaptation'
  module = claims.load(str(folder))
  ends = {}
  results = str(folder / 'results' / 'countdown_tuning')
  for result in experiments.read_runs(results).values():
    rate = float(result['levels']['rate'].removeprefix('lr'))
    at_end = result['evaluations'][-1][1]
    ends.setdefault(result['arm'], {}).setdefault(rate, []).append(at_end)
  assert {len(of_seeds) for arm in ends.values() for of_seeds in arm.values()} == {2}
  chosen = {
    arm: max(sorted(by_rate), key=lambda rate: sum(by_rate[rate]))
    for arm, by_rate in ends.items()
  }
  assert chosen == module.TUNED_RATE


@pytest.mark.parametrize(
  ('name', 'experiment', 'arm'),
  [('OWN_MEAN', 'tuning', 'balanced'), ('RECIPE_MEAN', 'control', 'recipe')],
)
def test_fixed_mean_bounds_are_those_of_an_earlier_experiment(name, experiment, arm):
  module = claims.load(str(PAPERS / 'bench'))
  results = experiments.read_runs(str(PAPERS / 'bench' / 'results' / experiment))
  stored = [x['steps'] for x in results.values() if x['arm'] == arm]
  means = [np.mean([run[f'clip/{x}'] for run in stored]) for x in ('low', 'high')]
  np.testing.assert_allclose(getattr(module, name), means, atol=1e-3)


def test_the_sums_of_s3_are_those_of_their_script():
  sums = experiments.run_file(str(PAPERS / 'bench' / 'sums.py'))
  rows = sums.rows()
  for row in rows:
    a, sign, b = re.fullmatch(r'What is (\d+) ([+-]) (\d+)\?', row['problem']).groups()
    assert (
      int(row['answer']) == (int(a) + int(b) if sign == '+' else int(a) - int(b)) >= 0
    )
  parts = [
    (sums.FOLDER / f'sums_{part}.jsonl').read_text() for part in ('test', 'train')
  ]
  assert (
    ''.join(parts) == sums.lines(rows) and len(set(sums.lines(rows).split('\n'))) == 897
  )
