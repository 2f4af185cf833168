"""What a user gets wrong is answered in one sentence, before anything compiles."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TINY = 'configs/aime.py'
CASES = [  # flags, what the sentence must say
  ([], 'give a --config'),
  (['--config=configs/aime.py:8b'], "no variant '8b'"),
  (['--config=configs/nope.py'], "No such file or directory: 'configs/nope.py'"),
  (['--config=' + TINY, '--wrkdir=x'], 'workdir'),
  (['--config=' + TINY, 'steps=3'], "what is 'steps=3'"),
  (['--config=' + TINY, '--config.clip.rul=fixed'], 'the nearest are clip.rule'),
  (['--config=' + TINY, '--config.steps=many'], 'config.steps=many'),
  (['--config=' + TINY, '--config.clip.rule=balnced'], "no rule named 'balnced'"),
  (['--config=' + TINY, '--config.clip.balanced.target=1.5'], 'target=1.5'),
  (['--config=' + TINY, '--config.clip.balanced.low=(0.9,0.6)'], 'low=(0.9, 0.6)'),
  (['--config=' + TINY, '--config.loss.rule=tis'], "choose clip.rule='unclipped'"),
  (['--config=' + TINY, '--config.learner.minibatches=5'], 'prompts.count=64'),
  (['--config=' + TINY, '--config.mesh.data=3'], 'does not fill'),
  (
    ['--config=' + TINY, '--config.sampler.group_size=1'],
    'sampler.group_size=1 is too small',
  ),
  (
    ['--config=' + TINY, '--config.sampler.max_new_tokens=40000'],
    "the model's 32768 positions",
  ),
  (['--config=' + TINY, '--config.problems.level=9'], 'no level 9'),
  (['--config=' + TINY, '--workdir=README.md/x'], 'cannot be used'),
  (['--config=' + TINY, '--mode=export'], 'holds no checkpoint; train there first'),
  (['--config=' + TINY, '--mode=eval'], 'names no model; train there first'),
  (['--config=' + TINY, '--mode=show'], 'holds no run; train there first'),
  (['--config=' + TINY, '--config.problems.source=x.jsonl'], "test_source='synthetic'"),
  (
    ['--config=' + TINY, '--config.problems.source=countdown']
    + ['--config.problems.test_source=requirements.txt'],
    "'requirements.txt' ends in none of .jsonl",
  ),
  (['--config=' + TINY, '--mode=exprt'], 'should be one of'),
  (['--config=' + TINY, '--checkpoint=best'], 'always goes on from the newest'),
  (['--config=' + TINY, '--config.rewards.rule=amie'], "no rule named 'amie'"),
  (['--config=' + TINY, '--config.evaluate.k=(1,8)'], 'evaluate.group_size=1'),
  (['--config=' + TINY, '--config.model.remat=half'], "model.remat='half' is none"),
  (['--config=' + TINY, '--config.model.attention=splash'], 'splash needs a tpu'),
  (['--config=configs/countdown.py:dapo'], "no cell 'dapo'"),
  (['--config=configs/countdown.py', '--mode=table'], 'no folder with a finished grid'),
  (['--config=configs/countdown.py', "--config.cells=('grpo',)"], "cells: 'grpo' is"),
  (
    ['--config=' + TINY, '--config.problems.source=countdown']
    + ['--config.problems.test_source=countdown'],
    "give wording='short'",
  ),
  (['--config=configs/aime.py:7b'], '--config.problems.source=data/skywork'),
]


@pytest.mark.parametrize(
  'flags, says', CASES, ids=lambda v: v if type(v) is str else ''
)
def test_bad_input(flags, says, tmp_path):
  if not any(flag.startswith('--workdir') for flag in flags):
    flags = [*flags, f'--workdir={tmp_path}']
  run = subprocess.run(
    [sys.executable, '-m', 'bapo_jax.main', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert run.returncode == 2, run.stderr
  (line,) = run.stderr.strip().splitlines()
  assert line.startswith('bapo_jax: ')
  assert says in line
  assert not list(tmp_path.iterdir()), 'nothing is written before the input is sound'


def test_a_plan_without_libtpu_says_what_to_install():
  # None in sys.modules: as if it were not installed, whether it is or not.
  hide = "import runpy, sys; sys.modules['libtpu'] = None; "
  run = subprocess.run(
    [
      sys.executable,
      '-c',
      f"{hide}runpy.run_module('bapo_jax.main', run_name='__main__')",
    ]
    + [f'--config={TINY}', '--mode=plan', '--topology=v5e:2x2'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert run.returncode == 2
  (line,) = run.stderr.strip().splitlines()
  assert line.startswith('bapo_jax: --mode=plan') and 'requirements-tpu.txt' in line
