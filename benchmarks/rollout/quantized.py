"""Measures how far a quantised actor's policy is from the learner's.

  python -m benchmarks.rollout.quantized --model=DIR --data=FILE [--compute=float32]
    [--prompts=32] [--config.<knob>=value ...]

Samples responses at temperature 1 with actors whose projections have model.compute's
type (the baseline: the difference is rounding in decoding), int8 and float8_e4m3fn, and
scores them with the full weights in float32. r = p / q is the ratio of a token: p of
the learner, q as recorded by the actor that sampled it. The mean of r over samples of q
is 1 for any actor. The last line is one JSON object: actor -> figures.

Printed per actor: mean |log r|, its 99th percentile and maximum; the share of r outside
[0.8, 1.2] and above 2 (the cap of truncated importance sampling); the bytes of the
actor, and tokens/s at most, by the roofline of a device of each kind.
"""

import argparse
import dataclasses
import json
from typing import Any

import jax
import numpy as np

from bapo_jax import main as command_line
from bapo_jax.data import prompts
from bapo_jax.models import decoder, logprobs
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.tools.plan.chips import CHIPS as ALL_CHIPS
from bapo_jax.training import budget, build, policy
from bapo_jax.training.resolve import Resolved, resolve
from bapo_jax.types import Tree
from benchmarks import roofline

ACTORS = ('compute', 'int8', 'float8_e4m3fn')
CHIPS = [name for name in ('v5e', 'h100') if name in ALL_CHIPS]
SCORED = 16  # rows scored at once
COLUMNS = {
  'mean': 'mean',
  'p99': '99 %',
  'max': 'max',
  'outside': 'not .8-1.2',
  'above_2': 'above 2',
  'mean_ratio': 'mean r',
}


def figures(logp_N: np.ndarray, recorded_N: np.ndarray) -> dict[str, float]:
  """Summarises log r of N tokens, given log p and the recorded log q, in nats."""
  log_ratio_N = np.asarray(logp_N, np.float64) - np.asarray(recorded_N, np.float64)
  ratio_N, size_N = np.exp(log_ratio_N), np.abs(log_ratio_N)
  return {
    'mean': float(size_N.mean()),
    'p99': float(np.quantile(size_N, 0.99)),
    'max': float(size_N.max()),
    'outside': float(((ratio_N < 0.8) | (ratio_N > 1.2)).mean()),
    'above_2': float((ratio_N > 2).mean()),
    'mean_ratio': float(ratio_N.mean()),
    'tokens': len(ratio_N),
  }


def bounds(spec: ModelSpec, slots: int, length: int) -> dict[str, float]:
  """Returns the bytes of an actor, and the most tokens/s of a device of each kind."""
  alone = {'data': 1, 'fsdp': 1, 'tensor': 1}
  cache = slots * budget.cache_bytes(spec, length, 1)
  cost = roofline.decode(spec, alone, slots, length, cache)
  return {'bytes': budget.actor_bytes(spec)} | {
    f'{name}_tps': slots / max(cost.seconds(ALL_CHIPS[name], 0).values())
    for name in CHIPS
  }


def measure(
  r: Resolved, data: build.Material, params: Tree, spec: ModelSpec
) -> dict[str, float]:
  """Samples with an actor of this spec, and scores with the full weights."""
  config = r.config
  engine = dataclasses.replace(build.make_engine(r), spec=spec)
  ids = np.arange(config.prompts.count, dtype=np.int32)
  rollouts = PartialRollouts(engine, config.prompts.count)
  rows = config.prompts.count * config.sampler.group_size
  uid_B = np.arange(rows, dtype=np.uint32)
  rollouts.submit(prompts.prompts_by_id(data.problems, ids), uid_B)
  actor = jax.jit(decoder.actor, static_argnames='spec')(params, spec=spec)
  rollouts.decode(actor, jax.random.key(config.seed))
  rows_of = rollouts.rows
  tokens_BT, recorded_BT, version_BT = map(
    np.asarray, (rows_of.tokens_BT, rows_of.logp_BT, rows_of.policy_version_BT)
  )
  score = jax.jit(logprobs.sequence_stats, static_argnames='spec')
  pieces = [
    np.asarray(
      score(params, tokens_BT[i : i + SCORED], spec=r.spec, temperature=1.0)[0]
    )
    for i in range(0, rows, SCORED)
  ]
  mask_BT = version_BT >= 0
  found = figures(np.concatenate(pieces)[mask_BT], recorded_BT[mask_BT])
  return found | bounds(spec, config.sampler.max_num_seqs, config.row_length)


def overrides(args: argparse.Namespace) -> list[str]:
  """Returns the knobs of the run whose sampler is measured."""
  values = {
    'model.path': args.model,
    'problems.source': args.data,
    'problems.test_source': args.data,
    'problems.overlap': 'keep',
    'tokenizer.template': 'chat:{problem}',
    'rewards.rule': 'gsm8k',
    'prompts.count': args.prompts,
    'learner.minibatches': 1,  # nothing is trained
    'prompts.max_prompt_tokens': 64,
    'sampler.max_new_tokens': 64,
    'sampler.max_num_seqs': 64,
    'sampler.prefill_batch_size': 64,
  }
  return [f'--config.{name}={value}' for name, value in values.items()]


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', required=True, help='a Hugging Face directory')
  parser.add_argument('--data', required=True, help='problems: jsonl, csv or parquet')
  parser.add_argument('--compute', default='bfloat16', help="type of actors' products")
  parser.add_argument('--prompts', type=int, default=32)
  args, given = parser.parse_known_args()
  r = resolve(command_line.read_config('configs/aime.py', overrides(args) + given))
  data = build.tabulate(r)
  params = policy.load(r, PhaseTimer())
  names = [*COLUMNS.values(), 'tokens', 'MiB', *(f'{name} tok/s' for name in CHIPS)]
  print(f'{"actor":>14}' + ''.join(f'{name:>12}' for name in names))
  found: dict[str, Any] = {}
  for kind in ACTORS:
    spec = dataclasses.replace(r.spec, compute=args.compute, actor_dtype=kind)
    name = args.compute if kind == 'compute' else kind
    found[name] = row = measure(r, data, params, spec)
    cells = [f'{row[key]:12.5f}' for key in COLUMNS]
    cells += [f'{row["tokens"]:12}', f'{row["bytes"] / 2**20:12.1f}']
    cells += [f'{row[f"{chip}_tps"]:12.0f}' for chip in CHIPS]
    print(f'{name:>14}' + ''.join(cells), flush=True)
  print(json.dumps(found | {'compute': args.compute}))


if __name__ == '__main__':
  main()
