"""Times one RL step of TRL's GRPOTrainer; `rl_step` starts this program.

  python -m benchmarks.training.trl_step --model=DIR --problems=FILE --out=DIR
      --prompts=8 --group=8 --new=20 --updates=4 --steps=3 --lr=1e-6 [--chat]

Needs requirements/peers.txt on PYTHONPATH. A step is `prompts` x `group` responses and
`updates` optimiser updates on them, from the end of the update before it to the end of
its own last one. The problems, {"problem", "answer", "rule"} a line, come in the order
of the file, and our verifiers give the rewards. The last line is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from bapo_jax.rewards import verifiers

SKIPPED = 1  # steps at the start that are not counted


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """The arguments."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name in ('model', 'problems', 'out'):
    parser.add_argument(f'--{name}', required=True)
  for name in ('prompts', 'group', 'new', 'updates', 'steps'):
    parser.add_argument(f'--{name}', type=int, required=True)
  parser.add_argument('--lr', type=float, required=True)
  parser.add_argument('--chat', action='store_true')
  return parser.parse_args(argv)


def example(row: dict[str, str], chat: bool) -> dict[str, Any]:
  """Converts a problem to TRL's format: a prompt, or a chat."""
  problem = row['problem']
  prompt = [{'role': 'user', 'content': problem}] if chat else f'{problem}\n'
  return {'prompt': prompt, 'answer': row['answer'], 'rule': row['rule']}


def reward(
  completions: list[Any], answer: list[str], rule: list[str], **_: Any
) -> list[float]:
  """Returns 1 per response that our verifier accepts, else 0."""
  texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]
  verdicts = map(verifiers.verify, rule, answer, texts)
  return [float(verdict.right is True) for verdict in verdicts]


def settings(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of GRPOConfig that match our settings."""
  return {
    'output_dir': args.out,
    'use_cpu': True,
    'bf16': False,
    'gradient_checkpointing': False,
    'per_device_train_batch_size': args.prompts * args.group // args.updates,
    'gradient_accumulation_steps': 1,
    'steps_per_generation': args.updates,
    'num_generations': args.group,
    'max_completion_length': args.new,
    'max_steps': args.updates * (args.steps + SKIPPED),
    'shuffle_dataset': False,
    'temperature': 1.0,
    'loss_type': 'bnpo',  # the mean over the tokens of the minibatch
    'epsilon': 0.2,
    'beta': 0.0,
    'learning_rate': args.lr,
    'lr_scheduler_type': 'constant',
    'max_grad_norm': 1.0,
    'save_strategy': 'no',
    'report_to': [],
    'logging_steps': 10**6,
    'disable_tqdm': True,
  }


def train(args: argparse.Namespace) -> tuple[list[float], list[float]]:
  """Returns (seconds per step, seconds of generation per step) for all steps."""
  import torch
  import transformers
  import trl
  from datasets import Dataset

  ends, generations = [], []

  class Clock(transformers.TrainerCallback):
    def on_train_begin(self, *_: Any, **__: Any) -> None:
      ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
      ends.append(time.perf_counter())

  class Timed(trl.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
      begun = time.perf_counter()
      out = super()._generate_and_score_completions(inputs)
      generations.append(time.perf_counter() - begun)
      return out

  # tokenizer.json to the letter, as ours reads it.
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
  tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
  with open(args.problems) as file:
    rows = [example(json.loads(line), args.chat) for line in file]
  Timed(
    model=transformers.AutoModelForCausalLM.from_pretrained(
      args.model, dtype=torch.float32
    ),
    reward_funcs=reward,
    args=trl.GRPOConfig(**settings(args)),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[Clock()],
  ).train()
  ends = ends[:: args.updates]
  return [b - a for a, b in itertools.pairwise(ends)], generations


def main() -> None:
  """Prints the JSON line."""
  args = parse()
  steps, generations = (seconds[SKIPPED:] for seconds in train(args))
  sample_s = statistics.median(generations)
  step_s = statistics.median(steps)
  print(
    json.dumps(
      {
        'step_s': step_s,
        'sample_s': sample_s,
        'update_s': step_s - sample_s,
        'steps_s': steps,
      }
    )
  )


if __name__ == '__main__':
  main()
