"""Recorded batches under the rules of every arm: numbers by hand, and the table."""

import json
import pathlib
import shutil
import types

import pytest

from bapo_jax.training.config import Config, plain
from lab import counterfactual
from lab.experiments import Experiment

RUN = pathlib.Path(__file__).parents[2] / 'notebooks' / '5_run'
ARMS = {
  'grpo': {'clip.rule': 'fixed', 'clip.fixed.low': 0.8, 'clip.fixed.high': 1.2},
  'widest': {'clip.rule': 'fixed', 'clip.fixed.low': 0.9, 'clip.fixed.high': 3.0},
}


def module():
  """A description of a page with two runs of the arm `grpo`."""
  experiment = Experiment(plain(Config()), ARMS, (0, 1))
  return types.SimpleNamespace(
    ARMS=ARMS,
    RECORDED=('main', 'grpo', ('grpo', 'widest')),
    get_experiment=lambda name: experiment,
  )


def test_tokens_inside_all_bounds_are_counted_from_the_record():
  found = counterfactual.summarise(str(RUN), ARMS, 'grpo')
  (path,) = (RUN / 'groups').glob('*.jsonl')
  inside = tokens = 0
  for line in path.read_text().splitlines():
    for response in json.loads(line)['responses']:
      if response['learner_logp']:
        tokens += response['tokens']
        inside += sum(0.9 < ratio < 1.2 for ratio in response['ratio'])
  assert found['tokens'] == tokens
  assert found['inside'] == pytest.approx(inside / tokens, abs=2e-3)
  assert found['arms']['grpo']['low'] == pytest.approx(0.8)
  # A higher upper bound frees tokens with A > 0, a higher lower one cuts others.
  grpo, widest = found['arms']['grpo'], found['arms']['widest']
  assert widest['cut_positive'] < grpo['cut_positive']
  assert widest['cut_negative'] > grpo['cut_negative']
  assert not any(found['searches'].values()), 'its bounds were fixed'
  # Where the policy is the one that sampled no ratio is cut, and all are inside.
  staler = found['staler']
  assert staler['0']['inside'] == 1 and staler['0']['cut_negative'] == 0
  assert staler['1'] == grpo
  assert staler['8']['inside'] < found['inside'] < 1
  assert staler['8']['cut_negative'] > grpo['cut_negative']


def test_recorded_updates_are_counted_by_where_their_search_stopped(tmp_path):
  run = tmp_path / 'run'
  shutil.copytree(RUN, run)
  config = json.loads((run / 'config.json').read_text())
  config['clip']['rule'] = 'balanced'
  config['clip']['balanced'] |= {'low': [0.6, 0.9], 'high': [1.2, 3.0]}
  (run / 'config.json').write_text(json.dumps(config))
  (path,) = (run / 'groups').glob('*.jsonl')
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  first, second, *_ = dict.fromkeys(line['update'] for line in lines)
  bounds = {first: (0.6, 1.2), second: (0.9, 3.0)}
  for line in lines:
    line['low'], line['high'] = bounds.get(line['update'], (0.6, 1.7))
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
  others = len({line['update'] for line in lines}) - 2
  found = counterfactual.summarise(str(run), ARMS, 'grpo')['searches']
  assert found == {'start': 1, 'between': others, 'ends': 1} and others > 5


def test_only_runs_of_the_arm_are_stored_and_the_table_has_their_means(tmp_path):
  for run in ('grpo-seed0', 'widest-seed0'):
    shutil.copytree(RUN, tmp_path / 'runs' / 'main' / run)
  counterfactual.store_summaries(module(), str(tmp_path), str(tmp_path / 'runs'))
  stored = counterfactual.read_summaries(str(tmp_path))
  assert [p.name for p in (tmp_path / 'results' / 'recorded').iterdir()] == [
    'grpo-seed0.json'
  ]
  assert stored == [counterfactual.summarise(str(RUN), ARMS, 'grpo')]
  one = {
    'tokens': 10,
    'inside': 0.8,
    'arms': {'grpo': dict.fromkeys(counterfactual.COLUMNS, 0.25)},
    'searches': {'start': 1, 'between': 2, 'ends': 4},
    'staler': {'2': dict.fromkeys([*counterfactual.COLUMNS, 'inside'], 0.5)},
  }
  two = one | {
    'inside': 0.9,
    'arms': {'grpo': dict.fromkeys(counterfactual.COLUMNS, 0.35)},
  }
  text = counterfactual.recorded_table([one, two])
  assert text.startswith('2 recorded steps, 20 tokens with an advantage: 85.0% ± 5.0%')
  assert 'Of their 14 recorded updates 2 have the bounds of the start, 8 those' in text
  assert '| grpo | 0.300 ± 0.050 |' in text and '| 2 | 0.500 ± 0.000 |' in text
  assert counterfactual.read_summaries(str(tmp_path / 'elsewhere')) == []
