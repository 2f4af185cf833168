"""What a user gets wrong is answered in one sentence, before anything compiles."""

import math
import pathlib
import re
import subprocess
import sys

import pytest

from bapo_jax import main
from bapo_jax.training import overrides
from bapo_jax.training.config import Config

ROOT = pathlib.Path(__file__).parents[1]
TINY = 'configs/aime.py'
GOOD = '--config=' + TINY
CASES = [  # flags, what the sentence must say
  ([], 'give a --config'),
  (['--config=configs/aime.py:8b'], "no variant '8b'"),
  (['--config=configs/nope.py'], 'No such file or directory'),
  (['--config=configs'], "not a file that ends in .py: 'configs'"),
  ([GOOD, '--wrkdir=x'], 'workdir'),
  ([GOOD, '--workdir'], 'workdir'),
  ([GOOD, 'steps=3'], "what is 'steps=3'"),
  ([GOOD, '--config.clip.rul=fixed'], 'the nearest are clip.rule'),
  ([GOOD, '--config.clip=fixed'], 'no knob --config.clip; the nearest are'),
  ([GOOD, '--config.steps=many'], 'steps=many: give an integer from 1 to 2147483647'),
  ([GOOD, '--config.steps=1.5'], 'steps=1.5: give an integer from 1 to'),
  ([GOOD, '--config.steps=0'], 'steps=0: give an integer from 1 to'),
  ([GOOD, '--config.steps'], 'steps=: give an integer from 1 to'),
  ([GOOD, '--config.steps=' + '9' * 5000], 'steps=' + '9' * 57 + '...: give an int'),
  ([GOOD, '--config.responses=nan'], 'responses=nan: give a number above 0 or inf'),
  (
    [GOOD, '--config.clip.balanced.low=3'],
    'clip.balanced.low=3: give a tuple of 2 numbers',
  ),
  ([GOOD, '--config.clip.balanced.low=(0.6,'], 'low=(0.6,: give a tuple of 2 numbers'),
  ([GOOD, '--config.evaluate.k=(1,8)'], 'evaluate.group_size=1'),
  ([GOOD, '--config.evaluate.k=' + '(' * 5000], 'evaluate.k=((((('),
  ([GOOD, '--config.metrics.wandb=maybe'], 'metrics.wandb=maybe: give True or False'),
  ([GOOD, '--config.clip.rule=balnced'], "clip.rule='balnced': give one of 'uncl"),
  ([GOOD, '--config.clip.balanced.target=1.5'], 'target=1.5: give a number from 0'),
  ([GOOD, '--config.clip.balanced.low=(0.9,0.6)'], 'low=(0.9, 0.6)'),
  ([GOOD, '--config.loss.rule=tis'], "choose clip.rule='unclipped'"),
  ([GOOD, '--config.learner.minibatches=5'], 'prompts.count=64'),
  ([GOOD, '--config.prompts.count=4096'], 'count=4096: give 1 to problems.train=2048'),
  ([GOOD, '--config.mesh.data=3'], 'does not fill'),
  ([GOOD, '--config.sampler.group_size=1'], 'group_size=1: give an integer from 2 to'),
  ([GOOD, '--config.sampler.max_new_tokens=40000'], "the model's 32768 positions"),
  (
    [GOOD, '--config.problems.level=9'],
    'problems.level=9: give an integer from 1 to 4',
  ),
  ([GOOD, '--workdir=README.md/x'], 'cannot be used'),
  ([GOOD, '--mode=export'], 'holds no checkpoint; train there first'),
  ([GOOD, '--mode=eval'], 'names no model; train there first'),
  ([GOOD, '--mode=show'], 'holds no run; train there first'),
  ([GOOD, '--config.problems.source=x.jsonl'], "test_source='synthetic'"),
  (
    [GOOD, '--config.problems.source=synthetic']
    + ['--config.problems.test_source=requirements.txt'],
    "'requirements.txt' ends in none of .jsonl",
  ),
  ([GOOD, '--mode=exprt'], 'should be one of'),
  ([GOOD, '--checkpoint=best'], 'always goes on from the newest'),
  ([GOOD, '--config.rewards.rule=amie'], "rewards.rule='amie': give one of 'aime'"),
  (
    [GOOD, '--config.model.remat=half'],
    "model.remat='half': give one of 'auto', 'full'",
  ),
  ([GOOD, '--config.model.attention=splash'], 'splash needs a tpu'),
  (['--config=configs/countdown.py:dapo'], "no cell 'dapo'"),
  (
    [GOOD, '--config.problems.source=countdown']
    + ['--config.problems.test_source=countdown'],
    "give wording='short'",
  ),
  (['--config=configs/aime.py:7b'], '--config.problems.source=data/skywork'),
]


