"""Reports memory and package versions without importing JAX."""

import contextlib
import ctypes
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import resource
import sys

M_TRIM_THRESHOLD = -1  # of glibc's mallopt
M_MMAP_THRESHOLD = -3
# The share of a GPU's memory that XLA's allocator takes. JAX's default of 0.75 is for
# shared GPUs; the other 8 % are for the CUDA context, the buffers of NCCL and other
# libraries.
GPU_SHARE = 0.92
# Two names of the variable that sets it; JAX refuses both at once.
GPU_SHARES = 'XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION'
CUDA_PLUGINS = 'jax_cuda12_plugin', 'jax_cuda13_plugin'
GPUS = '/dev/nvidia[0-9]*'
# XLA's options for GPUs, unless the user sets them.
GPU_FLAGS = {
  # Overlaps collectives with products. Recommended by JAX's "GPU performance tips" and
  # set in NVIDIA's images of JAX; programs for one device stay the same.
  'xla_gpu_enable_latency_hiding_scheduler': 'true',
}
CONFIRMED = (
  'one H100 ran the programs of commit 33ea926, within 5 % of their planned memory; '
  'those for several GPUs and for TPUs are compiled only'
)
# Packages whose version can change the results of a run.
PACKAGES = (
  'jax jaxlib libtpu flax optax orbax-checkpoint numpy transformers tokenizers '
  'math-verify sympy'
)


def prepare_gpu() -> None:
  """Sets JAX's share of a GPU's memory and XLA's GPU_FLAGS, before JAX starts.

  Keeps what the user has set. Without one of the CUDA_PLUGINS, sets no flags.
  """
  if not os.environ.keys() & set(GPU_SHARES):
    os.environ[GPU_SHARES[0]] = str(GPU_SHARE)
  if any(map(importlib.util.find_spec, CUDA_PLUGINS)):
    given = os.environ.get('XLA_FLAGS', '')
    flags = (f'--{x}={y}' for x, y in GPU_FLAGS.items() if f'--{x}' not in given)
    os.environ['XLA_FLAGS'] = ' '.join([given, *flags]).strip()


def gpus() -> list[str]:
  """Returns the NVIDIA GPUs that JAX would use, as names for CUDA_VISIBLE_DEVICES.

  JAX is not asked: it would take most of their memory.
  """
  cuda = any(map(importlib.util.find_spec, CUDA_PLUGINS))
  if not cuda or os.environ.get('JAX_PLATFORMS') == 'cpu':
    return []
  every = ','.join(map(str, range(len(glob.glob(GPUS)))))
  visible = os.environ.get('CUDA_VISIBLE_DEVICES', every).split(',')
  return [name for name in visible if name not in ('', '-1')]


def versions() -> dict[str, str]:
  """Returns each package's version, and a digest of bapo_jax's source as 'code'."""
  root = pathlib.Path(__file__).parents[1]
  digest = hashlib.sha256()
  for path in sorted(root.glob('**/*.py')):
    digest.update(f'{path.relative_to(root)}\n'.encode() + path.read_bytes())
  found = {'code': digest.hexdigest()[:12], 'python': platform.python_version()}
  for name in PACKAGES.split():
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def processor() -> str:
  """Returns digits that change with the kind of the CPU and its number of usable cores.

  Both decide how XLA divides a program among threads, and so how sums are rounded.
  """
  kind = platform.machine()
  info = pathlib.Path('/proc/cpuinfo')
  if info.exists():
    described = ('vendor_id', 'model name', 'flags', 'CPU part', 'Features')
    first = info.read_text().partition('\n\n')[0].splitlines()
    kind += '\n'.join(line for line in first if line.startswith(described))
  return hashlib.sha256(f'{kind} {len(cores())}'.encode()).hexdigest()[:12]


def cores() -> list[int]:
  """Returns the numbers of the cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # Linux only
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def host_memory() -> int:
  """Returns the size of the host's memory in bytes."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def peak_rss() -> int:
  """Returns the peak memory of this process so far (resident set size) in bytes."""
  # getrusage includes the memory of the parent process between fork and exec.
  with contextlib.suppress(OSError), open('/proc/self/status') as file:
    return next(int(x.split()[1]) << 10 for x in file if x.startswith('VmHWM'))
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hold_freed_memory() -> None:
  """Lets glibc keep up to 512 MiB of freed memory; a no-op with other C libraries.

  On a CPU every call of a program allocates new temporaries. By default glibc returns
  blocks over 32 MiB to the kernel, which must zero the pages again: this is a third of
  the CPU time of a small policy. `trim` releases the kept memory.
  """
  with contextlib.suppress(AttributeError, OSError):
    for what, most in ((M_MMAP_THRESHOLD, 2**28), (M_TRIM_THRESHOLD, 2**29)):
      ctypes.CDLL(None).mallopt(what, most)


def trim() -> None:
  """Gives the freed memory that glibc keeps, often hundreds of MiB, to the system."""
  with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).malloc_trim(0)
