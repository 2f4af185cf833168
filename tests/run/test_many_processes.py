"""Whole runs, tiny, in several processes: equal to one, resumed by another number."""

import json
import os
import pathlib
import random
import re
import signal
import time
from typing import Any

import numpy as np
import processes
import pytest
import runs
from runs import PARTIAL, Saved, last_run

from bapo_jax.runtime import hosts, metrics
from bapo_jax.runtime import workdir as workdir_lib
from configs import countdown

RULES = {'batch.rule': 'adapted', 'clip.rule': 'balanced'}
MESH = {'mesh.data': 2, 'mesh.fsdp': 2}
# Sums over devices run in another order between processes: the largest difference of a
# weight that was seen after four steps is 2.2e-6.
FAR = 2e-5


def assert_states(one: Saved, other: Saved, far: float = 0.0) -> None:
  """The states are equal, up to this difference of their floats."""
  assert one.scalars == other.scalars
  assert one.arrays.keys() == other.arrays.keys()
  for name, x in one.arrays.items():
    np.testing.assert_allclose(x, other.arrays[name], 0, far, err_msg=name)


def texts(workdir: pathlib.Path) -> dict[str, list]:
  """File -> responses and verdicts, of evaluations and of recorded groups."""
  found = {}
  for path in (workdir / 'eval').glob('*.json'):
    samples = json.loads(path.read_text())['samples']
    found[path.name] = [(x['response'], x['verdict']) for x in samples]
  for path in (workdir / 'groups').glob('*.jsonl'):
    for row in map(json.loads, path.read_text().splitlines()):
      seen = [(r['response'], r['correct'], r['version']) for r in row['responses']]
      group = row['id'], row['source'], row['update'], seen
      found.setdefault(path.name, []).append(group)
  return found


def assert_equal_runs(one: pathlib.Path, other: pathlib.Path) -> None:
  """Responses, verdicts and counts are equal; weights and means to a figure."""
  a, b = last_run(one), last_run(other)
  assert any(float(row.get('learner/grad_norm', 0)) > 0 for row in a.rows.values())
  assert texts(one) == texts(other)
  assert '0.json' in texts(one) and any(x.endswith('l') for x in texts(one))
  assert_states(a, b, FAR)
  assert a.rows.keys() == b.rows.keys()
  for step, row in a.rows.items():
    # The last step of a part was evaluated.
    for name in row.keys() & b.rows[step].keys():
      x, y = (float(rows[step][name].strip("'")) for rows in (a.rows, b.rows))
      counted = re.match('rollout|batch|buffer|eval', name) and 'logp' not in name
      far = 1e-6 if counted else 2e-3
      # A metric near 0 is a difference of sums of the order of 1.
      np.testing.assert_allclose(x, y, far, 0.05 * far, err_msg=f'{name}, {step}')


def wait_for_step(workdir: pathlib.Path, step: int, started: list) -> None:
  """Returns when a row of this step is written, or a process has ended."""
  while all(process.poll() is None for process in started):
    if last_step(workdir) >= step:
      return
    time.sleep(0.1)


def last_step(workdir: pathlib.Path) -> int:
  """The last step that has a row of metrics; 0 without one."""
  return max((int(row['step']) for row in metrics.read(workdir)), default=0)


# With rewards of steps, in the groups and in the replay buffer.
KNOBS = RULES | PARTIAL | runs.TALK | {'rewards.rule': f'{runs.MY}:halves'}
KNOBS |= {'sampler.stop': ('5', '66')}


@pytest.fixture
def two(tmp_path) -> pathlib.Path:
  """Trains in two processes until the second one gets a signal, after step 2."""
  workdir = tmp_path / 'two'
  started = processes.trainings(workdir, 2, **KNOBS | {'steps': 200})
  wait_for_step(workdir, 2, started)
  started[1].send_signal(signal.SIGTERM)
  stopped = 128 + signal.SIGTERM
  outputs = processes.outputs(started, workdir.parent / 'two.output', stopped)
  assert 'Saved.' in outputs[0]
  # The second process writes nothing about a run to its console.
  assert not re.search('held-out accuracy|training|Warm start', outputs[1])
  return workdir


@pytest.fixture
def alone(two, tmp_path) -> pathlib.Path:
  """Trains in this process to the step after the last of two."""
  train(tmp_path / 'alone', last_step(two) + 1)
  return tmp_path / 'alone'


def train(workdir: pathlib.Path, steps: int) -> None:
  """Trains in this process, on as many devices."""
  config = runs.tiny(**KNOBS | MESH, steps=steps)
  assert runs.train(config, workdir, devices=processes.DEVICES) == 0


def test_two_processes_make_the_run_of_one_which_continues_from_their_checkpoint(
  two, alone, capsys
):
  last = last_run(two)
  step = last.scalars['step']
  assert any('step_end_PGT' in name for name in last.arrays)
  assert 2 <= step == max(last.rows) < 200
  train(two, step + 1)
  assert f'Resuming after step {step}' in capsys.readouterr().out
  assert_equal_runs(alone, two)
  assert (two / 'report.html').exists()
  assert max(row['rollout/turns'] for row in metrics.read(str(two))[1:]) > 1


CELLS = {
  f'{name}-{how}': {'batch.rule': batch, 'clip.rule': clip} | partial
  for name, batch, clip in countdown.CELLS
  for how, partial in (('whole', {}), ('partial', PARTIAL))
} | {'adapters-partial': RULES | PARTIAL | {'lora.rank': 2}}
# Groups of eight: of four, most are all wrong and teach nothing.
GRID = {'sampler.group_size': 8, 'steps': 3, 'evaluate.every': 3, 'checkpoint.every': 3}


