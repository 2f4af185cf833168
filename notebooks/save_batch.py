"""Writes notebooks/2_batch.npz: one stale minibatch of a real run, for notebook 2.

  python -m notebooks.save_batch --workdir=runs/default

1. takes the newest checkpoint of a run of the embedded default, and one rollout of it;
2. makes four times the eight updates of a learner step on that rollout;
3. stores eight of its groups as the policy sees them then: 32 updates stale.

The file at hand comes from a run of 20 steps (--config.steps=20).
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.learner import learner
from bapo_jax.models import layers, transformer
from bapo_jax.run import resume
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, checkpoint, trainer
from bapo_jax.training.config import parse
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import Tree, take
from configs import base

FILE = pathlib.Path(__file__).with_name('2_batch.npz')
STEPS, GROUPS = 4, 8  # learner steps on one rollout; groups that are stored


def restored(workdir: str) -> tuple[Trainer, TrainState]:
  """Trainer and newest state of a run of the embedded default."""
  config = parse(base.get_config().to_dict())
  t, s = build.start(config, workdir, PhaseTimer())
  with checkpoint.manager(workdir, config.checkpoint.keep) as checkpoints:
    s, _ = resume.resume(checkpoints, s)
  return t, s


def stale_minibatch(t: Trainer, s: TrainState) -> dict[str, np.ndarray]:
  """Groups with right and wrong responses, and the policy after STEPS more steps."""
  keys = trainer.step_keys(t.config.seed, s.step)
  s = trainer.sync_actor_if_due(t, s)
  groups = trainer.sample_fresh(t, s, s.prompt_round, keys.fresh).groups
  source_P = jnp.zeros(len(groups.id_P), jnp.int32)
  later = s
  for i in range(STEPS):  # staleness is the number of updates from one rollout
    key = jax.random.fold_in(keys.update, i)
    later, _ = trainer.update(t, later, groups, source_P, key)
  rate_P = np.asarray(groups.correct_PG).mean(1)
  learnable = np.flatnonzero((rate_P > 0) & (rate_P < 1))[:GROUPS]
  batch = learner.flatten(
    take(groups, learnable), source_P[learnable], t.rules.advantage
  )
  loss_mask_BT = np.asarray(batch.loss_mask_BT)
  logp_BTV = all_logprobs(t, later.params, batch.tokens_BT)
  used = int(np.flatnonzero(loss_mask_BT.any(0))[-1]) + 1  # columns
  return {
    'tokens_BT': np.asarray(batch.tokens_BT[:, :used], np.int16),
    'loss_mask_BT': loss_mask_BT[:, :used],
    'behavior_logp_BT': np.asarray(batch.behavior_logp_BT[:, :used]),
    'adv_B': np.asarray(batch.adv_B),
    # Of the N tokens in the loss mask alone, row by row: nobody looks at the others.
    'logp_NV': logp_BTV[loss_mask_BT[:, 1:]].astype(np.float16),
    'step': np.asarray(s.step),
  }


def all_logprobs(t: Trainer, params: Tree, tokens_BT: jax.Array) -> np.ndarray:
  """Log-probabilities [B, T-1, V] of every token after each column but the last."""
  hidden_BTD = layers.forward(params, tokens_BT, t.spec)
  logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD[:, :-1], transformer.head(params))
  return np.asarray(jax.nn.log_softmax(logits_BTV / t.config.sampler.temperature))


def main() -> None:
  """Writes the file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', required=True)
  saved = stale_minibatch(*restored(parser.parse_args().workdir))
  np.savez_compressed(FILE, allow_pickle=False, **saved)
  rows, size = len(saved['adv_B']), FILE.stat().st_size
  print(f'{FILE}: {size} bytes, {rows} rows, sampled at step {saved["step"]}')


if __name__ == '__main__':
  main()
