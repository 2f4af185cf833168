"""Counts what decoding would save if the responses of a group shared their prompt.

  python -m benchmarks.rollout.shared_prompts [--prompt=1024] [--group=16]

Today every slot has its own copy of its prompt's keys and values. If the responses of a
group shared one copy, a step would read it once for all of them. Nothing is measured:

1. `Rollout` derives live columns and prompts per slot from the distribution of lengths;
2. `step` counts the bytes and the lower bound of a step with the plan's roofline;
3. the table has a line per machine and mean response length, today against shared.

The model is Qwen2.5-7B in bfloat16, all weights trained on the same devices. A line has
as many slots as fit today; the last column has as many as fit with shared prompts. Rows
have room for the prompt and four times the mean response.
"""

import argparse
import json
from typing import NamedTuple

import numpy as np

from bapo_jax.models import ragged, transformer
from bapo_jax.tools.plan import roofline
from bapo_jax.tools.plan.roofline import GIB
from bapo_jax.training import budget

SPEC = transformer.ModelSpec(
  vocab=152064,
  width=3584,
  layers=28,
  ffn=18944,
  heads=28,
  kv_heads=4,
  head_width=128,
  tied=False,
  compute='bfloat16',
)
MEANS = (1024, 2048, 4096, 8192)  # tokens of a response
ROOM = 4  # times the mean: the longest response
MACHINES = {'h100': (8, 1), 'v5e': (32, 4)}  # chip -> (devices, tensor)
STATE = 12  # bytes of a weight and its two moments in float32


class Rollout(NamedTuple):
  """Means over the steps of decoding, with slots that are refilled."""

  live: float  # columns of a slot's response
  tokens: float  # of a response
  longest: float  # tokens of the longest response of a group

  @classmethod
  def of(cls, mean: int, group: int, kind: str) -> 'Rollout':
    """Returns the means for a kind of length: 'equal' or 'geometric'.

    Geometric lengths have this mean and are cut at ROOM times the mean.
    """
    step_L = np.arange(mean if kind == 'equal' else ROOM * mean)
    busy_L = np.ones(len(step_L)) if kind == 'equal' else (1 - 1 / mean) ** step_L
    tokens = busy_L.sum()  # P(length > step), summed over steps
    longest = (1 - (1 - busy_L) ** group).sum()
    return cls(float(((step_L + 1) * busy_L).sum() / tokens), tokens, longest)

  def prompts(self, group: int, slots: int) -> float:
    """Returns the mean number of prompts per slot that have a response in a slot.

    The first response of a group starts up to `group` refills before the last.
    """
    return min(1.0, self.longest / (group * self.tokens) + 1 / slots)


class Step(NamedTuple):
  """A decoding step of the devices that share the heads (mesh axis tensor)."""

  slots: int
  cache: float  # GiB per device that are allocated
  read: float  # GiB per device and step, weights included
  rate: float  # tokens/s per device, at most


def step(
  machine: str, rollout: Rollout, prompt: int, longest: int, slots: int, copies: float
) -> Step:
  """Counts a step of `slots` slots with `copies` prompts per slot in the cache."""
  chip, (_, tensor) = roofline.CHIPS[machine], MACHINES[machine]
  shape = {'data': 1, 'fsdp': 1, 'tensor': tensor}
  columns, block = prompt + longest, ragged.BLOCK
  if chip.gpu is None:
    heads = SPEC.kv_heads // tensor
    block = ragged.block_columns(heads, SPEC.head_width, columns, 2)
  # `copies` prompts per slot are read on average; the response ends within a block.
  live = rollout.live + copies * prompt
  read = roofline.columns_read(columns, block, live)
  column = budget.cache_bytes(SPEC, 1, tensor)
  context = prompt + rollout.live
  cost = roofline.decode(SPEC, shape, slots, context, slots * read * column)
  linked = roofline.hidden_sums(SPEC, slots).received(shape)
  seconds = max(cost.seconds(chip, linked).values())
  cache = slots * (longest + copies * prompt) * column
  return Step(slots, cache / GIB, cost.bytes / GIB, slots / seconds / tensor)


def fitting(
  machine: str, rollout: Rollout, prompt: int, longest: int, group: int, shared: bool
) -> Step:
  """Returns the step with the most slots that fit beside the weights, in groups."""
  chip, (devices, tensor) = roofline.CHIPS[machine], MACHINES[machine]
  state = STATE * transformer.count(SPEC) / devices
  room = (
    budget.DEVICE_SHARE * chip.hbm * GIB - state - budget.actor_bytes(SPEC) / tensor
  )
  slots, best = group, None
  while True:
    copies = rollout.prompts(group, slots) if shared else 1.0
    found = step(machine, rollout, prompt, longest, slots, copies)
    if found.cache * GIB > room:
      break
    best, slots = found, slots + group
  if best is None:
    raise ValueError(f'not even {group} slots fit {machine}; lower --prompt or --group')
  return best


def row(
  machine: str, mean: int, prompt: int, group: int, kind: str
) -> dict[str, float]:
  """Returns the figures of a machine and a mean length, today and shared."""
  rollout, longest = Rollout.of(mean, group, kind), ROOM * mean
  sizes = machine, rollout, prompt, longest
  today = fitting(*sizes, group, shared=False)
  copies = rollout.prompts(group, today.slots)
  shared = step(*sizes, today.slots, copies)
  more = fitting(*sizes, group, shared=True)
  cases = {'today': today, 'shared': shared, 'more': more}
  found = {f'{name}_{key}': x for name, s in cases.items() for key, x in _dict(s)}
  return {'copies': copies} | found


def _dict(step: Step) -> list[tuple[str, float]]:
  return [(key, round(value, 3)) for key, value in step._asdict().items()]


def line(kind: str, name: str, r: dict[str, float]) -> str:
  """Formats a row of the table."""
  rates = [r[f'{case}_rate'] for case in ('today', 'shared', 'more')]
  gain, most = (rate / rates[0] - 1 for rate in rates[1:])
  return (
    f'| {name} | {kind} | {r["copies"]:.2f} | {r["today_slots"]} '
    f'| {r["today_cache"]:.1f}, {r["shared_cache"]:.1f} '
    f'| {r["today_read"]:.1f}, {r["shared_read"]:.1f} '
    f'| {rates[0]:,.0f}, {rates[1]:,.0f}, {gain:+.0%} '
    f'| {r["more_slots"]}: {rates[2]:,.0f}, {most:+.0%} |'
  )


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--prompt', type=int, default=1024, help='tokens of a prompt')
  parser.add_argument('--group', type=int, default=16, help='responses per prompt')
  args = parser.parse_args()
  print(
    '| device, mean | lengths | prompts per slot | slots | cache, GiB | read, GiB '
    '| tokens/s | slots that fit |\n'
    '|---|---|--:|--:|--:|--:|--:|--:|'
  )
  found = {}
  for kind in ('geometric', 'equal'):
    for machine in MACHINES:
      for mean in MEANS:
        name = f'{machine}, {mean}'
        found[f'{name}, {kind}'] = r = row(machine, mean, args.prompt, args.group, kind)
        print(line(kind, name, r))
  print(json.dumps(found))


if __name__ == '__main__':
  main()
