"""Protocol 4: its check, tests and words on results that are made by hand."""

import itertools

import making
import numpy as np
import pytest

from papers.bench import experiments, routes

SETTING = experiments.get_experiment('routes')


def run_of(rng, arm, precision, staleness, seed, agree):
  """A run where replay adds .1 to the accuracy of GSPO and halves the mismatch."""
  method, way = arm.rsplit('_', 1)
  gain = 0.1 if way == 'on' and method == 'gspo' else 0.0
  mismatch = (1e-3 if way == 'on' else 2e-3) if precision == 'bfloat16' else 1e-7
  last = 0.5 + gain + rng.normal() * 0.005
  return making.result(
    None,
    [(0, 0.5), (10, 0.5 + gain), (20, last)],
    arm=arm,
    levels={'precision': precision, 'staleness': staleness},
    seed=seed,
    steps={
      'rollout/logp_diff': [mismatch * (1 + rng.normal() / 10), None],
      'moe/agree': [agree, agree],
      'moe/load': [1.5, 1.5],
    },
  )


def made(agree):
  rng = np.random.default_rng(0)
  cells = itertools.product(
    SETTING.arms, routes.PRECISIONS, routes.STALENESS, SETTING.seeds
  )
  return {
    f'{arm}-{precision}-{staleness}-seed{seed}': run_of(
      rng, arm, precision, staleness, seed, agree
    )
    for arm, precision, staleness, seed in cells
  }


@pytest.fixture(scope='module')
def results():
  return made(0.95)


def test_routers_that_agree_anyway_are_a_premise_that_is_absent():
  agreeing = routes.verdicts(made(0.995))
  absent = {x.difference.name: x.word == 'premise absent' for x in agreeing}
  assert absent == {'H1': True, 'H2': True, 'H3': False}


def test_runs_that_end_low_are_counted_by_the_words_one_definition(results):
  # 64 updates: .5 at the start and the best; .34 is above two thirds of it, .33 is not.
  changed = dict(results)
  for seed, last in ((700, 0.34), (701, 0.33), (702, 0.52)):
    name = f'grpo_on-float32-updates64-seed{seed}'
    changed[name] = results[name] | {
      'evaluations': [[0, 0.5, 0.01, 0.0], [20, last, 0.01, 0.0]]
    }
  name = 'grpo_on-float32-updates64-seed703'
  changed[name] = changed[name] | {'diverged': True, 'planned': 20}
  rest = [
    run
    for name, run in changed.items()
    if name.startswith('grpo_on-') and 'updates64' in name and run['seed'] > 703
  ]
  assert len(rest) == 4 + 4  # of two precisions; the other eight are below
  below = sum(run['evaluations'][-1][1] < 0.5 for run in rest)
  for seed in range(700, 704):
    run = changed[f'grpo_on-bfloat16-updates64-seed{seed}']
    below += run['evaluations'][-1][1] < 0.5
  row = next(x for x in routes.ends(changed).splitlines() if x.startswith('| grpo_on '))
  # 701 and 703 collapsed; 700, 701 and 703 ended below their start, 703 below half.
  assert row.startswith(f'| grpo_on | 16 | 2 | {below + 3} | 1 | 0.500 |')
  (cell,) = (
    x
    for x in routes.cell_table(changed).splitlines()
    if x.startswith('| grpo_on, float32, updates64 |')
  )
  assert cell.endswith('| 2 |')


def test_every_family_can_be_seen():
  # The smallest p of eight seeds is 2 of 256 sign patterns; Holm multiplies it.
  for family in {x.family for x in routes.DIFFERENCES}:
    members = [x for x in routes.DIFFERENCES if x.family == family]
    assert len(members) * 2 / 2 ** len(SETTING.seeds) < 0.05


def test_arms_differ_in_the_routes_alone():
  for method in routes.METHODS:
    on, measure = (dict(SETTING.arms[f'{method}_{way}']) for way in ('on', 'measure'))
    assert {k for k in on if on[k] != measure[k]} == {'model.replay_routes'}
  assert [*SETTING.seeds] == [*range(700, 708)]
