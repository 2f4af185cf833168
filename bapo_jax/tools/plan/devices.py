"""Describes devices that are not attached, for a compiler.

1. `parse` reads a topology such as v5p:4x4x4 (a TPU slice), h100:8 (GPUs of one host)
   or h100:4x8 (four hosts of eight);
2. `attach` returns its devices, for which XLA's own compiler for TPUs or GPUs compiles.
"""

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from bapo_jax.runtime import machine
from bapo_jax.tools.plan.chips import CHIPS, GIB, Chip

INSTALL = (
  'install requirements/plan.txt with -c requirements/constraints.txt into an '
  'environment of its own (no GPU or TPU is needed)'
)
CUDNN = (9, 10)  # the version whose attention kernels the compiler may use


def parse(topology: str) -> tuple[Chip, tuple[int, ...]]:
  """Returns (chip, sizes) of a topology; a GPU's sizes are (hosts, GPUs per host).

  Raises:
    ValueError: the chip or the form of the shape is unknown.
  """
  name, _, shape = topology.partition(':')
  chip = CHIPS.get(name)
  form = r'\d+(x\d+)?' if chip and chip.gpu else r'\d+(x\d+)+'
  sizes = tuple(int(n) for n in re.findall(r'\d+', shape))
  if chip is None or not re.fullmatch(form, shape) or not all(sizes):
    raise ValueError(
      f'--topology={topology!r} is not a topology; give one of '
      f'{sorted(CHIPS)} with its shape, for instance h100:8 (one host of '
      'eight GPUs), h100:4x8 (four such hosts), v5p:2x2x4 or v6e:4x4'
    )
  return chip, (1, *sizes)[-2:] if chip.gpu else sizes


def attach(topology: str) -> tuple[Chip, Sequence[Any]]:
  """Returns (chip, devices) of a topology; programs compile for these devices.

  Raises:
    ValueError: the chip or the arrangement does not exist, or the compiler for this
      kind of device is not installed.
  """
  chip, sizes = parse(topology)
  kind, plugins = ('cuda', machine.CUDA_PLUGINS) if chip.gpu else ('tpu', ('libtpu',))
  if not any(map(importlib.util.find_spec, plugins)):
    compiler = "JAX's CUDA plugin" if chip.gpu else 'libtpu'
    raise ValueError(
      f'--topology={topology} needs {compiler}, which is not installed; {INSTALL}'
    )
  options = dict(chip.options)
  if chip.gpu:
    # The topology is NVLink domains x hosts per domain x GPUs per host.
    hosts, gpus = sizes
    options = {
      'topology': f'{hosts}x1x{gpus}',
      'target_config': target_config(chip),
    }
  try:
    found = topologies.get_topology_desc(topology, kind, **options)
  except Exception as error:  # the plugins raise exception types of their own
    reason = str(error).partition('=== Source')[0]
    raise ValueError(f'--topology={topology}: {reason}') from error
  return chip, found.devices


def target_config(chip: Chip) -> str:
  """Formats a GPU as the text proto from which XLA compiles for an absent GPU.

  The message is stream_executor.GpuTargetConfigProto. The limits that are equal for all
  CUDA GPUs since 2017 are from table "Technical Specifications per Compute Capability"
  of the CUDA C++ Programming Guide.
  """
  gpu = chip.gpu
  assert gpu is not None, 'only called for GPUs'
  major, minor = gpu.capability
  # Hopper and data-centre Blackwell have instructions of their own (sm_90a, sm_100a).
  features = 'ACCELERATED_FEATURES' if major in (9, 10) else 'NONE'
  fields = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'threads_per_core_limit': gpu.threads,
    'shared_memory_per_block': 48 << 10,
    'shared_memory_per_block_optin': (gpu.shared - 1) << 10,
    'shared_memory_per_core': gpu.shared << 10,
    'registers_per_core_limit': 64 << 10,
    'registers_per_block_limit': 64 << 10,
    'block_dim_limit_x': 2**31 - 1,
    'block_dim_limit_y': 2**16 - 1,
    'block_dim_limit_z': 2**16 - 1,
    'core_count': gpu.cores,
    'fpus_per_core': gpu.lanes,
    'clock_rate_ghz': gpu.clock,
    'l2_cache_size': gpu.cache << 20,
    'memory_bandwidth': int(chip.memory),
    'device_memory_size': int(chip.hbm / machine.GPU_SHARE * GIB),
  }
  lines = [f'  {name}: {value}' for name, value in fields.items()]
  capability = f'major: {major} minor: {minor} feature_extension: {features}'
  return '\n'.join(
    [
      'gpu_device_info {',
      *lines,
      f'  cuda_compute_capability {{ {capability} }}',
      '}',
      'platform_name: "CUDA"',
      f'dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}',
      f'device_description_str: "{gpu.name}"',
    ]
  )
