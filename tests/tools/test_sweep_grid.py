"""An experiment: its runs, their results, and which results are refused."""

import json

import pytest
import runs as tiny_runs

from bapo_jax.tools import sweep_grid
from bapo_jax.tools.sweep_grid import Experiment
from bapo_jax.training.config import Config, plain

ARMS = {
  'grpo': {'clip.rule': 'fixed'},
  'wide': {'clip.rule': 'fixed', 'clip.fixed.low': 0.6},
}
FACTORS = {'updates': {'k4': {'learner.minibatches': 4}, 'k8': {}}}


def experiment(arms=ARMS, factors=FACTORS, seeds=(0, 1)):
  values = plain(Config())
  values['problems']['family'] = 'chain'
  return Experiment(values, arms, seeds, factors)


def result(run, **changed):
  """A result of three steps with two evaluations."""
  made = {
    'arm': run.arm,
    'levels': run.levels,
    'seed': run.seed,
    'config': sweep_grid.fingerprint(run.config),
    'commit': 'c0ffee',
    'versions': {'code': 'a'},
    'diverged': False,
    'planned': 3,
    'evaluations': [[0, 0.25, 0.02, 0], [3, 0.5, 0.02, 96]],
    'right': {'0': [0, 1], '3': [1, 1]},
    'group_size': 2,
    'steps': {name: [0.1, 0.2, 0.3] for name in sweep_grid.STEP_METRICS},
    'seconds': 3.0,
  }
  return made | changed


def test_every_arm_runs_at_every_level_with_every_seed():
  runs = sweep_grid.runs(experiment())
  assert list(runs)[:4] == ['grpo-k4-seed0', 'wide-k4-seed0', 'grpo-k8-seed0'] + [
    'wide-k8-seed0'
  ]
  assert len(runs) == 2 * 2 * 2
  run = runs['wide-k4-seed1']
  assert (run.arm, run.levels, run.seed) == ('wide', {'updates': 'k4'}, 1)
  assert run.config.learner.minibatches == 4 and run.config.seed == 1
  assert run.config.clip.fixed.low == 0.6 and run.config.clip.fixed.high == 1.2
  assert run.config.problems.family == 'chain'
  # An arm leaves nothing behind in the next one.
  assert runs['grpo-k4-seed1'].config.clip.fixed.low == 0.8


def test_bad_knobs_and_equal_arms_are_refused_by_the_name_of_the_run():
  with pytest.raises(ValueError, match=r"run bad-k4-seed0: clip\.rule='fixd': give"):
    sweep_grid.runs(experiment({'bad': {'clip.rule': 'fixd'}}))
  twins = {'a': ARMS['grpo'], 'b': ARMS['grpo']}
  with pytest.raises(ValueError, match=r'run a-k4-seed0 has the config of another run'):
    sweep_grid.runs(experiment(twins))


def test_the_title_is_no_part_of_a_fingerprint_and_the_seed_is():
  config = Config()
  titled = config.model_copy(update={'title': 'x'})
  seeded = config.model_copy(update={'seed': 1})
  assert sweep_grid.fingerprint(titled) == sweep_grid.fingerprint(config)
  assert sweep_grid.fingerprint(seeded) != sweep_grid.fingerprint(config)


def test_a_result_counts_where_config_and_code_are_the_same(tmp_path):
  (name, run), *_ = sweep_grid.runs(experiment()).items()
  where, code = str(tmp_path), {'code': 'a'}
  assert not sweep_grid.is_done(where, name, run, code)
  sweep_grid.write(where, name, result(run))
  assert sweep_grid.is_done(where, name, run, code)
  with pytest.raises(ValueError, match=r'other code or packages, at commit c0ffee'):
    sweep_grid.is_done(where, name, run, {'code': 'b'})
  other = run._replace(config=run.config.model_copy(update={'steps': 81}))
  with pytest.raises(ValueError, match=r'grpo-k4-seed0\.json is of another config'):
    sweep_grid.is_done(where, name, other, code)


