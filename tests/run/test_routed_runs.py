"""Whole runs with recorded routes: resumed, sampled beside, in two processes."""

import pathlib

import numpy as np
import processes
import pytest
import runs
import test_overlap
from runs import PARTIAL, ROUTED, TALK, last_run, same, tiny
from test_many_processes import assert_equal_runs

from bapo_jax.runtime import metrics

pytestmark = pytest.mark.nightly
RULES = {'batch.rule': 'adapted', 'clip.rule': 'balanced', 'buffer.reevaluate': 4}
KNOBS = RULES | PARTIAL | ROUTED | TALK
# Short responses earn more, so that every group teaches.
REWARD = {
  'rewards.rule': f'{runs.ROOT}/tests/my_functions.py:brief',
  'rewards.right_from': 1 / 6,
}


def trained(workdir: pathlib.Path, **knobs) -> runs.Saved:
  assert runs.train(tiny(**KNOBS | REWARD | knobs), workdir) == 0
  return last_run(workdir)


def test_a_resumed_run_has_the_routes_of_buffer_and_unfinished_rows(tmp_path):
  knobs = {'evaluate.every': 3}
  whole = trained(tmp_path / 'whole', steps=6, **knobs)
  trained(tmp_path / 'parts', steps=3, **knobs)
  resumed = trained(tmp_path / 'parts', steps=6, **knobs)
  assert whole.rows == resumed.rows
  assert same(whole.arrays, resumed.arrays)
  routes = [name for name in whole.arrays if 'routes' in name]
  assert any('buffer' in name for name in routes)
  assert any('partial' in name and 'rows' in name for name in routes)
  assert any((np.asarray(whole.arrays[name]) < 255).any() for name in routes)
  rows = metrics.read(str(tmp_path / 'whole'))[1:]
  assert all(row['moe/missing'] == 0 for row in rows)
  agree = [row['moe/agree'] for row in rows if row['learner/tokens_computed']]
  assert agree and all(0.5 < share <= 1 for share in agree)
  assert max(row['rollout/turns'] for row in rows) > 1


def test_beside_equals_ahead(tmp_path):
  knobs = KNOBS | REWARD | {'rollout.depth': 2}
  folders = tmp_path / 'ahead', tmp_path / 'beside'
  started = (
    test_overlap.start(folders[0], 1, **knobs),
    test_overlap.start(folders[1], 2, **knobs | test_overlap.BESIDE),
  )
  for process in started:
    output = process.communicate()[0]
    assert process.returncode == 0, output.decode()
  ahead, beside = ([last_run(x, step) for step in test_overlap.SAVED] for x in folders)
  test_overlap.check_equal(ahead, beside, folders)
  assert any('routes' in name for name in ahead[-1].arrays)


def test_one_and_two_processes_make_the_same_run(tmp_path):
  grid = {'sampler.group_size': 8, 'steps': 3, 'evaluate.every': 3}
  knobs = RULES | PARTIAL | ROUTED | grid | {'checkpoint.every': 3}
  one, two = tmp_path / 'one', tmp_path / 'two'
  for n, workdir in ((1, one), (2, two)):
    processes.trained(workdir, n, **knobs)
  assert_equal_runs(one, two)
