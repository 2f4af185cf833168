"""Writes notebooks/5_trl.jsonl: a batch of TRL, for 5_counterfactual.ipynb.

  python -m notebooks.save_trl_record       (with requirements/peers.txt and torch)

A random policy of two layers writes digits and earns 1 for a 4 or a 7. The trainer is
the class of docs/guide/running.md, which is executed from there. Four prompts of four
responses, two optimiser updates on them and two passes: recorded is the second pass,
whose ratios are not 1. Also prints the shares of tokens that TRL's own loss clips in
the updates of that pass, for tests/lab/test_neutral_record.py.
"""

import os
import pathlib
import re
import tempfile
from typing import Any

from lab import neutral_record

HERE = pathlib.Path(__file__).parent
PATH = HERE / '5_trl.jsonl'
PAGE = HERE.parent / 'docs' / 'guide' / 'running.md'
LETTERS = '0123456789=+'
PROMPTS = ('1+2=', '3+4=', '5+6=', '7+8=')


def documented(name: str) -> str:
  """Returns the code of docs/guide/running.md under this name."""
  found = re.search(rf'```python\n# {name}\n(.*?)```', PAGE.read_text(), re.DOTALL)
  assert found, f'{PAGE} has no code for {name}'
  return found[1]


def reward(completions: list[str], **_: Any) -> list[float]:
  """Returns 1 for a response with a 4 or a 7, else 0."""
  return [float('4' in text or '7' in text) for text in completions]


def main() -> None:
  """Trains on one batch of responses and keeps the record of the second pass."""
  import torch
  import transformers
  import trl
  from datasets import Dataset
  from tokenizers import Tokenizer, models, pre_tokenizers

  names = {'torch': torch, 'trl': trl, 'neutral_record': neutral_record}
  exec(documented('TRL'), names)
  torch.manual_seed(0)
  vocabulary = {letter: i for i, letter in enumerate(['<pad>', '<eos>', *LETTERS])}
  backend = Tokenizer(models.WordLevel(vocabulary, unk_token='<pad>'))
  backend.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token='<pad>', eos_token='<eos>'
  )
  config = transformers.LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
    initializer_range=0.3,
  )
  with tempfile.TemporaryDirectory() as folder:
    args = trl.GRPOConfig(
      output_dir=folder,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      per_device_train_batch_size=8,
      gradient_accumulation_steps=1,
      steps_per_generation=2,
      num_iterations=2,
      num_generations=4,
      max_completion_length=12,
      max_steps=4,
      learning_rate=0.002,
      beta=0.0,
      seed=0,
      logging_steps=1,
      save_strategy='no',
      report_to=[],
      disable_tqdm=True,
    )
    trainer = names['Recorded'](
      model=transformers.LlamaForCausalLM(config),
      reward_funcs=reward,
      args=args,
      train_dataset=Dataset.from_list([{'prompt': prompt} for prompt in PROMPTS]),
      processing_class=tokenizer,
    )
    os.chdir(folder)
    trainer.train()
    for row in trainer.state.log_history[2:4]:
      print({name: row[f'clip_ratio/{name}_mean'] for name in ('low', 'high')})
    PATH.write_text(pathlib.Path('batch-1.jsonl').read_text())
  print(f'{PATH}: {PATH.stat().st_size} bytes')


if __name__ == '__main__':
  main()
