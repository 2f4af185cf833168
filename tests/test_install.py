"""`pip install .` makes the command `bapo`, which runs where the configs are."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

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
  done = bapo(installed, 'check', '--help')
  assert done.returncode == 0 and '--show_with' in done.stdout and not done.stderr
  # configs/aime.py imports configs/base.py, which is found from the current folder.
  done = bapo(installed, 'show', '--config=configs/aime.py', f'--workdir={tmp_path}')
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
  assert str(tmp_path) in done.stderr
  done = bapo(installed, 'check', cwd=tmp_path)
  assert 'no folder configs/ is here' in done.stderr


def test_python_m_bapo_jax_is_the_same_program(installed):
  command = [sys.executable, '-m', 'bapo_jax', 'check', '--config=nope.py']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  other = bapo(installed, 'check', '--config=nope.py')
  assert done.returncode == other.returncode == 2
  assert done.stderr == other.stderr != ''
