"""Writes random models of published shapes, a tokenizer, and problems of one length.

  python -m benchmarks.on_gpu.models FOLDER NAME...

NAME is s135, q05, q15, or tiny for a dry run.

FOLDER/NAME is a directory as transformers writes it: config.json, model.safetensors in
bfloat16, tokenizer.json. FOLDER/problems.jsonl has problems of exactly PROMPT tokens.
The standard deviation of the weights exceeds that of a fresh model, so that
log-probabilities differ between tokens.
"""

import json
import os
import random
import sys
import time

from bapo_jax.data import tokenizer
from benchmarks.on_gpu.sizes import PROMPT

QWEN = dict(
  vocab_size=151936,
  num_key_value_heads=2,
  max_position_embeddings=32768,
  rope_theta=1e6,
  rms_norm_eps=1e-6,
)
SHAPES = {  # name -> (model_type, sizes of its config.json)
  's135': (  # SmolLM2-135M
    'llama',
    dict(
      vocab_size=49152,
      hidden_size=576,
      intermediate_size=1536,
      num_hidden_layers=30,
      num_attention_heads=9,
      num_key_value_heads=3,
      max_position_embeddings=8192,
      rope_theta=1e5,
      rms_norm_eps=1e-5,
    ),
  ),
  'q05': (  # Qwen2.5-0.5B
    'qwen2',
    QWEN
    | dict(
      hidden_size=896,
      intermediate_size=4864,
      num_hidden_layers=24,
      num_attention_heads=14,
    ),
  ),
  'q15': (  # Qwen2.5-1.5B
    'qwen2',
    QWEN
    | dict(
      hidden_size=1536,
      intermediate_size=8960,
      num_hidden_layers=28,
      num_attention_heads=12,
    ),
  ),
  'tiny': (
    'qwen2',
    QWEN
    | dict(
      vocab_size=512,
      hidden_size=64,
      intermediate_size=128,
      num_hidden_layers=2,
      num_attention_heads=4,
    ),
  ),
}
SPREAD = 0.04  # standard deviation of every matrix


def write_model(folder: str, name: str) -> None:
  """Writes FOLDER/NAME unless it exists."""
  path = os.path.join(folder, name)
  if os.path.exists(os.path.join(path, 'done')):
    return
  import torch
  import transformers

  kind, sizes = SHAPES[name]
  sizes = dict(sizes)
  theta = sizes.pop('rope_theta')
  config = transformers.AutoConfig.for_model(
    kind,
    **sizes,
    rope_parameters={'rope_type': 'default', 'rope_theta': theta},
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
    dtype='bfloat16',
  )
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  torch.manual_seed(0)
  with torch.device('meta'):
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
  net = net.to_empty(device=device)
  with torch.no_grad():
    for key, w in net.named_parameters():
      if key.endswith('norm.weight'):
        w.fill_(1.0)
      else:
        w.normal_(0.0, SPREAD)
  net.tie_weights()
  net.save_pretrained(path)
  # Single characters; the other ids of the vocabulary have no text.
  tokenizer.load(tokenizer.EMBEDDED, '').backend.save_pretrained(path)
  open(os.path.join(path, 'done'), 'w').close()


def write_problems(path: str, count: int = 4096) -> None:
  """Writes problems of PROMPT characters, which are as many tokens."""
  draw = random.Random(0)
  with open(path, 'w') as file:
    for i in range(count):
      text = f'{i} ' + ''.join(draw.choices('0123456789+-*=|', k=PROMPT))
      file.write(json.dumps({'problem': text[:PROMPT], 'answer': '0'}) + '\n')


def main() -> None:
  """Writes the problems and the given models."""
  folder, *names = sys.argv[1:]
  os.makedirs(folder, exist_ok=True)
  write_problems(os.path.join(folder, 'problems.jsonl'))
  for name in names:
    begun = time.perf_counter()
    write_model(folder, name)
    print(f'{name}: {time.perf_counter() - begun:.1f} s', flush=True)


if __name__ == '__main__':
  main()
