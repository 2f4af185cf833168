"""Whole runs, tiny: the grid, the report, exact resume, signals, kills."""

import glob
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from bapo_jax.runtime import files, metrics
from bapo_jax.runtime import workdir as workdir_lib
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import checkpoint, experiment, setup, validate
from configs import base

ROOT = pathlib.Path(__file__).parents[2]
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
  'sampler.group_size': 4,
  'sampler.max_new_tokens': 12,
  'sampler.max_num_seqs': 32,
  'sampler.prefill_batch_size': 16,
  'sampler.tokens_per_dispatch': 6,
  'learner.minibatches': 2,
  'sft.clean': 60,
  'sft.noisy': 1,
  'sft.batch': 16,
  'buffer.capacity': 8,
  'buffer.reevaluate': 4,
  'buffer.reeval_interval': 1,
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
  _, run = setup.start(config, validate.check(config), str(workdir), PhaseTimer())
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
  list(itertools.product(('fresh_only', 'adapted'), ('fixed', 'balanced'), (0, 1))),
)
def test_every_cell_of_the_grid_runs_and_resumes_to_the_bit(
  batch, clip, partial, tmp_path, one_device
):
  rules = {'clip.rule': clip, 'batch.rule': batch, 'rollout.weight_sync_interval': 2}
  if partial:
    rules |= {'rollout.max_off_policy_steps': 1, 'rollout.max_tokens_per_step': 6.0}
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
  start = setup.start(config, rules, str(tmp_path / '0'), PhaseTimer())[1].params
  assert not same(start, params[0])
  assert same(params[0], params[1])
  assert same(params[0], params[2])


def test_another_config_is_refused_with_the_difference(tmp_path):
  workdir_lib.open_workdir(str(tmp_path), tiny())
  # A longer run is the same run, and so is one on another mesh.
  workdir_lib.open_workdir(str(tmp_path), tiny(steps=9, **{'mesh.fsdp': 2}))
  with pytest.raises(ValueError, match=r'sampler\.group: 4 then, 8 now'):
    workdir_lib.open_workdir(str(tmp_path), tiny(**{'sampler.group_size': 8}))


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

  # Fewer of them: the ids on the buffer would be those of other problems, or of none.
  write(*first[::-2])
  with pytest.raises(
    ValueError, match=r'not those of step 2 .*problems\.changed=accept'
  ):
    experiment.train(tiny(**own, steps=3), workdir)
  accept = own | {'problems.changed': 'accept', 'buffer.reevaluate': 0, 'steps': 3}
  with pytest.raises(ValueError, match=r'buffer\.reevaluated: 4 then, 0 now'):
    experiment.train(tiny(**accept), workdir)  # that, and nothing else
  accept.pop('buffer.reevaluate')
  capsys.readouterr()
  assert experiment.train(tiny(**accept), workdir) == 0
  assert 'accepted, the buffer are emptied' in capsys.readouterr().out
  run, _ = last_run(workdir, tiny(**accept))
  assert run.step == 3
  completed_step_P = np.concatenate(
    [run.buffer.hard.completed_step_P, run.buffer.reusable.completed_step_P]
  )
  assert set(completed_step_P.tolist()) <= {-1, 2}, (
    'no group of an earlier step is left'
  )
  # From here on these are its problems, and the knob is not needed any more.
  with checkpoint.manager(workdir, 2) as kept:
    now = checkpoint.read_meta(kept, 3)['problems']
    assert now != asked and experiment.recognise(kept, now, 'refuse')


def test_a_workdir_that_cannot_be_used_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot be used'):
    workdir_lib.open_workdir(str(tmp_path / 'file' / 'run'), tiny())


def test_another_mesh_is_told(capsys):
  workdir_lib.log_mesh_change({'data': 1, 'tensor': 1}, {'data': 1, 'tensor': 1})
  workdir_lib.log_mesh_change(
    None, {'data': 1}
  )  # a checkpoint from before it was noted
  assert not capsys.readouterr().out
  workdir_lib.log_mesh_change({'data': 1, 'tensor': 1}, {'data': 4, 'tensor': 2})
  told = capsys.readouterr().out
  assert 'data 1 x tensor 1 then, data 4 x tensor 2 now' in told
  assert 'rounded differently' in told


@pytest.mark.parametrize('name', ['inside', 'elsewhere'])
def test_what_cannot_be_written_is_one_sentence(name, tmp_path):
  # No file may grow beyond 100 bytes: the system refuses as a full disk does.
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  (tmp_path / 'run' / 'checkpoints' / '12').mkdir(parents=True)
  path = str(tmp_path / ('run' if name == 'inside' else '') / 'eval.json')
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
  try:
    with pytest.raises(ValueError) as told, workdir_lib.writable(str(tmp_path / 'run')):
      files.write(path, 'x' * 1000)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  for part in (path, 'File too large', 'step 12', f'--workdir={tmp_path}/run goes on'):
    assert part in str(told.value)
  # What is not about writing, and not in the workdir, is somebody else's error.
  with pytest.raises(FileNotFoundError), workdir_lib.writable(str(tmp_path / 'run')):
    open(tmp_path / 'run2')  # noqa: SIM115


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
def test_a_second_signal_stops_at_once(tmp_path):
  # Two hundred epochs: seconds in which a step can be interrupted.
  call = command(tmp_path, **{'learner.epochs': 200})
  with open(tmp_path / 'log', 'w') as log:
    process = subprocess.Popen(**call, stdout=log, stderr=subprocess.PIPE, text=True)
  wait_for(process, lambda: checkpoint.newest(str(tmp_path)))
  process.send_signal(signal.SIGTERM)
  wait_for(process, lambda: 'once more' in (tmp_path / 'log').read_text())
  process.send_signal(signal.SIGTERM)
  _, complaint = process.communicate(timeout=120)
  assert process.returncode == 130  # 143 where the step was finished
  assert 'Stopped at once' in complaint and 'Traceback' not in complaint
  step = checkpoint.newest(str(tmp_path))
  with checkpoint.manager(str(tmp_path), 2) as kept:
    assert checkpoint.read_meta(kept, step)['run']['step'] == step


