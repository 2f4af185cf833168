"""Compares splits of the devices between learner and rollouts, by hand counts.

Nothing is compiled. For each number of rollout devices, and for all devices that do
both in turn:

1. `lengths` lists the response lengths of a step, and `fill` simulates the slots that
   decode them, until the last response ends;
2. `search.fastest_update` and `fastest_rollout` find the setting of each side that fits
   its devices and takes the least time by the roofline;
3. `weights` and `groups` count what crosses between the sides;
4. `Split.seconds` is the time of a step of the overlapped schedule.

Prefill, log-probability passes, verification and evaluation are not counted.
"""

import functools
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.tools.plan import programs, roofline, search
from bapo_jax.tools.plan.roofline import Chip, Cost
from bapo_jax.tools.plan.search import BEST, GIB, TooLarge, Update
from bapo_jax.training import budget
from bapo_jax.training.config import Config

PER_SHARD = sorted(m << e for m in (1, 3) for e in range(20))  # slots that are tried
ORDER = 0  # seed of the order in which short and long responses start
Option = TypeVar('Option')
Made = TypeVar('Made')


class Case(NamedTuple):
  """Holds a planned run without its devices."""

  config: Config
  spec: ModelSpec
  chip: Chip
  memory: float  # bytes per device that a count may reach
  mean_share: float  # mean length over the longest, of prompts and of responses alike


class Load(NamedTuple):
  """The decoding of a step's responses in a number of slots."""

  steps: int  # decode steps until the last response ends
  columns: float  # cache columns that a slot reads per step, idle slots included


class Rollout(NamedTuple):
  """The fastest setting of a step's rollout that fits a mesh."""

  shape: dict[str, int]
  slots: int
  bytes: float  # per device
  load: Load
  token: dict[str, float]  # resource -> lower bound of a decode step, seconds

  @property
  def seconds(self) -> float:
    """Lower bound of the whole rollout."""
    return self.load.steps * max(self.token.values())


class Transfer(NamedTuple):
  """Bytes that cross from one side to the other, with a lower bound on their time."""

  bytes: float  # of one copy
  into_device: float
  seconds: float


class Split(NamedTuple):
  """One division of the devices; at depth 0 both sides have all of them, in turn."""

  update: Update
  rollout: Rollout
  learning: float  # lower bound of the updates of a step, seconds
  weights: Transfer
  groups: Transfer
  depth: int  # steps by which sampling runs ahead

  @property
  def devices(self) -> tuple[int, int]:
    """The number of devices of (learner, rollouts)."""
    sides = self.update, self.rollout
    learner, rollout = (math.prod(side.shape.values()) for side in sides)
    return learner, rollout

  @property
  def seconds(self) -> float:
    """Lower bound of a step.

    Each side does its steps one after the other. At depth k, learner step s trains on
    groups that the weights after learner step s - k - 1 sampled, so that k + 1 steps
    take at least a rollout, a learner step and both transfers in a row.
    """
    row = self.rollout.seconds + self.groups.seconds
    row += self.learning + self.weights.seconds
    return max(self.rollout.seconds, self.learning, row / (self.depth + 1))


@functools.cache
def lengths(longest: int, share: float, n: int) -> tuple[int, ...]:
  """Lists n response lengths whose mean is `share` of the longest, in mixed order.

  They are n quantiles, in the middle of equal parts, of an exponential distribution
  that is cut at the longest as the sampler cuts responses: with scale c, its mean is
  c (1 - exp(-longest / c)). The order is random with a fixed seed.

  Args:
    share: in (0, 1]; 1: all responses are the longest.
  """
  low, high = 0.0, 1 / share  # of x = longest / c; the share (1 - exp(-x)) / x falls
  for _ in range(100):
    x = (low + high) / 2
    low, high = (x, high) if -math.expm1(-x) > share * x else (low, x)
  longer_N = 1 - (np.arange(n) + 0.5) / n  # probability of a longer response
  length_N = longest * np.minimum(1.0, -np.log(longer_N) / high)
  mixed_N = np.random.default_rng(ORDER).permutation(length_N)
  return tuple(np.maximum(1, np.rint(mixed_N)).astype(int).tolist())


