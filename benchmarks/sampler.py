"""Useful tokens a second: this sampler, a static batch, and transformers' generate.

  python -m benchmarks.sampler [--batch=32,64] [--rounds=1] [--device]

A random Qwen2 of about 25 M parameters (hidden 384, 8 layers, vocabulary 32 000),
float32, prompts of 64 tokens, G = 8 responses to each. How long a response is was drawn
beforehand, geometric, a quarter of the longest (256) in the mean, the same for all:

- ours: `batch` slots, refilled as responses end;
- static: the same functions, a batch at a time, the next when the longest has ended;
- transformers: `generate` on torch with the same weights and its cache, a batch at a
  time, stopped at the longest of the batch.

Only tokens up to a response's own length count. `waves` batches of responses are made
one way after the other in one process, `rounds` times; medians. `outside_run_fraction`
is the share of our wall time in which no `run` was executed, from a pass of its own in
which every call is waited for. With --device a model shaped like Qwen2.5-1.5B is
decoded in bfloat16 at batch 64, and the bytes that it must read a second are set beside
those that a copy moves on the same card. The last line is one JSON object.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models import hf_config, transformer
from bapo_jax.rollout import decode, engine
from bapo_jax.types import Prompts

SMALL = transformer.ModelSpec(
  vocab=32000,
  max_prompt_tokens=384,
  layers=8,
  heads=6,
  kv_heads=2,
  head_width=64,
  ffn=1024,
  positions=512,
)
LARGE = transformer.ModelSpec(
  vocab=151936,
  max_prompt_tokens=1536,
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


def lengths(rows: int, seed: int) -> np.ndarray:
  """Tokens of each response: geometric, mean NEW / 4 after the cut at NEW."""
  rng = np.random.default_rng(seed)
  # A cut at four means takes 2 % of the mean: drawn a little longer.
  return np.minimum(rng.geometric(1 / (NEW / 4 * 1.02), rows), NEW).astype(np.int32)


def asked(prompts: int, spec: transformer.ModelSpec) -> Prompts:
  """Random prompts of PROMPT tokens."""
  tokens_PT = np.random.default_rng(1).integers(1, spec.vocab, (prompts, PROMPT))
  length_P = np.full(prompts, PROMPT, np.int32)
  return Prompts(
    np.arange(prompts, dtype=np.int32), tokens_PT.astype(np.int32), length_P
  )


class Timed:
  """A function whose calls are waited for and timed."""

  def __init__(self, function):
    self.function, self.seconds = function, 0.0

  def __call__(self, *args, **kwargs):
    jax.block_until_ready(args)
    begun = time.perf_counter()
    out = jax.block_until_ready(self.function(*args, **kwargs))
    self.seconds += time.perf_counter() - begun
    return out


def make(spec, max_num_seqs: int, places: int, knobs: dict) -> engine.RolloutEngine:
  """A flight with room for all."""
  return engine.RolloutEngine(
    spec,
    places=places,
    max_prompt_tokens=PROMPT,
    group_size=GROUP,
    max_new_tokens=NEW,
    temperature=1.0,
    eos=(END,),
    max_num_seqs=slots,
    **knobs,
  )


def fly(params, spec, prompts, wanted_B, slots, knobs, *, static=False, timed=False):
  """(seconds, share of them outside `run`, tokens) of all responses."""
  G, P = GROUP, len(prompts.id_P)
  share = slots // G if static else P
  key, outside, tokens = jax.random.key(0), 0.0, 0
  flying = make(spec, slots, share, knobs)
  flying.warm_up(params, key)
  run = Timed(flying._run) if timed else None
  flying._run = run or flying._run
  jax.block_until_ready(flying.slots)
  begun = time.perf_counter()
  for first in range(0, P, share):
    part = slice(first, first + share)
    uid_B = np.arange(first * G, (first + share) * G, dtype=np.uint32)
    flying.ask(Prompts(*(x[part] for x in prompts)), uid_B, new_B=wanted_B[uid_B])
    flying.advance(params, key)
    places = flying.finished()
    rows = jax.block_until_ready(flying.read(places, len(places)))
    tokens += int((rows.policy_version_BT >= 0).sum())
    flying.free(places)
  seconds = time.perf_counter() - begun
  if run:
    outside = 1 - run.seconds / seconds
  return seconds, outside, tokens


def in_torch(params, spec):
  """The same weights in transformers; a function of (prompts, lengths, batch)."""
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

  def run(prompts, wanted_B, batch):
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


def small(args) -> dict:
  """All three, side by side."""
  params = transformer.init(SMALL, jax.random.key(0))
  theirs = None if args.alone else in_torch(params, SMALL)
  told = {k: {} for k in ('ours_tps', 'static_tps', 'transformers_tps')}
  told['outside_run_fraction'] = {}
  knobs = dict(
    prefill_batch_size=args.refill,
    tokens_per_dispatch=args.chunk,
    cache_segments=args.segments,
    done_check_lag=args.late,
  )
  print(
    f'{"batch":>6}{"ours":>10}{"static":>10}{"torch":>10}{"outside run":>13}  tokens/s'
  )
  for batch in map(int, args.batch.split(',')):
    rows = args.waves * batch
    prompts, wanted_B = asked(rows // GROUP, SMALL), lengths(rows, batch)
    useful = int(wanted_B.sum())
    seen = {k: [] for k in ('ours', 'static', 'theirs', 'outside')}
    fly_ = functools.partial(fly, params, SMALL, prompts, wanted_B, batch)
    for _ in range(args.rounds):
      seconds, _, tokens = fly_(knobs)
      seen['ours'].append(tokens / seconds)
      seen['outside'].append(fly_(knobs | {'done_check_lag': 0}, timed=True)[1])
      whole = knobs | {'prefill_batch_size': batch}
      seconds, _, tokens = fly_(whole, static=True)
      seen['static'].append(tokens / seconds)
      if theirs:
        seen['theirs'].append(useful / theirs(prompts, wanted_B, batch))
    middle = {k: statistics.median(v) if v else float('nan') for k, v in seen.items()}
    print(
      f'{batch:6}{middle["ours"]:10.0f}{middle["static"]:10.0f}'
      f'{middle["theirs"]:10.0f}{middle["outside"]:12.1%}',
      flush=True,
    )
    told['ours_tps'][batch] = round(middle['ours'], 1)
    told['static_tps'][batch] = round(middle['static'], 1)
    if theirs:
      told['transformers_tps'][batch] = round(middle['theirs'], 1)
    told['outside_run_fraction'][batch] = round(middle['outside'], 4)
  return told


def copied() -> float:
  """Bytes a second that a copy of 2 GiB reads and writes on this device."""
  x = jnp.zeros(2**29, jnp.float32)
  copy = jax.jit(lambda x, i: x + i)
  jax.block_until_ready(copy(x, 0.0))
  took = []
  for i in range(10):
    begun = time.perf_counter()
    jax.block_until_ready(copy(x, float(i)))
    took.append(time.perf_counter() - begun)
  return 2 * x.nbytes / statistics.median(took)


def on_device(args) -> dict:
  """Decode bandwidth of a 1.5B-shaped model beside the card's own."""
  spec, S, n = LARGE, 64, 64
  params = transformer.cast(transformer.init(spec, jax.random.key(0)), spec.compute)
  length = PROMPT + 1024
  slots = decode.empty(spec, S, length, args.segments)
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
    slots, told_S = decode.run(
      params, slots, key, 1.0, n, 0, spec=spec, eos=(END,), live=live
    )
    jax.block_until_ready(told_S)
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
  sizes = {
    'rounds': 1,
    'waves': 4,
    'prefill_batch_size': 8,
    'tokens_per_dispatch': 8,
    'cache_segments': 5,
    'done_check_lag': 0,
  }
  for name, value in sizes.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--alone', action='store_true', help='without transformers')
  parser.add_argument('--device', action='store_true')
  args = parser.parse_args()
  told = on_device(args) if args.device else small(args)
  print(json.dumps(told | {name: getattr(args, name) for name in sizes}))


if __name__ == '__main__':
  main()
