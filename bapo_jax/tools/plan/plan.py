"""Compiles a run for a TPU that is not attached, and checks whether it fits.

1. `attach` turns 'v5p:4x4x4' into devices to compile for;
2. `compiled` runs the TPU's compiler and reads memory and collectives of a program;
3. `remedy` searches the largest batch that fits if the configured one does not;
4. `run` does so for every program and prints memory, collectives and a roofline.

No weight is loaded and no program runs: a config.json is enough.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.tools.plan import hlo, programs, roofline
from bapo_jax.training import remat, rules, setup
from bapo_jax.training.config import Config

GIB = 2**30
UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
COLUMNS = ('arguments', 'output', 'temporaries', 'cache', 'resident', 'total')


class Row(NamedTuple):
  """Memory and collectives of a compiled program; bytes on one device."""

  arguments: float
  output: float  # beyond donated arguments
  temporaries: float
  cache: float  # part of the arguments
  resident: float  # memory of the run that the program does not take
  total: float
  loops: list[hlo.Collective]
  seconds: float  # to compile


def attach(topology: str) -> tuple[roofline.Chip, Sequence[Any]]:
  """(chip, devices) of a topology like 'v5p:4x4x4'.

  Raises:
    ValueError: the chip or the arrangement does not exist.
  """
  name, _, shape = topology.partition(':')
  if name not in roofline.CHIPS or not re.fullmatch(r'\d+(x\d+)+', shape):
    raise ValueError(
      f'--topology={topology!r} is no topology; give one of '
      f'{sorted(roofline.CHIPS)} with its shape, for instance v5p:2x2x4 or v6e:4x4'
    )
  chip = roofline.CHIPS[name]
  try:
    found = topologies.get_topology_desc(
      platform='tpu', topology_name=topology, **chip.options
    )
  except Exception as error:  # libtpu raises its own kind
    reason = str(error).partition('=== Source')[0]
    raise ValueError(f'--topology={topology}: {reason}') from None
  return chip, found.devices


def compiled(program: programs.Program, mesh: Mesh) -> Row | float:
  """The compiled program's row; if memory does not suffice, the bytes needed."""
  begun = time.time()
  with sharding.current(mesh):
    lowered = program.function.lower(*program.args, **program.static)
    try:
      executable = lowered.compile()
    except Exception as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return bytes_needed(str(error), program)
  m = executable.memory_analysis()
  assert m is not None, 'every TPU has it'
  output = m.output_size_in_bytes - m.alias_size_in_bytes
  own = m.argument_size_in_bytes + output + m.temp_size_in_bytes
  return Row(
    m.argument_size_in_bytes,
    output,
    m.temp_size_in_bytes,
    program.cache,
    program.resident,
    own + program.resident,
    hlo.in_loops(executable.as_text() or '', program.micro_batches),
    time.time() - begun,
  )


def bytes_needed(message: str, program: programs.Program) -> float:
  """Bytes that a device would need, by the compiler's error; inf if it gives none."""
  if found := re.search(r'Used ([\d.]+)([KMGT]) of', message):
    return float(found[1]) * UNITS[found[2]] + program.resident
  if found := re.search(r'temporaries \(([\d.]+)([KMGT])\)', message):
    own = float(found[1]) * UNITS[found[2]] + programs.bytes_per_device(program.args)
    return own + program.resident
  return math.inf


def room(chip: roofline.Chip) -> float:
  """Bytes of the chip that a hand count may fill; the compiler has the last word."""
  return remat.DEVICE_SHARE * chip.hbm * GIB


def excess(row: Row | float, chip: roofline.Chip) -> float:
  """Bytes beyond the chip's memory; negative if the program fits."""
  return (row.total if isinstance(row, Row) else row) - chip.hbm * GIB


