"""Times a turn: rollouts of two turns beside rollouts of one with as many tokens.

  python -m benchmarks.rollout.turns [--rounds=5] [--slots=32]

A random Qwen2 of about 25 M parameters, float32, prompts of 64 tokens, 8 responses to
each. One token in 64 ends a turn; an environment that does not think answers the first
turn with 16 tokens. The rollouts of one turn get the number of tokens that each
response of two turns has sampled. Both take turns in one process; figures are medians.
The last line is one JSON object: sampled tokens/s of both, their ratio, and the share
of the time of two turns that goes into `resume`, the prefill of what was said so far.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bapo_jax.models import decoder, transformer
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.turns import Turn
from benchmarks import machine
from benchmarks.rollout import sampler

NEW, MESSAGE, GROUP, PROMPTS = 256, 16, 8, 8
ENDS = 500  # of 32 000 tokens, which are sampled about equally often


@dataclasses.dataclass(frozen=True)
class TimedEngine(RolloutEngine):
  """An engine whose calls of `resume` are waited for and timed."""

  seconds: list[float] = dataclasses.field(default_factory=list)

  def resume(
    self,
    params: Any,
    slots: decode.Slots,
    rows: decode.Rows,
    id_A: np.ndarray,
    entering: decode.Entering,
    message_AT: np.ndarray,
    *,
    columns: int,
  ) -> sampler.TimedCall:
    """Returns the engine's call, timed."""
    jax.block_until_ready(slots)
    call = super().resume(
      params, slots, rows, id_A, entering, message_AT, columns=columns
    )
    return sampler.TimedCall(call, self.seconds)


class Prompt:
  """Answers the first turn at once, with MESSAGE tokens."""

  max_turns = 2

  def __init__(self):
    self._asked: list[tuple[int, Sequence[int]]] = []

  def ask(self, turns: Sequence[Turn]) -> None:
    """Prepares an answer, or none where it does not fit."""
    for turn in turns:
      fits = turn.left > MESSAGE
      self._asked.append((turn.row, [ENDS + 1] * MESSAGE * fits))

  def answers(self, at_least: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yields an answer for every row."""
    while self._asked:
      yield self._asked.pop()


def sampled(engine: RolloutEngine, actor: Any, limit_B: Any, turns: int):
  """Samples all responses; returns (seconds, tokens of each)."""
  rollouts = PartialRollouts(engine, PROMPTS)
  prompts = sampler.prompts_of(PROMPTS, engine.spec)
  rollouts.submit(prompts, np.arange(PROMPTS * GROUP), limit_B=limit_B)
  environment = Prompt() if turns > 1 else None
  begun = time.perf_counter()
  rollouts.decode(actor, jax.random.key(0), environment=environment)
  jax.block_until_ready(rollouts.rows)
  seconds = time.perf_counter() - begun
  return seconds, np.asarray(rollouts.rows.response_mask_BT).sum(1)


def main() -> None:
  """Prints a line per round and the JSON object."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--slots', type=int, default=32)
  arguments = parser.parse_args()
  spec = machine.QWEN2_25M
  actor = decoder.actor(transformer.init(spec, jax.random.key(0)), spec)
  two = TimedEngine(
    spec,
    max_prompt_tokens=sampler.PROMPT,
    max_new_tokens=NEW,
    group_size=GROUP,
    temperature=1.0,
    eos=tuple(range(ENDS)),
    max_num_seqs=arguments.slots,
    prefill_batch_size=8,
    tokens_per_dispatch=8,
  )
  one = dataclasses.replace(two, eos=(sampler.END,))
  _, tokens_B = sampled(two, actor, None, 2)  # compiles
  sampled(one, actor, tokens_B, 1)
  two.seconds.clear()
  rates, shares = [], []
  for _ in range(arguments.rounds):
    seconds, again_B = sampled(two, actor, None, 2)
    assert (again_B == tokens_B).all()
    alone, _ = sampled(one, actor, tokens_B, 1)
    rates.append((tokens_B.sum() / seconds, tokens_B.sum() / alone))
    shares.append(sum(two.seconds) / seconds)
    two.seconds.clear()
    print(f'two turns {rates[-1][0]:.0f}, one {rates[-1][1]:.0f} tokens/s', flush=True)
  result = {
    'two_turns': statistics.median(rate for rate, _ in rates),
    'one_turn': statistics.median(rate for _, rate in rates),
    'ratio': statistics.median(a / b for a, b in rates),
    'resume': statistics.median(shares),
    'tokens': int(tokens_B.sum()),
  }
  print(json.dumps({name: round(float(x), 3) for name, x in result.items()}))


if __name__ == '__main__':
  main()
