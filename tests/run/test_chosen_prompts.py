"""Whole runs whose prompts depend on the verdicts so far."""

import json

import pytest
import runs
import test_overlap
import test_remote_sampler
from chains import chains
from runs import last_run, same, tiny

import bapo_jax
from bapo_jax.runtime import metrics
from bapo_jax.runtime import workdir as workdir_lib
from bapo_jax.types import History

# 24 problems in epochs of three steps; groups of four have narrow pass rates.
WINDOW = {'prompts.rule': 'by_difficulty', 'prompts.low': 0.2, 'prompts.high': 0.8}
KNOBS = {'steps': 6, 'checkpoint.keep': 9, 'evaluate.every': 6}
CUSTOM = {'prompts.rule': f'{runs.MY}:unknown_first'}
ADAPTED = {'batch.rule': 'adapted', 'buffer.reevaluate': 4}


def chosen(workdir) -> dict[int, list[int]]:
  """Step -> the fresh problems of its recorded batch."""
  ids = {}
  for path in (workdir / 'groups').glob('*.jsonl'):
    rows = map(json.loads, path.read_text().splitlines())
    ids[int(path.stem)] = [row['id'] for row in rows if row['source'] == 'fresh']
  return ids


CASES = {
  'window': WINDOW,
  'custom': CUSTOM | {'prompts.noise': 0.1},
  'ahead': WINDOW | {'rollout.depth': 2} | ADAPTED,
  'partial': CUSTOM | {'rollout.depth': 2} | ADAPTED | runs.PARTIAL,
}


SYNCHRONOUS = [pytest.param(x, marks=pytest.mark.nightly) for x in ('window', 'custom')]


@pytest.mark.parametrize('case', ['ahead', 'partial', *SYNCHRONOUS])
def test_a_run_is_resumed_with_its_history(case, tmp_path):
  config = tiny(**KNOBS | CASES[case])
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  assert runs.train(config, whole) == 0
  runs.truncated(runs.Recorded(config, whole), broken, 4)
  assert runs.train(config, broken) == 0
  a, b = last_run(whole), last_run(broken)
  assert a.scalars == b.scalars and a.rows == b.rows and same(a.arrays, b.arrays)
  assert chosen(whole) == chosen(broken)
  tries_N, right_N, last_step_N, waiting_N = (
    a.arrays[f'history/{name}'] for name in History._fields
  )
  # Every group was completed, or waits; re-evaluated groups come on top of the rounds.
  assert waiting_N.min() == 0 < tries_N.sum()
  submitted = a.scalars['prompt_round'] * config.prompts.count
  assert tries_N.sum() // config.sampler.group_size + waiting_N.sum() >= submitted
  assert (waiting_N.sum() > 0) == (config.rollout.depth > 0)
  assert 0 < right_N.sum() < tries_N.sum() and (right_N <= tries_N).all()
  assert ((last_step_N >= 0) == (tries_N > 0)).all() and last_step_N.max() == 5


def test_a_shuffled_run_saves_no_history(whole_run):
  assert not any('history' in name for name in last_run(whole_run.workdir).arrays)


def test_other_problems_begin_another_history(tmp_path):
  # The first 20 of the problems have the same rows, but ids may be of other problems.
  knobs = KNOBS | WINDOW | {'steps': 3}
  assert runs.train(tiny(**knobs), tmp_path / 'run') == 0
  assert last_run(tmp_path / 'run').arrays['history/tries_N'].sum() == 24 * 4
  knobs |= {'steps': 4, 'problems.changed': 'accept', 'problems.custom.train': 20}
  assert runs.train(tiny(**knobs), tmp_path / 'run') == 0
  arrays = last_run(tmp_path / 'run').arrays
  assert arrays['history/tries_N'].tolist().count(4) == 8
  assert arrays['history/last_step_N'].shape == (20,)
  assert set(arrays['history/last_step_N'].tolist()) == {-1, 3}


def test_functions_of_the_program_choose_and_reward(tmp_path, capsys):
  asked = []
  *_, hard = chains('test')

  def last(history, key, count):
    asked.append((key, history.tries_N.sum()))
    return range(len(history.tries_N) - count, len(history.tries_N))

  def found(sample, *, worth: float = 1.0):
    if sample.prompt == hard['problem']:
      raise RuntimeError('too hard')
    return worth * (sample.answer in sample.response)

  workdir, knobs = tmp_path / 'run', {'steps': 2, 'rewards.custom.worth': 0.25}
  given = {'knobs': knobs, 'rules': {'prompts': last}, 'reward': found}
  with runs.on_devices(1):
    assert bapo_jax.train(runs.plain(**runs.TINY), str(workdir), **given) == 0
  assert chosen(workdir)[2] == [*range(16, 24)]
  # Tried twice before the run, with the first key, and called once per step.
  assert asked == [((0, 0), 0), ((0, 0), 48), ((0, 0), 0), ((0, 1), 32)]
  row = metrics.read(str(workdir))[2]
  assert 0 < row['reward/found'] == row['rollout/reward'] < 0.25
  assert 'python:found raises RuntimeError: too hard' in capsys.readouterr().out


def test_a_wrong_function_is_refused_before_anything_compiles(tmp_path):
  (tmp_path / 'own.py').write_text('def few(history, key, count):\n  return [3, 4]\n')
  config = tiny(**{'prompts.rule': f'{tmp_path}/own.py:few'})
  with pytest.raises(
    ValueError, match=r'few returns int64\[2\]; return prompts\.count=8'
  ):
    runs.train(config, tmp_path / 'run')
  assert not workdir_lib.has_begun(str(tmp_path / 'run'))


@pytest.mark.nightly
def test_prompts_chosen_beside_are_those_chosen_ahead(tmp_path):
  test_overlap.compared(tmp_path, **CASES['ahead'])


@pytest.mark.nightly
def test_prompts_reach_another_process_that_samples(tmp_path):
  test_remote_sampler.compared(tmp_path, **CASES['ahead'])