def test_a_run_of_another_experiment_is_not_trained_twice(tmp_path):
  main, other = experiment(), experiment({'base': ARMS['grpo']}, {}, (0, 1, 2))
  made = sweep_grid.runs(main)
  for name, code in (('grpo-k8-seed0', 'a'), ('grpo-k8-seed1', 'b')):
    stored = result(made[name], versions={'code': code})
    sweep_grid.write(str(tmp_path / 'main'), name, stored)
  undone, where = sweep_grid.runs(other), str(tmp_path / 'other')
  assert sweep_grid.borrow(where, undone, {'code': 'a'}) == {'base-seed0'}
  found = sweep_grid.read(other, where)
  assert list(found) == ['base-seed0']
  assert found['base-seed0'] == result(undone['base-seed0'])
  assert sweep_grid.is_done(where, 'base-seed0', undone['base-seed0'], {'code': 'a'})


def test_results_of_two_versions_are_not_read_together(tmp_path):
  made, where = experiment(), str(tmp_path)
  runs = sweep_grid.runs(made)
  for name in ('grpo-k4-seed0', 'wide-k4-seed0'):
    sweep_grid.write(where, name, result(runs[name]))
  assert list(sweep_grid.read(made, where)) == ['grpo-k4-seed0', 'wide-k4-seed0']
  newer = result(runs['wide-k4-seed0'], versions={'code': 'b'}, commit='beef')
  sweep_grid.write(where, 'wide-k4-seed0', newer)
  with pytest.raises(ValueError, match=r'commit beef\) than .* \(commit c0ffee\)'):
    sweep_grid.read(made, where)
  wrong = result(runs['wide-k8-seed0'])
  sweep_grid.write(where, 'wide-k4-seed0', wrong)
  with pytest.raises(ValueError, match='is the result of another run'):
    sweep_grid.read(made, where)


def test_a_description_is_a_file_and_a_name(tmp_path):
  file = tmp_path / 'experiments.py'
  file.write_text(
    'from bapo_jax.tools.sweep_grid import Experiment\n'
    'def get_experiment(name):\n'
    "  return {'main': Experiment({}, {}, (1, 2))}[name]\n"
  )
  assert sweep_grid.load(f'{file}:main').seeds == (1, 2)
  with pytest.raises(ValueError, match=r'none\.py is no Python file'):
    sweep_grid.load(f'{tmp_path}/none.py:main')
  with pytest.raises(ValueError, match=r"experiments\.py has no experiment 'mian'"):
    sweep_grid.load(f'{file}:mian')


def test_a_result_holds_what_the_workdir_says(tmp_path):
  (run, *_) = sweep_grid.runs(experiment()).values()
  run = run._replace(config=run.config.with_values(evaluate={'group_size': 2}))
  (tmp_path / 'eval').mkdir()
  for step, right in ((0, (0, 0, 1, 0)), (2, (1, 0, 1, 1))):
    samples = [{'correct': bool(r)} for r in right]
    written = {'result': {'accuracy': 0.5}, 'samples': samples}
    (tmp_path / 'eval' / f'{step}.json').write_text(json.dumps(written))
  rows = [
    {'step': 0, 'eval/accuracy': 0.25, 'eval/stderr': 0.1},
    {'step': 1, 'loss/entropy': 0.123456, 'time/step': 2.0},
    {'step': 2, 'loss/entropy': 'nan', 'time/step': 1.0, 'rollout/responses': 64.0}
    | {'eval/accuracy': 0.75, 'eval/stderr': 0.1},
  ]
  lines = [json.dumps(row) for row in rows]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join([*lines, '']))
  found = sweep_grid.outcome(run, str(tmp_path), 'c0ffee', {'code': 'a'}, False)
  assert found['evaluations'] == [[0, 0.25, 0.1, 0], [2, 0.75, 0.1, 64]]
  assert found['right'] == {'0': [0, 1], '2': [1, 2]} and found['group_size'] == 2
  assert found['steps']['loss/entropy'] == [0.12346, None]
  assert found['seconds'] == 3.0
  assert (found['commit'], found['arm'], found['seed']) == ('c0ffee', 'grpo', 0)
  json.dumps(found, allow_nan=False)


def test_the_tiny_run_is_described_by_knobs_alone():
  made = Experiment(plain(Config()), {'tiny': tiny_runs.TINY}, (3,))
  (run,) = sweep_grid.runs(made).values()
  assert run.config.model.width == 16 and run.config.seed == 3