@functools.cache
def fill(
  length_N: tuple[int, ...], slots: int, prompt: float, dispatch: int = 1, lag: int = 0
) -> Load:
  """Simulates slots that take the next response whenever they are free.

  Args:
    prompt: mean tokens of a prompt, to which the first token of a response attends.
    dispatch: tokens between two checks for ended responses.
    lag: further dispatches before an ended response frees its slot.
  """
  free, steps = [0] * min(slots, len(length_N)), 0
  for length in length_N:
    start = heapq.heappop(free)
    steps = max(steps, start + length)
    heapq.heappush(free, start + dispatch * (math.ceil(length / dispatch) + lag))
  read = sum(n * prompt + n * (n - 1) / 2 for n in length_N)
  return Load(steps, read / (slots * steps))


def fastest_rollout(case: Case, mesh: Mesh, held: float) -> Rollout:
  """Finds the number of slots with which a step's rollout is fastest on this mesh.

  Tries PER_SHARD. `held` is the memory of all but the cache, in bytes per device.
  Raises TooLarge if no slot fits, and ValueError if the heads do not divide over the
  mesh.
  """
  config, spec, chip, memory, mean_share = case
  sharding.shardings(transformer.abstract(spec), mesh, 'decode')
  k, T, shards = config.sampler, config.row_length, sharding.row_shards(mesh)
  responses, shape = config.prompts.count * k.group_size, dict(mesh.shape)
  length_N = lengths(k.max_new_tokens, mean_share, responses)
  prompt = mean_share * config.prompts.max_prompt_tokens
  each, found = budget.cache_bytes(spec, T, shape['tensor']), []
  most = int(max(0.0, memory - held) / each)
  for n in filter(lambda n: n <= most, PER_SHARD):
    slots = n * shards
    load = fill(length_N, slots, prompt, k.tokens_per_dispatch, k.done_check_lag)
    changed = config.with_values(sampler={'max_num_seqs': slots})
    job = programs.Job(changed, spec, Schedule(), mesh)
    cost, _ = programs.decode_cost(job, load.columns / T)
    traffic = [roofline.hidden_sums(spec, n)]
    token = search.bounds(cost, chip, mesh, traffic)
    found.append(Rollout(shape, slots, held + n * each, load, token))
  if not found:
    raise TooLarge('decoding', 'one slot per shard', held + each, memory)
  return min(found, key=lambda rollout: rollout.seconds)


def weights(spec: ModelSpec, chip: Chip, learner: Mesh, rollout: Mesh) -> Transfer:
  """Counts a copy of the actor from the learner's weights to the rollouts' devices.

  The learner's devices have equal parts over fsdp and tensor, and a rollout device
  needs its part over tensor. A host receives what its devices lack once; its devices
  exchange the remainder over their links. The links between two parts of a TPU slice
  are counted like those inside a part.
  """
  parts = rollout.shape['tensor']
  split = learner.shape['fsdp'] * learner.shape['tensor']
  held, needed = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
  for i, device in enumerate(learner.devices.flat):
    held[device.process_index].add(i % split)
  for i, device in enumerate(rollout.devices.flat):
    needed[device.process_index].add(i % parts)
  lacking = (
    max(0.0, len(needed[host]) / parts - len(held[host]) / split) / n
    for host, n in _per_host(rollout).items()
  )
  whole, own = budget.actor_bytes(spec), learner is rollout
  into = whole * (1 / parts - own / split)
  return Transfer(whole, into, _seconds(chip, into, whole * max(lacking)))


def groups(config: Config, chip: Chip, learner: Mesh, rollout: Mesh) -> Transfer:
  """Counts the groups of a step, from the rollouts' devices to the learner's."""
  rows = config.prompts.count * config.sampler.group_size
  whole = float(budget.RECORDED * rows * config.row_length)
  if learner is rollout:
    return Transfer(whole, 0.0, 0.0)
  into, there = whole / sharding.row_shards(learner), _per_host(rollout)
  # A host of the learner without rollout devices receives all its rows from others.
  far = 1 - min(there[host] for host in _per_host(learner)) / rollout.size
  return Transfer(whole, into, _seconds(chip, into, far * whole / learner.size))


def _per_host(mesh: Mesh) -> Counter[int]:
  """Returns the number of devices of the mesh on each host."""
  return Counter(device.process_index for device in mesh.devices.flat)


