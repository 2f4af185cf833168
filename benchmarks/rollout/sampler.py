"""Compares useful tokens/s of this sampler, a static batch and transformers' generate.

  python -m benchmarks.rollout.sampler [--batch=32,64] [--rounds=1] [--device]
  PYTHONPATH=PEERS python -m benchmarks.rollout.sampler --model=DIR --batch=32
  python -m benchmarks.rollout.sampler --window=512 --length=4096 --batch=32

A random Qwen2 of about 25 M parameters (hidden 384, 8 layers, vocabulary 32 000),
float32, prompts of 64 tokens, G = 8 responses to each. The lengths of responses are
drawn beforehand, geometric with a mean of a quarter of the longest (256), and equal for
all samplers:

- ours: `batch` slots, refilled as responses end;
- static: the same functions, one batch at a time until its longest response ends;
- transformers: `generate` on torch with the same weights and its cache, one batch
  at a time until its longest response ends.

Only tokens up to a response's own length count. The samplers take turns to
generate `waves` batches in one process, `rounds` times; figures are medians.
`outside_run_fraction` is the share of our wall time outside `run`, from a separate pass
that waits for every call. With --device a model shaped like Qwen2.5-1.5B is decoded in
bfloat16 at batch 64, and its read rate is compared with the rate of a copy.

With --model, real weights in float32, greedy: static lengths (64 tokens each) and those
above, beside transformers and google-tunix's sampler (where PYTHONPATH has it), and one
decode step beside its lower bound. The last line is one JSON object: model -> static,
skewed -> tokens/s, and the step.

With --window, a decode step of `batch` slots is timed beside that of a model with this
window in five of six layers.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
from typing import Any

import jax
import numpy as np

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime import ahead
from bapo_jax.runtime.ahead import Call
from bapo_jax.types import Prompts, Tree
from benchmarks import machine
from benchmarks.rollout import bound, peers

SMALL = machine.QWEN2_25M
PROMPT, NEW, GROUP = 64, 256, 8
END = 0  # rarely sampled, one token in 32 000, because lengths are given
COUNTS = {'rounds': 1, 'waves': 4}
KNOBS = {
  'prefill_batch_size': 8,
  'tokens_per_dispatch': 8,
  'cache_segments': 5,
  'done_check_lag': 0,
}


def lengths(rows: int, seed: int) -> np.ndarray:
  """Draws the tokens per response: geometric, cut at NEW, with a mean of NEW / 4."""
  rng = np.random.default_rng(seed)
  # The cut at four means lowers the mean by 2 %, so the mean is drawn a little higher.
  return np.minimum(rng.geometric(1 / (NEW / 4 * 1.02), rows), NEW).astype(np.int32)


def prompts_of(prompts: int, spec: transformer.ModelSpec) -> Prompts:
  """Draws random prompts of PROMPT tokens."""
  tokens_PT = np.random.default_rng(1).integers(1, spec.vocab, (prompts, PROMPT))
  length_P = np.full(prompts, PROMPT, np.int32)
  return Prompts(
    np.arange(prompts, dtype=np.int32), tokens_PT.astype(np.int32), length_P
  )


class TimedCall(Call):
  """A call that is waited for, and adds its time to `seconds`."""

  def __init__(self, call: Call, seconds: list[float]):
    super().__init__(call.mesh, call.function, *call.args, **call.kwargs)
    self._seconds = seconds

  def __call__(self) -> Any:
    """Calls the function."""
    begun = time.perf_counter()
    out = jax.block_until_ready(super().__call__())
    self._seconds.append(time.perf_counter() - begun)
    return out


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
  ) -> TimedCall:
    """Returns the engine's call, timed."""
    jax.block_until_ready((params, slots))
    call = super().run(params, slots, key, n, version, live)
    return TimedCall(call, self.seconds)


def sample(
  actor: Tree,
  spec: transformer.ModelSpec,
  prompts: Prompts,
  wanted_B: np.ndarray,
  slots: int,
  knobs: dict[str, Any],
  *,
  temperature: float = 1.0,
  static: bool = False,
  timed: bool = False,
) -> tuple[float, float, int]:
  """Samples all responses; returns (seconds, share outside `run`, tokens)."""
  G, P = GROUP, len(prompts.id_P)
  share = slots // G if static else P
  key, tokens = jax.random.key(0), 0
  engine = (TimedEngine if timed else RolloutEngine)(
    spec,
    max_prompt_tokens=PROMPT,
    max_new_tokens=NEW,
    group_size=GROUP,
    eos=(END,),
    max_num_seqs=slots,
    temperature=temperature,
    **knobs,
  )
  programs = ahead.compile_all(engine.programs(actor, places=share))
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
    rollouts.decode(actor, key)
    places = rollouts.finished()
    rows = jax.block_until_ready(rollouts.read(places, len(places)))
    tokens += int((rows.policy_version_BT >= 0).sum())
    rollouts.free(places)
  seconds = time.perf_counter() - begun
  del programs  # until here, the calls find them
  inside = sum(engine.seconds) if isinstance(engine, TimedEngine) else seconds
  return seconds, 1 - inside / seconds, tokens


