"""Whole runs, tiny, in several processes: equal to one, resumed by another number."""

import json
import os
import pathlib
import random
import re
import signal
import time

import numpy as np
import processes
import pytest
from runs import Saved, copied, last_run

from bapo_jax.runtime import watch
from bapo_jax.runtime import workdir as workdir_lib

PARTIAL = {'rollout.max_off_policy_steps': 1, 'rollout.max_tokens_per_step': 6.0}
RULES = {'batch.rule': 'adapted', 'clip.rule': 'balanced'}
# Sums over devices run in another order between processes: the largest difference of a
# weight that was seen after four steps is 2.2e-6 (`distance` prints it).
FAR = 2e-5


@pytest.fixture
def start_from(warm_start: pathlib.Path, tmp_path: pathlib.Path):
  """Makes a workdir of the test, by name, in which the warm start is done."""
  return lambda name: copied(warm_start, tmp_path / name)


def distance(one: Saved, other: Saved) -> float:
  """The largest difference of a weight; whatever is no float is equal."""
  assert one.scalars == other.scalars
  assert one.arrays.keys() == other.arrays.keys()
  far = 0.0
  for name, x in one.arrays.items():
    x, y = np.asarray(x), np.asarray(other.arrays[name])
    if np.issubdtype(x.dtype, np.floating):
      if name.startswith('params'):
        far = max(far, float(np.abs(x - y).max()))
    else:
      assert np.array_equal(x, y), name
  print(f'largest difference of a weight: {far:.3g}')
  return far


def texts(workdir: pathlib.Path, step: int) -> list[tuple[str, str]]:
  """Responses and verdicts of an evaluation."""
  found = json.loads((workdir / 'eval' / f'{step}.json').read_text())
  return [(sample['response'], sample['verdict']) for sample in found['samples']]


def assert_equal_runs(one: pathlib.Path, other: pathlib.Path) -> None:
  """Responses, verdicts and counts are equal; weights and means to a figure."""
  a, b = last_run(one), last_run(other)
  learned = [float(row.get('learner/grad_norm', 0)) for row in a.rows.values()]
  assert max(learned) > 0
  assert distance(a, b) < FAR
  for step in (0, a.scalars['step']):
    assert texts(one, step) == texts(other, step)
  assert a.rows.keys() == b.rows.keys()
  for step, row in a.rows.items():
    both = row.keys() & b.rows[step].keys()  # the last step of a part was evaluated
    assert all(name.startswith('eval/') for name in row.keys() ^ b.rows[step].keys())
    for name in both:
      value = row[name]
      x, y = (float(v.strip("'")) for v in (value, b.rows[step][name]))
      counted = name.split('/')[0] in ('rollout', 'batch', 'buffer', 'eval')
      if counted and 'logp' not in name:
        np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=name)
      else:
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_two_processes_make_the_run_of_one_and_one_goes_on_from_their_checkpoint(
  start_from,
):
  alone, two = start_from('alone'), start_from('two')
  knobs = RULES | PARTIAL | {'steps': 5}
  processes.trained(alone, 1, **knobs)
  _, quiet = processes.trained(two, 2, **knobs | {'steps': 4})
  # The second process writes nothing of a run on its console.
  assert 'held-out accuracy' not in quiet and 'training' not in quiet
  resumed = processes.trained(two, 1, **knobs)
  assert 'Resuming after step 4' in resumed[0]
  assert_equal_runs(alone, two)
  assert (two / 'report.md').exists()


CELLS = [
  {'batch.rule': 'fresh_only', 'clip.rule': 'fixed'},
  {'batch.rule': 'fresh_only', 'clip.rule': 'balanced'} | PARTIAL,
  {'batch.rule': 'adapted', 'clip.rule': 'fixed'} | PARTIAL,
  RULES,
]


@pytest.mark.nightly
@pytest.mark.parametrize('cell', CELLS)
def test_one_two_and_four_processes_make_the_same_run(start_from, cell):
  workdirs = [start_from(str(n)) for n in (1, 2, 4)]
  for n, workdir in zip((1, 2, 4), workdirs, strict=True):
    processes.trained(workdir, n, **cell)
  for other in workdirs[1:]:
    assert_equal_runs(workdirs[0], other)


@pytest.mark.nightly
def test_a_run_goes_on_in_another_number_of_processes_and_on_another_mesh(start_from):
  whole, parts = start_from('whole'), start_from('parts')
  processes.trained(whole, 1, **RULES | PARTIAL)
  processes.trained(parts, 2, steps=1, **RULES | PARTIAL)
  processes.trained(
    parts, 4, steps=2, **RULES | PARTIAL | {'mesh.fsdp': 4, 'mesh.data': 1}
  )
  processes.trained(parts, 1, steps=3, **RULES | PARTIAL)
  processes.trained(
    parts, 2, steps=4, **RULES | PARTIAL | {'mesh.fsdp': 1, 'mesh.data': 4}
  )
  assert_equal_runs(whole, parts)


def wait_for_step(workdir: pathlib.Path, step: int, started: list) -> None:
  """Returns when a row of this step is written, or a process has ended."""
  path = workdir / 'metrics.jsonl'
  while all(process.poll() is None for process in started):
    if path.exists() and f'{{"step": {step},' in path.read_text():
      return
    time.sleep(0.1)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_the_same_step_in_all(start_from):
  workdir = start_from('stopped')
  started = processes.trainings(workdir, 2, steps=200)
  wait_for_step(workdir, 1, started)
  started[1].send_signal(signal.SIGTERM)
  statuses, outputs = processes.ended(started, workdir.parent / 'stopped.output')
  assert statuses == [128 + signal.SIGTERM] * 2, outputs
  assert 'Saved.' in outputs[0]
  last = last_run(workdir)
  assert max(last.rows) == last.scalars['step'] < 200


@pytest.mark.nightly
@pytest.mark.parametrize(('kills', 'steps'), [(2, 4), (12, 12)])
def test_a_killed_run_ends_as_the_unbroken_one(start_from, kills, steps):
  whole, broken = start_from('whole'), start_from('broken')
  knobs = RULES | PARTIAL | {'steps': steps}
  processes.trained(whole, 2, **knobs)
  rng, output = random.Random(0), broken.parent / 'broken.output'
  for kill in range(kills):
    started = processes.trainings(broken, 2, **knobs)
    wait_for_step(broken, min(kill, steps - 1), started)
    time.sleep(3 * rng.random())
    victim = rng.randrange(2)
    started[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    other = started[1 - victim]
    status = other.wait(processes.PATIENCE_S)
    print(f'kill {kill} of {victim}: {time.monotonic() - killed:.1f} s for the other')
    if status:  # else the run was over
      assert status == watch.LOST
      assert 'is gone' in (output / f'{1 - victim}.txt').read_text()
  processes.trained(broken, 2, **knobs)
  a, b = last_run(whole), last_run(broken)
  assert distance(a, b) == 0.0
  assert a.rows == b.rows


@pytest.mark.slow
def test_a_process_with_another_config_is_refused_by_all(start_from):
  workdir = start_from('mixed')
  started = processes.trainings(workdir, 2, each=[{}, {'learner.epochs': 2}])
  statuses, outputs = processes.ended(started, workdir.parent / 'mixed.output')
  assert statuses == [2, 2], outputs
  words = (
    r'process 1 of 2 differs from process 0: config.learner.epochs 2 here and 1 there'
  )
  assert all(re.search(words, text) for text in outputs), outputs
  assert not (workdir / 'metrics.jsonl').exists()
  assert not workdir_lib.checkpoint_steps(str(workdir)) and os.path.isdir(workdir)
