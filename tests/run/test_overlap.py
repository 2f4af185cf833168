"""Sampling beside the learner equals sampling ahead of it, bit for bit.

The reference has the same rollout.depth, and samples on the learner's devices at the
submission of the prompts.
"""

import json

import jax
import pytest
from runs import PARTIAL, last_run, same, tiny

from bapo_jax.run import experiment

ADAPTED = {'batch.rule': 'adapted', 'buffer.reevaluate': 4}
BALANCED = {'clip.rule': 'balanced'}
FIXED = {'clip.rule': 'fixed'}
CELLS = {
  'grpo': FIXED,
  'clip': BALANCED,
  'batch': FIXED | ADAPTED,
  'both': BALANCED | ADAPTED,
}
KNOBS = {'steps': 6, 'evaluate.every': 3, 'checkpoint.every': 3, 'checkpoint.keep': 9}


def trained(workdir, monkeypatch, devices, **knobs):
  """Trains on the first devices; returns the run after each checkpoint."""
  with monkeypatch.context() as patch:
    some = jax.devices()[:devices]
    patch.setattr(jax, 'devices', lambda *_: some)
    assert experiment.train(tiny(**KNOBS | knobs), str(workdir)) == 0
  return [last_run(workdir, step) for step in (3, 6)]


def texts(workdir):
  """The responses of all evaluations, with their verdicts."""
  paths = sorted((workdir / 'eval').glob('*.json'))
  found = {path.name: json.loads(path.read_text()) for path in paths}
  return {
    name: [(x['response'], x['verdict']) for x in found[name]['samples']]
    for name in found
  }


def check_equal(ahead, beside, folders):
  """Asserts that two runs have equal states, metrics and evaluated responses."""
  for one, other in zip(ahead, beside, strict=True):
    assert one.scalars == other.scalars
    assert same(one.arrays, other.arrays)
    assert one.rows == other.rows
  one, other = map(texts, folders)
  assert one == other and len(one) == 3


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('depth', [1, 2, 4])
@pytest.mark.parametrize('partial', [False, True])
def test_beside_equals_ahead(warm, monkeypatch, cell, depth, partial):
  knobs = CELLS[cell] | (PARTIAL if partial else {}) | {'rollout.depth': depth}
  folders = warm('ahead'), warm('beside')
  ahead = trained(folders[0], monkeypatch, 1, **knobs)
  beside = trained(folders[1], monkeypatch, 2, **knobs, **{'mesh.rollout': 1})
  check_equal(ahead, beside, folders)
  last = ahead[-1].rows[6]
  assert float(last['rollout/age_max']) >= depth