def _seconds(chip: Chip, linked: float, crossed: float) -> float:
  """Returns a lower bound on the time of the bytes that a device receives."""
  return max(Cost(0, 0, 0).seconds(chip, linked, crossed).values())


def meshes(devices: Sequence[Any]) -> list[Mesh]:
  """Lists all meshes of the devices."""
  shapes, grid = search.shapes(len(devices)), np.asarray(devices)
  return [Mesh(grid.reshape(tuple(s.values())), sharding.AXES) for s in shapes]


def fastest(
  make: Callable[[Option], Made],
  options: Iterable[Option],
  order: Callable[[Made], Any],
) -> Made:
  """Returns what `make` returns for an option, the first in this order.

  Raises:
    ValueError: every option is refused; the error is the smallest TooLarge, if any,
      or else that of the last option.
  """
  found, refused = [], []
  for option in options:
    try:
      found.append(make(option))
    except ValueError as error:
      refused.append(error)
  if not found:
    large = [error for error in refused if isinstance(error, TooLarge)]
    raise min(large, key=lambda error: error.excess) if large else refused[-1]
  return min(found, key=order)


def in_turn(case: Case, devices: Sequence[Any]) -> Split:
  """Returns the fastest setting with which all devices sample and train in turn.

  Raises:
    ValueError: no mesh fits.
  """

  def make(mesh: Mesh) -> Split:
    update = search.fastest_update(*case[:3], mesh, case.memory)
    b = budget.count(case.config, case.spec, Schedule(), mesh)
    rollout = fastest_rollout(case, mesh, b.decoding - b.cache + b.buffer)
    return _joined(case, (mesh, update), (mesh, rollout), 0)

  return fastest(make, meshes(devices), lambda s: (s.seconds, s.update.order))


def divided(case: Case, devices: Sequence[Any], n: int, depth: int) -> Split:
  """Returns the fastest setting with which the last n devices only sample.

  Both sides have the same mesh.tensor, and the rollouts split rows over their other
  devices. A rollout device has the weights and responses of depth + 1 steps.

  Raises:
    ValueError: no mesh of one side fits.
  """
  learners, samplers = devices[:-n], devices[-n:]

  def train(mesh: Mesh) -> tuple[Mesh, Update]:
    update = search.fastest_update(*case[:3], mesh, case.memory)
    b = budget.count(case.config, case.spec, Schedule(), mesh)
    copying = b.weights + b.moments + b.actor + b.buffer  # the actor, before it is sent
    if copying > case.memory:
      few = 'no update at the same time'
      raise TooLarge('a copy of the actor', few, copying, case.memory)
    return mesh, update

  def make(tensor: int) -> Split:
    same = [mesh for mesh in meshes(learners) if mesh.shape['tensor'] == tensor]
    learner = fastest(train, same, lambda pair: pair[1].order)
    mesh = sharding.make(tensor=tensor, devices=samplers)
    config = case.config.with_values(rollout={'depth': depth})
    b = budget.count(config, case.spec, Schedule(), mesh, rollout_mesh=mesh)
    held = b.sampling - b.cache
    return _joined(case, learner, (mesh, fastest_rollout(case, mesh, held)), depth)

  both = reversed(search.divisors(math.gcd(len(learners), len(samplers))))
  return fastest(make, both, lambda s: (s.seconds, s.update.order))


def _joined(
  case: Case, learner: tuple[Mesh, Update], rollout: tuple[Mesh, Rollout], depth: int
) -> Split:
  config, mesh, update = case.config, *learner
  # Packed rows take the share of the padded time that their tokens have.
  updates = case.mean_share * config.updates_per_step
  return Split(
    update,
    rollout[1],
    updates * max(update.seconds.values()),
    weights(case.spec, case.chip, mesh, rollout[0]),
    groups(config, case.chip, mesh, rollout[0]),
    depth,
  )


def compare(
  case: Case, devices: Sequence[Any], depth: int = 1
) -> tuple[list[Split], dict[int, ValueError]]:
  """Returns the splits that fit, fastest first, and the errors of the others.

  One of the splits is all devices in turn, of depth 0. The errors are by the number of
  rollout devices, 0 for all in turn.
  """
  # A sync follows every step, and the learner's devices have no actor in an update.
  config = case.config.with_values(rollout={'weight_sync_interval': 1})
  case, found, refused = case._replace(config=config), [], dict[int, ValueError]()
  for n in range(len(devices)):
    try:
      split = divided(case, devices, n, depth) if n else in_turn(case, devices)
      found.append(split)
    except ValueError as error:
      refused[n] = error
  return sorted(found, key=lambda split: split.seconds), refused


