"""Writes notebooks/2_batch.npz: one stale minibatch of a real run, for notebook 2.

  python -m notebooks.save_batch --workdir=runs/default

From the newest checkpoint of a run of the embedded default: a rollout, four times the
eight updates of a step on it, and then eight of its groups as the policy sees them now.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms.advantage import group_relative
from bapo_jax.models import transformer
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import checkpoint, experiment, learner, setup, validate
from bapo_jax.types import take
from configs import base

FILE = pathlib.Path(__file__).with_name('2_batch.npz')


def main() -> None:
  """Writes the file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workdir', required=True)
  workdir = parser.parse_args().workdir
  config = base.get_config()
  job, run = setup.start(config, validate.check(config), workdir, PhaseTimer())
  with checkpoint.manager(workdir, 2) as kept:
    run, _ = experiment.resume(kept, run)
  fresh_key, _, _, update_key = job.keys(run.step)
  prompts = job.ask(run.asked)
  groups = job.rollout(
    run.actor,
    prompts,
    fresh_key,
    asked=run.asked,
    step=run.step,
    policy_version=run.step,
  )
  source_P = jnp.zeros(len(prompts.id_P), jnp.int32)
  params, opt = run.params, run.opt
  for i in range(4):  # staleness is the number of updates from one rollout batch
    key = jax.random.fold_in(update_key, i)
    params, opt, _ = job.update(params, opt, groups, source_P, key)

  rate_P = np.asarray(groups.correct_PG).mean(1)
  teaching = np.flatnonzero((rate_P > 0) & (rate_P < 1))[:8]
  batch = learner.flatten(take(groups, teaching), source_P[teaching], group_relative)
  hidden_BTD = transformer.forward(params, batch.tokens_BT, job.spec)
  logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD[:, :-1], transformer.head(params))
  logp_BTV = np.asarray(jax.nn.log_softmax(logits_BTV / config.sampler.temperature))
  used = int(np.flatnonzero(np.asarray(batch.loss_mask_BT).any(0))[-1]) + 1
  np.savez_compressed(
    FILE,
    tokens_BT=np.asarray(batch.tokens_BT[:, :used], np.int16),
    loss_mask_BT=np.asarray(batch.loss_mask_BT[:, :used]),
    logmu_BT=np.asarray(batch.behavior_logp_BT[:, :used]),
    adv_B=np.asarray(batch.adv_B),
    # Of the tokens that teach, in order of rows: the others' words say nothing here.
    logp_NV=logp_BTV[np.asarray(batch.loss_mask_BT[:, 1:])].astype(np.float16),
    step=run.step,
  )
  print(
    f'{FILE}: {FILE.stat().st_size} bytes, step {run.step}, rows {len(batch.adv_B)}'
  )


if __name__ == '__main__':
  main()
