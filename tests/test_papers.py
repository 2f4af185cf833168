"""The pages of the two papers: protocol first, seeds apart, numbers from results."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from bapo_jax.tools import (
  claim_shown,
  claim_verdicts,
  claims,
  sweep_grid,
  sweep_runner,
)

PAPERS = pathlib.Path(__file__).parents[1] / 'papers'
FOLDERS = ('2510.18927', '2602.20722')
TUNED = ('imbalance', 'tuning')  # experiments that choose, and are no evidence
EVERY = pytest.mark.parametrize('folder', FOLDERS)


def test_every_paper_is_tested():
  assert {path.parent.name for path in PAPERS.glob('*/README.md')} == set(FOLDERS)


@EVERY
def test_every_number_of_a_page_comes_from_its_results(folder):
  assert claims.main([str(PAPERS / folder), '--check']) == 0


@EVERY
def test_tuning_and_test_seeds_are_disjoint_and_main_has_eight(folder):
  module = claims.load(str(PAPERS / folder))
  assert not set(module.TUNING) & set(module.TEST) and len(module.TEST) == 8
  for name in module.NAMES:
    seeds = module.get_experiment(name).seeds
    assert set(seeds) <= set(module.TUNING if name in TUNED else module.TEST)
    assert len(seeds) >= (2 if name in TUNED else 8 if name == 'main' else 4)


@EVERY
def test_every_run_is_valid_and_what_is_compared_exists(folder):
  module = claims.load(str(PAPERS / folder))
  claim_shown.check(module)
  for name in module.NAMES:
    assert sweep_grid.runs(module.get_experiment(name))


@EVERY
def test_every_claim_compares_cells_that_are_run(folder):
  module = claims.load(str(PAPERS / folder))
  claim_verdicts.check(module)
  assert len(module.CLAIMS) > 5
  for claim in module.CLAIMS:
    assert bool(claim.experiment) == bool(claim.parts)
    assert claim.experiment not in TUNED, 'a tuning seed is no evidence'


def first_commit(*paths):
  """Seconds of the commit that added the oldest of these files; None without any."""
  log = ['git', 'log', '--diff-filter=A', '--format=%ct', '--', *paths]
  found = subprocess.run(log, cwd=PAPERS, capture_output=True, text=True).stdout.split()
  return min(map(int, found), default=None)


def test_the_protocol_is_older_than_any_result():
  protocol, results = first_commit('protocol.md'), first_commit('*/results/*.json')
  if protocol is None:
    pytest.skip('no history here')
  assert results is None or protocol < results


@pytest.mark.parametrize('path', ['protocol.md', *(f'{f}/README.md' for f in FOLDERS)])
def test_links_and_commands_are_those_of_the_repository(path):
  text = (PAPERS / path).read_text()
  for link in re.findall(r'\]\(([^)\s#]+)\)', text):
    assert '://' in link or (PAPERS / path).parent.joinpath(link).exists(), link
  for name in re.findall(r'experiments\.py:(\w+)', text):
    assert name in claims.load(str((PAPERS / path).parent)).NAMES


# The smallest figure of each page: its experiment, and the runs of its first seed.
SMALLEST = {'2510.18927': 'entropy', '2602.20722': 'delay'}


@pytest.mark.nightly
@EVERY
def test_the_smallest_figure_has_the_same_numbers_when_it_is_made_again(
  folder, tmp_path
):
  where, name = PAPERS / folder, SMALLEST[folder]
  module = claims.load(str(where))
  experiment = module.get_experiment(name)
  there = sweep_grid.read(experiment, str(where / 'results' / name))
  if not there:
    pytest.skip(f'{name} has no results yet')
  again = [run for run in there if run.endswith(f'seed{experiment.seeds[0]}')]
  for run in again:
    start = sweep_runner.warm_start(sweep_grid.runs(experiment)[run])
    sweep_runner.share(str(tmp_path / name), run, start)
    command = [sys.executable, '-m', 'bapo_jax.tools.sweep_runner', f'--only={run}']
    command += [f'{where}/experiments.py:{name}', f'--results={tmp_path}/results']
    subprocess.run([*command, f'--runs={tmp_path}'], check=True, cwd=PAPERS.parent)
    path = sweep_grid.path_of(f'{tmp_path}/results/{name}', run)
    made = json.loads(pathlib.Path(path).read_text())
    # Another kind of processor rounds otherwise, and then samples other responses.
    for what in ('evaluations', 'right', 'steps'):
      assert made[what] == there[run][what], f'{run}: {what}'
