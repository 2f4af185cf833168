r"""Bounds the seconds of a planned run from below, by hand counts and data sheets.

  python -m benchmarks.seconds --config=configs/aime.py:7b --topology=v5p:4x4x4 \
    --mean_share=0.5 --config.model.path=models/DeepSeek-R1-Distill-Qwen-7B

Takes the flags of `bapo plan` and compiles the same programs. FLOPs and bytes of memory
are counted by roofline.py, bytes on links are those of the compiled program. No figure
was compared with a machine of several chips.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bapo_jax import main as command
from bapo_jax import sharding
from bapo_jax.autosetup import derive
from bapo_jax.models import decoder, ragged
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import shapes
from bapo_jax.runtime.ahead import Call
from bapo_jax.tools.plan import devices as devices_lib
from bapo_jax.tools.plan import plan, programs
from bapo_jax.tools.plan.chips import GIB, Chip
from bapo_jax.tools.plan.plan import Row
from bapo_jax.tools.plan.programs import Program
from bapo_jax.training import budget, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved
from benchmarks import hlo, meshes, roofline
from benchmarks.roofline import Cost, Traffic

UNIT = {  # what a cost counts
  'train step': 'update',
  'log-prob pass': 'round of responses',
  'teacher pass': 'batch of responses',
  'prefill': 'batch of prompts',
  'decode': 'token per slot',
  'tower': 'block of prompts',
}


class Work(NamedTuple):
  """Counts what a program does per call, or per token in every slot."""

  cost: Cost
  traffic: Sequence[Traffic]


def works(r: Resolved, found: Mapping[str, Program]) -> dict[str, Work]:
  """Returns the work of the programs of a run, from `programs.programs_of`.

  Programs that compute the cache anew, of rows and not of prompts, are not counted.
  """
  config = r.config
  spec = r.spec
  shape = r.mesh.shape
  language = dataclasses.replace(spec, vision=None)
  n = config.learner.grad_accum_steps
  shards = sharding.row_shards(r.mesh)

  def sums(spec: ModelSpec, tokens: float) -> Traffic:
    return roofline.hidden_sums(spec, tokens / shards)

  def scored(spec: ModelSpec, call: Call) -> Work:
    P, G, T = call.args[1].tokens_PGT.shape
    gathers = roofline.gathers(spec, shape)
    return Work(
      roofline.score(spec, shape, P * G, T),
      [gathers] * micro_batches(r, call) + [sums(spec, P * G * T)],
    )

  batch = r.schedule, shape, config.minibatch_rows, config.row_length, n
  by_name = {
    'train step': Work(
      roofline.train(language, *batch, budget.adapters(config, spec)),
      roofline.train_traffic(language, *batch),
    )
  }
  if program := found.get('log-prob pass'):
    by_name['log-prob pass'] = scored(language, program.call)
  if program := found.get('teacher pass'):
    teacher = r.teacher.spec if r.teacher else language
    by_name['teacher pass'] = scored(teacher, program.call)
  _, _, tokens_RT, *_, pictures = found['prefill'].call.args
  admitted = roofline.score(language, shape, *tokens_RT.shape, logits=False)
  if pictures is not None:
    seen = roofline.tower(spec, shape, *pictures.pixels_PZE.shape[:2])
    admitted = Cost(*map(sum, zip(admitted, seen, strict=True)))
  by_name['prefill'] = Work(admitted, [sums(language, tokens_RT.size)])
  slots = config.sampler.max_num_seqs
  by_name['decode'] = Work(decode_cost(r)[0], [sums(language, slots)])
  if program := found.get('tower'):
    _, pixels = program.call.args
    tower = roofline.tower(spec, shape, *pixels.pixels_PZE.shape[:2])
    by_name['tower'] = Work(tower, [])
  return by_name


def micro_batches(r: Resolved, call: Call) -> int:
  """Returns the most micro-batches of a program that scores groups."""
  P, G, _ = call.args[1].tokens_PGT.shape
  return -(-P * G // r.config.micro_batch_rows)


def decode_cost(r: Resolved, mean_share: float = 1.0) -> tuple[Cost, float]:
  """Counts a token in every slot; returns (cost, share of the cache that is read).

  `mean_share` is the mean live length of a slot divided by the longest row. With
  geometric response lengths and refilled slots, it is the mean row length divided by
  the longest; it is smaller if the response lengths vary less.
  """
  config = r.config
  spec = r.spec
  shape = r.mesh.shape
  # Of two key heads on three devices, every device has both.
  heads = spec.kv_heads // (1 if spec.kv_heads % shape['tensor'] else shape['tensor'])
  live = mean_share * config.row_length
  share = 1.0
  columns = config.row_length
  if decoder.is_ragged(spec):
    (columns,) = shapes.cache_columns(spec, config.row_length, 1)
    block = ragged.BLOCK  # of the GPU's kernel
    if spec.attention != 'flash':
      size = budget.itemsize(spec.compute)
      block = ragged.block_columns(heads, spec.head_width, columns, size)
    share = roofline.columns_read(columns, block, live) / columns
  S = config.sampler.max_num_seqs
  each = budget.cache_bytes(spec, columns, shape['tensor'])
  cache = S / sharding.row_shards(r.mesh) * each
  language = dataclasses.replace(spec, vision=None)
  return roofline.decode(language, shape, S, live, share * cache), share


def received(r: Resolved, name: str, row: Row) -> float | None:
  """Returns the bytes on links per call, or per token; None if it was not compiled."""
  if row.executable is None:
    return None
  most = 1  # turns of the loop over micro-batches
  if name == 'train step':
    most = r.config.learner.grad_accum_steps
  elif name.endswith('pass'):
    most = micro_batches(r, row.program.call)
  runs = hlo.in_loops(row.executable.as_text() or '', most)
  tokens = r.config.sampler.tokens_per_dispatch if name == 'decode' else 1
  return sum(run.received for run in runs) / tokens


def table(
  linked: Mapping[str, float | None],
  chip: Chip,
  r: Resolved,
  of_programs: Mapping[str, Work],
  mean_share: float = 1.0,
) -> str:
  """Formats lower bounds on the seconds of each program and of a step.

  `linked` has the bytes on links of each compiled program, see `received`; None: they
  are counted. `of_programs` are their `works`.
  """
  lines = [
    f'{"seconds, at least":18}{"products":>12}{"memory":>12}{"links":>12}'
    f'{"network":>12}  of one'
  ]
  took = {}

  def bounds(name: str, cost: Cost) -> dict[str, float]:
    traffic = of_programs[name].traffic
    return roofline.bounds(cost, chip, r.mesh, traffic, linked[name])

  for name in linked:
    cost = of_programs[name].cost
    seconds = bounds(name, cost).values()
    took[name] = max(seconds)
    cells = ''.join(f'{s:12.4g}' for s in seconds)
    share = cost.model_flops / chip.flops / took[name]
    lines.append(
      f'{name:18}{cells}  {UNIT[name]}: {cost.model_flops / 1e12:.4g} TFLOP '
      f'of the model per device, {cost.flops / 1e12:.4g} computed, '
      f'{cost.bytes / GIB:.4g} GiB moved; at most {share:.0%} of the peak'
    )
  config = r.config
  sampler = config.sampler
  rounds = config.prompts.count * sampler.group_size / sampler.max_num_seqs
  hours = rounds * sampler.max_new_tokens * took['decode'] / 3600
  cost, share = decode_cost(r, mean_share)
  live = max(bounds('decode', cost).values())
  lines.append(
    f'decoding: at most {sampler.max_num_seqs / took["decode"]:.0f} tokens/s if all '
    f'slots are full; a rollout of responses of {sampler.max_new_tokens} tokens at '
    f'least {hours:.2f} h\n'
    f'  by the assumption --mean_share={mean_share:g} a step reads {share:.1%} of '
    f'the cache: at most {sampler.max_num_seqs / live:.0f} tokens/s'
  )
  updates = config.updates_per_step
  hours = updates * took['train step'] / 3600
  columns = updates * config.minibatch_rows * config.row_length
  lines.append(
    f'learning: {updates} updates per step on {columns / 1e6:.4g} M columns, padded: '
    f'at least {hours:.3g} h\n'
    f'  packed, by the assumption --mean_share={mean_share:g} (mean row over the '
    f'longest): {mean_share * columns / 1e6:.4g} M of them hold a token, at least '
    f'{mean_share * hours:.3g} h'
  )
  return '\n'.join(lines)


def run(config: Config, topology: str, mean_share: float) -> None:
  """Compiles the programs of a run for absent devices and prints the table."""
  chip, devices = devices_lib.attach(topology)
  print(plan.heading(config, topology, chip, devices))
  config = derive.decide(config, '')
  mesh = resolve.make_mesh(config, devices)
  r = plan.planned(config, mesh, chip)
  found = programs.programs_of(r)
  of_programs = works(r, found)
  linked = {name: received(r, name, plan.compiled(found[name])) for name in of_programs}
  print(table(linked, chip, r, of_programs, mean_share))
  print(json.dumps({'topology': topology, 'bytes_on_links': linked}))


def main() -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(add_help=False)
  parser.add_argument('--mean_share', type=float, default=1.0)
  own, others = parser.parse_known_args()
  if not 0 < own.mean_share <= 1:
    raise ValueError(f'--mean_share={own.mean_share:g}: give a number in (0, 1]')
  config, topology = meshes.to_plan(others)
  run(config, topology, own.mean_share)


if __name__ == '__main__':
  try:
    main()
  except ValueError as error:
    command.fail(error)