@pytest.mark.nightly
@pytest.mark.parametrize('name', CELLS)
def test_one_two_and_four_processes_make_the_same_run(name, tmp_path):
  one, two, four = (tmp_path / name for name in ('one', 'two', 'four'))
  for n, workdir in ((1, one), (2, two), (4, four)):
    processes.trained(workdir, n, **CELLS[name] | GRID)
  assert_equal_runs(one, two)
  assert_equal_runs(one, four)


CUSTOM = {'prompts.rule': f'{runs.MY}:unknown_first'}  # whose processes choose others
MORE = {
  'chosen': CUSTOM | {'prompts.noise': 0.1},
  'chosen-ahead': CUSTOM | RULES | PARTIAL | {'rollout.depth': 2},
  'given': {'rollout.given': 1, 'loss.imitation': 0.1},
  'experts': RULES | PARTIAL | runs.ROUTED,
  'shared': RULES | PARTIAL | {'learner.share_prompts': 2},
  'shared-experts': RULES | PARTIAL | runs.ROUTED | {'learner.share_prompts': 4},
}


@pytest.mark.nightly
@pytest.mark.parametrize('name', MORE)
def test_two_processes_make_the_run_of_one(name, tmp_path):
  one, two = tmp_path / 'one', tmp_path / 'two'
  for n, workdir in ((1, one), (2, two)):
    processes.trained(workdir, n, **MORE[name] | GRID)
  assert_equal_runs(one, two)


@pytest.mark.nightly
def test_a_run_that_is_killed_six_times_ends_as_the_unbroken_one(tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  knobs = KNOBS | {'steps': 1000, 'evaluate.every': 1000}
  rng, output = random.Random(0), broken.parent / 'broken.output'
  for _ in range(6):
    started, victim = processes.trainings(broken, 2, **knobs), rng.randrange(2)
    wait_for_step(broken, last_step(broken) + 1, started)
    time.sleep(rng.random())
    started[victim].send_signal(signal.SIGKILL)
    status = started[1 - victim].wait(processes.PATIENCE_S)
    assert (started[victim].wait(), status) == (-signal.SIGKILL, hosts.LOST)
    assert 'another process is gone' in (output / f'{1 - victim}.txt').read_text()
  knobs |= {'steps': last_step(broken) + 2}
  for workdir in (broken, whole):
    processes.trained(workdir, 2, **knobs)
  a, b = last_run(whole), last_run(broken)
  assert_states(a, b)
  assert a.rows == b.rows
  assert texts(whole) == texts(broken)


def refused(workdir: pathlib.Path, words: str, **arguments: Any) -> None:
  """Both processes end with status 2 and one sentence; the run has not begun."""
  started = processes.trainings(workdir, 2, **arguments)
  output = workdir.parent / f'{workdir.name}.output'
  for text in processes.outputs(started, output, 2):
    sentences = [line for line in text.splitlines() if line.startswith('bapo_jax: ')]
    assert len(sentences) == 1 and re.search(words, sentences[0]), text
    assert 'Traceback' not in text
  assert not (workdir / 'metrics.jsonl').exists()
  assert not workdir_lib.checkpoint_steps(str(workdir))


def test_a_process_with_another_config_or_package_is_refused_by_all(tmp_path):
  # The metadata of another version, found before that of the installed one.
  site = tmp_path / 'site' / 'optax-0.0.1.dist-info'
  site.mkdir(parents=True)
  (site / 'METADATA').write_text('Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n')
  env = processes.environment(2)
  other = {'env': env | {'PYTHONPATH': f'{site.parent}{os.pathsep}{env["PYTHONPATH"]}'}}
  differs = r'process 1 of 2 differs .*config.learner.epochs 2 there and 1.*optax'
  each = [{}, {'learner.epochs': 2}]
  refused(tmp_path / 'run', differs, each=each, apart=[{}, other])


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> list[dict[str, pathlib.Path]]:
  """Arguments of two processes in different folders: relative paths differ."""
  for name in ('zero', 'one'):
    (tmp_path / name).mkdir()
  return [{'cwd': tmp_path / name} for name in ('zero', 'one')]


def test_a_process_with_other_problems_or_weights_is_refused_by_all(tmp_path, folders):
  for i, folder in enumerate(arguments['cwd'] for arguments in folders):
    rows = [{'problem': f'{n}+1', 'answer': str(n + 1)} for n in range(20)]
    rows[7]['answer'] = str(i)
    (folder / 'problems.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (folder / 'test.jsonl').write_text('{"problem": "3+4", "answer": "7"}')
    file = pathlib.Path(runs.source(folder / 'model')) / 'model.safetensors'
    content = bytearray(file.read_bytes())
    content[-2] ^= i  # of the last number the least significant bit
    file.write_bytes(content)
  knobs = {'problems.source': 'problems.jsonl', 'problems.test_source': 'test.jsonl'}
  knobs |= {'model.path': 'model'}
  differs = r'process 1 of 2 .*model\.model\.safetensors \[.*problems \(fingerprints\)'
  refused(tmp_path / 'run', differs, apart=folders, **knobs)


def test_a_process_without_access_to_the_workdir_is_refused_by_all(
  tmp_path, folders, monkeypatch
):
  # The lock of an earlier run, which another process held.
  (tmp_path / 'one' / 'run').mkdir()
  (tmp_path / 'one' / 'run' / '.lock').write_text('process 1 on host\nffff\n')
  words = '--workdir=run of process 1 on .* is not the directory of process 0'
  monkeypatch.chdir(tmp_path)
  refused(pathlib.Path('run'), words, apart=folders)
  assert os.listdir('one/run') == ['.lock']
