"""Compiles a run for a TPU that is not attached, and says whether it fits.

1. `attach` turns 'v5p:4x4x4' into devices that can be compiled for;
2. `compiled` asks the TPU's compiler for the memory and the collectives of a program;
3. `remedy` looks for the largest batch that fits where the asked one does not;
4. `report` prints it all, with a roofline.

Nothing is loaded and nothing runs: a config.json is enough.
"""

import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.tools.plan import hlo, programs, roofline
from bapo_jax.training import rules, setup
from bapo_jax.training.config import Config

GIB = 2**30
UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
COLUMNS = ('arguments', 'output', 'temporaries', 'cache', 'beside', 'total')


class Row(NamedTuple):
  """What the compiler says of it; bytes on one device."""

  arguments: float
  output: float  # beyond donated arguments
  temporaries: float
  cache: float  # part of the arguments
  beside: float
  total: float
  loops: list  # of Collective
  seconds: float  # to compile

  def over(self, chip: roofline.Chip) -> float:
    """Bytes beyond what the chip has."""
    return self.total - chip.hbm * GIB


def attach(topology: str):
  """(chip, devices) of 'v5p:4x4x4'.

  Raises:
    ValueError: no such chip, or no such arrangement of them.
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


def compiled(program: programs.Program, mesh) -> Row | float:
  """What the compiler says; where memory does not suffice, the bytes it asks for."""
  begun = time.time()
  with sharding.current(mesh):
    lowered = program.function.lower(*program.args, **program.knobs)
    try:
      made = lowered.compile()
    except Exception as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return asked(str(error), program)
  m = made.memory_analysis()
  output = m.output_size_in_bytes - m.alias_size_in_bytes
  own = m.argument_size_in_bytes + output + m.temp_size_in_bytes
  return Row(
    m.argument_size_in_bytes,
    output,
    m.temp_size_in_bytes,
    program.cache,
    program.beside,
    own + program.beside,
    hlo.in_loops(made.as_text()),
    time.time() - begun,
  )


def asked(message: str, program: programs.Program) -> float:
  """Bytes a device would need, from the compiler's refusal; inf where it says none."""
  if found := re.search(r'Used ([\d.]+)([KMGT]) of', message):
    return float(found[1]) * UNITS[found[2]] + program.beside
  if found := re.search(r'temporaries \(([\d.]+)([KMGT])\)', message):
    own = float(found[1]) * UNITS[found[2]] + programs.held(program.args)
    return own + program.beside
  return math.inf


def ladder(name: str, config, mesh):
  """(knob, value) to try one after the other where a program does not fit.

  From the largest batch down, so that the first that fits is the largest.
  """
  shards = sharding.row_shards(mesh)
  if name in ('prefill', 'decode'):
    knob = {'prefill': 'prefill_batch_size', 'decode': 'max_num_seqs'}[name]
    n = getattr(config.sampler, knob) // 2
    while n >= shards and n % shards == 0:
      yield f'sampler.{knob}', n
      n //= 2
    return
  if config.model.remat != 'full' and name == 'train step':
    yield 'model.remat', 'full'
  rows = config.minibatch_rows
  slices = 2 * config.learner.grad_accum_steps
  while rows % (slices * shards) == 0:
    yield 'learner.grad_accum_steps', slices
    slices *= 2


def remedy(name: str, config: Config, mesh: Mesh, chip: roofline.Chip, echo) -> str:
  """What would make the program fit, found by compiling it."""
  changed, tried = config, {}
  for knob, value in ladder(name, config, mesh):
    section, key = knob.split('.')
    changed = changed.with_values(**{section: {key: value}})
    tried[knob] = value
    flags = ' '.join(f'--config.{k}={v}' for k, v in tried.items())
    echo(f'  {name}: trying {flags}')
    spec, bound = programs.described(changed), rules.bind(changed)
    row = compiled(programs.PROGRAMS[name](changed, bound, spec, mesh), mesh)
    if isinstance(row, Row) and row.over(chip) <= 0:
      return f'{flags} fits, {-row.over(chip) / GIB:.1f} GiB left'
  if not tried:
    return 'no smaller batch divides over this mesh'
  return f'not even with {flags}: a larger mesh.tensor or topology would'


