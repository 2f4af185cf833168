"""Whole runs whose prompts depend on the verdicts so far."""

import json

import pytest
import runs
from runs import last_run, same, tiny

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
  'custom': CUSTOM | {'prompts.noise': 0.5},
  'ahead': WINDOW | {'rollout.depth': 2} | ADAPTED,
  'partial': CUSTOM | {'rollout.depth': 2} | ADAPTED | runs.PARTIAL,
}


@pytest.mark.parametrize('case', CASES)
def test_a_run_is_resumed_with_its_history(case, tmp_path):
  config = tiny(**KNOBS | CASES[case])
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  assert runs.train(config, whole) == 0
  runs.truncated(runs.Recorded(config, whole), broken, 4)
  assert runs.train(config, broken) == 0
  a, b = last_run(whole), last_run(broken)
  assert a.scalars == b.scalars and a.rows == b.rows and same(a.arrays, b.arrays)
  assert chosen(whole) == chosen(broken)
  history = {
    name.partition('/')[2]: x for name, x in a.arrays.items() if 'history/' in name
  }
  # Every submitted group is counted, and waits until it is completed.
  groups = a.scalars['prompt_round'] * config.prompts.count
  tries = history['tries_N'].sum() / config.sampler.group_size
  assert history['waiting_N'].min() >= 0 and (case in ('ahead', 'partial')) == (
    history['waiting_N'].sum() > 0
  )
  assert tries + history['waiting_N'].sum() >= groups
  assert 0 < history['right_N'].sum() < history['tries_N'].sum()
  if case in ('window', 'custom'):
    plain = tmp_path / 'plain'
    assert runs.train(tiny(**KNOBS), plain) == 0
    assert chosen(plain) != chosen(whole)
    assert not any('history' in name for name in last_run(plain).arrays)
