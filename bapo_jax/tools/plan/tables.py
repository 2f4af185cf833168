"""Prints a plan: memory, collectives in loops, lower bounds on time.

1. `Row` describes a compiled program;
2. `memory_table`, `loops_table` and `roofline_table` print all rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bapo_jax.tools.plan import hlo, programs, roofline
from bapo_jax.training.config import Config

GIB = 2**30
COLUMNS = ('arguments', 'output', 'temporaries', 'cache', 'resident', 'total')


class Row(NamedTuple):
  """Memory and collectives of a compiled program; bytes on one device, or one host."""

  arguments: float
  output: float  # beyond donated arguments
  temporaries: float
  cache: float  # part of the arguments
  resident: float  # memory of the run that the program does not take
  total: float
  loops: list[hlo.Collective]
  seconds: float  # to compile
  between: float = 0.0  # into the host that receives most, by collectives


def memory_table(rows: dict[str, Row | float], verdicts: dict[str, str]) -> str:
  """Prints one line per program, in GiB per device."""
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
  """Prints the collectives inside the loops of each program, largest first."""
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
  """Prints lower bounds on the seconds of each program and of a step."""
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
  """Prints lower bounds on the decoding and learning time of a step.

  Args:
    took: program -> lower bound on its time in seconds.
  """
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
