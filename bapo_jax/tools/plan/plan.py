"""Compiles a run for devices that are not attached, and checks whether it fits.

No weight is loaded and no program runs: a config.json is enough.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.autosetup import derive
from bapo_jax.runtime import machine
from bapo_jax.tools.plan import contents, programs
from bapo_jax.tools.plan import devices as devices_lib
from bapo_jax.tools.plan.chips import GIB, Chip
from bapo_jax.tools.plan.programs import Program
from bapo_jax.training import budget, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved

UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
COLUMNS = ('arguments', 'output', 'temporaries', 'cache', 'resident', 'total')


class Row(NamedTuple):
  """The memory of a program, in bytes per device; nan if it was not compiled."""

  program: Program
  arguments: float  # the cache included
  output: float  # beyond donated arguments
  temporaries: float
  total: float  # of the whole run while this program runs
  executable: Any = None  # None: not compiled

  def left(self, chip: Chip) -> float:
    """Returns the GiB of a chip that stay free; negative if the run cannot fit."""
    return chip.hbm - self.total / GIB


def compiled(program: Program) -> Row:
  """Compiles a program; a program that the compiler refuses has only a total."""
  # Also with one device, unlike `sharding.current`: since jax 0.11 the kernels of an
  # absent GPU are lowered for the kind of device that the ambient mesh has.
  call = program.call
  with jax.set_mesh(call.mesh):
    lowered = call.lower()
    try:
      executable = lowered.compile()
    except Exception as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      needed = bytes_needed(str(error), program)
      return Row(program, math.nan, math.nan, math.nan, needed)
  m = executable.memory_analysis()
  assert m is not None, 'every TPU and GPU reports it'
  output = m.output_size_in_bytes - m.alias_size_in_bytes
  needed = m.argument_size_in_bytes + output + m.temp_size_in_bytes
  return Row(
    program,
    m.argument_size_in_bytes,
    output,
    m.temp_size_in_bytes,
    needed + program.resident,
    executable,
  )


def bytes_needed(message: str, program: Program) -> float:
  """Reads the bytes that a device needs from a compiler error; inf if not stated."""
  # Another memory may be full, such as the smem that holds a kernel's scalars.
  total = re.search(r'Used ([\d.]+)([KMGT]) of \S+ hbm', message)
  found = total or re.search(r'temporaries \(([\d.]+)([KMGT])\)', message)
  if not found:
    return math.inf
  arguments = 0 if total else programs.bytes_per_device(program.call.args)
  return float(found[1]) * UNITS[found[2]] + arguments + program.resident


def room(chip: Chip) -> float:
  """Returns the bytes of a chip's memory that an estimate from formulas may fill."""
  return budget.DEVICE_SHARE * chip.hbm * GIB


def ladder(name: str, r: Resolved) -> Iterator[tuple[str, int | str]]:
  """Yields (knob, value) to try in turn if a program of the run does not fit.

  Knobs that add no FLOPs come first, then batch sizes, largest first.
  """
  config = r.config
  schedule = r.schedule
  shards = sharding.row_shards(r.mesh)
  if name in ('prefill', 'refresh', 'resume', 'decode'):
    knob = 'max_num_seqs' if name == 'decode' else 'prefill_batch_size'
    n = getattr(config.sampler, knob) // 2
    while n >= shards and n % shards == 0:
      yield f'sampler.{knob}', n
      n //= 2
    return
  if name == 'tower':  # its block is fixed
    return
  if not schedule.sequence_sharding and r.mesh.shape['tensor'] > 1:
    yield 'model.sequence_sharding', 'on'
  if name == 'train step':
    if schedule.bounds_pass == 'stored':
      yield 'learner.bounds_pass', 'again'
    for kind in budget.REMATS[budget.REMATS.index(schedule.remat) + 1 :]:
      yield 'model.remat', kind
  steps = 2 * config.learner.grad_accum_steps
  while config.minibatch_rows % (steps * shards) == 0:
    yield 'learner.grad_accum_steps', steps
    steps *= 2


def planned(config: Config, mesh: Mesh, chip: Chip) -> Resolved:
  """Returns the config's run on a mesh of these chips."""
  spec = programs.device_spec(config, mesh.devices.flat[0].platform)
  sizes = budget.sizes_of(config, spec)
  schedule = budget.choose_schedule(sizes, spec, mesh, room(chip))
  return programs.resolved(config, spec, mesh, schedule)


