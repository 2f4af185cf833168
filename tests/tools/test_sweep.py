"""A sweep: its cells, its table, and that a stopped one goes on."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from bapo_jax.runtime import metrics
from bapo_jax.tools import sweep
from bapo_jax.training.config import Config, parse
from configs import countdown

ROOT = pathlib.Path(__file__).parents[2]


def test_a_cell_is_the_single_run_of_its_variant():
  config = parse(countdown.get_config().to_dict())
  assert [name for name, *_ in config.cells] == ['grpo', 'clip', 'batch', 'both']
  for name, *rules in config.cells:
    cell = sweep.cell(config, name, *rules)
    assert cell == parse(countdown.get_config(name).to_dict())
    assert (cell.batch.rule, cell.clip.rule) == tuple(rules) and cell.cells == ()
  assert config.batch.rule == Config().batch.rule, 'the sweep itself is as it was'
  with pytest.raises(ValueError, match="no cell 'dapo'; choose one of"):
    countdown.get_config('dapo')


@pytest.mark.parametrize(
  ('cells', 'message'),
  [
    (('grpo',), r"cells=\('grpo',\): give a tuple of tuples, each a tuple of 3 str"),
    ((('grpo', 'fixed'),), r"cells=\(\('grpo', 'fixed'\),\): give a tuple of tuples"),
    ((('../up', 'fresh_only', 'fixed'),), r"cells: '\.\./up' cannot name a folder"),
    ((('a', 'x', 'y'), ('a', 'x', 'z')), r"cells: 'a' .* give each .* its own"),
    ((('odd', 'fresh_only', 'balnced'),), r"cells: odd: clip\.rule='balnced': give"),
    ((('a', 'fresh_only', 'fixed'),) * 65, r'cells: 65 cells; give 64 at most'),
  ],
)
def test_cells_that_cannot_be_trained_are_refused(cells, message):
  with pytest.raises(ValueError, match=message):
    parse(countdown.get_config().to_dict() | {'cells': cells})


def finished_cell(folder, before, after, *, warm=20.0):
  """The files of a run: verdicts of two evaluations, two responses per problem."""
  (folder / 'eval').mkdir(parents=True)
  for step, verdicts in ((0, before), (7, after)):
    samples = [{'correct': bool(v)} for problem in verdicts for v in problem]
    written = {'result': {'group_size': 2}, 'samples': samples}
    (folder / 'eval' / f'{step}.json').write_text(json.dumps(written))
  report = {'steps': 7, 'responses': 896.0, 'wall_s': 50.0}
  (folder / 'report.json').write_text(
    json.dumps(report | {'phases': {'warm start': warm, 'update': 9.0}})
  )
  rows = ({'step': s, 'learner/updates': 8 * s} for s in (6, 7))
  (folder / 'metrics.jsonl').write_text('\n'.join(json.dumps(row) for row in rows))


def test_a_cell_is_read_from_its_files(tmp_path):
  # Problems: right once, never, never, both times; afterwards 2, 1, 0, 2 of 2.
  finished_cell(
    tmp_path, [(0, 1), (0, 0), (0, 0), (1, 1)], [(1, 1), (1, 0), (0, 0), (1, 1)]
  )
  found = sweep.read_cell(str(tmp_path))
  assert found['before'] == 3 / 8 and found['after'] == 5 / 8
  # Means by problem 1, 1/2, 0, 1: variance 11/48, over four problems.
  assert found['after_error'] == pytest.approx(math.sqrt(11 / 48 / 4))
  # The second and third were failed: 1 of 4 responses is right, 1 of 2 is solved.
  assert found['failed'] == 2
  assert found['failed_after'] == 1 / 4 and found['failed_solved'] == 1 / 2
  # Means 1/2 and 0: variance 1/8, over two problems; solved 1 and 0: variance 1/2.
  assert found['failed_after_error'] == pytest.approx(1 / 4)
  assert found['failed_solved_error'] == pytest.approx(1 / 2)
  assert (found['responses'], found['steps'], found['updates']) == (896, 7, 56)
  assert found['train_s'] == 30.0  # the warm start left out


def test_a_cell_whose_start_failed_nothing_says_so(tmp_path):
  finished_cell(tmp_path, [(0, 1), (1, 1)], [(1, 1), (1, 0)])
  found = sweep.read_cell(str(tmp_path))
  assert found['failed'] == 0 and math.isnan(found['failed_after'])
  assert '| - |' in sweep.markdown(sweep.of_one_seed({'grpo': found}))


def seeds(tmp_path, after, config='c'):
  """sweep.json of seeds 0, 1, ...: `after[cell][seed]`, all else alike."""
  same = {'before': 0.25, 'failed_after': 0.125, 'failed_solved': None}
  same |= {'responses': 512.0, 'steps': 1, 'updates': 8.0, 'train_s': 60.0}
  for seed in range(len(next(iter(after.values())))):
    cells = {name: same | {'after': values[seed]} for name, values in after.items()}
    (tmp_path / f'seed{seed}').mkdir(exist_ok=True)
    (tmp_path / f'seed{seed}' / 'sweep.json').write_text(
      json.dumps({'seed': seed, 'config': config, 'cells': cells})
    )


def test_the_table_over_seeds(tmp_path):
  # grpo: mean 0.5, deviations -0.1, 0, 0.1: s = 0.1, error 0.1 / sqrt(3) = 0.0577.
  # both: 0.55, 0.6, 0.8: mean 0.65, s^2 = (.01 + .0025 + .0225) / 2 = .0175.
  # Differences 0.15, 0.1, 0.2: mean 0.15, s = 0.05, error 0.0289: paired, it is half
  # of what the errors of the two means would give.
  seeds(tmp_path, {'grpo': [0.4, 0.5, 0.6], 'both': [0.55, 0.6, 0.8]})
  (tmp_path / 'notes.txt').write_text('no sweep')
  assert sweep.table(str(tmp_path)) == 0
  found = json.loads((tmp_path / 'table.json').read_text())
  assert found['seeds'] == [0, 1, 2] and list(found['cells']) == ['grpo', 'both']
  both = found['cells']['both']
  assert both['after']['mean'] == pytest.approx(0.65)
  assert both['after']['stderr'] == pytest.approx(math.sqrt(0.0175 / 3))
  assert both['minus after'] == pytest.approx({'mean': 0.15, 'stderr': 0.05 / 3**0.5})
  assert both['failed_solved'] == {'mean': None, 'stderr': None}
  assert 'minus after' not in found['cells']['grpo']

  text = (tmp_path / 'table.md').read_text().splitlines()
  assert text[0] == '3 seed(s): 0, 1, 2; ± is the standard error over seeds'
  lines = {line.split('|')[1].strip(): line for line in text[2:] if line[:1] == '|'}
  assert '| 0.500 ± 0.058 | 0.125 ± 0.000 | - | 512 ± 0 | 1.0 ± 0.0 |' in lines['grpo']
  assert lines['both'] == '| both | +0.150 ± 0.029 | +0.000 ± 0.000 | - |'


def test_one_seed_has_no_error(tmp_path):
  seeds(tmp_path, {'grpo': [0.4], 'both': [0.55]})
  sweep.table(str(tmp_path))
  text = (tmp_path / 'table.md').read_text()
  assert (
    '| both | +0.150 | +0.000 | - |' in text and '±' not in text.split('|', 1)[1][:400]
  )


def test_what_cannot_be_compared_is_refused(tmp_path):
  for folder in (tmp_path, tmp_path / 'none'):
    with pytest.raises(ValueError, match=r'no folder with a finished sweep'):
      sweep.table(str(folder))
  seeds(tmp_path, {'grpo': [0.4, 0.5]})
  first, second = (tmp_path / f'seed{i}' / 'sweep.json' for i in (0, 1))
  second.write_text(first.read_text())
  with pytest.raises(ValueError, match=r'holds a seed twice: \[0, 0\]'):
    sweep.table(str(tmp_path))
  second.write_text(second.read_text().replace('"c"', '"d"'))
  with pytest.raises(ValueError, match=r'seed1.* is of another config than .*seed0'):
    sweep.table(str(tmp_path))


MICRO = {
  'steps': 40,
  'responses': 600.0,  # 18 or more steps of 32 and what is re-evaluated
  'model.width': 16,
  'model.layers': 1,
  'model.heads': 2,
  'model.kv_heads': 2,
  'model.head_width': 8,
  'model.ffn': 16,
  'problems.train': 24,
  'problems.test': 16,
  'prompts.count': 8,
  'sampler.group_size': 4,
  'sampler.max_new_tokens': 12,
  'sampler.max_num_seqs': 32,
  'sampler.prefill_batch_size': 16,
  'sampler.tokens_per_dispatch': 6,
  'learner.minibatches': 2,
  'sft.clean': 4,
  'sft.batch': 16,
  'buffer.capacity': 8,
  'buffer.reevaluate': 4,
  'evaluate.every': 20,
  'evaluate.group_size': 2,
  'checkpoint.every': 2,
  'mesh.data': 1,
  'cells': "(('grpo','fresh_only','fixed'),('both','adapted','balanced'))",
}


def command(workdir):
  """The command line of a micro sweep, on one device."""
  flags = [f'--config.{name}={value}' for name, value in MICRO.items()]
  start = [sys.executable, '-m', 'bapo_jax.main', '--config=configs/countdown.py']
  return {
    'args': [*start, f'--workdir={workdir}', *flags],
    'cwd': ROOT,
    'env': os.environ | {'XLA_FLAGS': '', 'PYTHONUNBUFFERED': '1'},
    'text': True,
  }


@pytest.mark.slow
def test_a_sweep_stopped_in_its_second_cell_goes_on_there(tmp_path):
  call = command(tmp_path)
  with subprocess.Popen(**call, stdout=subprocess.PIPE) as process:
    deadline = time.monotonic() + 1200  # of a busy machine: it compiles two cells
    while len(metrics.read(tmp_path / 'both')) < 4 and process.poll() is None:
      if time.monotonic() > deadline:
        process.kill()
      time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
  assert process.returncode == 128 + signal.SIGINT
  assert 'Cell 1 of 2, grpo' in output and 'the same command' in output
  assert not (tmp_path / 'sweep.json').exists()
  report = tmp_path / 'grpo' / 'report.json'
  before = report.stat().st_mtime_ns

  output = subprocess.run(**call, check=True, capture_output=True).stdout
  assert 'grpo: finished before, left alone' in output
  assert 'Resuming after step' in output
  assert report.stat().st_mtime_ns == before
  found = json.loads((tmp_path / 'sweep.json').read_text())
  assert found['seed'] == 0 and list(found['cells']) == ['grpo', 'both']
  grpo, both = found['cells'].values()
  # A cell ends with the first step that reaches 600 responses: 32 per step and, every
  # second step, up to four problems of four responses.
  assert grpo['responses'] == 608 and grpo['steps'] == 19
  assert 600 <= both['responses'] < 648 and both['steps'] < 19
  assert grpo['before'] == both['before'], 'they start from one policy'
  phases = json.loads((tmp_path / 'both' / 'report.json').read_text())['phases']
  assert 'warm start' not in phases, 'the warm start is made once'
  assert '| both |' in (tmp_path / 'sweep.md').read_text()


def test_the_launcher_runs_each_seed_in_its_folder_and_then_the_table():
  output = subprocess.run(
    ['bash', 'launch/sweep.sh', '--config.steps=3'],
    cwd=ROOT,
    env=os.environ | {'PYTHON': 'echo', 'SEEDS': '0 4', 'RUNS': '/r'},
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  main = '-m bapo_jax.main --config=configs/countdown.py'
  assert output.splitlines() == [
    f'{main} --workdir=/r/seed0 --config.seed=0 --config.steps=3',
    f'{main} --workdir=/r/seed4 --config.seed=4 --config.steps=3',
    f'{main} --mode=table --workdir=/r',
  ]