def run(config: Config, topology: str, echo: Callable = print) -> bool:
  """Plans the run and prints the plan; whether everything fits.

  Raises:
    ValueError: the topology, the model or the knobs make no sense.
  """
  chip, devices = attach(topology)
  mesh = setup.make_mesh(config, devices)
  bound = rules.bind(config)
  spec = programs.described(config)
  sizes = ' '.join(f'{axis}={n}' for axis, n in mesh.shape.items())
  echo(
    f'{config.title} on {topology}: {mesh.size} devices of {chip.hbm} GiB, {sizes}, '
    f'attention {spec.attention}, remat {spec.remat}'
  )
  made, rows, verdicts = {}, {}, {}
  for name, make in programs.PROGRAMS.items():
    made[name] = make(config, bound, spec, mesh)
    rows[name] = row = compiled(made[name], mesh)
    over = row.over(chip) if isinstance(row, Row) else row - chip.hbm * GIB
    if over > 0:
      echo(f'  {name} does not fit; looking for what does')
      found = remedy(name, config, mesh, chip, echo)
      verdicts[name] = f'{over / GIB:.1f} GiB too much; {found}'
    else:
      verdicts[name] = f'fits, {-over / GIB:.1f} left'
      echo(f'  {name} compiled in {row.seconds:.0f} s')
  echo('')
  echo(memory_table(rows, verdicts))
  known = {name: row for name, row in rows.items() if isinstance(row, Row)}
  echo('')
  echo(loops_table(known))
  echo('')
  echo(roofline_table(known, made, chip, config))
  return all(verdict.startswith('fits') for verdict in verdicts.values())


def memory_table(rows: dict, verdicts: dict) -> str:
  """A line a program, GiB on one device."""
  lines = [f'{"GiB on a device":16}' + ''.join(f'{c:>12}' for c in COLUMNS)]
  for name, row in rows.items():
    if isinstance(row, Row):
      cells = ''.join(f'{getattr(row, c) / GIB:12.2f}' for c in COLUMNS)
    else:
      cells = f'{"":60}{row / GIB:12.2f}'
    lines.append(f'{name:16}{cells}  {verdicts[name]}')
  lines.append(
    'cache is part of the arguments; beside is what the run holds there meanwhile '
    '(the learner, the actor, the buffer)'
  )
  for name, row in rows.items():
    if isinstance(row, Row) and row.cache:
      share = row.temporaries / row.cache
      lines.append(f'{name}: temporaries are {share:.1%} of the cache')
  return '\n'.join(lines)


def loops_table(rows: dict) -> str:
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


def roofline_table(rows: dict, made: dict, chip, config) -> str:
  """Lower bounds on the seconds of each program, and what they make of a step."""
  bounds = ('products', 'memory', 'links')
  lines = [
    f'{"seconds, at least":18}' + ''.join(f'{b:>12}' for b in bounds) + '  of one'
  ]
  took = {}
  for name, row in rows.items():
    program = made[name]
    linked = sum(c.received for c in row.loops) / program.runs
    cost = program.cost(linked)
    seconds = cost.seconds(chip)
    took[name] = max(seconds.values())
    cells = ''.join(f'{seconds[b]:12.4g}' for b in bounds)
    share = cost.model_flops / chip.flops / took[name]
    lines.append(
      f'{name:18}{cells}  {programs.UNIT[name]}: {cost.model_flops / 1e12:.4g} TFLOP '
      f'of the model a device, {cost.flops / 1e12:.4g} computed, '
      f'{cost.bytes / GIB:.4g} GiB moved; at most {share:.0%} of the peak'
    )
  if 'decode' in took:
    tokens = config.sampler.max_num_seqs / took['decode']
    rounds = (
      config.prompts.count * config.sampler.group_size / config.sampler.max_num_seqs
    )
    hours = rounds * config.sampler.max_new_tokens * took['decode'] / 3600
    lines.append(
      f'decoding: at most {tokens:.0f} tokens/s; a rollout whose responses are all '
      f'{config.sampler.max_new_tokens} tokens at least {hours:.2f} h'
    )
  if 'train step' in took:
    updates = config.updates_per_step
    hours = updates * took['train step'] / 3600
    lines.append(f'learning: {updates} updates a rollout batch, at least {hours:.2f} h')
  return '\n'.join(lines)
