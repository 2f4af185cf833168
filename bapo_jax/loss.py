"""The clipped surrogate, and what one pass over its arrays tells about it.

1. `ratio` compares the policy with the one that wrote each token;
2. `surrogate` is PPO's objective (arXiv:1707.06347, Eq. 7) under bounds it is handed;
3. `diagnose` reports shares, clipping, ratios and entropy from the same arrays.
"""

import jax.numpy as jnp

from bapo_jax import clip
from bapo_jax.types import Batch, Bounds, masked_mean


def ratio(logp_BT, batch: Batch):
  """pi / mu of each token; 1 where none was chosen."""
  return jnp.exp(jnp.where(batch.mask_BT, logp_BT - batch.logp_BT, 0))


def surrogate(ratio_BT, adv_BT, mask_BT, bounds: Bounds):
  """-sum over tokens of min(r A, clip(r, low, high) A); divide by a token count."""
  clipped_BT = jnp.clip(ratio_BT, bounds.low, bounds.high)
  gain_BT = jnp.minimum(ratio_BT * adv_BT, clipped_BT * adv_BT)
  return -jnp.where(mask_BT, gain_BT, 0).sum()


def diagnose(logp_BT, entropy_BT, batch: Batch, start: Bounds, bounds: Bounds) -> dict:
  """Metrics of one optimiser minibatch; `start` holds the bounds before the search."""
  ratio_BT = ratio(logp_BT, batch)
  mask_BT = batch.mask_BT
  adv_BT = jnp.broadcast_to(batch.adv_B[:, None], mask_BT.shape)
  up_BT, down_BT = mask_BT & (adv_BT > 0), mask_BT & (adv_BT < 0)
  cut_up_BT = up_BT & (ratio_BT >= bounds.high)
  cut_down_BT = down_BT & (ratio_BT <= bounds.low)
  gain_BT = jnp.where(mask_BT, jnp.abs(adv_BT), 0)
  up = (gain_BT * jnp.where(up_BT, jnp.minimum(ratio_BT, bounds.high), 0)).sum()
  down = (gain_BT * jnp.where(down_BT, jnp.maximum(ratio_BT, bounds.low), 0)).sum()
  log_ratio_BT = jnp.where(mask_BT, logp_BT - batch.logp_BT, 0)
  return {
    'advantage/positive': up_BT.sum() / jnp.maximum((up_BT | down_BT).sum(), 1),
    'clip/low': bounds.low,
    'clip/high': bounds.high,
    'clip/moves': bounds.moves,
    'clip/moved': bounds.moves > 0,
    'clip/met': bounds.met,
    'clip/share_start': clip.share(ratio_BT, adv_BT, mask_BT, start.low, start.high),
    'clip/share': clip.share(ratio_BT, adv_BT, mask_BT, bounds.low, bounds.high),
    'clip/surrogate_share': up / jnp.maximum(up + down, jnp.finfo(jnp.float32).tiny),
    'clip/fraction': masked_mean(cut_up_BT | cut_down_BT, mask_BT),
    'clip/fraction_positive': masked_mean(cut_up_BT, up_BT),
    'clip/fraction_negative': masked_mean(cut_down_BT, down_BT),
    'loss/ratio_mean': masked_mean(ratio_BT, mask_BT),
    'loss/ratio_max': jnp.where(mask_BT, ratio_BT, 0).max(),
    'loss/entropy': masked_mean(entropy_BT, mask_BT),
    'loss/kl': masked_mean(ratio_BT - 1 - log_ratio_BT, mask_BT),
  }
