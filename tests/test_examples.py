"""The examples run: the loop in one file learns, the reward is that of its text."""

import pathlib
import runpy

import numpy as np
import pytest
from refusals import refused

from bapo_jax.main import read_config
from bapo_jax.rewards.score import Sample

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'


@pytest.mark.nightly
def test_the_loop_in_one_file_learns(capsys):
  names = runpy.run_path(str(EXAMPLES / 'minimal.py'))
  before, *_, after = names['main']()
  assert before < 0.45 < 0.7 < after
  assert f'held-out accuracy {after:.3f}' in capsys.readouterr().out
  assert len((EXAMPLES / 'minimal.py').read_text().splitlines()) <= 250


def test_the_advantages_of_the_loop_are_those_of_the_package():
  names = runpy.run_path(str(EXAMPLES / 'minimal.py'))
  adv_B = names['advantages'](np.array([[1, 0, 0, 0], [1, 1, 1, 1]], np.float32))
  # mean 1/4, variance 3/16: (3/4) / sqrt(3/16) = sqrt(3), (-1/4) / sqrt(3/16).
  assert adv_B == pytest.approx([3**0.5, *3 * [-(3**-0.5)], 0, 0, 0, 0], abs=1e-4)


def test_the_rubric_adds_what_its_knobs_say():
  score = runpy.run_path(str(EXAMPLES / 'rubric.py'))['score']
  right = Sample(r'4|\boxed{4}', '4', tokens=tuple(range(9)))
  assert score(right) == {'answer': 0.8, 'boxed': 0.1, 'brief': 0.1}
  assert sum(score(right, answer=1.0, most_tokens=8).values()) == pytest.approx(1.1)
  twice = Sample(r'\boxed{4}\boxed{5}', '4', tokens=tuple(range(99)))
  assert sum(score(twice).values()) == 0


def test_the_config_of_its_own_is_valid_and_its_knobs_are_overrides():
  file = str(EXAMPLES / 'own_config.py')
  config = read_config(file, ['--config.rewards.custom.brief=0.3'])
  assert config.advantage.rule == 'leave_one_out' and config.clip.target == 0.45
  assert 'brief' in refused([f'--config={file}', '--config.rewards.custom.brif=1'])