@pytest.mark.slow
def test_a_full_disk_ends_a_run_that_then_goes_on(tmp_path, one_device):
  knobs = {'batch.rule': 'adapted', 'evaluate.every': 4}
  subprocess.run(**command(tmp_path / 'whole', **knobs), check=True)
  full = tmp_path / 'full'
  subprocess.run(**command(full, **knobs | {'steps': 1}), check=True)
  call = command(full, **knobs) | {'capture_output': True, 'text': True}
  # No file above 20 KiB, which is less than a checkpoint needs.
  limited = ['bash', '-c', 'ulimit -f 20; exec "$@"', 'bash', *call['args']]
  refused = subprocess.run(**call | {'args': limited})
  assert refused.returncode == 2, refused.stderr
  told = refused.stderr.strip().splitlines()[-1]
  assert told.startswith(f'bapo_jax: {full}/checkpoints/2 cannot be written (File too')
  assert 'the checkpoint of step 1 is complete' in told
  assert 'Traceback' not in refused.stderr
  assert os.listdir(full / 'checkpoints') == ['1']
  done = subprocess.run(**call, check=True)
  assert 'Resuming after step 1.' in done.stdout
  config = tiny(**knobs)
  whole, rows = last_run(tmp_path / 'whole', config)
  pieces, rows_in_pieces = last_run(full, config)
  assert same(whole, pieces)
  # Step 1 was evaluated as the last of the first part.
  assert [r for r in rows if r['step'] != '1'] == [
    r for r in rows_in_pieces if r['step'] != '1'
  ]


SEED, KILLS, STEPS = 7, 30, 120


@pytest.mark.slow
def test_thirty_kills_end_where_an_unbroken_run_does(tmp_path, one_device):
  knobs = {'steps': STEPS, 'batch.rule': 'adapted', 'evaluate.every': STEPS}
  knobs |= {
    'clip.rule': 'fixed',
    'rollout.max_off_policy_steps': 1,
    'rollout.max_tokens_per_step': 6.0,
  }
  subprocess.run(**command(tmp_path / 'whole', **knobs), check=True)

  broken, log = tmp_path / 'broken', tmp_path / 'log'
  random_, inside, until_saving = random.Random(SEED), 0, 5.0
  for kill in range(KILLS):
    where = f'seed {SEED}, kill {kill}'
    before = checkpoint.newest(str(broken)) or 0
    with open(log, 'w') as file:
      process = subprocess.Popen(**command(broken, **knobs), stdout=file)
    began = time.monotonic()
    if kill % 3:  # a few milliseconds after the second save has begun, or the third

      def saving(last=before):
        return (checkpoint.newest(str(broken)) or 0) > last and half_written(broken)

      wait_for(process, saving, where)
      until_saving = time.monotonic() - began
      time.sleep(random_.uniform(0, 0.06))
    else:  # anywhere: loading, compiling, resuming, between two saves
      time.sleep(random_.uniform(0, 1.1 * until_saving))
    assert process.poll() is None, f'the run is over, {where}'
    process.kill()
    process.wait()
    inside += bool(kill % 3 and half_written(broken))
    if before and 'Resuming' in log.read_text():
      assert f'Resuming after step {before}.' in log.read_text(), where
  assert inside >= KILLS / 3, f'only {inside} kills fell into a save'

  subprocess.run(**command(broken, **knobs), check=True)
  config = tiny(**knobs)
  whole, rows = last_run(tmp_path / 'whole', config)
  pieces, rows_in_pieces = last_run(broken, config)
  assert whole.step == pieces.step == STEPS
  assert same(whole._replace(flight=None), pieces._replace(flight=None)), SEED
  assert same(whole.flight.state(), pieces.flight.state()), SEED
  assert rows == rows_in_pieces, SEED
  assert not half_written(broken)


def half_written(workdir):
  """Directories of checkpoints that are not whole."""
  return glob.glob(f'{workdir}/checkpoints/*{checkpoint.HALF}')


def wait_for(process, happened, where=''):
  """Returns once it has happened, while the process is running."""
  deadline = time.monotonic() + 300
  while not happened():
    assert process.poll() is None, f'the run ended before it was stopped {where}'
    assert time.monotonic() < deadline, where
    time.sleep(0.001)


@pytest.mark.slow
def test_an_interrupted_warm_start_says_so(tmp_path):
  call = command(tmp_path, **{'sft.clean': 100_000})
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
  call = command(tmp_path, **{'mesh.data': 2, 'steps': 1, 'sft.clean': 2})
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
