"""Devices that are not attached are described as their makers describe them."""

import itertools

import jax
import pytest

from bapo_jax.tools.plan import devices, roofline

GPUS = [name for name, chip in roofline.CHIPS.items() if chip.gpu]


@pytest.mark.parametrize(
  ('topology', 'hosts'),
  [
    ('h100:1', [0]),
    ('h200:8', [0] * 8),
    ('b200:2x4', [0] * 4 + [1] * 4),
    ('v5p:2x2x2', [0] * 4 + [1] * 4),
  ],
)
def test_devices_are_counted_without_a_compiler(topology, hosts):
  chip, found = devices.count(topology)
  assert [d.process_index for d in found] == hosts
  assert {d.platform for d in found} == {'gpu' if chip.gpu else 'tpu'}
  assert [d.id for d in found] == list(range(len(found)))


@pytest.mark.parametrize(('name', 'shape'), itertools.product(GPUS, ['1', '2x4']))
def test_the_compiler_has_the_devices_that_are_counted(topology, name, shape):
  found = topology(f'{name}:{shape}')
  chip, counted = devices.count(f'{name}:{shape}')
  assert found[0].device_kind == chip.gpu.name
  assert {d.platform for d in found} == {d.platform for d in counted}
  assert [d.process_index for d in found] == [d.process_index for d in counted]


def test_a_program_compiles_for_every_gpu(topology):
  for name in GPUS:
    layout = jax.sharding.SingleDeviceSharding(topology(f'{name}:1')[0])
    x = jax.ShapeDtypeStruct((256, 256), 'bfloat16', sharding=layout)
    text = jax.jit(lambda x: x @ x).lower(x).compile().as_text()
    assert 'gemm' in text or 'dot' in text


def test_the_peak_of_a_gpu_is_that_of_its_cores():
  # Dense bfloat16 products per core and clock, from the architectures' white papers.
  for name, per_clock in {'a100-80': 2048, 'rtx6000': 1024, 'rtx4090': 512}.items():
    chip = roofline.CHIPS[name]
    peak = per_clock * chip.gpu.cores * chip.gpu.clock * 1e9
    assert chip.flops == pytest.approx(peak, rel=0.005)


def test_a_run_gets_the_memory_that_is_planned():
  # 92 % of 79.11 GiB; the form of the proto is checked by the compiler, above.
  assert roofline.CHIPS['h100'].hbm == pytest.approx(72.8, abs=0.05)
  text = devices.target_config(roofline.CHIPS['h100'])
  assert f'device_memory_size: {int(79.11 * 2**30)}' in text
