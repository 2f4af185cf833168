"""`pip install .` makes the command `bapo`, and copied configs run anywhere."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from bapo_jax.training import config

ROOT = pathlib.Path(__file__).parents[1]
PARTS = ('bapo_jax', 'pyproject.toml', 'README.md', 'LICENSE', 'requirements.txt')


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
  """A folder that pip installed the package into, without its requirements."""
  folder = tmp_path_factory.mktemp('installed')
  source = folder / 'source'  # setuptools builds in the source tree
  source.mkdir()
  for part in PARTS:
    if (ROOT / part).is_dir():
      ignore = shutil.ignore_patterns('__pycache__')
      shutil.copytree(ROOT / part, source / part, ignore=ignore)
    else:
      shutil.copy(ROOT / part, source)
  pip = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index']
  pip += ['--no-build-isolation', f'--target={folder / "target"}', str(source)]
  subprocess.run(pip, check=True, capture_output=True, text=True, timeout=300)
  return folder / 'target'


def bapo(installed, *args, cwd=ROOT):
  command = [sys.executable, str(installed / 'bin' / 'bapo'), *args]
  env = os.environ | {'PYTHONPATH': str(installed)}
  return subprocess.run(
    command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120
  )


def test_the_command_reads_the_configs_of_the_current_folder(installed, tmp_path):
  done = bapo(installed)
  assert done.returncode == 2 and 'configs/aime.py[:tiny|' in done.stderr
  done = bapo(installed, 'show', '--help')
  assert done.returncode == 0 and '--views' in done.stdout and not done.stderr
  done = bapo(installed, 'show', '--config=configs/aime.py', f'--workdir={tmp_path}')
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
  assert str(tmp_path) in done.stderr
  done = bapo(installed, 'check', cwd=tmp_path)
  assert 'no folder configs/ is here' in done.stderr


COPIES = """
import json, runpy, sys
import bapo_jax
from bapo_jax.training.config import load
assert bapo_jax.__file__.startswith(sys.argv[1])
found = {}
for file in sys.argv[2:]:
  for variant in ('', *runpy.run_path(file).get('VARIANTS', ())):
    name = f'{file}:{variant}' if variant else file
    found[name] = load(name)
print(json.dumps(found))
"""


def test_a_copy_of_every_config_runs_outside_the_checkout(installed, tmp_path):
  copies = []
  for path in sorted((ROOT / 'configs').glob('*.py')):  # each in a folder of its own
    copies.append(tmp_path / path.stem / path.name)
    copies[-1].parent.mkdir()
    shutil.copy(path, copies[-1])
  done = subprocess.run(
    [sys.executable, '-c', COPIES, str(installed), *map(str, copies)],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(installed)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert len(found) > len(copies)
  for name, values in found.items():
    shipped = f'configs/{pathlib.Path(name).name}'
    assert values == json.loads(json.dumps(config.load(shipped))), shipped


def test_a_copied_config_trains_by_command_and_from_python(installed, tmp_path):
  shutil.copy(ROOT / 'configs' / 'aime.py', tmp_path / 'copy.py')
  (tmp_path / 'work').write_text('no folder')  # what ends both, before they train
  flags = [f'--config={tmp_path}/copy.py', f'--workdir={tmp_path}/work']
  done = bapo(installed, 'train', *flags, cwd='/')
  assert done.returncode == 2 and '/work cannot be used' in done.stderr, done.stderr
  call = f"import bapo_jax; bapo_jax.train('{tmp_path}/copy.py', '{tmp_path}/work')"
  done = subprocess.run(
    [sys.executable, '-c', call],
    cwd='/',
    env=os.environ | {'PYTHONPATH': str(installed)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert '/work cannot be used' in done.stderr.splitlines()[-1], done.stderr


def test_python_m_bapo_jax_is_the_same_program(installed):
  command = [sys.executable, '-m', 'bapo_jax', 'check', '--config=nope.py']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  other = bapo(installed, 'check', '--config=nope.py')
  assert done.returncode == other.returncode == 2
  assert done.stderr == other.stderr != ''
