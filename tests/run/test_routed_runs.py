"""Whole runs with recorded routes: resumed, sampled beside, in two processes."""

import pathlib

import numpy as np
import pytest
import runs
import test_overlap
from runs import PARTIAL, ROUTED, TALK, last_run, same, tiny

from bapo_jax.runtime import metrics

pytestmark = pytest.mark.nightly
RULES = {'batch.rule': 'adapted', 'clip.rule': 'balanced', 'buffer.reevaluate': 4}
KNOBS = RULES | PARTIAL | ROUTED | TALK | runs.BRIEF


def trained(workdir: pathlib.Path, **knobs) -> runs.Saved:
  assert runs.train(tiny(**KNOBS | knobs), workdir) == 0
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
  ahead = test_overlap.compared(tmp_path, **KNOBS, **{'rollout.depth': 2})
  assert any('routes' in name for name in ahead.arrays)
