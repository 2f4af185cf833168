"""Whole runs, tiny: the grid, the report, exact resume, signals, kills."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from bapo_jax import checkpoint, experiment, metrics, setup, validate
from bapo_jax.progress import Clock
from configs import base

ROOT = pathlib.Path(__file__).parents[1]
TINY = {
  'steps': 4,
  'model.width': 16,
  'model.layers': 1,
  'model.heads': 2,
  'model.kv_heads': 2,
  'model.head_width': 8,
  'model.ffn': 16,
  'problems.family': 'chain',  # a guess is right one time in ten: something to learn
  'problems.level': 1,
  'problems.train': 24,
  'problems.test': 16,
  'prompts.count': 8,
  'sampler.group': 4,
  'sampler.new': 12,
  'sampler.slots': 32,
  'sampler.refill': 16,
  'sampler.chunk': 6,
  'learner.minibatches': 2,
  'warmstart.clean': 60,
  'warmstart.noisy': 1,
  'warmstart.batch': 16,
  'buffer.capacity': 8,
  'buffer.recheck': 4,
  'buffer.every': 1,
  'evaluate.every': 2,
  'checkpoint.every': 1,
  'metrics.tensorboard': False,
  'mesh.data': 1,
}


def tiny(**overrides):
  config = base.get_config()
  with config.unlocked():
    config.update_from_flattened_dict(TINY | overrides)
  return config


def last_run(workdir, config):
  """(run, rows of metrics) as the workdir holds them."""
  _, run = setup.start(config, validate.check(config), str(workdir), Clock())
  with checkpoint.manager(str(workdir), 2) as kept:
    run, _ = experiment.resume(kept, run)
  rows = [
    # as text: a length is nan where no response is of its kind, and nan != nan
    {k: repr(v) for k, v in row.items() if 'time/' not in k and 'per_s' not in k}
    for row in metrics.read(workdir)
  ]
  return run, rows


def same(a, b):
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('batch', 'clip', 'partial'),
  [
    ('fresh_only', 'fixed', False),
    ('fresh_only', 'balanced', False),
    ('adapted', 'fixed', False),
    ('adapted', 'balanced', False),
    ('adapted', 'balanced', True),
  ],
)
def test_every_cell_of_the_grid_runs_and_resumes_to_the_bit(
  batch, clip, partial, tmp_path, one_device
):
  rules = {'clip.rule': clip, 'batch.rule': batch, 'rollout.refresh_every': 2}
  if partial:
    rules |= {'rollout.max_age': 1, 'rollout.budget': 6.0}
  config = tiny(**rules)
  assert experiment.train(config, str(tmp_path / 'whole')) == 0
  # In two parts: the second starts from nothing but the workdir.
  assert experiment.train(tiny(**rules, steps=3), str(tmp_path / 'parts')) == 0
  assert experiment.train(config, str(tmp_path / 'parts')) == 0

  whole, rows = last_run(tmp_path / 'whole', config)
  parts, rows_in_parts = last_run(tmp_path / 'parts', config)
  assert whole.step == 4
  assert same(whole._replace(flight=None), parts._replace(flight=None))
  if partial:
    assert whole.flight.unfinished  # or nothing was in flight
    assert same(whole.flight.state(), parts.flight.state())
  by_step = {int(row['step']): row for row in rows}
  again = {int(row['step']): row for row in rows_in_parts}
  assert sorted(by_step) == [0, 1, 2, 3, 4]
  assert max(float(row.get('learner/grad_norm', 0)) for row in rows) > 0  # it did learn
  for step, row in by_step.items():
    shared = row.keys() & again[step].keys()  # step 3 was evaluated as the last of 3
    assert {k: row[k] for k in shared} == {k: again[step][k] for k in shared}
  if batch == 'adapted':
    shelved = [float(by_step[4][f'buffer/{shelf}']) for shelf in ('hard', 'good')]
    assert sum(shelved) > 0

  report = json.loads((tmp_path / 'whole' / 'report.json').read_text())
  assert set(report) == {
    'eval_before',
    'eval_after',
    'wall_s',
    'peak_rss_bytes',
    'phases',
    'clip_moved_fraction',
    'length_ratio',
    'steps',
    'config_hash',
    'responses',
  }
  assert report['eval_before'].keys() >= {'accuracy', 'stderr', 'n'}
  assert sum(report['phases'].values()) <= report['wall_s']
  assert (tmp_path / 'whole' / 'curves.png').stat().st_size > 10_000


@pytest.mark.slow
def test_one_update_a_fresh_batch_makes_all_clip_rules_one(tmp_path, one_device):
  # The ratio is 1 and nothing is clipped: the rule must not matter, to the last bit.
  once = {'learner.minibatches': 1, 'learner.epochs': 1, 'steps': 3}
  params = []
  for i, rule in enumerate(
    (
      {'clip.rule': 'fixed'},
      {'clip.rule': 'balanced'},
      {'clip.rule': 'balanced', 'clip.balanced.target': 1.0},
    )
  ):
    config = tiny(**once, **rule)
    experiment.train(config, str(tmp_path / str(i)))
    run, rows = last_run(tmp_path / str(i), config)
    assert max(float(row.get('clip/fraction', 0)) for row in rows) == 0
    params.append(run.params)
  config = tiny()
  rules = validate.check(config)
  start = setup.start(config, rules, str(tmp_path / '0'), Clock())[1].params
  assert not same(start, params[0])
  assert same(params[0], params[1])
  assert same(params[0], params[2])


def test_another_config_is_refused_with_the_difference(tmp_path):
  experiment.open_workdir(str(tmp_path), tiny())
  experiment.open_workdir(str(tmp_path), tiny(steps=9))  # a longer run is the same run
  with pytest.raises(ValueError, match=r'sampler\.group: 4 then, 8 now'):
    experiment.open_workdir(str(tmp_path), tiny(**{'sampler.group': 8}))


@pytest.mark.slow
def test_other_problems_are_refused_on_resume_and_can_be_accepted(
  tmp_path, one_device, capsys
):
  def write(*rows):
    lines = (json.dumps({'problem': p, 'answer': a}) for p, a in rows)
    (tmp_path / 'own.jsonl').write_text('\n'.join(lines))

  first = [(f'{a}+{b}', a + b) for a in range(4) for b in range(4)]
  write(*first)
  own = {'problems.source': str(tmp_path / 'own.jsonl'), 'batch.rule': 'adapted'}
  own |= {'problems.test_source': own['problems.source']}
  workdir = str(tmp_path / 'run')
  assert experiment.train(tiny(**own, steps=2), workdir) == 0
  with checkpoint.manager(workdir, 2) as kept:
    asked = checkpoint.read_meta(kept, 2)['problems']
    assert experiment.recognise(kept, asked, 'refuse')
  assert max(int(row['buffer/hard']) for row in metrics.read(workdir)[1:]) > 0

  # Fewer of them: the ids on the shelves would be those of other problems, or of none.
  write(*first[::-2])
  with pytest.raises(
    ValueError, match=r'not those of step 2 .*problems\.changed=accept'
  ):
    experiment.train(tiny(**own, steps=3), workdir)
  accept = own | {'problems.changed': 'accept', 'buffer.recheck': 0, 'steps': 3}
  with pytest.raises(ValueError, match=r'buffer\.recheck: 4 then, 0 now'):
    experiment.train(tiny(**accept), workdir)  # that, and nothing else
  accept.pop('buffer.recheck')
  capsys.readouterr()
  assert experiment.train(tiny(**accept), workdir) == 0
  assert 'accepted, the shelves are emptied' in capsys.readouterr().out
  run, _ = last_run(workdir, tiny(**accept))
  assert run.step == 3
  born_P = np.concatenate([run.shelves.hard.born_P, run.shelves.good.born_P])
  assert set(born_P.tolist()) <= {-1, 2}, 'no group of an earlier step is left'
  # From here on these are its problems, and the knob is not needed any more.
  with checkpoint.manager(workdir, 2) as kept:
    now = checkpoint.read_meta(kept, 3)['problems']
    assert now != asked and experiment.recognise(kept, now, 'refuse')


def test_a_workdir_that_cannot_be_used_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot be used'):
    experiment.open_workdir(str(tmp_path / 'file' / 'run'), tiny())


def command(workdir, **overrides):
  """The command line of a tiny run, on one device."""
  knobs = TINY | overrides
  flags = [f'--config.{name}={value}' for name, value in knobs.items()]
  environment = os.environ | {'XLA_FLAGS': '', 'PYTHONUNBUFFERED': '1'}
  arguments = [sys.executable, '-m', 'bapo_jax.main', '--config=configs/aime.py']
  return {
    'args': [*arguments, f'--workdir={workdir}', *flags],
    'cwd': ROOT,
    'env': environment,
  }


def start_and_wait(workdir, logged, **overrides):
  """A run in a process of its own, once it has logged so many steps."""
  process = subprocess.Popen(
    **command(workdir, **overrides), stdout=subprocess.PIPE, text=True
  )
  deadline = time.monotonic() + 300
  while len(metrics.read(workdir)) <= logged:
    assert process.poll() is None, 'the run ended before it could be interrupted'
    assert time.monotonic() < deadline
    time.sleep(0.02)
  return process


@pytest.mark.slow
def test_killed_and_interrupted_runs_end_where_an_unbroken_one_does(
  tmp_path, one_device
):
  knobs = {'steps': 30, 'batch.rule': 'adapted', 'checkpoint.every': 3}
  subprocess.run(**command(tmp_path / 'whole', **knobs), check=True)

  broken = tmp_path / 'broken'
  process = start_and_wait(broken, 5, **knobs)
  process.kill()
  process.wait()
  process = start_and_wait(broken, 11, **knobs)
  process.send_signal(signal.SIGINT)
  told = process.communicate()[0]
  assert process.returncode == 128 + signal.SIGINT
  assert 'Resuming after step 3' in told  # steps 4 and 5 were logged, not saved
  assert f'--workdir={broken} continues' in told
  done = subprocess.run(
    **command(broken, **knobs), check=True, capture_output=True, text=True
  )
  assert 'Resuming after step' in done.stdout

  config = tiny(**knobs)
  whole, rows = last_run(tmp_path / 'whole', config)
  pieces, rows_in_pieces = last_run(broken, config)
  assert whole.step == pieces.step == 30
  assert same(whole, pieces)
  assert rows == rows_in_pieces


@pytest.mark.slow
def test_an_interrupted_warm_start_says_so(tmp_path):
  call = command(tmp_path, **{'warmstart.clean': 100_000})
  process = subprocess.Popen(
    **call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  while 'results in' not in process.stdout.readline():
    assert process.poll() is None
  process.send_signal(signal.SIGINT)
  _, complaint = process.communicate(timeout=120)
  assert process.returncode == 130
  assert 'a warm start is saved when it is done' in complaint
  assert 'Traceback' not in complaint


@pytest.mark.slow
def test_local_launch_shards_over_eight_devices(tmp_path):
  call = command(tmp_path, **{'mesh.data': 2, 'steps': 1, 'warmstart.clean': 2})
  flags = call['args'][call['args'].index('--config=configs/aime.py') + 1 :]
  run = subprocess.run(
    ['bash', 'launch/local.sh', *flags],
    cwd=ROOT,
    env=call['env'] | {'PYTHON': sys.executable},
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0, run.stderr[-2000:]
  assert '8 cpu device(s)' in run.stdout
  assert (tmp_path / 'report.md').exists()
