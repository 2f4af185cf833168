"""The axes of the records, empty rows, and means over a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax import types


def test_agree_returns_the_size_of_every_letter():
  logp_BT, adv_B, x_TV = jnp.zeros((4, 3)), jnp.zeros(4), jnp.zeros((3, 2))
  size = types.agree(logp_BT=logp_BT, adv_B=adv_B, x_TV=x_TV)
  assert size == {'B': 4, 'T': 3, 'V': 2}


@pytest.mark.parametrize(
  ('arrays', 'message'),
  [
    # The example of the docstring: the first array sets B, the second breaks it.
    (
      {'logp_BT': np.zeros((4, 3)), 'adv_B': np.zeros(5)},
      'adv_B has B=5, but B=4 elsewhere',
    ),
    # One letter twice in one name is one size as well.
    ({'cov_DD': np.zeros((2, 3))}, 'cov_DD has D=3, but D=2 elsewhere'),
    (
      {'loss_mask_BT': np.zeros((4, 3, 1))},
      'loss_mask_BT promises axes BT, but its shape is (4, 3, 1)',
    ),
    ({'adv_B': np.zeros(())}, 'adv_B promises axes B, but its shape is ()'),
  ],
)
def test_agree_names_the_array_that_breaks_its_promise(arrays, message):
  with pytest.raises(ValueError) as error:
    types.agree(**arrays)
  assert str(error.value) == message


def test_empty_rows_are_empty_in_every_field():
  groups = types.empty_groups(rows=3, group=2, length=5)
  size = types.agree(**groups._asdict())
  assert size == {'P': 3, 'G': 2, 'T': 5}
  for field in ('id_P', 'completed_step_P', 'policy_version_PGT'):
    assert (getattr(groups, field) == -1).all()
  for field in (
    'tokens_PGT',
    'response_mask_PGT',
    'behavior_logp_PGT',
    'correct_PG',
    'reward_PG',
  ):
    assert not getattr(groups, field).any()
  kinds = {name: x.dtype.name for name, x in groups._asdict().items()}
  assert kinds == {
    'id_P': 'int32',
    'tokens_PGT': 'int32',
    'response_mask_PGT': 'bool',
    'behavior_logp_PGT': 'float32',
    'policy_version_PGT': 'int32',
    'correct_PG': 'bool',
    'reward_PG': 'float32',
    'teaches_PG': 'bool',
    'completed_step_P': 'int32',
  }


def test_take_and_concat_move_whole_rows():
  groups = types.empty_groups(4, 2, 3)._replace(
    id_P=jnp.arange(4), reward_PG=jnp.arange(8.0).reshape(4, 2)
  )
  moved = types.concat(
    types.take(groups, jnp.array([3, 0])), types.take(groups, jnp.array([], int))
  )
  moved = types.concat(moved, types.take(groups, groups.id_P == 1))
  np.testing.assert_array_equal(moved.id_P, [3, 0, 1])
  np.testing.assert_array_equal(moved.reward_PG, [[6, 7], [0, 1], [2, 3]])
  assert types.agree(**moved._asdict()) == {'P': 3, 'G': 2, 'T': 3}


def test_masked_mean(variant):
  # (1 + 3 + 8) / 3 = 4; the five that are masked out, one of them infinite, are not
  # read.
  x_B = jnp.array([1.0, 2.0, 3.0, jnp.inf, 8.0, 5.0, 6.0, 7.0])
  mask_B = jnp.array([1, 0, 1, 0, 1, 0, 0, 0], bool)
  assert variant(types.masked_mean, x_B, mask_B) == 4
  assert variant(types.masked_mean, x_B, jnp.zeros(8, bool)) == 0  # and not 0 / 0


def test_masked_mean_of_nothing_has_no_gradient():
  grad_B = jax.grad(types.masked_mean)(jnp.ones(8), jnp.zeros(8, bool))
  np.testing.assert_array_equal(grad_B, np.zeros(8))