def small(args: argparse.Namespace) -> dict[str, dict[int, float]]:
  """Compares the three samplers; returns measure -> batch -> median."""
  params = transformer.init(SMALL, jax.random.key(0))
  actor = decoder.actor(params, SMALL)
  theirs = None if args.alone else peers.in_torch(params, SMALL, GROUP, greedy=False)
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
    prompts, wanted_B = (
      prompts_of(rows // GROUP, SMALL),
      lengths(rows, batch),
    )
    seen: dict[str, list[float]] = {name: [] for name in found}
    measure = functools.partial(sample, actor, SMALL, prompts, wanted_B, batch)
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


def peers_of(
  args: argparse.Namespace, params: Tree, spec: transformer.ModelSpec
) -> dict[str, peers.Peer]:
  """Returns the other installed samplers; prints why a sampler is missing."""
  if args.alone:
    return {}
  found = {'transformers_tps': peers.in_torch(params, spec, GROUP, greedy=True)}
  if why := peers.missing_tunix(spec):
    print(f'no column for tunix: {why}')
  else:
    found['tunix_tps'] = peers.in_tunix(params, spec, GROUP, PROMPT + NEW)
  return found


def real(args: argparse.Namespace) -> dict[str, Any]:
  """Samples greedily from --model; returns lengths -> tokens/s, and the step."""
  mesh = sharding.make(1, 1, 1, jax.devices()[:1])
  spec = hf_config.read_spec(args.model, 'float32')
  params = hf_weights.load(args.model, spec, mesh)
  actor = decode.sync_actor(params, spec, mesh)
  theirs = peers_of(args, params, spec)
  batch = int(args.batch.split(',')[0])
  knobs = {name: getattr(args, name) for name in KNOBS}
  measure = functools.partial(sample, actor, spec, temperature=0.0)
  rows = args.waves * batch
  prompts = prompts_of(rows // GROUP, spec)
  static_B = np.full(rows, NEW // 4, np.int32)
  found: dict[str, Any] = {}
  names = ('ours_tps', 'transformers_tps', 'tunix_tps')
  print(f'{batch} slots, greedy, useful tokens/s')
  print(f'{"lengths":>8}' + ''.join(f'{name[:-4]:>14}' for name in names))
  for kind, wanted_B in (('static', static_B), ('skewed', lengths(rows, batch))):
    seen: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
      seconds, _, tokens = measure(prompts, wanted_B, batch, knobs)
      seen['ours_tps'].append(tokens / seconds)
      for name, run in theirs.items():
        seen[name].append(int(wanted_B.sum()) / run(prompts, wanted_B, batch))
    found[kind] = {k: round(statistics.median(v), 1) for k, v in seen.items() if v}
    columns = (found[kind].get(name, float('nan')) for name in names)
    print(f'{kind:>8}' + ''.join(f'{x:14.0f}' for x in columns), flush=True)
  step = bound.share(actor, spec, batch, PROMPT + NEW // 4, greedy=True)
  print(
    f'a step takes {step["step_ms"]:.0f} ms; its products {step["products_ms"]:.0f} ms '
    f'at {step["gemm_gflops"]:.0f} GFLOP/s, its bytes {step["memory_ms"]:.0f} ms at '
    f'{step["copy_gbps"]:.0f} GB/s: {step["fraction"]:.0%} of the larger, '
    f'{step["fraction_of_sum"]:.0%} of the sum'
  )
  return {os.path.basename(os.path.abspath(args.model)): found | {'step': step}}


def on_device(args: argparse.Namespace) -> dict[str, str | float]:
  """Decode bandwidth of a 1.5B-shaped model beside the card's own."""
  spec, S = machine.QWEN2_1_5B, 64
  actor = decoder.actor(transformer.init(spec, jax.random.key(0)), spec)
  took, cache = bound.step_seconds(actor, spec, S, PROMPT + 1024, greedy=False, n=64)
  read = sum(x.nbytes for x in jax.tree.leaves(actor)) + cache
  rate, card = read / took, machine.copy_rate()
  print(f'{S / took:.0f} tokens/s, {rate / 1e9:.0f} of {card / 1e9:.0f} GB/s')
  return {
    'device': jax.devices()[0].device_kind,
    'device_tps': round(S / took, 1),
    'bytes_per_s': rate,
    'copy_bytes_per_s': card,
    'fraction': round(rate / card, 4),
  }


def windows(args: argparse.Namespace) -> dict[str, float]:
  """Times decode steps with and without windows, every slot at half of its row."""
  batch = int(args.batch.split(',')[0])
  found = {}
  for name, spec in {
    'full': SMALL,
    'windows': machine.with_windows(SMALL, args.window),
  }.items():
    actor = decoder.actor(transformer.init(spec, jax.random.key(0)), spec)
    took, _ = bound.step_seconds(actor, spec, batch, args.length, greedy=False)
    found[f'{name}_ms'] = round(1e3 * took, 2)
  found['ratio'] = round(found['windows_ms'] / found['full_ms'], 4)
  print(
    f'{batch} slots at column {args.length // 2}: a step takes {found["full_ms"]} ms, '
    f'with windows of {args.window} {found["windows_ms"]} ms ({found["ratio"]})'
  )
  return found


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batch', default='32,64', help='slots; --model: the first')
  for name, value in (COUNTS | KNOBS).items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--alone', action='store_true', help='without transformers')
  parser.add_argument('--device', action='store_true')
  parser.add_argument('--model', default='', help='a Hugging Face directory')
  parser.add_argument('--window', type=int, default=0)
  parser.add_argument('--length', type=int, default=4096, help='of a row; --window')
  args = parser.parse_args()
  measure = on_device if args.device else real if args.model else small
  if args.window:
    measure = windows
  found = measure(args)
  print(json.dumps(found | {name: getattr(args, name) for name in COUNTS | KNOBS}))


if __name__ == '__main__':
  main()
