"""Times one RL step of this project; `rl_step` starts this program.

  python -m benchmarks.training.our_step --workdir=DIR [--config.<knob>=value ...]

Runs configs/aime.py with the overrides through `trainer.train_loop`, without evaluation
or checkpoints; the first step is not counted. For the peer <workdir>/problems.jsonl has
the problems of all steps in their order, and <workdir>/model the weights at step 0
where they are not those of a published model. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import time
from typing import Any

SKIPPED = 1  # steps at the start that are not counted: they compile


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
  """(arguments, overrides)."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', required=True)
  return parser.parse_known_args(argv)


def measure(workdir: str, overrides: list[str]) -> dict[str, Any]:
  """Measures a run of `steps` steps in this process."""
  from bapo_jax import main as command_line
  from bapo_jax.run import experiment
  from bapo_jax.runtime.progress import PhaseTimer
  from bapo_jax.training import build, inputs
  from benchmarks.training import rates

  os.makedirs(workdir, exist_ok=True)
  config = command_line.read_config('configs/aime.py', overrides)
  timer = PhaseTimer()
  t, s = build.start(config, timer)
  write_problems(t, os.path.join(workdir, 'problems.jsonl'))
  if not config.model.path:
    shutil.copytree(inputs.resolve(config), os.path.join(workdir, 'model'))
  try:
    steps, phases, rows, batches, compiles = steps_of(experiment.compiled(t, s), s)
  finally:
    t.verifier.close()
  counted = [rates.teaching(batch) for batch in batches]
  return {
    'step_s': statistics.median(steps),
    'sample_s': statistics.median(phase['sample'] for phase in phases),
    'update_s': statistics.median(phase.get('update', 0.0) for phase in phases),
    'steps_s': steps,
    'compiles': compiles,
    'learnable': statistics.mean(row['batch/learnable'] for row in rows),
    'sampled_tps': sum(row['rollout/tokens'] for row in rows) / sum(steps),
  } | learner_figures(t.spec, counted, phases)


def steps_of(t: Any, s: Any) -> tuple[list[float], list[dict], list[dict], list, int]:
  """Of the counted steps: seconds, seconds by phase, metrics; batches; compilations.

  Args:
    t, s: trainer and state at step 0.
  """
  import jax

  from bapo_jax.training.trainer import train_loop

  train_step, batches, compiled = t.train_step, [], []

  def recorded(params: Any, opt: Any, batch: Any) -> Any:
    batches.append(batch)
    return train_step(params, opt, batch)

  def count(event: str, duration_secs: float, **_: Any) -> None:
    if 'backend_compile' in event:
      compiled.append(duration_secs)

  jax.monitoring.register_event_duration_secs_listener(count)
  steps, phases, rows = [], [], []
  t.timer.since()
  begun = time.perf_counter()
  for state, row, _ in train_loop(dataclasses.replace(t, train_step=recorded), s):
    took, phase = time.perf_counter() - begun, t.timer.since()
    if state.step > SKIPPED:
      steps.append(took)
      phases.append(phase)
      rows.append(row)
    else:
      batches.clear()
      compiled.clear()
    begun = time.perf_counter()
  return steps, phases, rows, batches, len(compiled)


def learner_figures(spec: Any, counted: list, phases: list[dict]) -> dict[str, float]:
  """Rates of all counted updates, and what the learner reaches of this machine's.

  Args:
    counted: a `rates.Teaching` per update.
    phases: seconds by phase of each step.
  """
  from benchmarks import machine
  from benchmarks.training import rates

  updating = sum(phase.get('update', 0.0) for phase in phases) or float('nan')
  teaching = sum(int(update.response_R.sum()) for update in counted)
  rate, gemm = rates.useful_flops(spec, counted) / updating, machine.gemm_rate()
  return {
    'teaching': teaching / max(sum(update.trained for update in counted), 1),
    'teaching_tps': teaching / updating,
    'gemm_gflops': gemm / 1e9,
    'learner': rate / gemm,
  }


def write_problems(t: Any, path: str) -> None:
  """Writes the problems of all steps, in the order of sampling."""
  from bapo_jax.data import prompt_rules

  config, problems = t.config, t.problems
  count = config.prompts.count
  with open(path, 'w') as file:
    for step in range(config.steps):
      key = config.seed, step
      id_N = prompt_rules.shuffled(len(problems.id_N), key, count)
      for i in id_N[:count].tolist():
        x = problems.rows[i]
        rule = x.verifier or config.rewards.rule
        row = {'problem': x.problem, 'answer': x.answer, 'rule': rule}
        file.write(json.dumps(row) + '\n')


def main() -> None:
  """Prints the JSON line."""
  args, overrides = parse()
  print(json.dumps(measure(args.workdir, overrides)))


if __name__ == '__main__':
  main()
