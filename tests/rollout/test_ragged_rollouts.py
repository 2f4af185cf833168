"""A rollout whose decoding reads only live blocks has the text of any other.

On a CPU the TPU's kernel is emulated.
"""

import dataclasses

import jax
import numpy as np
import oracles
import pytest

from bapo_jax.models import decoder, ragged, transformer
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.types import Prompts

PLAIN = transformer.ModelSpec(
  vocab=64, width=32, layers=2, heads=4, kv_heads=2, head_width=16, ffn=32,
  positions=1024,
)  # fmt: skip
RAGGED = dataclasses.replace(
  PLAIN, positions=1025
)  # equal but for the compiled program
LENGTH_P = np.asarray([1, 40, 17, 64, 3, 0], np.int32)
P, G, WIDTH, NEW = 6, 2, 64, 320  # rows are three blocks of 128 columns
LIMIT_B = np.asarray([320, 1, 320, 130, 64, 320, 2, 320, 250, 30, 0, 0])


def rollout(spec: transformer.ModelSpec, temperature: float):
  """Rows of 12 responses in 4 slots: refilled, paused twice, new weights in between."""
  engine = RolloutEngine(
    spec, max_prompt_tokens=WIDTH, max_new_tokens=NEW, group_size=G, eos=(3,),
    temperature=temperature, max_num_seqs=4, prefill_batch_size=2,
    tokens_per_dispatch=16, cache_segments=3,
  )  # fmt: skip
  rng, key = np.random.default_rng(0), jax.random.key(0)
  tokens_PT = rng.integers(4, spec.vocab, (P, WIDTH), np.int32)
  tokens_PT[np.arange(WIDTH) >= LENGTH_P[:, None]] = 0
  rollouts = PartialRollouts(engine, P)
  rollouts.submit(
    Prompts(np.arange(P, dtype=np.int32), tokens_PT, LENGTH_P),
    np.arange(P * G, dtype=np.uint32),
    limit_B=LIMIT_B,
  )
  actors = [decoder.actor(oracles.noisy(spec, seed), spec) for seed in range(2)]
  rollouts.decode(actors[0], key, max_tokens=150)
  rollouts.refresh(actors[1])
  rollouts.decode(actors[1], key, policy_version=1, max_tokens=40)
  assert rollouts.busy, 'nothing is partial'
  rollouts.decode(actors[1], key, policy_version=1)
  return jax.tree.map(np.asarray, rollouts.rows)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_text_and_log_probabilities_are_those_of_plain_decoding(
  monkeypatch, temperature
):
  monkeypatch.setattr(decoder, 'is_ragged', lambda spec: spec == RAGGED)
  monkeypatch.setattr(ragged, 'MOST_COLUMNS', 128)
  calls, attend = [], ragged.attend
  monkeypatch.setattr(ragged, 'attend', lambda *a: calls.append(a) or attend(*a))
  plain = rollout(PLAIN, temperature)
  assert not calls
  found = rollout(RAGGED, temperature)
  assert calls and calls[0][2][0].shape[3] == WIDTH + NEW
  np.testing.assert_array_equal(found.tokens_BT, plain.tokens_BT)
  np.testing.assert_array_equal(found.policy_version_BT, plain.policy_version_BT)
  # Rounding grows with the size of a log-probability: 1.7e-5 at -3.7 on one processor.
  np.testing.assert_allclose(found.logp_BT, plain.logp_BT, rtol=1e-5, atol=1e-5)
  ends = LENGTH_P.repeat(G) + plain.response_mask_BT.sum(1)
  assert ends[LIMIT_B == 1] == [2] and ends.max() > 256  # one block to three
  assert len(np.unique(ends)) > 6
