"""Counts what a GPU would run: kernels, copied bytes and loops of a compiled program.

  python -m benchmarks.on_gpu.programs [--topology=h100:1] [--config.<knob>=value]
  python -m benchmarks.on_gpu.programs --planned > benchmarks/on_gpu/planned.json

Compiles the update, the log-probability pass and a decoded token of Qwen2.5-0.5B, as
benchmarks.on_gpu runs them, for a GPU that may be absent (requirements/plan.txt). The
last line is one JSON object. No weight is needed, no program runs, and nothing is
autotuned: counts are those of the program, and no seconds.
"""

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

from bapo_jax import main as command_line
from bapo_jax.models import logprob_tiles
from bapo_jax.rollout import decode
from bapo_jax.tools.plan import devices, plan, programs
from bapo_jax.training import budget, resolve
from bapo_jax.training.resolve import Resolved
from benchmarks import hlo, seconds
from benchmarks.on_gpu import models, ours

OPCODE = re.compile(r' = (.*?) ([a-z][\w\-]*)\(')
# Instructions that run no kernel: names, views, control flow, and ends of async ones.
FREE = {
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call'),
  *('conditional', 'after-all', 'opt-barrier', 'partition-id', 'replica-id'),
}
MOVES = {'copy', 'dynamic-slice', 'dynamic-update-slice', 'slice', 'copy-start'}
CALLS = re.compile(r' calls=%?([\w.\-]+)')


def counts(text: str, turns: Sequence[int]) -> dict[str, float]:
  """Counts a program's kernels, copied GiB, and turns of loops of unknown length.

  A copy is an instruction, or a fusion, that only moves numbers; its bytes are those
  that it writes. A turn of a loop of unknown length copies a predicate to the host.

  Args:
    text: HLO of the compiled program.
    turns: of these loops, from the outside in; see `hlo.steps`.
  """
  bodies, _ = hlo.computations(text)
  kernels, copied, unknown = 0, 0.0, 0
  for step in hlo.steps(text, turns):
    found = OPCODE.search(step.line)
    if step.fused or not found:
      continue
    shape, opcode = found.groups()
    if opcode == 'while' and 'known_trip_count' not in step.line:
      unknown += step.times * (turns[step.unknown] if step.unknown < len(turns) else 1)
    if opcode in FREE or opcode.endswith('-done'):
      continue
    kernels += step.times
    called = CALLS.search(step.line)
    inside = bodies[called[1]] if called and opcode.startswith('fusion') else ()
    copied += step.times * moved(shape, opcode, inside)
  return {
    'kernels': kernels,
    'copied_gib': copied / budget.GIB,
    'turns_of_unknown_loops': unknown,
  }


def moved(shape: str, opcode: str, inside: Sequence[str]) -> int:
  """Returns the bytes that a copy writes; 0 for an instruction that computes.

  Args:
    shape: of the result, in HLO.
    inside: the instructions of a fusion.
  """
  if opcode in ('copy', 'copy-start'):
    return hlo.size(shape, opcode, opcode.endswith('start'), '')
  shapes, total = {}, 0
  for line in inside:
    found = OPCODE.search(line)
    if not found:
      return 0
    name = line.split(' = ')[0].split()[-1]
    shapes[name] = found[1]
    if found[2] in MOVES:
      written = found[1]
      if found[2] == 'dynamic-update-slice':
        _, update, *_ = line.split('dynamic-update-slice(')[1].split(', ')
        written = shapes[update.split()[-1]]
      total += array_bytes(written)
    elif found[2] not in FREE and math.prod(dims(found[1])) > 1:
      return 0
  return total


def dims(shape: str) -> list[int]:
  """Returns the dimensions of the first array of a shape in HLO."""
  found = hlo.ARRAY.search(shape)
  return [int(n) for n in found[2].split(',') if n] if found else []


def array_bytes(shape: str) -> int:
  """Returns the bytes of the arrays of a shape in HLO."""
  return hlo.size(shape, '', False, '')


def run_of(
  folder: str, name: str, topology: str, given: Sequence[str] = ()
) -> Resolved:
  """Returns the run of stage e of benchmarks.on_gpu; its model has no weights."""
  chip, attached = devices.attach(topology)
  model_type, sizes = models.SHAPES[name]
  described = dict(sizes, model_type=model_type, tie_word_embeddings=True)
  os.makedirs(os.path.join(folder, name), exist_ok=True)
  with open(os.path.join(folder, name, 'config.json'), 'w') as file:
    json.dump(described, file)
  flags = [*ours.overrides(folder, name), *given]
  config = command_line.read_config('configs/aime.py', flags)
  return plan.planned(config, resolve.make_mesh(config, attached), chip)


def measure(topology: str, given: Sequence[str] = ()) -> dict[str, Any]:
  """Compiles the programs and returns their counts, memory and schedule."""
  with tempfile.TemporaryDirectory() as folder:
    r = run_of(folder, 'q05', topology, given)
    config = r.config
    found: dict[str, Any] = {'schedule': str(r.schedule)}
    cells = config.micro_batch_rows * config.row_length
    tile = logprob_tiles.largest(r.schedule.tile_mib, r.spec.vocab)
    _, chunk = logprob_tiles.split(cells, tile.columns, logprob_tiles.COLUMN_STEP)
    chunks = -(-config.micro_batch_rows * config.sampler.max_new_tokens // chunk)
    n = config.sampler.tokens_per_dispatch
    made = programs.programs_of(r)
    # Loops of unknown length, from the outside in.
    turns = {
      'train step': (config.learner.grad_accum_steps, chunks),
      'log-prob pass': (seconds.micro_batches(r, made['log-prob pass'].call), chunks),
      'decode': (n // decode.DONE_CHECK_INTERVAL, decode.DONE_CHECK_INTERVAL),
    }
    for name in turns:
      with jax.set_mesh(r.mesh):
        executable = made[name].call.lower().compile()
      row = counts(executable.as_text() or '', turns[name])
      # Per token, and per micro-batch of the pass.
      share = {'decode': n, 'log-prob pass': turns['log-prob pass'][0]}.get(name, 1)
      row = {key: x / share for key, x in row.items()}
      memory = executable.memory_analysis()
      assert memory is not None, 'every GPU reports it'
      row['temporaries_gib'] = memory.temp_size_in_bytes / budget.GIB
      found[name] = row
  return found


def planned() -> dict[str, Any]:
  """Returns planned.json of benchmarks.on_gpu: schedules, and GiB of programs."""
  found: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as folder:
    for topology in ('h100:1', 'h200:1'):
      gpu = devices.parse(topology)[0].gpu
      assert gpu is not None, 'only called for GPUs'
      found[gpu.name] = {}
      for name in ('q05', 'q15', 's135'):
        r = run_of(folder, name, topology)
        gib = {
          what: round(plan.compiled(program).total / budget.GIB, 2)
          for what, program in programs.programs_of(r).items()
        }
        found[gpu.name][name] = {'schedule': str(r.schedule), 'gib': gib}
  return found


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  if sys.argv[1:] == ['--planned']:
    print(json.dumps(planned(), indent=1))
  else:
    where = [x for x in sys.argv[1:] if x.startswith('--topology=')] or ['=h100:1']
    knobs = [x for x in sys.argv[1:] if x.startswith('--config.')]
    print(json.dumps(measure(where[0].split('=')[1], knobs)))
