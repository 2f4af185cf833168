"""Writes notebooks/5_smollm2.jsonl: a recorded step of a published model.

  python -m bapo_jax.main --config=configs/finetune.py --workdir=runs/smollm2 \\
    --config.model.path=M --config.problems.source=train.jsonl \\
    --config.problems.test_source=test.jsonl --config.steps=4 \\
    --config.prompts.count=16 --config.learner.minibatches=4 \\
    --config.rollout.weight_sync_interval=4 --config.optimizer.lr=1e-5 \\
    --config.sampler.max_new_tokens=48                (Ctrl-C after the first step)
  python -m notebooks.save_model_record runs/smollm2

M is SmolLM2-135M-Instruct, unpacked from four bits to float32; the problems are sums
and differences of numbers below 60, 'What is 39 + 14?'. The recorded groups with right
and wrong responses are kept, in the format of lab/neutral_record.py.
"""

import pathlib
import sys

from bapo_jax.run import step_record
from lab import neutral_record

PATH = pathlib.Path(__file__).with_name('5_smollm2.jsonl')


def main(workdir: str) -> None:
  """Writes the groups of the newest recorded step that have advantages."""
  step = step_record.newest(workdir)
  assert step is not None, f'{workdir} has no recorded step'
  groups = [g for g in step_record.read(workdir, step) if step_record.taught(g)]
  PATH.unlink(missing_ok=True)
  neutral_record.append(PATH, **neutral_record.columns(groups))
  print(f'{PATH.name}: {len(groups)} groups, {PATH.stat().st_size} bytes')


if __name__ == '__main__':
  main(*sys.argv[1:])
