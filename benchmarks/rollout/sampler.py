"""Useful tokens per second: this sampler, a static batch, transformers' generate.

  python -m benchmarks.rollout.sampler [--batch=32,64] [--rounds=1] [--device]

A random Qwen2 of about 25 M parameters (hidden 384, 8 layers, vocabulary 32 000),
float32, prompts of 64 tokens, G = 8 responses to each. The lengths of responses are
drawn beforehand, geometric, on average a quarter of the longest (256), equal for all:

- ours: `batch` slots, admitted to as responses end;
- static: the same functions, a batch at a time, the next when the longest has ended;
- transformers: `generate` on torch with the same weights and its cache, a batch at a
  time, stopped at the longest of the batch.

Only tokens up to a response's own length count. `waves` batches of responses are made
one way after the other in one process, `rounds` times; medians. `outside_run_fraction`
is the share of our wall time in which no `run` was executed, from a pass of its own in
which every call is waited for. With --device a model shaped like Qwen2.5-1.5B is
decoded in bfloat16 at batch 64, and the bytes per second that it must read are set
beside those that a copy moves on the same card. The last line is one JSON object.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models import hf_config, transformer
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.types import Prompts, Tree

SMALL = transformer.ModelSpec(
  vocab=32000,
  width=384,
  layers=8,
  heads=6,
  kv_heads=2,
  head_width=64,
  ffn=1024,
  positions=512,
)
LARGE = transformer.ModelSpec(
  vocab=151936,
  width=1536,
  layers=28,
  heads=12,
  kv_heads=2,
  head_width=128,
  ffn=8960,
  positions=2048,
  compute='bfloat16',
)
PROMPT, NEW, GROUP = 64, 256, 8
END = 0  # one token in 32 000: lengths are given
COUNTS = {'rounds': 1, 'waves': 4}
KNOBS = {
  'prefill_batch_size': 8,
  'tokens_per_dispatch': 8,
  'cache_segments': 5,
  'done_check_lag': 0,
}


def lengths(rows: int, seed: int) -> np.ndarray:
  """Tokens of each response: geometric, mean NEW / 4 after the cut at NEW."""
  rng = np.random.default_rng(seed)
  # A cut at four means takes 2 % of the mean: drawn a little longer.
  return np.minimum(rng.geometric(1 / (NEW / 4 * 1.02), rows), NEW).astype(np.int32)


def prompts_of(prompts: int, spec: transformer.ModelSpec) -> Prompts:
  """Random prompts of PROMPT tokens."""
  tokens_PT = np.random.default_rng(1).integers(1, spec.vocab, (prompts, PROMPT))
  length_P = np.full(prompts, PROMPT, np.int32)
  return Prompts(
    np.arange(prompts, dtype=np.int32), tokens_PT.astype(np.int32), length_P
  )


@dataclasses.dataclass(frozen=True)
class TimedEngine(RolloutEngine):
  """An engine whose calls of `run` are waited for and timed."""

  seconds: list[float] = dataclasses.field(default_factory=list)

  def run(
    self,
    params: Tree,
    slots: decode.Slots,
    key: jax.Array,
    n: int,
    version: int,
    live: int,
  ) -> tuple[decode.Slots, jax.Array]:
    """As the engine's; adds to `seconds`."""
    jax.block_until_ready((params, slots))
    begun = time.perf_counter()
    out = super().run(params, slots, key, n, version, live)
    jax.block_until_ready(out)
    self.seconds.append(time.perf_counter() - begun)
    return out


def sample(
  params: Tree,
  spec: transformer.ModelSpec,
  prompts: Prompts,
  wanted_B: np.ndarray,
  slots: int,
  knobs: dict[str, Any],
  *,
  static: bool = False,
  timed: bool = False,
) -> tuple[float, float, int]:
  """(seconds, share of them outside `run`, tokens) of all responses."""
  G, P = GROUP, len(prompts.id_P)
  share = slots // G if static else P
  key, tokens = jax.random.key(0), 0
  engine = (TimedEngine if timed else RolloutEngine)(
    spec,
    max_prompt_tokens=PROMPT,
    max_new_tokens=NEW,
    group_size=GROUP,
    temperature=1.0,
    eos=(END,),
    max_num_seqs=slots,
    **knobs,
  )
  engine.warm_up(params, key, places=share)
  if isinstance(engine, TimedEngine):
    engine.seconds.clear()
  rollouts = PartialRollouts(engine, share)
  jax.block_until_ready(rollouts.slots)
  begun = time.perf_counter()
  for first in range(0, P, share):
    part = slice(first, first + share)
    uid_B = np.arange(first * G, (first + share) * G, dtype=np.uint32)
    now = Prompts(*(x[part] for x in prompts))
    rollouts.submit(now, uid_B, limit_B=wanted_B[uid_B])
    rollouts.decode(params, key)
    places = rollouts.finished()
    rows = jax.block_until_ready(rollouts.read(places, len(places)))
    tokens += int((rows.policy_version_BT >= 0).sum())
    rollouts.free(places)
  seconds = time.perf_counter() - begun
  inside = sum(engine.seconds) if isinstance(engine, TimedEngine) else seconds
  return seconds, 1 - inside / seconds, tokens


