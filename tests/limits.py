"""Marks the fast files, and fails a test that takes too long without the mark nightly.

The limit is on processor time, so that a loaded machine fails no test; child processes
may take five times as much, as each starts JAX. Two threads of one core share it, which
makes processor time up to 1.7 times as long: a test above the limit is measured against
`slowdown`. The limit is in force if CI=true, as in .ci/run, or with --limit=<seconds>.
"""

import os
import pathlib
import time
from collections.abc import Generator

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
# Ten seconds on idle cores are the aim (--limit=10). CI allows twice as much: its cores
# may be slower, or shared.
CI_LIMIT_S = 20.0
PROBE_S = 0.09  # processor seconds of `slowdown`'s work on an idle Xeon of 2.5 GHz
MOST = 2.0  # times the limit, on a machine that is slow or busy at the moment
CHILDREN = 5  # times the limit: two processes that start JAX and a run
# Pure and quick, by measured durations: 90 s in all on two cores.
FAST = {
  'algorithms': 'advantage batch_rules knobs_of_rules loss',
  'autosetup': 'presets',
  'data': 'countdown drawn hub local_files pictures prompts synthetic',
  'lab': 'claims run_plots',
  'models': 'hf_config hf_directory',
  'rollout': 'rollout',
  'run': 'page step_record',
  'runtime': 'machine markdown metrics progress workdir',
  'tools': 'compare roofline',
  'training': 'config evaluate',
  '.': 'architecture docs fuzz_config install knobs limits main notebooks '
  'on_gpu custom_code sharding types',
}


def fast_files() -> set[pathlib.Path]:
  """Returns the paths of the fast files."""
  return {
    HERE / folder / f'test_{name}.py'
    for folder, names in FAST.items()
    for name in names.split()
  }


def slowdown() -> float:
  """Returns how much more processor time fixed work takes now than when idle."""
  numbers = np.random.default_rng(0).random(2_000_000)
  took = []
  for _ in range(5):
    began = time.process_time()
    np.sort(numbers)
    sum(i & 3 for i in range(1_000_000))
    took.append(time.process_time() - began)
  return min(max(max(took) / PROBE_S, 1.0), MOST)  # the slowest: load comes and goes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks the tests of fast files, except for those that are nightly."""
  fast = fast_files()
  for item in items:
    if item.path in fast and not item.get_closest_marker('nightly'):
      item.add_marker('fast')


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds --limit."""
  parser.addoption(
    '--limit',
    type=float,
    default=CI_LIMIT_S if os.environ.get('CI') == 'true' else 0.0,
    help='processor seconds of a test that is not nightly; 0: any',
  )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
  """Fails a test that took more than the limit; its fixtures do not count."""
  began, limit = os.times(), item.config.getoption('--limit')
  result = yield
  used = [now - then for now, then in zip(os.times(), began, strict=True)]
  own, children = sum(used[:2]), sum(used[2:4])
  marked = item.get_closest_marker('nightly')
  if limit and not marked and (own > limit or children > CHILDREN * limit):
    limit *= slowdown()
  if limit and not marked and (own > limit or children > CHILDREN * limit):
    pytest.fail(
      f'{own:.1f} s of processor time and {children:.1f} s in child processes, at most '
      f'{limit:g} and {CHILDREN * limit:g} without the mark nightly: make the test '
      'faster or mark it',
      pytrace=False,
    )
  return result
