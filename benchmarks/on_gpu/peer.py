"""Times the parts of an RL step with transformers and torch, on a model of models.py.

  python -m benchmarks.on_gpu.peer FOLDER NAME

The sizes are those of ours.py: `generate` for the same number of prompts and tokens
(bfloat16, no end token), the log-probabilities of all rows, and the optimiser updates
(float32 weights, products in bfloat16 by autocast, fused AdamW, clipped surrogate; the
head sees the response alone). It is neither TRL nor vLLM, which fills freed slots and
captures graphs. The last line is one JSON object.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.first_contact.rates import chip_of
from benchmarks.on_gpu.sizes import CHOSEN, LR

GIB = 2**30
LOW, HIGH = 0.8, 1.2


def measure(folder: str, name: str) -> dict[str, Any]:
  """Runs the parts in this process."""
  import torch
  import transformers

  n = CHOSEN
  gpu = torch.cuda.is_available()
  device = 'cuda' if gpu else 'cpu'

  def now() -> float:
    if gpu:
      torch.cuda.synchronize()
    return time.perf_counter()

  def peak() -> float | None:
    found = torch.cuda.max_memory_allocated() / GIB if gpu else None
    if gpu:
      torch.cuda.reset_peak_memory_stats()
    return found and round(found, 3)

  begun = now()
  path = os.path.join(folder, name)
  net = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
  net = net.to(device).eval()
  net.generation_config.eos_token_id = None
  loaded = now() - begun
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
  with open(os.path.join(folder, 'problems.jsonl')) as file:
    texts = [json.loads(line)['problem'] for line in file][: n.prompts]
  prompts = tokenizer(texts, add_special_tokens=False, return_tensors='pt').input_ids
  rows = prompts.to(device).repeat_interleave(n.group, 0)

  def generate(new: int) -> Any:
    return net.generate(
      rows,
      attention_mask=torch.ones_like(rows),
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      max_new_tokens=new,
      min_new_tokens=new,
      pad_token_id=0,
    )

  with torch.inference_mode():
    generate(8)
    begun = now()
    tokens = generate(n.new).clone()
    sample_s = now() - begun
  peaks = {'sampled': peak()}
  print(f'sampled in {sample_s:.2f} s', file=sys.stderr, flush=True)

  net = net.float().train()
  kwargs = {'fused': True} if gpu else {}
  tx = torch.optim.AdamW(
    net.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0, **kwargs
  )
  adv = torch.where(torch.arange(n.rows, device=device) % 2 == 0, 1.0, -1.0)

  def logprobs(piece: Any) -> Any:
    with torch.autocast(device, torch.bfloat16):
      logits = net(piece, use_cache=False, logits_to_keep=n.new + 1).logits
    logits = logits[:, :-1].float()
    target = piece[:, n.prompt :, None]
    return logits.gather(-1, target)[..., 0] - logits.logsumexp(-1)

  size = n.rows // n.updates // n.pieces

  def score() -> Any:
    with torch.no_grad():
      return torch.cat([logprobs(piece) for piece in tokens.split(size)])

  tokens = tokens.clone()  # no inference tensor
  score()
  begun = now()
  old = score()
  score_s = now() - begun

  def update(i: int) -> None:
    tx.zero_grad(set_to_none=True)
    first = i * n.rows // n.updates
    for j in range(n.pieces):
      part = slice(first + j * size, first + (j + 1) * size)
      ratio = torch.exp(logprobs(tokens[part]) - old[part])
      a = adv[part, None]
      loss = -torch.minimum(ratio * a, ratio.clamp(LOW, HIGH) * a).mean() / n.pieces
      loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    tx.step()

  update(0)
  steps = []
  for _ in range(n.steps):
    begun = now()
    for i in range(n.updates):
      update(i)
    steps.append(now() - begun)
  peaks['trained'] = peak()
  update_s = statistics.median(steps)
  kind = torch.cuda.get_device_name() if gpu else 'cpu'
  chip = chip_of(kind)
  flops = useful_flops(net.config, n)
  return {
    'who': 'torch',
    'model': name,
    'device': kind,
    'sizes': n._asdict(),
    'load_s': loaded,
    'step_s': sample_s + score_s + update_s,
    'sample_s': sample_s,
    'score_s': score_s,
    'update_s': update_s,
    'steps_s': steps,
    'sampled_tps': n.rows * n.new / sample_s,
    'trained_tps': n.rows * n.new / update_s,
    'update_tflops': flops / update_s / 1e12,
    'update_mfu': flops / update_s / chip.flops if chip else None,
    'attention': net.config._attn_implementation,
    'peak_gib': peaks,
  }


def useful_flops(config: Any, n: Any) -> float:
  """Counts the FLOPs of all gradients of a step, as benchmarks/training/rates.py."""
  D, F, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
  H, K = config.num_attention_heads, config.num_key_value_heads
  C = getattr(config, 'head_dim', None) or D // H
  layers = 2 * L * (D * (H + 2 * K) * C + H * C * D + 3 * D * F)
  attention = 2 * L * 2 * H * C * n.length / 2
  head = 2 * D * config.vocab_size
  return 3.0 * n.rows * (n.length * (layers + attention) + n.new * head)


def main() -> None:
  """Prints the JSON line."""
  folder, name = sys.argv[1:]
  print(json.dumps(measure(folder, name)))


if __name__ == '__main__':
  main()