def run(flags, timeout=60):
  """The command line with these flags, finished."""
  return subprocess.run(
    [sys.executable, '-m', 'bapo_jax.main', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=timeout,
  )


@pytest.mark.parametrize(
  ('flags', 'message'), CASES, ids=lambda v: v[:50] if type(v) is str else ''
)
def test_bad_input_is_one_sentence(flags, message, tmp_path):
  if not any(flag.startswith('--workdir') for flag in flags):
    flags = [*flags, f'--workdir={tmp_path}']
  done = run(flags)
  assert done.returncode == 2, done.stderr
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith('bapo_jax: ')
  assert message in line
  assert not list(tmp_path.iterdir()), 'nothing is written before the input is sound'
  assert not done.stdout


FILES = [  # a config file, what the sentence must say
  ("raise KeyError('boom')", "KeyError: 'boom'"),
  ('def get_config(:', 'SyntaxError: invalid syntax'),
  ('import nothing_of_this_name', 'ModuleNotFoundError: No module named'),
  ('steps = 3', "has no attribute 'get_config'"),
  ('raise SystemExit(0)', 'SystemExit: 0'),
  ('get_config = lambda: None', 'get_config() returns None, not a ConfigDict'),
  ('get_config = dict', 'get_config() returns {}, not a ConfigDict'),
  ("raise ValueError('two\\nlines')", 'two lines'),
]
DICT = 'from ml_collections import ConfigDict\nget_config = lambda: ConfigDict({})\n'


@pytest.mark.parametrize(('text', 'message'), FILES)
def test_a_config_file_that_raises_is_one_sentence(text, message, tmp_path):
  (tmp_path / 'own.py').write_text(text)
  with pytest.raises(ValueError) as error:
    overrides.load(str(tmp_path / 'own.py'))
  assert message in ' '.join(str(error.value).split())
  assert str(error.value).startswith(f'--config={tmp_path}/own.py: ')


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'stps': 3}, 'no knob stps'),
    ({'steps': '3'}, "steps='3': give an integer"),
    ({'clip': 3}, 'clip=3: '),
    ({'clip': {'rule': 'fixed', 'fixed': {'hi': 1.5}}}, 'no knob clip.fixed.hi'),
  ],
)
def test_what_a_config_file_sets_is_checked_like_an_override(values, message, tmp_path):
  (tmp_path / 'own.py').write_text(DICT.format(values))
  for given in ([], ['--config.clip.rule=fixed']):
    with pytest.raises(ValueError, match=re.escape(message)):
      main.read_config(str(tmp_path / 'own.py'), given)


def test_a_config_file_may_set_few_knobs_and_overrides_come_last(tmp_path):
  (tmp_path / 'own.py').write_text(DICT.format({'clip': {'rule': 'fixed'}}))
  given = ['--config.clip.fixed.high=1.28', '-config.seed=3', '--config.seed=4']
  config = main.read_config(str(tmp_path / 'own.py'), given)
  assert (config.clip.rule, config.clip.fixed.high, config.seed) == ('fixed', 1.28, 4)
  assert config.clip.balanced == Config().clip.balanced


@pytest.mark.parametrize(
  ('given', 'value'),
  [
    ('--config.steps=10', 10),
    ('--config.responses=512', 512.0),
    ('--config.responses=inf', math.inf),
    ('--config.title=a=b', 'a=b'),
    ('--config.title=', ''),
    ('--config.metrics.wandb', True),
    ('--noconfig.metrics.wandb', False),
    ('--config.metrics.wandb=False', False),
    ('--config.metrics.wandb=t', True),
    ('--config.evaluate.k=(1, 8)', (1, 8)),
    ('--config.evaluate.k=[1,8]', (1, 8)),
    ('--config.evaluate.k=8', (8,)),
    ('--config.clip.balanced.sources=fresh', ('fresh',)),
    ("--config.clip.balanced.sources=('fresh','reused')", ('fresh', 'reused')),
  ],
)
def test_an_override_is_read_by_the_type_of_its_knob(given, value):
  name = given.split('config.')[1].split('=')[0]
  assert overrides.overrides([given]) == {name: value}


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
