"""Times a layer with experts beside a dense layer of the same active width.

  .venv/bin/python -m benchmarks.models.experts

Both take turns in one process, and the ratio is that of medians. Prints one JSON
object: milliseconds of forward and gradient passes for each kernel, and ratios.
"""

import argparse
import functools
import json
import statistics
import time

import jax

from bapo_jax.models import experts
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import machine

EXPERTS, ACTIVE = 64, 8


def layer(width: int, ffn: int, kernel: str):
  """Returns (weights, function of weights and tokens) of a layer with experts."""
  spec = ModelSpec(
    vocab=8,
    width=width,
    layers=1,
    heads=1,
    kv_heads=1,
    head_width=16,
    ffn=ffn,
    experts=EXPERTS,
    active=ACTIVE,
    experts_kernel=kernel,
  )
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = {
    'router': (width, EXPERTS),
    'expert_gate': (EXPERTS, width, ffn),
    'expert_up': (EXPERTS, width, ffn),
    'expert_down': (EXPERTS, ffn, width),
  }
  w = {
    name: jax.random.normal(key, shape) * shape[-2] ** -0.5
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  return w, lambda w, y: experts.mlp(w, y, spec)[0]


def dense(width: int, ffn: int):
  """Returns the same of a dense layer."""
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = {'gate': (width, ffn), 'up': (width, ffn), 'down': (ffn, width)}
  w = {
    name: jax.random.normal(key, shape) * shape[0] ** -0.5
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  return w, lambda w, y: (jax.nn.silu(y @ w['gate']) * (y @ w['up'])) @ w['down']


def calls(w, function, y):
  """Returns the compiled forward and gradient passes, called once."""
  forward = functools.partial(jax.jit(function), w, y)
  grad = jax.jit(jax.grad(lambda w, y: (function(w, y) ** 2).sum(), (0, 1)))
  both = {'forward': forward, 'gradient': functools.partial(grad, w, y)}
  for call in both.values():
    jax.block_until_ready(call())
  return both


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tokens', type=int, nargs='+', default=[512, 2048])
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--ffn', type=int, default=128, help='of an expert')
  parser.add_argument('--kernels', nargs='+', default=['blocks'])
  parser.add_argument('--rounds', type=int, default=15)
  args = parser.parse_args()
  found = {}
  for tokens in args.tokens:
    y = jax.random.normal(jax.random.key(1), (tokens, args.width))
    made = {'dense': calls(*dense(args.width, ACTIVE * args.ffn), y)}
    made |= {k: calls(*layer(args.width, args.ffn, k), y) for k in args.kernels}
    times = {(name, kind): [] for name in made for kind in ('forward', 'gradient')}
    for _ in range(args.rounds):
      for (name, kind), seconds in times.items():
        began = time.perf_counter()
        jax.block_until_ready(made[name][kind]())
        seconds.append(time.perf_counter() - began)
    middle = {key: 1e3 * statistics.median(x) for key, x in times.items()}
    found[tokens] = {
      name: {
        kind: {
          'ms': round(middle[name, kind], 2),
          'of_dense': round(middle[name, kind] / middle['dense', kind], 2),
        }
        for kind in ('forward', 'gradient')
      }
      for name in made
    }
  sizes = {'experts': EXPERTS, 'active': ACTIVE, 'width': args.width, 'ffn': args.ffn}
  result = {'processor': machine.processor(), 'sizes': sizes, 'tokens': found}
  print(json.dumps(result))


if __name__ == '__main__':
  main()
