"""Forks of a run: the same steps again, paired differences, refused requests."""

import json
import math

import pytest
import runs

from bapo_jax.runtime import metrics
from bapo_jax.tools import compare
from bapo_jax.training import evaluate
from lab import fork

FIXED = 'clip.rule=fixed,clip.fixed.high=1.05,clip.fixed.low=0.95'


@pytest.fixture(scope='module')
def forked(whole_run, tmp_path_factory):
  """The directory of two forks of a recorded run, from its first step to its fourth."""
  to = tmp_path_factory.mktemp('forks')
  given = ['--step=1', '--steps=3', '--arms=run', f'--arms={FIXED}', f'--to={to}']
  with runs.one_device():
    assert fork.main([str(whole_run.workdir), *given]) == 0
    stored = (to / 'fork.json').read_bytes()
    assert fork.main([str(whole_run.workdir), *given]) == 0  # trains nothing
  assert (to / 'fork.json').read_bytes() == stored
  return to


def test_the_arm_of_the_run_repeats_its_steps_bit_for_bit(forked, whole_run):
  ours, theirs = (runs.last_run(x) for x in (forked / 'run/seed0', whole_run.workdir))
  assert ours.scalars == theirs.scalars and ours.rows == theirs.rows
  assert runs.same(ours.arrays, theirs.arrays)
  before, after = (
    evaluate.read_recorded(str(x), 4) for x in (forked / 'run/seed0', whole_run.workdir)
  )
  assert before == after


def test_another_rule_trains_on_the_same_prompts_and_noise(forked):
  one, other = (
    {row['step']: row for row in metrics.read(path)}
    for path in sorted(forked.glob('*/seed0'))
  )
  assert set(one) == set(other) == set(range(5))
  # The first step after the checkpoint samples the same responses.
  for name in ('rollout/accuracy', 'rollout/length', 'rollout/tokens'):
    assert one[2][name] == other[2][name]
  assert one[2]['clip/fraction'] != other[2]['clip/fraction']
