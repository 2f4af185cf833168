"""Sets up JAX for all tests, and makes the recorded runs.

JAX gets eight virtual devices, strict promotion and one cache of compiled programs. The
environment is set here, before JAX is imported.
"""

import contextlib
import importlib.metadata
import itertools
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'
# Tests compile programs more often than they run them: LLVM need not optimise, and
# XLA's older emitters compile a train step in two thirds of the time (0.12 has none).
FLAGS = [
  '--xla_force_host_platform_device_count=8',
  '--xla_backend_optimization_level=0',
]
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  FLAGS.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *FLAGS])
# Runs spend most of their time compiling the same tiny programs. The process that
# starts pytest makes one cache per session, which its workers and the processes of
# tests inherit.
COMPILED = '' if 'JAX_COMPILATION_CACHE_DIR' in os.environ else tempfile.mkdtemp()
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', COMPILED)
# Runs of tests share their embedded policies, and must not find those of the user.
USER = '' if 'PYTEST_XDIST_WORKER' in os.environ else tempfile.mkdtemp()
os.environ['XDG_CACHE_HOME'] = USER or os.environ['XDG_CACHE_HOME']
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'

import browser as browser_lib
import jax
import pytest
import runs
from limits import (  # noqa: F401
  pytest_addoption,
  pytest_collection_modifyitems,
  pytest_runtest_call,
)

from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.rewards import Verifier

# A shell that starts pytest in the background makes it ignore SIGINT. The processes of
# tests would inherit that, and wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
# Likewise nohup and SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_unconfigure() -> None:
  """Removes the caches in the process that made them."""
  for path in filter(None, (COMPILED, USER)):
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=['plain', 'jitted', 'sharded'])
def variant(request: pytest.FixtureRequest) -> Callable:
  """Calls a function of arrays with rows: plain, jitted, and split over 8 devices."""
  if request.param == 'plain':
    return lambda function, *arrays: function(*arrays)
  if request.param == 'jitted':
    return lambda function, *arrays: jax.jit(function)(*arrays)
  from bapo_jax import sharding

  rows = sharding.over_rows(sharding.make(data=4, fsdp=2))

  def sharded(function, *arrays):
    return jax.jit(function)(*(jax.device_put(x, rows) for x in arrays))

  return sharded


@pytest.fixture
def topology() -> Callable:
  """Returns devices that are not attached, to compile for; needs their compiler."""
  from bapo_jax.main import PLANNING
  from bapo_jax.tools.plan import devices

  os.environ.update({k: v for k, v in PLANNING.items() if 'EFFORT' not in k})

  def attach(name: str) -> Sequence[Any]:
    try:
      return devices.attach(name)[1]
    except ValueError as error:
      if devices.INSTALL not in str(error):
        raise
      pytest.skip(str(error))

  return attach


MOST_MAPS = 20_000  # of the 65 530 that Linux gives a process
LOOK = itertools.cycle(range(16))  # counting takes ms; a test adds 700 maps at most


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
  """Clears the compiled programs before their memory maps reach the system's limit."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if next(LOOK) or not maps.exists():
    return
  if maps.read_bytes().count(b'\n') > MOST_MAPS:
    jax.clear_caches()


@pytest.fixture
def one_device() -> Iterator[None]:
  """Hides seven of the eight devices, as a run on a laptop needs."""
  with runs.on_devices(1):
    yield


def recorded(name: str) -> Any:
  """Returns the fixture of a recorded run."""

  @pytest.fixture(scope='session')
  def run(tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
    return runs.recorded(tmp_path_factory, name)

  return run


# What the runs are: runs.RECORDED.
whole_run, partial_run, pictured_run, adapter_run = map(recorded, runs.RECORDED)


@pytest.fixture
def verifier() -> Iterator[Callable[..., Verifier]]:
  """Makes verifiers of a rule, and ends their processes."""
  with contextlib.ExitStack() as stack:

    def make(rule: str, **knobs: Any) -> Verifier:
      made = Verifier(Verification.model_validate({'rule': rule} | knobs))
      return stack.enter_context(contextlib.closing(made))

    yield make


@pytest.fixture
def compiled() -> Iterator[list[str]]:
  """Returns the names of the programs that JAX compiles, as the test goes on."""
  names: list[str] = []

  def note(event: str, seconds: float, **details: Any) -> None:
    if event.endswith('backend_compile_duration'):
      names.append(details.get('fun_name', ''))

  jax.monitoring.register_event_duration_secs_listener(note)
  yield names
  jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope='session')
def browser(
  tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[browser_lib.Browser]:
  """Returns a headless Chromium; skips the test where none is installed."""
  chromium = browser_lib.Browser(tmp_path_factory.mktemp('chromium'))
  yield chromium
  chromium.close()
