"""What crosses between hosts is counted by hand."""

from bapo_jax.tools.plan import hosts
from bapo_jax.tools.plan.roofline import Traffic


def test_traffic_into_a_device_by_hand():
  # Two hosts of four. fsdp has its halves on both: each gather of 8 bytes brings 4 into
  # a host for each of its two columns over tensor, 8 bytes for four devices.
  shape, of_four = {'data': 1, 'fsdp': 4, 'tensor': 2}, [0] * 4 + [1] * 4
  gather, inner = Traffic('all-gather', 'fsdp', 8), Traffic('all-reduce', 'tensor', 100)
  assert hosts.into_device([gather], shape, of_four) == 2
  assert hosts.into_device([gather, inner], shape, of_four) == 2
  # A sum over pairs of both hosts, there and back: four pairs, half of each from there.
  shape = {'data': 2, 'fsdp': 2, 'tensor': 2}
  assert hosts.into_device([Traffic('all-reduce', 'data', 8)], shape, of_four) == 8
  assert hosts.into_device([gather, inner], shape, of_four) == 0
  assert hosts.into_device([gather], {**shape, 'data': 1, 'fsdp': 4}, [0] * 8) == 0
