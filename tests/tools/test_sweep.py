"""`bapo sweep`: the grid by hand, refusals, and two runs to their end."""

import re

import pytest
from refusals import refused

from bapo_jax import main
from bapo_jax.runtime import metrics
from bapo_jax.tools import sweep


def test_a_grid_has_every_value_with_every_seed():
  found = sweep.grid(['clip.rule=fixed,balanced', 'clip.x=(1,2),[3,4]'], [0, 7])
  assert len(found) == 8
  assert found['clip.rule=balanced,clip.x=[3,4]/7'] == [
    '--config.clip.rule=balanced',
    '--config.clip.x=[3,4]',
    '--config.seed=7',
  ]
  first = [name.rpartition('/')[2] for name in found]
  assert first == ['0'] * 4 + ['7'] * 4  # runs of one seed share a warm start
  assert sweep.grid([], [3]) == {'3': ['--config.seed=3']}
  assert list(sweep.grid(['loss.rule=a/b.py:f'], [1])) == ['loss.rule=a_b.py:f/1']


def test_seeds_are_a_range_or_a_list():
  assert sweep.seeds_of('0:3') == [0, 1, 2]
  assert sweep.seeds_of('0,7,9') == [0, 7, 9]
  for text in ('3:3', '', '1,1', '-1', '0:3:1', 'a'):
    with pytest.raises(ValueError, match=r'--seeds=.*0:3.*0,7,9'):
      sweep.seeds_of(text)


@pytest.mark.parametrize(
  ('flags', 'sentence'),
  [
    (['--set', 'clip.rule'], r'--set clip.rule: give knob=value,value'),
    (['--set', 'clip.rule=fixed,'], r'give knob=value,value'),
    (['--set', 'clip.rule=fixed,fixed'], r'twice; give it once'),
    (['--set', 'clip.rule=fixed', '--set', 'clip.rule=dcpo'], r'twice; give it once'),
    (['--set', 'clip.rule=fixed,balence'], r"'balence': give one of 'balanced'"),
    (['--workers=0'], r'--workers=0: give at least 1'),
    (['--config=configs/none.py'], r'no such file'),
  ],
)
def test_a_wrong_sweep_is_refused_before_a_run_starts(flags, sentence, tmp_path):
  folder = tmp_path / 'runs'
  command = ['sweep', '--config=configs/aime.py', f'--workdir={folder}', *flags]
  assert re.search(sentence, refused(command))
  assert not folder.exists()


def test_runs_of_a_seed_share_a_warm_start_and_are_compared(tmp_path):
  sizes = 'steps=1 sft.clean=3 sft.noisy=1 problems.train=64 problems.test=16'
  flags = [f'--config.{size}' for size in sizes.split()]
  arguments = ['bapo', 'sweep', '--config=configs/aime.py', f'--workdir={tmp_path}']
  arguments += ['--set', 'clip.rule=fixed,unclipped', '--seeds=1,4', *flags]
  for _ in range(2):  # the second time all runs are done, and stay as they are
    assert main.start(main.parse(arguments)) == 0
  starts = set()
  for run in sweep.grid(['clip.rule=fixed,unclipped'], [1, 4]):
    assert len(metrics.read(str(tmp_path / run))) == 1 + 1  # of step 0, and a step
    (start,) = (tmp_path / run / 'warmstart').iterdir()
    starts.add(start.name)
  assert len(starts) == 1
  page = (tmp_path / 'compare.html').read_text()
  assert 'clip.rule=unclipped' in page
