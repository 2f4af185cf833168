"""Off-policy rules equal their published code: the objective and its gradient.

`published.json` holds made tokens, and what the published code of each rule computes
from them in float64 (`make_published.py`). KPop and DRO, whose code could not be run,
are compared with formulas in numpy: DRO in test_extreme_ratios.py.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.algorithms import clip, loss, masks
from bapo_jax.types import Batch
from tests import making

FOUND = json.loads((pathlib.Path(__file__).parent / 'published.json').read_text())
SURROGATE = loss.Clipped(), clip.Unclipped()
UNLIMITED = loss.Tis(cap=math.inf)
RULES = {  # published code -> loss, clip and mask rule
  'dppo_tv': (*SURROGATE, masks.DppoTv()),
  'dppo_kl': (*SURROGATE, masks.DppoKl()),
  'sapo': (loss.Sapo(), clip.Unclipped(), masks.NoMask()),
  'vespo': (loss.Vespo(), clip.Unclipped(), masks.NoMask()),
  'opsm': (*SURROGATE, masks.Opsm()),
  'icepop': (UNLIMITED, clip.Unclipped(), masks.IcePop()),
  'm2po': (*SURROGATE, masks.M2po()),
  'dcpo': (loss.Clipped(), clip.Dcpo(), masks.NoMask()),
  'aspo': (loss.Aspo(), clip.Fixed(), masks.NoMask()),
  'fipo': (loss.Fipo(), clip.Fixed(), masks.NoMask()),
}


def recorded() -> tuple[jax.Array, Batch]:
  """Returns (logp_BT, batch) of the made tokens."""
  made = {name: np.asarray(x) for name, x in FOUND['tokens'].items()}
  zero_BT = np.zeros(made['mask'].shape, np.int32)
  adv_BT = made['adv'][:, None] + np.zeros(made['mask'].shape)
  fields = zero_BT, made['mask'], made['log_q'], made['log_q'], adv_BT
  return jnp.asarray(made['log_p']), Batch(
    *map(jnp.asarray, (*fields, zero_BT[:, 0], zero_BT == 0))
  )


@pytest.mark.parametrize('name', RULES)
def test_rules_equal_their_published_code(name):
  with jax.enable_x64(True):
    value, weight_BT = making.applied(RULES[name], *recorded())
  wanted = FOUND['rules'][name]
  np.testing.assert_allclose(weight_BT, wanted['weight'], rtol=1e-6, atol=1e-9)
  np.testing.assert_allclose(value, wanted['gain'], rtol=1e-6)


def test_every_published_rule_is_compared():
  assert set(RULES) == set(FOUND['rules'])


def test_kpop_masks_by_both_divergences():
  with jax.enable_x64(True):
    logp_BT, batch = recorded()
    keep_BT = np.asarray(masks.KPop()(logp_BT, batch))
  p, q, mask = (np.asarray(FOUND['tokens'][x]) for x in ('log_p', 'log_q', 'mask'))
  p, q = np.exp(p), np.exp(q)
  both = [
    a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))
  ]
  wanted = (both[0] <= 0.1) & (both[1] <= 0.1)
  assert 0.05 < wanted[mask].mean() < 0.95
  # Each direction decides for some token.
  assert ((both[0] <= 0.1) != (both[1] <= 0.1))[mask].any()
  np.testing.assert_array_equal(keep_BT[mask], wanted[mask])


def test_m2po_keeps_as_many_tokens_as_a_sort_allows():
  logp_BT, batch = recorded()
  for limit in (1e-6, 0.001, 0.04, 0.3, 10.0):
    keep_BT = masks.M2po(limit=limit)(logp_BT, batch)
    log_r_BT = loss.log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)
    square = np.sort(np.square(np.asarray(log_r_BT))[batch.loss_mask_BT])
    means = np.cumsum(square, dtype=np.float64) / np.arange(1, len(square) + 1)
    assert int(np.asarray(keep_BT)[batch.loss_mask_BT].sum()) == (means < limit).sum()


@pytest.mark.parametrize('contribution', ['gradient', 'surrogate'])
def test_a_mask_reaches_the_search_of_the_bounds(contribution):
  """A masked token does not count towards the share that a search balances."""
  logp_BT, batch = recorded()
  k = {'target': 0.6, 'contribution': contribution}
  rules = loss.Clipped(), clip.Balanced(**k)
  scale_B = jnp.ones(len(batch.adv_BT))

  def bounds(mask_rule):
    find = loss.finder((*rules, mask_rule), logp_BT, batch, scale_B)
    return find(loss.ratio(logp_BT, batch))

  def no_negatives(logp_BT, batch):
    return batch.adv_BT > 0

  plain, masked = bounds(masks.NoMask()), bounds(no_negatives)
  assert plain.keep_BT is None and int(plain.search_steps) > 0
  # Without negative tokens the share is 1 at the first bounds.
  assert int(masked.search_steps) == 0 and bool(masked.target_met)
  assert not np.asarray(masked.keep_BT)[np.asarray(batch.adv_BT) < 0].any()


@pytest.mark.parametrize(
  ('ratio', 'adv', 'kept'),
  [
    # q = e^-2 = .135: p - q = .203 at r = 2.5 and .190 at r = 2.4; .2 is the limit.
    (2.4, 1.0, True),
    (2.5, 1.0, False),
    # r = .5 is a fall of .068, r = .25 one of .1015; .1 is the limit.
    (0.5, -1.0, True),
    (0.25, -1.0, False),
  ],
)
def test_binary_total_variation_golden(ratio, adv, kept):
  behavior_BT = np.full((1, 1), -2.0, np.float32)
  batch = making.batch([adv], [[True]], behavior_BT)
  logp_BT = jnp.asarray(behavior_BT + math.log(ratio))
  assert bool(masks.DppoTv(low=0.1)(logp_BT, batch)[0, 0]) == kept
