"""Lists the GPUs and TPUs for which a run can be planned, with their data sheets."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bapo_jax.runtime import machine

GIB = 2**30


class Gpu(NamedTuple):
  """Figures of a GPU that XLA's compiler needs in addition to those of `Chip`."""

  capability: tuple[int, int]  # its compute capability
  cores: int  # streaming multiprocessors
  clock: float  # GHz, boost
  cache: int  # MiB, level 2
  shared: int  # KiB of shared memory per core
  lanes: int = 128  # float32 units per core
  threads: int = 2048  # per core
  name: str = ''  # as CUDA reports it


class Chip(NamedTuple):
  """One device as JAX counts devices, which may be half of a chip."""

  hbm: float  # GiB that a program may use, by the compiler's count
  flops: float  # bfloat16 with float32 sums, dense, per second
  memory: float  # bytes per second
  links: float  # bytes per second into the device from all its neighbours
  network: float = math.inf  # likewise from other hosts; TPUs use their links
  options: Mapping[str, Any] = {}  # options of a TPU topology
  gpu: Gpu | None = None  # None: a TPU


A100 = Gpu((8, 0), 108, 1.41, 40, 164, lanes=64)
HOPPER = Gpu((9, 0), 132, 1.98, 50, 228)
BLACKWELL = Gpu((10, 0), 148, 1.965, 126, 228)
ADA = Gpu((8, 9), 128, 2.52, 72, 100, threads=1536)
RTX_PRO = Gpu((12, 0), 188, 2.617, 128, 100, threads=1536)

# TPUs: peaks of cloud.google.com/tpu/docs; a TPU7x chip is two devices.
# GPUs: NVIDIA's data sheets of H100 SXM, H200 SXM, A100 SXM and HGX B200, and the white
# papers "RTX Blackwell PRO" for the RTX PRO 6000 Blackwell Workstation or Server
# Edition and "Ada GPU Architecture" for the RTX 4090. Links are NVLink in one
# direction, for the RTX PRO 6000 PCIe 5.0 x16 and for the RTX 4090 PCIe 4.0 x16. The
# network is one adapter per GPU: 400 Gb/s in DGX H100, H200 and B200, 200 Gb/s in
# DGX A100 and in NVIDIA's reference architecture for eight RTX PRO 6000. An RTX 4090
# has no such architecture: 10 Gb/s Ethernet is assumed; its usable memory is that of
# errors that PyTorch's users report.
CHIPS = {
  'v4': Chip(30.75, 275e12, 1.228e12, 300e9, options={'chip_config_name': 'megacore'}),
  'v5e': Chip(15.75, 197e12, 0.819e12, 200e9),
  'v5p': Chip(95.74, 459e12, 2.765e12, 600e9),
  'v6e': Chip(31.25, 918e12, 1.638e12, 400e9),
  'tpu7x': Chip(94.75, 1153.5e12, 3.69e12, 300e9),
}
# Kind, name and GiB as CUDA reports them; then flops, memory, links and network.
GPUS: dict[str, tuple] = {
  'a100-40': (A100, 'NVIDIA A100-SXM4-40GB', 39.42, 312e12, 1.555e12, 300e9, 25e9),
  'a100-80': (A100, 'NVIDIA A100-SXM4-80GB', 79.25, 312e12, 2.039e12, 300e9, 25e9),
  'h100': (HOPPER, 'NVIDIA H100 80GB HBM3', 79.11, 989e12, 3.35e12, 450e9, 50e9),
  'h200': (HOPPER, 'NVIDIA H200', 139.8, 989e12, 4.8e12, 450e9, 50e9),
  'b200': (BLACKWELL, 'NVIDIA B200', 178.35, 2250e12, 8e12, 900e9, 50e9),
  'rtx6000': (
    RTX_PRO,
    'NVIDIA RTX PRO 6000 Blackwell',
    94.97,
    503.8e12,
    1.792e12,
    63e9,
    25e9,
  ),
  'rtx4090': (
    ADA,
    'NVIDIA GeForce RTX 4090',
    23.64,
    165.2e12,
    1.008e12,
    31.5e9,
    1.25e9,
  ),
}
CHIPS |= {
  key: Chip(machine.GPU_SHARE * total, *figures, gpu=gpu._replace(name=name))
  for key, (gpu, name, total, *figures) in GPUS.items()
}