def in_torch(
  params: Tree, spec: transformer.ModelSpec
) -> Callable[[Prompts, np.ndarray, int], float]:
  """The same weights in transformers: (prompts, lengths, batch) -> seconds."""
  import tempfile

  import torch
  import transformers

  from bapo_jax.models import hf_weights

  with tempfile.TemporaryDirectory() as path:
    flat = transformer.flatten(jax.tree.map(np.asarray, params))
    hf_weights.save(path, flat.__getitem__, spec, 'float32')
    with open(f'{path}/config.json', 'w') as file:
      json.dump(hf_config.config_of(spec), file)
    net = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
  net.eval()
  torch.manual_seed(0)

  def run(prompts: Prompts, wanted_B: np.ndarray, batch: int) -> float:
    rows = torch.from_numpy(np.repeat(prompts.tokens_PT, GROUP, 0)).long()
    begun = time.perf_counter()
    for first in range(0, len(rows), batch):
      longest = int(wanted_B[first : first + batch].max())
      net.generate(
        rows[first : first + batch],
        attention_mask=torch.ones_like(rows[first : first + batch]),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=longest,  # no end token stops a batch early
        max_new_tokens=longest,
        pad_token_id=END,
        eos_token_id=END,
      )
    return time.perf_counter() - begun

  return run


def small(args: argparse.Namespace) -> dict[str, dict[int, float]]:
  """All three, side by side: measure -> batch -> median."""
  params = transformer.init(SMALL, jax.random.key(0))
  theirs = None if args.alone else in_torch(params, SMALL)
  knobs = {name: getattr(args, name) for name in KNOBS}
  found: dict[str, dict[int, float]] = {
    name: {}
    for name in ('ours_tps', 'static_tps', 'transformers_tps', 'outside_run_fraction')
  }
  print(
    f'{"batch":>6}{"ours":>10}{"static":>10}{"torch":>10}{"outside run":>13}  tokens/s'
  )
  for batch in map(int, args.batch.split(',')):
    rows = args.waves * batch
    prompts, wanted_B = prompts_of(rows // GROUP, SMALL), lengths(rows, batch)
    seen: dict[str, list[float]] = {name: [] for name in found}
    measure = functools.partial(sample, params, SMALL, prompts, wanted_B, batch)
    for _ in range(args.rounds):
      seconds, _, tokens = measure(knobs)
      seen['ours_tps'].append(tokens / seconds)
      outside = measure(knobs | {'done_check_lag': 0}, timed=True)[1]
      seen['outside_run_fraction'].append(outside)
      seconds, _, tokens = measure(knobs | {'prefill_batch_size': batch}, static=True)
      seen['static_tps'].append(tokens / seconds)
      if theirs:
        seconds = theirs(prompts, wanted_B, batch)
        seen['transformers_tps'].append(int(wanted_B.sum()) / seconds)
    middle = {k: statistics.median(v) if v else float('nan') for k, v in seen.items()}
    print(
      f'{batch:6}{middle["ours_tps"]:10.0f}{middle["static_tps"]:10.0f}'
      f'{middle["transformers_tps"]:10.0f}{middle["outside_run_fraction"]:12.1%}',
      flush=True,
    )
    for name in (name for name, values in seen.items() if values):
      digits = 4 if name == 'outside_run_fraction' else 1
      found[name][batch] = round(middle[name], digits)
  return found


def copied() -> float:
  """Bytes per second that a copy of 2 GiB reads and writes on this device."""
  x = jnp.zeros(2**29, jnp.float32)
  copy = jax.jit(lambda x, i: x + i)
  jax.block_until_ready(copy(x, 0.0))
  took = []
  for i in range(10):
    begun = time.perf_counter()
    jax.block_until_ready(copy(x, float(i)))
    took.append(time.perf_counter() - begun)
  return 2 * x.nbytes / statistics.median(took)


def on_device(args: argparse.Namespace) -> dict[str, str | float]:
  """Decode bandwidth of a 1.5B-shaped model beside the card's own."""
  spec, S, n = LARGE, 64, 64
  params = transformer.cast(transformer.init(spec, jax.random.key(0)), spec.compute)
  length = PROMPT + 1024
  slots = decode.empty(spec, S, length, args.cache_segments)
  slots = slots._replace(
    row_S=jnp.arange(S),
    position_S=jnp.full(S, length // 2),
    limit_S=jnp.full(S, length),
    done_S=jnp.zeros(S, bool),
  )
  live = len(slots.cache[0])
  took, key = [], jax.random.key(0)
  for _ in range(5):
    jax.block_until_ready(slots)
    begun = time.perf_counter()
    slots, position_S = decode.run(
      params, slots, key, 1.0, n, 0, spec=spec, eos=(END,), live=live
    )
    jax.block_until_ready(position_S)
    took.append((time.perf_counter() - begun) / n)
  read = sum(x.nbytes for x in jax.tree.leaves((params, slots.cache)))
  rate, card = read / min(took[1:]), copied()
  print(f'{S / min(took[1:]):.0f} tokens/s, {rate / 1e9:.0f} of {card / 1e9:.0f} GB/s')
  return {
    'device': jax.devices()[0].device_kind,
    'device_tps': round(S / min(took[1:]), 1),
    'bytes_per_s': rate,
    'copy_bytes_per_s': card,
    'fraction': round(rate / card, 4),
  }


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batch', default='32,64', help='slots, with commas')
  for name, value in (COUNTS | KNOBS).items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--alone', action='store_true', help='without transformers')
  parser.add_argument('--device', action='store_true')
  args = parser.parse_args()
  found = on_device(args) if args.device else small(args)
  print(json.dumps(found | {name: getattr(args, name) for name in COUNTS | KNOBS}))


if __name__ == '__main__':
  main()
