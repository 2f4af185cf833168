"""Eight virtual devices, strict promotion and one cache of programs for every test.

The environment is set before JAX is imported, so it is set here and nowhere else.
"""

import itertools
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator

os.environ['JAX_PLATFORMS'] = 'cpu'
# Programs of tests are compiled more often than run: LLVM need not optimise them.
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '')
  + ' --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
)
# Whole runs compile the same tiny programs: most of their time. One cache per session;
# the process that pytest was started in makes it before its workers start, and they and
# the processes of the tests inherit it. Keyed by the program: other code finds nothing.
COMPILED = '' if 'JAX_COMPILATION_CACHE_DIR' in os.environ else tempfile.mkdtemp()
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', COMPILED)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'

import jax
import pytest
import runs
from limits import (  # noqa: F401
  pytest_addoption,
  pytest_collection_modifyitems,
  pytest_runtest_call,
)

# A shell that starts pytest in the background has it ignore SIGINT, and so would every
# process of the tests: they would wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_unconfigure() -> None:
  """Removes the cache, in the process that made it."""
  if COMPILED:
    shutil.rmtree(COMPILED, ignore_errors=True)


@pytest.fixture(params=['plain', 'jitted', 'sharded'])
def variant(request: pytest.FixtureRequest) -> Callable:
  """Calls a function of arrays with rows as it is, jitted, and split over 8 devices."""
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
  """Devices of a TPU that is not attached, to compile for; skips without libtpu."""
  pytest.importorskip('libtpu', reason='libtpu is not installed: requirements-tpu.txt')
  from bapo_jax.main import PLANNING
  from bapo_jax.tools.plan import plan

  os.environ.update({k: v for k, v in PLANNING.items() if 'EFFORT' not in k})
  return lambda name: plan.attach(name)[1]


MOST_MAPS = 20_000  # of the 65 530 that Linux gives a process
LOOK = itertools.cycle(range(16))  # a look takes some ms; a test makes 700 maps at most


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
  """Every compiled program maps memory; past the limit of maps a process crashes."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if next(LOOK) or not maps.exists():
    return
  if maps.read_bytes().count(b'\n') > MOST_MAPS:
    jax.clear_caches()


@pytest.fixture
def one_device() -> Iterator[None]:
  """The tests have eight devices; whole runs want the laptop's one."""
  with runs.one_device():
    yield


@pytest.fixture(scope='session')
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A workdir with the problems and the warm start of a tiny run, and nothing else."""
  return runs.shared(tmp_path_factory, 'warm_start', runs.warm_start)


@pytest.fixture
def warm(warm_start: pathlib.Path, tmp_path: pathlib.Path) -> Callable:
  """Makes a workdir of the test, by name, in which the warm start is done."""
  return lambda name='run': runs.copied(warm_start, tmp_path / name)


@pytest.fixture(scope='session')
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
  """The embedded policy, both papers' rules, four synchronous steps."""
  return runs.recorded(tmp_path_factory, 'whole')


@pytest.fixture(scope='session')
def partial_run(tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
  """The same with partial rollouts, twelve steps."""
  return runs.recorded(tmp_path_factory, 'partial')


@pytest.fixture(scope='session')
def pictured_run(tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
  """The same with a vision tower, on drawn pictures, four steps."""
  return runs.recorded(tmp_path_factory, 'pictures')


@pytest.fixture(scope='session')
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
  """Adapters of a model in a Hugging Face directory, four steps."""
  return runs.recorded(tmp_path_factory, 'adapters')
