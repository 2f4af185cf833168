"""The pages of the two papers: protocol first, seeds apart, numbers from results."""

import pathlib
import re
import subprocess

import pytest

from bapo_jax.tools import claims, sweep_grid

PAPERS = pathlib.Path(__file__).parents[1] / 'papers'
FOLDERS = ('2510.18927', '2602.20722')
VERDICTS = {'seen', 'not seen', 'opposite', 'not run'}
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
    assert set(seeds) <= set(module.TUNING if name == 'tuning' else module.TEST)
    assert len(seeds) >= {'tuning': 2, 'main': 8}.get(name, 4)


@EVERY
def test_every_run_is_valid_and_what_is_compared_exists(folder):
  module = claims.load(str(PAPERS / folder))
  assert set(module.COMPARED) == set(module.NAMES)
  for name in module.NAMES:
    experiment = module.get_experiment(name)
    assert sweep_grid.runs(experiment)
    arm, others, outcome = module.COMPARED[name]
    assert {arm, *others} <= set(experiment.arms) and arm not in others
    assert outcome in claims.OUTCOMES


@EVERY
def test_every_claim_has_a_verdict_and_no_verdict_lacks_a_run(folder):
  module = claims.load(str(PAPERS / folder))
  text = (PAPERS / folder / 'README.md').read_text()
  table = text.split('## Claims')[1].split('\n## ')[0]
  rows = [line.strip('|').split('|') for line in table.splitlines() if line[:1] == '|']
  assert len(rows) > 5
  for _, _, _, verdict, experiment in rows[2:]:
    assert verdict.strip() in VERDICTS
    assert experiment.strip() in {'', *module.NAMES}
    done = PAPERS / folder / 'results' / experiment.strip()
    assert verdict.strip() == 'not run' or (experiment.strip() and done.is_dir())


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