def remedy(name: str, r: Resolved, chip: Chip) -> str:
  """Adds flags until the program compiles and fits; describes them in a sentence."""
  changed = r.config
  flags = {}
  given = ''
  for knob, value in ladder(name, r):
    section, key = knob.split('.')
    changed = changed.with_values(**{section: {key: value}})
    flags[knob] = f'--config.{knob}={value}'
    given = ' '.join(flags.values())
    print(f'  {name}: trying {given}')
    found = programs.programs_of(planned(changed, r.mesh, chip))
    spare = compiled(found[name]).left(chip)
    if spare >= 0:
      return f'{given} fits, {spare:.1f} GiB left'
  if not given:
    return 'no smaller batch divides over this mesh; try a larger mesh.tensor'
  return f'not even with {given}; try a larger mesh.tensor or topology'


def run(config: Config, topology: str = 'v5p:2x2x4', workdir: str = '') -> int:
  """Plans the run and prints the plan; returns 0 if every program fits, else 1.

  Args:
    config: the config of the run.
    topology: devices to plan for
    workdir: directory of a run to continue

  Raises ValueError if topology, model and knobs do not fit together.
  """
  asked = config
  config = derive.decide(config, workdir)
  chip, devices = devices_lib.attach(topology)
  print(heading(asked, topology, chip, devices))
  mesh = resolve.make_mesh(config, devices)
  r = planned(config, mesh, chip)
  routed = f', experts {r.spec.experts_kernel}' * bool(r.spec.experts)
  axes = ' '.join(f'{axis}={n}' for axis, n in mesh.shape.items())
  print(f'mesh {axes}, attention {r.spec.attention}{routed}')
  print(machine.CONFIRMED)
  sizes = budget.sizes_of(config, r.spec)
  print(budget.sentence(sizes, r.schedule, r.budget.update, room(chip)))
  for text in filter(None, (of_routes(r), of_windows(r))):
    print(text)
  rows = {}
  verdicts = {}
  for name, program in programs.programs_of(r).items():
    rows[name] = row = compiled(program)
    spare = row.left(chip)
    if spare >= 0:
      verdicts[name] = f'fits, {spare:.1f} left'
      print(f'  {name} compiled; its largest arrays on a device:')
      print(contents.described(row.executable.as_text()))
    else:
      print(f'  {name} does not fit; searching for a smaller batch')
      found = remedy(name, r, chip)
      verdicts[name] = f'{-spare:.1f} GiB too much; {found}'
  print(f'\n{memory_table(rows, verdicts)}')
  return int(not all(verdict.startswith('fits') for verdict in verdicts.values()))


def of_routes(r: Resolved) -> str:
  """Describes the memory of recorded routes; '' if none are recorded."""
  size = budget.route_bytes(r.spec, r.mesh.shape['tensor'])
  if not size:
    return ''
  share = size / (budget.RECORDED + size) / GIB
  return (
    f'routes (model.replay_routes={r.spec.replay_routes}): '
    f'{budget.route_bytes(r.spec):.0f} bytes per token; GiB per device: '
    f'{share * r.budget.responses:.3g} responses, {share * r.budget.buffer:.3g} buffer'
  )


def of_windows(r: Resolved) -> str:
  """Describes the cache outside the windows of layers; '' without windows."""
  length = r.config.row_length
  outside = budget.outside(r.spec, length)
  if not outside:
    return ''
  cache = budget.cache_bytes(r.spec, length, r.mesh.shape['tensor'])
  cache *= r.config.sampler.max_num_seqs / sharding.row_shards(r.mesh) / GIB
  return (
    f'windows: every layer caches whole rows, {cache:.3g} GiB per device; rings of a '
    f'window would save {outside * cache:.3g}'
  )


def heading(config: Config, topology: str, chip: Chip, devices: Sequence) -> str:
  """Names what is planned, after a warning of knobs that are derived here."""
  names = [
    name
    for name in derive.undecided(config)
    if name.split('.')[0] in ('mesh', 'prompts', 'sampler', 'learner', 'model')
  ]
  text = (
    f'warning: derived from the devices of this machine and not from {topology}: '
    f'{", ".join(names)}; give those that should differ, such as '
    '--config.model.compute=bfloat16 and --config.prompts.count=64\n'
  ) * bool(names)
  return (
    f'{text}{config.model.path or config.title} on {topology}: {len(devices)} devices '
    f'of {chip.hbm:.4g} GiB; held out {config.problems.test_source}'
  )


def memory_table(rows: dict[str, Row], verdicts: dict[str, str]) -> str:
  """Formats the memory of each program, in GiB per device."""
  lines = [f'{"GiB on a device":16}' + ''.join(f'{c:>12}' for c in COLUMNS)]
  for name, row in rows.items():
    program, *sizes, total, _ = row
    sizes += [program.cache, program.resident, total]
    cells = ''.join(f'{size / GIB:12.2f}' for size in sizes)
    lines.append(f'{name:16}{cells}  {verdicts[name]}')
  lines.append(
    'cache is part of the arguments; resident is memory of the run that the '
    'program does not take (the learner, the actor, the buffer)'
  )
  return '\n'.join(lines)
