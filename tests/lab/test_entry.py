"""The table of entries: what a file has, and what its figures follow from."""

import json

import numpy as np
import pytest

from bapo_jax.training.config import Config
from lab import entry, experiments
from papers.bench import rates

pytestmark = pytest.mark.fast


def run(*accuracies, diverged=False):
  """The fields of a run evaluated at equal distances over its responses."""
  responses_N = np.linspace(0, 10_240, len(accuracies))
  rows = zip(range(len(accuracies)), accuracies, responses_N.tolist(), strict=True)
  evaluations = [[step, x, 0.01, n] for step, x, n in rows]
  return {'evaluations': evaluations, 'diverged': diverged, 'config': 'abc'}


def content(gain=0.1):
  """An entry that is ahead of GRPO by `gain` on every seed, but for a small noise."""
  grpo = {str(seed): run(0.4, 0.5 + (seed % 4) / 100, 0.6) for seed in entry.SEEDS}
  own = {seed: run(0.4, 0.5 + gain + (int(seed) % 2) / 100, 0.8) for seed in grpo}
  tuning = {
    f'{rate:g}': {str(seed): run(0.4, x, x) for seed in rates.TUNING}
    for rate, x in ((1e-4, 0.5), (2e-4, 0.6), (4e-4, 0.57))
  }
  made = {'name': 'mine', 'tuning': tuning, 'test': {'entry': own, 'grpo': grpo}}
  return made | {'row': entry.row(made)}


def stored(tmp_path, made):
  path = tmp_path / 'mine.json'
  path.write_text(json.dumps(made))
  return str(path)


def test_the_accuracy_of_a_run_is_its_mean_over_the_responses():
  # Trapezoids by hand: (.4 + .6) / 2 = .5 for the first half, (.6 + .8) / 2 = .7.
  assert entry.accuracy(run(0.4, 0.6, 0.8)) == pytest.approx(0.6)
  # Responses, not steps: an evaluation after a quarter of them weighs a quarter.
  uneven = run(0.4, 0.6, 0.8)
  uneven['evaluations'][1][3] = 2560.0
  assert entry.accuracy(uneven) == pytest.approx(0.25 * 0.5 + 0.75 * 0.7)


def test_a_run_that_diverged_has_no_accuracy_from_there_on():
  half = run(0.4, 0.6, diverged=True)
  half['evaluations'][1][3] = 5120.0
  assert entry.accuracy(half) == pytest.approx(0.5 * 0.5)


def test_a_row_follows_from_the_runs():
  row = content()['row']
  # Of the middle evaluation, which weighs half: entry .6 or .61, GRPO .50 to .53; of
  # the last one, a quarter: .8 less .6. The mean over the seeds is .5 * (.605 - .515)
  # + .25 * .2 = .095.
  assert row['gain'] == pytest.approx(0.095)
  assert row['rate'] == 2e-4
  assert row['stable'] == 2  # .5 is .1 * 3/4 behind, .57 is .03 * 3/4
  assert row['until'] == 10_240
  assert row['p'] == pytest.approx(2 / 2**16, abs=1e-5)


def test_an_entry_that_is_whole_passes(tmp_path):
  assert entry.check(stored(tmp_path, content())) == []


def test_a_changed_figure_or_evaluation_fails(tmp_path):
  made = content()
  made['row']['gain'] += 0.001
  (problem,) = entry.check(stored(tmp_path, made))
  assert problem.startswith('gain is 0.095 by the evaluations')
  made = content()
  made['test']['entry']['900']['evaluations'][-1][1] += 0.1
  assert entry.check(stored(tmp_path, made))


def test_missing_seeds_and_a_best_rate_at_an_edge_fail(tmp_path):
  made = content()
  for arm in ('entry', 'grpo'):
    del made['test'][arm]['915']
  made['row'] = entry.row(made)
  assert entry.check(stored(tmp_path, made)) == ['the test seeds are not 900 to 915']
  made = content()
  del made['tuning']['0.0004']
  made['row'] = entry.row(made)
  (problem,) = entry.check(stored(tmp_path, made))
  assert problem == 'the best rate is at an edge, and 0.0004 was not tried'
  del made['test']
  (problem,) = entry.check(stored(tmp_path, made))
  assert 'a field is missing' in problem


@pytest.mark.parametrize(
  'knob', ['sft.width', 'seed', 'problems.custom.level', 'steps']
)
def test_an_entry_may_not_change_the_track(knob):
  with pytest.raises(ValueError, match=f'{knob}: the track fixes this knob'):
    entry.refuse({knob: 1})


def test_the_rate_is_not_an_entrys_to_set():
  with pytest.raises(ValueError, match='the ladder tries the rates'):
    entry.refuse({'optimizer.lr': 1e-4})
  entry.refuse({'loss.rule': 'gmpo', 'learner.epochs': 2, 'optimizer.b2': 0.9})


def test_the_table_is_ordered_by_gain(tmp_path):
  (tmp_path / 'README.md').write_text(f'# Entries\n{entry.BEGIN}\n{entry.END}\nend\n')
  for name, gain in (('low', 0.05), ('high', 0.2)):
    made = content(gain) | {'name': name}
    (tmp_path / f'{name}.json').write_text(json.dumps(made))
  entry.write_table(tmp_path)
  text = (tmp_path / 'README.md').read_text()
  assert text.startswith('# Entries\n') and text.endswith(f'{entry.END}\nend\n')
  assert text.index('| high |') < text.index('| low |')


def test_a_result_has_the_overrides_and_the_text_of_custom_functions(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text('def judge(sample):\n  return 1.0\n')
  arms = {'judged': {'rewards.rule': f'{path}:judge'}}
  made = experiments.Experiment(Config().model_dump(), arms, (0,))
  (run,) = experiments.runs(made).values()
  assert run.knobs == arms['judged']
  assert experiments.sources(run.config) == {str(path): path.read_text()}
