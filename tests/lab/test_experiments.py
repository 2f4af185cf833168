"""An experiment: its runs, their results, and which results are refused."""

import json
import math

import making
import recordings
from refusals import sentence_of

from bapo_jax.training.config import Config
from lab import experiments
from lab.experiments import Experiment

ARMS = {
  'grpo': {'clip.rule': 'fixed'},
  'wide': {'clip.rule': 'fixed', 'clip.low': 0.6},
}
FACTORS = {'updates': {'k4': {'learner.minibatches': 4}, 'k8': {}}}


def experiment(arms=ARMS, factors=FACTORS, seeds=(0, 1)):
  values = Config().model_dump()
  values['problems']['custom'] |= {'level': 2}
  return Experiment(values, arms, seeds, factors)


def test_every_arm_runs_at_every_level_with_every_seed():
  runs = experiments.runs(experiment())
  first = ['grpo-k4-seed0', 'wide-k4-seed0', 'grpo-k8-seed0', 'wide-k8-seed0']
  assert list(runs)[:4] == first and len(runs) == 2 * 2 * 2
  run = runs['wide-k4-seed1']
  assert (run.arm, run.levels, run.seed) == ('wide', {'updates': 'k4'}, 1)
  assert run.config.learner.minibatches == 4 and run.config.seed == 1
  assert run.config.sft.seed == 1
  assert run.config.clip.low == 0.6 and run.config.clip.high == 1.2
  assert run.config.problems.custom.level == 2
  assert runs['grpo-k4-seed1'].config.clip.low == 0.8, 'arms are independent'


def test_a_result_counts_if_config_and_code_are_the_same(tmp_path):
  # Results of experiments beside this one count too: a folder without neighbours.
  runs, code = experiments.runs(experiment()), {'code': 'a'}
  folder = str(tmp_path / 'results')
  (name, run), *_ = runs.items()
  assert experiments.undone(folder, runs, code) == runs
  experiments.write(folder, name, making.result(run))
  assert [*experiments.undone(folder, runs, code)] == [*runs][1:]
  assert 'c0ffee' in sentence_of(experiments.undone, folder, runs, {'code': 'b'})
  other = run._replace(config=run.config.model_copy(update={'steps': 81}))
  assert 'another config' in sentence_of(
    experiments.undone, folder, {name: other}, code
  )


def test_a_run_of_another_experiment_is_not_trained_twice(tmp_path):
  main, other = experiment(), experiment({'base': ARMS['grpo']}, {}, (0, 1, 2))
  runs = experiments.runs(main)
  for name, code in (('grpo-k8-seed0', 'a'), ('grpo-k8-seed1', 'b')):
    stored = making.result(runs[name], versions={'code': code})
    experiments.write(str(tmp_path / 'main'), name, stored)
  runs, folder = experiments.runs(other), str(tmp_path / 'other')
  undone = experiments.undone(folder, runs, {'code': 'a'})
  assert [*undone] == ['base-seed1', 'base-seed2']
  assert experiments.read(other, folder) == {
    'base-seed0': making.result(runs['base-seed0']) | {'overrides': ARMS['grpo']}
  }


def test_results_of_two_versions_are_not_read_together(tmp_path):
  made, folder = experiment(), str(tmp_path)
  runs = experiments.runs(made)
  for name in ('grpo-k4-seed0', 'wide-k4-seed0'):
    experiments.write(folder, name, making.result(runs[name]))
  assert list(experiments.read(made, folder)) == ['grpo-k4-seed0', 'wide-k4-seed0']
  newer = making.result(runs['wide-k4-seed0'], versions={'code': 'b'}, commit='beef')
  experiments.write(folder, 'wide-k4-seed0', newer)
  assert 'beef' in sentence_of(experiments.read, made, folder)
  experiments.write(folder, 'wide-k4-seed0', making.result(runs['wide-k8-seed0']))
  assert 'another run' in sentence_of(experiments.read, made, folder)


def test_a_packed_experiment_reads_as_its_files(tmp_path):
  made, folder = experiment(), str(tmp_path / 'main')
  runs = experiments.runs(made)
  stored = {name: making.result(runs[name], seconds=i) for i, name in enumerate(runs)}
  for name, result in stored.items():
    experiments.write(folder, name, result)
  experiments.pack(folder)
  files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  assert set(files) == {'main.jsonl', 'details.zip'}
  lines = list(map(json.loads, files['main.jsonl'].decode().splitlines()))
  assert [line['run'] for line in lines] == sorted(runs)
  assert experiments.read(made, folder) == stored
  assert not experiments.undone(folder, runs, {'code': 'a'})
  # A run that is trained again replaces its line; equal results give equal files.
  experiments.write(folder, 'grpo-k4-seed0', making.result(runs['grpo-k4-seed0']))
  assert experiments.read(made, folder)['grpo-k4-seed0']['seconds'] == 9.0
  experiments.write(folder, 'grpo-k4-seed0', stored['grpo-k4-seed0'])
  experiments.pack(folder)
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
  (tmp_path / 'main.jsonl').write_bytes(files['main.jsonl'].split(b'\n', 1)[1])
  assert 'main.jsonl and details.zip' in sentence_of(experiments.read, made, folder)


def test_a_result_has_the_numbers_of_the_workdir(tmp_path):
  (run, *_) = experiments.runs(experiment()).values()
  run = run._replace(config=run.config.with_values(evaluate={'group_size': 2}))
  (tmp_path / 'eval').mkdir()
  for step, right in ((0, (0, 0, 1, 0)), (2, (1, 0, 1, 1))):
    samples = [{'correct': bool(r)} for r in right]
    written = {'result': {'accuracy': 0.5}, 'samples': samples}
    (tmp_path / 'eval' / f'{step}.json').write_text(json.dumps(written))
  rows = [
    {'eval/accuracy': 0.25, 'eval/stderr': 0.1},
    {'loss/entropy': 0.123456, 'time/step': 2.0},
    {'time/step': 1.0, 'rollout/responses': 64.0, 'eval/accuracy': 0.75}
    | {'eval/stderr': 0.1, 'loss/entropy': math.nan},
  ]
  recordings.run(tmp_path, rows)
  stored = experiments.outcome(run, str(tmp_path), 'c0ffee', {'code': 'a'}, False)
  assert stored['evaluations'] == [[0, 0.25, 0.1, 0], [2, 0.75, 0.1, 64]]
  assert stored['right'] == {'0': [0, 1], '2': [1, 2]} and stored['group_size'] == 2
  assert stored['steps']['loss/entropy'] == [0.12346, None]
  assert (stored['seconds'], stored['commit'], stored['arm']) == (3.0, 'c0ffee', 'grpo')
  json.dumps(stored, allow_nan=False)
