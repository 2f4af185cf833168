"""What is installed is what was asked for, and what CI saw is written down."""

import importlib.metadata
import pathlib
import re

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]


def requirements(*names):
  for name in names:
    for line in (ROOT / name).read_text().splitlines():
      line = line.split('#')[0].strip()
      if line and not line.startswith('-r'):
        yield Requirement(line)


@pytest.mark.parametrize(
  'wanted',
  [*requirements('requirements.txt', 'requirements-dev.txt')],
  ids=str,
)
def test_installed_version_is_in_range(wanted):
  assert importlib.metadata.version(wanted.name) in wanted.specifier


def test_constraints_pin_every_requirement_inside_its_range():
  pins = dict(
    line.split('==')
    for line in (ROOT / 'constraints.txt').read_text().splitlines()
    if line and not line.startswith('#')
  )
  pins = {re.sub(r'[-_.]+', '-', name).lower(): pin for name, pin in pins.items()}
  for wanted in requirements('requirements.txt', 'requirements-dev.txt'):
    name = re.sub(r'[-_.]+', '-', wanted.name).lower()
    assert pins[name] in wanted.specifier, wanted
