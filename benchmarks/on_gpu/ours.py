"""Times RL steps of the project on a model of models.py.

  python -m benchmarks.on_gpu.ours FOLDER NAME [--trace=DIR] [--config.<knob>=value ...]

The last line is one JSON object. Seconds are medians of the counted steps: `sample_s`
decodes and verifies, `score_s` recomputes log-probabilities with the learner's program,
`update_s` are all updates. `peak_gib` is the peak of the process on its device up to a
moment. With --trace one more step is traced, and the kernels are listed by their time.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from bapo_jax import main as command_line
from bapo_jax.models import attention
from bapo_jax.run import experiment
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build
from bapo_jax.training.trainer import train_loop
from benchmarks.first_contact.rates import chip_of
from benchmarks.first_contact.speed import peak
from benchmarks.on_gpu import traces
from benchmarks.on_gpu.sizes import CHOSEN, LR
from benchmarks.training import our_step, rates

HERE = os.path.dirname(os.path.abspath(__file__))


def overrides(folder: str, name: str) -> list[str]:
  """Returns the knobs of a run of GRPO with Balanced PO's bounds."""
  n, problems = CHOSEN, os.path.join(folder, 'problems.jsonl')
  values = {
    'model.path': os.path.join(folder, name),
    'model.compute': 'bfloat16',
    'tokenizer.template': '{problem}',
    'problems.source': problems,
    'problems.test_source': problems,
    'prompts.count': n.prompts,
    'prompts.max_prompt_tokens': n.prompt,
    'sampler.group_size': n.group,
    'sampler.max_new_tokens': n.new,
    'sampler.max_num_seqs': n.slots,
    'sampler.prefill_batch_size': n.slots,
    'sampler.tokens_per_dispatch': 64,
    'sampler.done_check_lag': 1,
    'rewards.rule': f'{HERE}/reward.py:score',
    'learner.minibatches': n.updates,
    'learner.grad_accum_steps': n.pieces,
    'optimizer.lr': LR,
    'optimizer.warmup': 0,
    'optimizer.b2': 0.999,
  }
  return [f'--config.{knob}={value}' for knob, value in values.items()]


def measure(folder: str, name: str, given: list[str], trace: str) -> None:
  """Runs the steps in this process and prints the JSON line, with kernels again."""
  begun = time.perf_counter()
  steps = our_step.SKIPPED + CHOSEN.steps
  total = f'--config.steps={steps + bool(trace)}'
  given = [*overrides(folder, name), total, *given]
  config = command_line.read_config('configs/aime.py', given)
  workdir = os.path.join(folder, f'{name}-run')
  os.makedirs(workdir, exist_ok=True)
  t, s = build.start(config, PhaseTimer())
  jax.block_until_ready(s.params)
  load_s = time.perf_counter() - begun
  peaks = {'loaded': peak()}
  begun = time.perf_counter()
  t = experiment.compiled(t, s)
  compile_s = time.perf_counter() - begun
  peaks['compiled'] = peak()
  train_step = t.train_step
  batches = []

  def recorded(params: Any, opt: Any, batch: Any) -> Any:
    if not batches:
      peaks['sampled'] = peak()
    batches.append(batch)
    return train_step(params, opt, batch)

  seconds, phases, rows = [], [], []
  t.timer.since()
  begun = time.perf_counter()
  loop = train_loop(dataclasses.replace(t, train_step=recorded), s)
  try:
    for i in range(steps):
      s, row, _ = next(loop)
      jax.block_until_ready(s.params)
      seconds.append(time.perf_counter() - begun)
      phases.append(t.timer.since())
      rows.append(row)
      print(f'step {i}: {seconds[-1]:.2f} s {phases[-1]}', file=sys.stderr, flush=True)
      begun = time.perf_counter()
    peaks['trained'] = peak()
    result = figures(t, phases, rows, batches) | {
      'model': name,
      'load_s': load_s,
      'compile_s': compile_s,
      'first_step_s': seconds[0],
      'step_s': statistics.median(seconds[our_step.SKIPPED :]),
      'steps_s': seconds,
      'peak_gib': peaks,
      'kernels': [],
    }
    print(json.dumps(result), flush=True)  # a trace may outlast the limit
    if trace:
      with jax.profiler.trace(trace):
        s, *_ = next(loop)
        jax.block_until_ready(s.params)
      result['kernels'] = traces.kernels(traces.spans(trace))[:25]
      print(json.dumps(result))
  finally:
    t.verifier.close()


def figures(
  t: Any, phases: list[dict[str, float]], rows: list[dict[str, Any]], batches: list[Any]
) -> dict[str, Any]:
  """Returns the medians and means over the counted steps."""
  skipped = our_step.SKIPPED
  phases, rows = phases[skipped:], rows[skipped:]
  batches = batches[skipped * CHOSEN.updates :][: CHOSEN.steps * CHOSEN.updates]

  def middle(phase: str) -> float:
    return statistics.median(seconds.get(phase, 0.0) for seconds in phases)

  sampled = statistics.median(row['rollout/tokens'] for row in rows)
  trained = sum(int(np.asarray(batch.loss_mask_BT).sum()) for batch in batches)
  flops = rates.useful_flops(t.spec, [rates.teaching(batch) for batch in batches])
  flops /= CHOSEN.steps
  device, spec = jax.devices()[0], t.spec
  chip = chip_of(device.device_kind)
  kind = attention.resolve(
    spec.attention, device.platform, spec.compute, spec.head_width
  )
  return {
    'who': 'ours',
    'device': device.device_kind,
    'sizes': CHOSEN._asdict(),
    'sample_s': middle('sample'),
    'verify_s': middle('verify'),
    'score_s': middle('score'),
    'update_s': middle('update'),
    'sampled_tps': sampled / middle('sample'),
    'trained_tps': trained / CHOSEN.steps / middle('update'),
    'update_tflops': flops / middle('update') / 1e12,
    'update_mfu': flops / middle('update') / chip.flops if chip else None,
    'learnable': statistics.mean(row['batch/learnable'] for row in rows),
    'logp_diff': rows[-1].get('rollout/logp_diff'),
    'attention': kind,
    'schedule': str(t.schedule),
  }


def main() -> None:
  """Prints the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder')
  parser.add_argument('name')
  parser.add_argument('--trace', default='')
  args, given = parser.parse_known_args()
  measure(os.path.abspath(args.folder), args.name, given, args.trace)


if __name__ == '__main__':
  main()
