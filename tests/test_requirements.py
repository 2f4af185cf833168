"""Installed versions are in range, and both lanes of CI pin every requirement."""

import importlib.metadata
import pathlib
import re
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]


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


def test_the_second_lane_has_the_newest_jax_that_is_allowed():
  (jax,) = (r for r in requirements('requirements.txt') if r.name == 'jax')
  limit = re.search(r'<0\.(\d+)', str(jax.specifier))
  assert limit
  newest = f'jax==0.{int(limit[1]) - 1}.'
  assert newest in (ROOT / 'requirements' / 'constraints-newest.txt').read_text()
