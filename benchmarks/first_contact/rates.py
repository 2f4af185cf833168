"""Describes the devices and measures what bounds every program: products and bytes."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterator
from typing import Any

import jax

from bapo_jax import sharding
from bapo_jax.runtime import machine as host
from bapo_jax.tools.plan.chips import CHIPS, Chip
from benchmarks import machine
from benchmarks.first_contact.figures import Context, Figure
from benchmarks.training import collectives

GIB = 2**30
# What JAX calls a device -> its name in chips.CHIPS. Cards of the same name with
# other figures, such as an H100 on PCIe, have no data sheet there.
KINDS = {
  'TPU v4': 'v4',
  'TPU v5 lite': 'v5e',
  'TPU v5': 'v5p',
  'TPU v6 lite': 'v6e',
  'TPU7x': 'tpu7x',
  'NVIDIA RTX PRO 6000 Blackwell Server Edition': 'rtx6000',
  'NVIDIA RTX PRO 6000 Blackwell Workstation Edition': 'rtx6000',
} | {chip.gpu.name: name for name, chip in CHIPS.items() if chip.gpu}


def chip_of(kind: str) -> Chip | None:
  """Returns the data sheet of a device kind; None if the table has none."""
  return CHIPS.get(KINDS.get(kind, ''))


def describe() -> dict[str, Any]:
  """Returns the facts about devices, host and versions that a report needs."""
  device = jax.devices()[0]
  stats = (device.memory_stats() if device.platform != 'cpu' else None) or {}
  command = ['git', 'describe', '--always', '--dirty']
  commit = ''
  with contextlib.suppress(FileNotFoundError):  # git is not installed
    done = subprocess.run(command, capture_output=True, text=True)
    commit = done.stdout.strip()
  return {
    'platform': device.platform,
    'kind': device.device_kind,
    'chip': KINDS.get(device.device_kind, ''),
    'devices': jax.device_count(),
    'memory_gib': stats.get('bytes_limit', 0) / GIB or None,
    'host': f'{platform.system()} {platform.machine()}',
    'host_cores': os.cpu_count() or 1,
    'host_memory_gib': host.host_memory() / GIB,
    'commit': commit or 'unknown',  # outside a repository
    'versions': host.versions(),
  }


def run(context: Context) -> Iterator[Figure | dict[str, Any]]:
  """Yields the facts, and rates beside those of the data sheet."""
  facts = describe()
  yield facts
  chip, on_cpu = chip_of(facts['kind']), facts['platform'] == 'cpu'
  times = 3 if context.small else 10
  # Large enough on an accelerator that starting the program does not count.
  size = 128 if context.small else 2048 if on_cpu else 8192
  products = {
    'product bfloat16': ('bfloat16', None),
    'product float32': ('float32', None),
    'product float32 highest': ('float32', 'highest'),
  }
  for name, (dtype, precision) in products.items():
    rate = machine.gemm_rate(dtype, times, size, precision)
    peak = chip.flops / 1e12 if chip and dtype == 'bfloat16' else None
    yield Figure(name, rate / 1e12, 'TFLOP/s', None, peak, 'data sheet' if peak else '')

  def of_bytes(name: str, rate: float, peak: float | None) -> Figure:
    peak = peak and peak / 1e9
    return Figure(name, rate / 1e9, 'GB/s', None, peak, 'data sheet' if peak else '')

  floats = 2**12 if context.small else 2**26 if on_cpu else 2**29
  rate = machine.copy_rate(floats, times)
  yield of_bytes('copy', rate, chip.memory if chip else None)
  if not on_cpu:
    yield of_bytes('host to device', machine.host_rate(floats // 4, times), None)
  if facts['devices'] > 1:
    mesh = sharding.make()
    rate = machine.gather_rate(mesh, floats // 16, times)
    yield of_bytes('all-gather', rate, chip.links if chip else None)
    took = collectives.latency(mesh, 10 if context.small else 100, times)
    for numbers, ms in took.items():
      yield Figure(f'sum of {numbers} numbers', ms, 'ms')
