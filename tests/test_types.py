"""The axes of the records, empty rows, and means over a mask."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax import types


@pytest.mark.parametrize(
  ('shapes', 'message'),
  [
    # The example of the docstring: the first array sets B, the second breaks it.
    ({'logp_BT': (4, 3), 'adv_B': (5,)}, 'adv_B has B=5, but B=4 elsewhere'),
    # One letter twice in one name is one size as well.
    ({'cov_DD': (2, 3)}, 'cov_DD has D=3, but D=2 elsewhere'),
    ({'adv_B': ()}, 'adv_B must have axes B, not shape ()'),
  ],
)
def test_agree_names_the_array_that_breaks_its_promise(shapes, message):
  assert types.agree(logp_BT=np.zeros((4, 3)), adv_B=np.zeros(4)) == {'B': 4, 'T': 3}
  with pytest.raises(ValueError, match=re.escape(message)):
    types.agree(**{name: np.zeros(shape) for name, shape in shapes.items()})


def test_masked_mean(variant):
  # (1 + 3 + 8) / 3 = 4; the others, one of them infinite, are not read.
  x_B = jnp.array([1.0, 2.0, 3.0, jnp.inf, 8.0, 5.0, 6.0, 7.0])
  mask_B = jnp.array([1, 0, 1, 0, 1, 0, 0, 0], bool)
  assert variant(types.masked_mean, x_B, mask_B) == 4
  assert variant(types.masked_mean, x_B, jnp.zeros(8, bool)) == 0  # and not 0 / 0
  grad_B = jax.grad(types.masked_mean)(jnp.ones(8), jnp.zeros(8, bool))
  np.testing.assert_array_equal(grad_B, np.zeros(8))