def ladder(
  name: str, config: Config, spec: ModelSpec, mesh: Mesh
) -> Iterator[tuple[str, int | str]]:
  """(knob, value) to try in turn if a program does not fit.

  Nothing that costs products before what does, and from the largest batch down, so
  that the first that fits is the largest.

  Args:
    spec: with the kind of rematerialisation that did not fit.
  """
  shards = sharding.row_shards(mesh)
  if name in ('prefill', 'decode'):
    knob = {'prefill': 'prefill_batch_size', 'decode': 'max_num_seqs'}[name]
    n = getattr(config.sampler, knob) // 2
    while n >= shards and n % shards == 0:
      yield f'sampler.{knob}', n
      n //= 2
    return
  if not spec.sequence_sharding and mesh.shape['tensor'] > 1:
    yield 'model.sequence_sharding', 'on'
  if name == 'train step':
    if spec.bounds_pass == 'stored':
      yield 'learner.bounds_pass', 'again'
    for kind in remat.KINDS[remat.KINDS.index(spec.remat) + 1 :]:
      yield 'model.remat', kind
  steps = 2 * config.learner.grad_accum_steps
  while config.minibatch_rows % (steps * shards) == 0:
    yield 'learner.grad_accum_steps', steps
    steps *= 2


def remedy(
  name: str,
  config: Config,
  spec: ModelSpec,
  mesh: Mesh,
  chip: roofline.Chip,
  echo: Callable[[str], object],
) -> str:
  """The flags that make the program fit, found by compiling it; a sentence."""
  changed, flags = config, {}
  for knob, value in ladder(name, config, spec, mesh):
    section, key = knob.split('.')
    changed = changed.with_values(**{section: {key: value}})
    flags[knob] = f'--config.{knob}={value}'
    echo(f'  {name}: trying {" ".join(flags.values())}')
    tried = remat.resolve(changed, programs.tpu_spec(changed), mesh, room(chip))
    program = programs.PROGRAMS[name](changed, rules.bind(changed), tried, mesh)
    row = compiled(program, mesh)
    if isinstance(row, Row) and excess(row, chip) <= 0:
      left = -excess(row, chip) / GIB
      return f'{" ".join(flags.values())} fits, {left:.1f} GiB left'
  if not flags:
    return 'no smaller batch divides over this mesh'
  return (
    f'not even with {" ".join(flags.values())}: a larger mesh.tensor or topology would'
  )


def run(
  config: Config,
  topology: str,
  mean_share: float = 1.0,
  echo: Callable[[str], object] = print,
) -> bool:
  """Plans the run and prints the plan; True if every program fits.

  Args:
    mean_share: mean length of the rows over the longest, in (0, 1].

  Raises:
    ValueError: topology, model or knobs do not fit together.
  """
  chip, devices = attach(topology)
  mesh = setup.make_mesh(config, devices)
  bound, memory = rules.bind(config), room(chip)
  spec = remat.resolve(config, programs.tpu_spec(config), mesh, memory)
  sizes = ' '.join(f'{axis}={n}' for axis, n in mesh.shape.items())
  echo(
    f'{config.title} on {topology}: {mesh.size} devices of {chip.hbm} GiB, {sizes}, '
    f'attention {spec.attention}\n{remat.sentence(config, spec, mesh, memory)}'
  )
  made, rows, verdicts = {}, {}, {}
  for name, make in programs.PROGRAMS.items():
    made[name] = make(config, bound, spec, mesh)
    rows[name] = row = compiled(made[name], mesh)
    over = excess(row, chip) / GIB
    if isinstance(row, Row) and over <= 0:
      verdicts[name] = f'fits, {-over:.1f} left'
      echo(f'  {name} compiled in {row.seconds:.0f} s')
    else:
      echo(f'  {name} does not fit; searching a smaller batch')
      found = remedy(name, config, spec, mesh, chip, echo)
      verdicts[name] = f'{over:.1f} GiB too much; {found}'
  known = {name: row for name, row in rows.items() if isinstance(row, Row)}
  for table in (
    memory_table(rows, verdicts),
    loops_table(known),
    roofline_table(known, made, chip, config, mean_share),
  ):
    echo('')
    echo(table)
  return all(verdict.startswith('fits') for verdict in verdicts.values())


