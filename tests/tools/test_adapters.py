"""The memory of adapters by rank, counted by hand, and its table in the docs."""

import dataclasses
import pathlib

import pytest

from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.tools.plan import adapters, roofline
from bapo_jax.training import remat

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  ('name', 'parameters'), [('1.5B', 1.54e9), ('7B', 7.62e9), ('32B', 32.8e9)]
)
def test_the_sizes_are_those_of_the_published_models(name, parameters):
  found = transformer.count(adapters.MODELS[name])
  assert found == pytest.approx(parameters, rel=0.005)


def test_one_line_by_hand():
  # Rank 16 on all projections of the 7B model: per layer and rank the sides of q, k, v,
  # o, gate, up and down.
  sides = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
  found = adapters.bytes_of(adapters.MODELS['7B'], 16)
  weights = transformer.count(adapters.MODELS['7B'])
  assert found.trained == 20 * 28 * 16 * sides
  assert found.frozen == found.actor == 2 * weights
  # An update of few rows needs less than the actor that was freed before it.
  assert found.actor > found.passes
  assert found.most == found.frozen + found.trained + found.actor
  # Float32 copies, two moments, gradients and their sums.
  full = adapters.bytes_of(adapters.MODELS['7B'], 0)
  assert full.trained == 20 * weights and full.frozen == found.frozen
  halves = adapters.bytes_of(adapters.MODELS['7B'], 16, fsdp=2, tensor=2)
  assert halves.frozen == found.frozen / 4 and halves.actor == found.actor / 2


def test_the_fewest_devices_suffice_and_half_of_them_do_not():
  spec, room = adapters.MODELS['7B'], 95 * 2**30
  for rank in (0, 16):
    fsdp, tensor = adapters.devices(spec, rank, room)
    limit = remat.DEVICE_SHARE * room
    assert adapters.bytes_of(spec, rank, fsdp, tensor).most <= limit
    fewer = fsdp * tensor // 2
    while fewer:
      for split in (1, 2, 4):
        if fewer % split == 0:
          assert adapters.bytes_of(spec, rank, fewer // split, split).most > limit
      fewer //= 2
  assert adapters.devices(spec, 0, 2**30) is None


def test_the_docs_have_the_table():
  assert adapters.table() in (ROOT / 'docs' / 'lora.md').read_text()


def test_a_model_of_one_s_own_has_a_line_per_rank():
  spec = dataclasses.replace(adapters.MODELS['1.5B'], dtype='float32', layers=2)
  lines = adapters.of_model('mine', spec).splitlines()[2:]
  assert [line.split(' | ')[1] for line in lines] == ['all', '8', '16', '64', '256']


def test_an_update_of_adapters_saves_the_products_of_frozen_weights():
  spec, shape = adapters.MODELS['1.5B'], {'data': 1, 'fsdp': 1, 'tensor': 1}
  once = roofline.forward(spec, 2048 / 2)
  full, few = (
    roofline.train(spec, Schedule(), shape, 8, 2048, 1, 0.0, n) for n in (0, 10**6)
  )
  saved = (once.layers + once.head - 6e6) * 8 * 2048
  assert full.model_flops - few.model_flops == pytest.approx(saved)
  assert full.flops - few.flops == pytest.approx(saved)
  assert full.bytes > few.bytes
