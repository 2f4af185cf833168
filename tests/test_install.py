"""`pip install .` makes the command `bapo`, and copied configs run anywhere."""

import importlib.metadata
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator

import processes
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
  pip += ['--no-build-isolation', f'--target={folder / "target"}', source]
  processes.call(*pip)
  return folder / 'target'


def python(installed, *args, **kwargs):
  return processes.call(sys.executable, *args, PYTHONPATH=str(installed), **kwargs)


def bapo(installed, *args, **kwargs):
  return python(installed, installed / 'bin' / 'bapo', *args, **kwargs)


def test_the_command_reads_the_configs_of_the_current_folder(installed, tmp_path):
  assert 'configs/aime.py[:tiny|' in bapo(installed, status=2).stderr
  policies = [path.name for path in installed.glob('bapo_jax/policies/*/*.safetensors')]
  assert policies == ['model.safetensors']
  assert (installed / 'bapo_jax' / 'pages' / 'page.js').exists()
  done = bapo(installed, 'show', '--help')
  assert '--views' in done.stdout and not done.stderr
  flags = '--config=configs/aime.py', f'--workdir={tmp_path}'
  done = bapo(installed, 'show', *flags, status=2)
  (line,) = done.stderr.splitlines()
  assert str(tmp_path) in line and not done.stdout
  done = bapo(installed, 'check', cwd=tmp_path, status=2)
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
  done = python(installed, '-c', COPIES, installed, *copies, cwd=tmp_path)
  found = json.loads(done.stdout)
  assert len(found) > len(copies)
  for name, values in found.items():
    shipped = f'configs/{pathlib.Path(name).name}'
    assert values == json.loads(json.dumps(config.load(shipped))), shipped


# --------- installed versions are in range, and both lanes of CI pin every requirement


def requirements(*names: str) -> Iterator[Requirement]:
  """The lines of these requirements files."""
  for name in names:
    for line in (ROOT / name).read_text().splitlines():
      line = line.split('#')[0].strip()
      if line and not line.startswith('-r'):
        yield Requirement(line)


@pytest.mark.parametrize(
  'wanted',
  [*requirements('requirements.txt', 'requirements/dev.txt')],
  ids=str,
)
def test_installed_version_is_in_range(wanted):
  assert importlib.metadata.version(wanted.name) in wanted.specifier


@pytest.mark.parametrize('name', ['constraints.txt', 'constraints-newest.txt'])
def test_constraints_pin_every_requirement_inside_its_range(name):
  lines = (ROOT / 'requirements' / name).read_text().splitlines()
  pairs = [line.split('==') for line in lines if line and not line.startswith('#')]
  pins = {canonicalize_name(package): pin for package, pin in pairs}
  assert len(pins) == len(pairs)
  for wanted in requirements('requirements.txt', 'requirements/dev.txt'):
    assert pins[canonicalize_name(wanted.name)] in wanted.specifier, wanted
