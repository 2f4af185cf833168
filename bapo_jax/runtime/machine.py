"""Reads the memory of this machine without importing JAX."""

import contextlib
import ctypes
import os
import resource
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def host_memory() -> int:
  """Bytes of the host's memory."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def peak_rss() -> int:
  """Largest resident size of this process so far, bytes."""
  # getrusage counts the process that this one was forked from, before its exec.
  with contextlib.suppress(OSError), open('/proc/self/status') as file:
    return next(int(x.split()[1]) << 10 for x in file if x.startswith('VmHWM'))
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hold_freed_memory() -> None:
  """Lets the C library hold up to 512 MiB of freed memory, where it is glibc.

  On a CPU every program allocates its temporaries anew. By its own measure glibc gives
  pieces of more than 32 MiB back each time, and the kernel clears the pages again: a
  third of the processor time of a small policy. `trim` gives back what is held.
  """
  with contextlib.suppress(AttributeError, OSError):
    for what, most in ((M_MMAP_THRESHOLD, 2**28), (M_TRIM_THRESHOLD, 2**29)):
      ctypes.CDLL(None).mallopt(what, most)


def trim() -> None:
  """Gives the system back what the C library holds of memory that was freed.

  Loading weights and compiling leave hundreds of MiB in pieces; only glibc can.
  """
  with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).malloc_trim(0)