def table(case: Case, found: Sequence[Split], refused: dict[int, ValueError]) -> str:
  """Formats the best splits, all devices in turn, and what crosses in the best."""
  config, sampler = case.config, case.config.sampler
  responses, updates = (
    config.prompts.count * sampler.group_size,
    config.updates_per_step,
  )
  lines = [
    f'a step: {responses} responses of {case.mean_share * sampler.max_new_tokens:.0f} '
    f'tokens on average (--mean_share={case.mean_share:g}), exponential, cut at '
    f'{sampler.max_new_tokens}; {updates} updates',
    f'{"learner":9}{"mesh":>9}{"micro":>7}{"remat":>12}{"GiB":>7}{"seconds":>9}{"idle":>6}'
    f'{"rollouts":>10}{"mesh":>9}{"slots":>7}{"GiB":>7}{"tokens":>8}{"seconds":>9}'
    f'{"idle":>6}{"step, s":>9}{"responses/h":>13}',
  ]
  ahead = [split for split in found if split.depth]
  turn = [split for split in found if not split.depth]
  lines += [_row(split, responses) for split in (*ahead[:BEST], *turn)]
  lines.append(
    'times are lower bounds; mesh: data x fsdp x tensor; GiB per device, counted by '
    'hand;\ntokens: decode steps until the last response ends'
  )
  if ahead:
    lines += _crossings(ahead[0], updates)
  if ahead and turn:
    gain = turn[0].seconds / ahead[0].seconds
    lines.append(f'the best split makes {gain:.2f} times the responses/h of in turn')
  slower = ', '.join(f'{a} + {b}' for a, b in (split.devices for split in ahead[BEST:]))
  if slower:
    lines.append(f'not {slower}: it fits and is slower')
  return '\n'.join([*lines, *_reasons(refused)])


def _row(split: Split, responses: int) -> str:
  """Formats a line of the table."""
  (learner, rollout), u, r = split.devices, split.update, split.rollout
  idle = [''] * 2
  if split.depth:
    idle = [f'{1 - x / split.seconds:.0%}' for x in (split.learning, r.seconds)]
  again = u.schedule.remat + (' split' if u.schedule.sequence_sharding else '')
  return (
    f'{learner:<9}{search.name(u.shape):>9}{u.grad_accum_steps:7}{again:>12}'
    f'{u.bytes / GIB:7.1f}{split.learning:9.1f}{idle[0]:>6}'
    f'{rollout if split.depth else "in turn":>10}{search.name(r.shape):>9}{r.slots:7}'
    f'{r.bytes / GIB:7.1f}{r.load.steps:8}{r.seconds:9.1f}{idle[1]:>6}'
    f'{split.seconds:9.1f}{3600 * responses / split.seconds:13,.0f}'
  )


def _crossings(split: Split, updates: int) -> list[str]:
  """Describes what crosses between the sides of a split, and the staleness."""
  (learner, rollout), depth = split.devices, split.depth
  lines = [
    f'{name}: {x.bytes / GIB:.3g} GiB, {x.into_device / GIB:.3g} into a device of the '
    f'{side}, at least {x.seconds:.2g} s'
    for name, x, side in (
      ('weights per step', split.weights, 'rollouts'),
      ('groups per step', split.groups, 'learner'),
    )
  ]
  first = depth * updates
  return [
    f'{learner} + {rollout}, depth {depth}:',
    *lines,
    f'staleness: {depth} {"steps" if depth > 1 else "step"}, '
    f'{first} to {first + updates - 1} updates (in turn: 0 to {updates - 1})',
  ]


def _reasons(refused: dict[int, ValueError]) -> list[str]:
  """Lists why numbers of rollout devices are refused; equal reasons share a line."""
  reasons: dict[str, list[str]] = {}
  for n, error in refused.items():
    reasons.setdefault(str(error), []).append(str(n) if n else 'all in turn')
  return [f'not {", ".join(ns)} for rollouts: {why}' for why, ns in reasons.items()]
