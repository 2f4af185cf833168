"""Reads the size of this machine, and tunes its C library; does not import JAX."""

import contextlib
import ctypes
import os
import resource
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def host_memory() -> int:
  """Returns the host's memory, bytes."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def peak_rss() -> int:
  """Returns the largest resident size of this process so far, bytes."""
  # getrusage includes the process that this one was forked from, before its exec.
  with contextlib.suppress(OSError), open('/proc/self/status') as file:
    return next(int(x.split()[1]) << 10 for x in file if x.startswith('VmHWM'))
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hold_freed_memory() -> None:
  """Lets glibc keep up to 512 MiB of freed memory; does nothing with another C library.

  On a CPU every program allocates its temporaries anew. By default glibc returns pieces
  of more than 32 MiB each time, and the kernel clears the pages again: a third of the
  processor time of a small policy. `trim` returns what is kept.
  """
  with contextlib.suppress(AttributeError, OSError):
    for what, limit in ((M_MMAP_THRESHOLD, 2**28), (M_TRIM_THRESHOLD, 2**29)):
      ctypes.CDLL(None).mallopt(what, limit)


def trim() -> None:
  """Returns freed memory that glibc keeps to the system.

  Loading weights and compiling leave hundreds of MiB in pieces.
  """
  with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).malloc_trim(0)
