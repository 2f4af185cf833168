"""The clip rules of protocol 3: bounds that do not react to the tokens that they clip.

The bounds come from another run (`recorded`), from a coin, or are constant. Everything
else that a rule returns is what a search finds on the same tokens: its point on the
path, whether it met its target, whether there was evidence. So every run records what
its search would have chosen, applied or not.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.algorithms import clip
from bapo_jax.types import Batch, Bounds, Weigh
from lab import experiments

Search = Literal['recipe', 'balanced']
SEARCHES = {  # the public code, and section 5 of the paper with the same dual clip
  'recipe': clip.Recipe(),
  'balanced': clip.Balanced(target=0.4, dual=clip.PublicCode().dual),
}
NARROW = clip.PublicCode().low[0], clip.PublicCode().high[0]
WIDE = clip.PublicCode().low[1], clip.PublicCode().high[1]


def recorded(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  *,
  results: str = '',
  donor: str = '',
  search: Search = 'recipe',
) -> Bounds:
  """Returns the bounds that another run, its donor, had at the update of this number.

  Args:
    results: folder of the donor's experiment.
    donor: name of the run.
    search: the rule whose choice on these tokens is recorded.
  """
  low_U, high_U = (jnp.asarray(bound_U) for bound_U in sequence(results, donor))
  now = jnp.minimum(_number(batch), len(low_U) - 1)
  return _replaced(search, ratio_BT, batch, weigh, low_U[now], high_U[now])


def coin(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  *,
  wide: float = 0.5,
  draw: int = 0,
  search: Search = 'recipe',
) -> Bounds:
  """Returns WIDE with probability `wide`, else NARROW, drawn anew at every update.

  Args:
    wide: probability of the wide bounds.
    draw: seed of the coin.
    search: the rule whose choice on these tokens is recorded.
  """
  key = jax.random.fold_in(jax.random.key(draw), _number(batch))
  is_wide = jax.random.uniform(key) < wide
  low, high = (jnp.where(is_wide, *ends) for ends in zip(WIDE, NARROW, strict=True))
  return _replaced(search, ratio_BT, batch, weigh, low, high)


def constant(
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  *,
  low: float = 0.8,
  high: float = 1.2,
  search: Search = 'recipe',
) -> Bounds:
  """Returns the same bounds at every update.

  Args:
    low, high: the bounds.
    search: the rule whose choice on these tokens is recorded.
  """
  return _replaced(search, ratio_BT, batch, weigh, low, high)


def _replaced(
  search: Search,
  ratio_BT: Array,
  batch: Batch,
  weigh: Weigh,
  low: Array | float,
  high: Array | float,
) -> Bounds:
  """Returns the result of a search with other bounds than those that it found."""
  of_search = SEARCHES[search](ratio_BT, batch, weigh)
  return of_search._replace(low=jnp.float32(low), high=jnp.float32(high))


def _number(batch: Batch) -> Array:
  """Returns the number of the optimiser update, equal in all rows."""
  assert batch.update_B is not None  # a run has it
  return batch.update_B.max()


def sequence(results: str, donor: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the bounds (low_U, high_U) of a run, float32, at its update of each number.

  An update without evidence, or one that an underfilled batch did not need, has the
  bounds of the next update with evidence; those after the last one have the last
  bounds.

  Raises:
    ValueError: the run has no result, or none of its updates had evidence.
  """
  stored = experiments.read_runs(results)
  if donor not in stored:
    raise ValueError(f'{results} has no result of the donor {donor}; run it first')
  updates = stored[donor]['updates']
  evidence_U = ~np.asarray(updates['no_evidence'], bool)
  if not evidence_U.any():
    raise ValueError(f'{donor}: none of its updates had evidence')
  number_U = np.asarray(updates['number'])[evidence_U]
  index = np.searchsorted(number_U, np.arange(updates['number'][-1] + 1))
  index = np.minimum(index, len(number_U) - 1)
  return (
    np.asarray(updates['low'], np.float32)[evidence_U][index],
    np.asarray(updates['high'], np.float32)[evidence_U][index],
  )
