"""Sampling beside the learner equals sampling ahead of it, bit for bit.

The reference has the same rollout.depth, and samples on the learner's devices when the
prompts are submitted.
"""

import subprocess

import making
import numpy as np
import pytest
import runs
from runs import PARTIAL, TALK, last_run, same, tiny
from test_many_processes import texts

from bapo_jax.rewards.rewards import Verifier

ADAPTED = {'batch.rule': 'adapted', 'buffer.reevaluate': 4}
BOTH = {'clip.rule': 'balanced'} | ADAPTED
BESIDE = {'mesh.rollout': 1}
SAVED = (3, 6)
KNOBS = {'steps': 6, 'evaluate.every': 3, 'checkpoint.every': 3, 'checkpoint.keep': 9}


def trained(workdir, **knobs):
  """Trains beside the sampler, on two devices; returns the run."""
  config = tiny(**KNOBS | BESIDE | knobs)
  assert runs.train(config, workdir, making.OddVerifier, devices=2) == 0
  return last_run(workdir)


def check_equal(one, other, folders):
  """Asserts that two runs have equal states, metrics and evaluated responses."""
  for a, b in zip(one, other, strict=True):
    assert a.scalars == b.scalars
    assert a.rows == b.rows
    assert same(a.arrays, b.arrays)
  assert texts(folders[0]) == texts(folders[1])
  assert texts(folders[0]).keys() >= {'0.json', '3.json', '6.json'}


def start(workdir, devices, **knobs):
  """Starts a run in a process with this many devices of its CPU."""
  given = runs.command(workdir, **KNOBS | knobs)
  flags = f'{runs.FLAGS} --xla_force_host_platform_device_count={devices}'
  given['env'] |= {'XLA_FLAGS': flags}
  return subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait(process):
  """Waits for the end of a run, which must be a good one."""
  output = process.communicate()[0]
  assert process.returncode == 0, output.decode()


def compared(tmp_path, **knobs):
  """Compares a run that samples ahead with one that samples beside; returns its end."""
  folders = tmp_path / 'ahead', tmp_path / 'beside'
  started = start(folders[0], 1, **knobs), start(folders[1], 2, **knobs | BESIDE)
  for process in started:
    wait(process)
  ahead, beside = ([last_run(x, step) for step in SAVED] for x in folders)
  check_equal(ahead, beside, folders)
  return ahead[-1]


def test_beside_equals_ahead(tmp_path):
  knobs = BOTH | PARTIAL | TALK | runs.BRIEF | {'rollout.depth': 2}
  knobs |= {'sampler.stop': ('5', '66')}
  rows = compared(tmp_path, **knobs).rows
  ages = [float(rows[step]['rollout/age']) for step in range(1, 7)]
  assert np.all(np.asarray(ages) >= [0, 1, 2, 2, 2, 2])
  assert float(rows[6]['learner/updates']) > 6
  assert float(rows[6]['rollout/turns']) > 1
  page = (tmp_path / 'beside' / 'report.html').read_text()
  assert 'Time without work' in page


@pytest.mark.nightly
@pytest.mark.parametrize('partial', [False, True])
def test_a_resumed_run_has_the_groups_in_flight(tmp_path, partial):
  knobs = BOTH | {'rollout.depth': 2} | (PARTIAL if partial else {})
  whole = trained(tmp_path / 'whole', **knobs)
  trained(tmp_path / 'parts', **knobs | {'steps': 3})
  resumed = trained(tmp_path / 'parts', **knobs)
  assert whole.scalars == resumed.scalars
  assert whole.rows == resumed.rows
  assert same(whole.arrays, resumed.arrays)


class Failing(Verifier):
  """Raises at the second submission of responses."""

  count = 0

  def submit(self, samples):
    """Verifies once."""
    self.count += 1
    if self.count > 2:
      raise OSError('the disk of the verifier is full')
    return super().submit(samples)


def test_a_failure_of_the_sampler_ends_the_run(tmp_path):
  config = tiny(**KNOBS | BESIDE | {'rollout.depth': 1})
  with pytest.raises(OSError, match='the disk of the verifier is full'):
    runs.train(config, tmp_path / 'failing', lambda: Failing(config.rewards), devices=2)