def memory_table(rows: dict[str, Row | float], verdicts: dict[str, str]) -> str:
  """One line per program, GiB on one device."""
  lines = [f'{"GiB on a device":16}' + ''.join(f'{c:>12}' for c in COLUMNS)]
  for name, row in rows.items():
    if isinstance(row, Row):
      cells = ''.join(f'{getattr(row, c) / GIB:12.2f}' for c in COLUMNS)
    else:
      cells = f'{"":60}{row / GIB:12.2f}'
    lines.append(f'{name:16}{cells}  {verdicts[name]}')
  lines.append(
    'cache is part of the arguments; resident is memory of the run that the '
    'program does not take (the learner, the actor, the buffer)'
  )
  for name, row in rows.items():
    if isinstance(row, Row) and row.cache:
      share = row.temporaries / row.cache
      lines.append(f'{name}: temporaries are {share:.1%} of the cache')
  return '\n'.join(lines)


def loops_table(rows: dict[str, Row]) -> str:
  """The collectives inside loops of each program, largest first."""
  lines = [f'{"in loops":16}{"kind":>20}{"MiB":>10}{"sites":>7}{"times":>8}{"GiB":>10}']
  for name, row in rows.items():
    heavy = [c for c in row.loops if c.received > 2**20]
    for c in heavy[:8]:
      lines.append(
        f'{name:16}{c.kind:>20}{c.bytes / 2**20:10.2f}{c.sites:7}{c.times:8}'
        f'{c.received / GIB:10.2f}'
      )
    rest = sum(c.received for c in row.loops if c not in heavy[:8])
    lines.append(f'{name:16}{"all others":>20}{"":25}{rest / GIB:10.2f}')
  return '\n'.join(lines)


def roofline_table(
  rows: dict[str, Row],
  made: dict[str, programs.Program],
  chip: roofline.Chip,
  config: Config,
  mean_share: float,
) -> str:
  """Lower bounds on the seconds of each program, and of a whole step."""
  bounds = ('products', 'memory', 'links')
  lines = [
    f'{"seconds, at least":18}' + ''.join(f'{b:>12}' for b in bounds) + '  of one'
  ]
  took = {}
  for name, row in rows.items():
    linked = sum(c.received for c in row.loops) / made[name].steps
    cost = made[name].cost(linked)
    seconds = cost.seconds(chip)
    took[name] = max(seconds.values())
    cells = ''.join(f'{seconds[b]:12.4g}' for b in bounds)
    share = cost.model_flops / chip.flops / took[name]
    lines.append(
      f'{name:18}{cells}  {programs.UNIT[name]}: {cost.model_flops / 1e12:.4g} TFLOP '
      f'of the model per device, {cost.flops / 1e12:.4g} computed, '
      f'{cost.bytes / GIB:.4g} GiB moved; at most {share:.0%} of the peak'
    )
  return '\n'.join([*lines, *_step_lines(took, config, mean_share)])


def _step_lines(
  took: dict[str, float], config: Config, mean_share: float
) -> Iterator[str]:
  """Lower bounds on decoding and learning of one step, given those of the programs."""
  sampler = config.sampler
  if 'decode' in took:
    tokens = sampler.max_num_seqs / took['decode']
    rounds = config.prompts.count * sampler.group_size / sampler.max_num_seqs
    hours = rounds * sampler.max_new_tokens * took['decode'] / 3600
    yield (
      f'decoding: at most {tokens:.0f} tokens/s; a rollout of responses of '
      f'{sampler.max_new_tokens} tokens at least {hours:.2f} h'
    )
  if 'train step' in took:
    updates = config.updates_per_step
    hours = updates * took['train step'] / 3600
    columns = updates * config.minibatch_rows * config.row_length
    yield (
      f'learning: {updates} updates per step on {columns / 1e6:.4g} M columns, padded: '
      f'at least {hours:.3g} h'
    )
    yield (
      f'  packed, by the assumption --mean_share={mean_share:g} (mean row over the '
      f'longest): {mean_share * columns / 1e6:.4g} M of them hold a token, at least '
      f'{mean_share * hours:.3g} h'
    )
