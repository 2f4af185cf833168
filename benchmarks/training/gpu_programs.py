"""Counts what a GPU would run: kernels, copied bytes and loops of a compiled program.

  python -m benchmarks.training.gpu_programs [--topology=h100:1] [--config.<knob>=value]

Compiles the update, the log-probability pass and a decoded token of Qwen2.5-0.5B, as
benchmarks.on_gpu runs them, for a GPU that may be absent (requirements-plan.txt). The
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

from bapo_jax.models import logprob_tiles
from bapo_jax.rollout import decode
from bapo_jax.tools.plan import devices, hlo, plan, programs
from bapo_jax.training import budget, resolve
from bapo_jax.training.config import Config
from benchmarks.on_gpu import models
from benchmarks.on_gpu.sizes import CHOSEN, PROMPT

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
        written = shapes[re.search(r'\((.*)\)', line)[1].split(', ')[1].split()[-1]]
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


def config_of(folder: str, given: Sequence[str] = ()) -> Config:
  """Returns the config of stage e of benchmarks.on_gpu, for shapes without weights."""
  from bapo_jax import main as command_line

  kind, sizes = models.SHAPES['q05']
  path = os.path.join(folder, 'q05')
  os.makedirs(path, exist_ok=True)
  described = dict(sizes, model_type=kind, tie_word_embeddings=True, hidden_act='silu')
  with open(os.path.join(path, 'config.json'), 'w') as file:
    json.dump(described, file)
  n = CHOSEN
  values = {
    'model.path': path,
    'model.compute': 'bfloat16',
    'tokenizer.path': path,
    'tokenizer.template': '{problem}',
    'prompts.count': n.prompts,
    'prompts.max_prompt_tokens': PROMPT,
    'sampler.group_size': n.group,
    'sampler.max_new_tokens': n.new,
    'sampler.max_num_seqs': n.slots,
    'sampler.prefill_batch_size': n.slots,
    'sampler.tokens_per_dispatch': 64,
    'learner.minibatches': n.updates,
    'learner.grad_accum_steps': n.pieces,
  }
  flags = [f'--config.{knob}={value}' for knob, value in values.items()]
  return command_line.read_config('configs/aime.py', [*flags, *given])


def measure(topology: str, given: Sequence[str] = ()) -> dict[str, Any]:
  """Compiles the programs and returns their counts, memory and schedule."""
  chip, attached = devices.attach(topology)
  with tempfile.TemporaryDirectory() as folder:
    config = config_of(folder, given)
    mesh = resolve.make_mesh(config, attached)
    job = plan.planned(config, mesh, chip)
    found: dict[str, Any] = {'schedule': str(job.schedule)}
    scored = config.micro_batch_rows * config.sampler.max_new_tokens
    cells = config.micro_batch_rows * config.row_length
    tile = logprob_tiles.largest(job.schedule.tile_mib, job.spec.vocab)
    _, chunk = logprob_tiles.split(cells, tile.columns, logprob_tiles.COLUMNS)
    chunks = -(-scored // chunk)
    n = config.sampler.tokens_per_dispatch
    # Loops of unknown length, from the outside in.
    turns = {
      'train step': (config.learner.grad_accum_steps, chunks),
      'log-prob pass': (1, chunks),
      'decode': (n // decode.DONE_CHECK_INTERVAL, decode.DONE_CHECK_INTERVAL),
    }
    for name in turns:
      program = programs.programs_of(job.spec)[name](job)
      with jax.set_mesh(mesh):
        lowered = program.function.lower(*program.args, **program.static)
        executable = lowered.compile()
      row = counts(executable.as_text() or '', turns[name])
      if name == 'decode':
        row = {key: x / n for key, x in row.items()}  # per token
      memory = executable.memory_analysis()
      row['temporaries_gib'] = memory.temp_size_in_bytes / budget.GIB
      found[name] = row
  return found


if __name__ == '__main__':
  where = [x for x in sys.argv[1:] if x.startswith('--topology=')]
  rest = [x for x in sys.argv[1:] if x not in where]
  jax.config.update('jax_platforms', 'cpu')
  print(json.dumps(measure((where or ['=h100:1'])[0].split('=')[1], rest)))
