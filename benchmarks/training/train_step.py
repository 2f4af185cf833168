"""Compares tokens/s of a train step with the same step in transformers and torch.

  python -m benchmarks.training.train_step [--layers=4] [--rows=4] [--length=256]
      [--steps=3] [--vocab=151936]

A random Qwen2 with the sizes of Qwen2.5-0.5B but for its depth, float32 parameters and
AdamW; one update on a clipped surrogate, products in float32 and in bfloat16 (torch:
autocast). Both use every core and run one after the other, each in a process of its
own; the first step compiles and is not counted. Needs torch
(`pip install -r requirements/parity.txt`). The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {
  'hidden_size': 896,
  'num_attention_heads': 14,
  'num_key_value_heads': 2,
  'intermediate_size': 4864,
}
KINDS = ('float32', 'bfloat16')
LR, LOW, HIGH = 1e-6, 0.8, 1.2


def example(rows: int, length: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens_BT, adv_B); all tokens but the first are trained."""
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, vocab, (rows, length), np.int32)
  return tokens_BT, rng.standard_normal(rows).astype(np.float32)


def ours(kind: str, args: argparse.Namespace) -> Callable[[], float]:
  """Returns a function that runs one update to its end and returns the loss."""
  import jax

  from bapo_jax.models import transformer
  from bapo_jax.training import build
  from bapo_jax.training.config import Config
  from bapo_jax.types import Batch

  config = Config().with_values(
    clip={'rule': 'fixed', 'low': LOW, 'high': HIGH},
    loss={'rule': 'clipped'},
    optimizer={'lr': LR, 'warmup': 0, 'b2': 0.999},
  )
  spec = transformer.ModelSpec(
    vocab=args.vocab,
    width=SIZES['hidden_size'],
    layers=args.layers,
    heads=SIZES['num_attention_heads'],
    kv_heads=SIZES['num_key_value_heads'],
    head_width=64,
    ffn=SIZES['intermediate_size'],
    compute=kind,
  )
  train_step = build.make_train_step(config, spec)
  params = transformer.init(spec, jax.random.key(0))
  opt = jax.jit(build.optimizer(config).init)(params)
  tokens_BT, adv_B = example(args.rows, args.length, args.vocab)
  loss_mask_BT = np.broadcast_to(np.arange(args.length) > 0, tokens_BT.shape)
  # Close to the log-probabilities of random weights: ratios close to one.
  logp_BT = np.full(tokens_BT.shape, -np.log(args.vocab), np.float32)
  source_B = np.zeros(args.rows, np.int32)
  adv_BT = np.broadcast_to(adv_B[:, None], tokens_BT.shape)
  arrays = tokens_BT, loss_mask_BT, logp_BT, logp_BT, adv_BT, source_B, loss_mask_BT
  fields: list[Any] = [jax.numpy.asarray(x) for x in arrays]
  batch = Batch(*fields)

  def step() -> float:
    nonlocal params, opt
    params, opt, metrics, _ = train_step(params, opt, batch)
    return float(metrics['loss/value'])

  return step


def theirs(kind: str, args: argparse.Namespace) -> Callable[[], float]:
  """`ours` in torch."""
  import torch
  import transformers

  torch.manual_seed(0)
  net = transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(
      **SIZES,
      vocab_size=args.vocab,
      num_hidden_layers=args.layers,
      tie_word_embeddings=True,
      dtype='float32',
    )
  )
  net.train()
  tx = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
  tokens_BT, adv_B = (
    torch.from_numpy(x) for x in example(args.rows, args.length, args.vocab)
  )
  tokens_BT = tokens_BT.long()
  old = -float(np.log(args.vocab))

  def step() -> float:
    with torch.autocast('cpu', torch.bfloat16, enabled=kind == 'bfloat16'):
      logits_BTV = net(tokens_BT, use_cache=False).logits[:, :-1]
    logits_BTV = logits_BTV.float()
    chosen_logit_BT1 = logits_BTV.gather(-1, tokens_BT[:, 1:, None])
    logp_BT = chosen_logit_BT1[..., 0] - logits_BTV.logsumexp(-1)
    ratio_BT = torch.exp(logp_BT - old)
    adv_B1 = adv_B[:, None]
    clipped_BT = ratio_BT.clamp(LOW, HIGH) * adv_B1
    loss = -torch.minimum(ratio_BT * adv_B1, clipped_BT).mean()
    tx.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    tx.step()
    return loss.item()

  return step


def measure(
  make: Callable[..., Callable[[], float]], kind: str, args: argparse.Namespace
) -> dict:
  """Returns tokens/s of the median step, and the seconds of every step."""
  step = make(kind, args)
  step()
  seconds = []
  for _ in range(args.steps):
    begun = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - begun)
  tokens = args.rows * args.length
  return {'tps': tokens / statistics.median(seconds), 'seconds': seconds}


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  sizes = {'layers': 4, 'rows': 4, 'length': 256, 'steps': 3, 'vocab': 151936}
  for name, value in sizes.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--only', help='ours or theirs, with a dtype: ours:float32')
  args = parser.parse_args()
  if args.only:
    who, kind = args.only.split(':')
    print(json.dumps(measure({'ours': ours, 'theirs': theirs}[who], kind, args)))
    return
  result = {'ours_tps': {}, 'torch_tps': {}}
  print(f'{"":10}{"":8}{"tokens/s":>10}  seconds per step')
  for kind in KINDS:
    for who, key in (('ours', 'ours_tps'), ('theirs', 'torch_tps')):
      command = [sys.executable, '-m', 'benchmarks.training.train_step', *sys.argv[1:]]
      run = subprocess.run(
        [*command, f'--only={who}:{kind}'], check=True, stdout=subprocess.PIPE
      )
      figures = json.loads(run.stdout.splitlines()[-1])
      result[key][kind] = round(figures['tps'], 1)
      took = ' '.join(f'{s:.2f}' for s in figures['seconds'])
      print(f'{kind:10}{who:8}{figures["tps"]:10.1f}  {took}', flush=True)
  print(json.dumps(result | {k: v for k, v in vars(args).items() if k != 'only'}))


if __name__ == '__main__':
  main()
