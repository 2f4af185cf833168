"""Rotary frequencies: each rule by hand, and the limits of every rule."""

import math

import numpy as np
import pytest

from bapo_jax.models import rope

LLAMA3 = {
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 100,
}


def table(width, theta, rule='default', **knobs):
  return rope.table(width, theta, rule, tuple(knobs.items()))


def test_default_and_linear_by_hand():
  # Width 4, theta 100: pairs 0 and 1 turn by 100^0 = 1 and 100^(-1/2) = 0.1 per token.
  found, factor = table(4, 100.0)
  np.testing.assert_allclose(found, [1, 0.1], rtol=1e-7)
  assert found.dtype == np.float32 and factor == 1
  np.testing.assert_allclose(table(4, 100.0, 'linear', factor=4.0)[0], [0.25, 0.025])


def test_llama3_by_hand():
  # Width 8, theta 1e4: 1, 0.1, 0.01, 0.001. In 100 tokens they turn 15.9, 1.59, 0.159
  # and 0.0159 times. More than 4: unchanged; fewer than 1: / 8; 1.59 lies
  # (1.59 - 1) / 3 = 0.19718 of the way: 0.1 * 0.19718 + 0.0125 * 0.80282 = 0.029754.
  found, factor = table(8, 1e4, 'llama3', **LLAMA3)
  np.testing.assert_allclose(found, [1, 0.0297535, 0.00125, 0.000125], rtol=1e-5)
  assert factor == 1


def test_yarn_by_hand():
  # Width 8, theta 1e4, 1000 tokens: pair 4 * ln(1000 / 2 pi r) / ln 1e4 turns r times:
  # r = 32 at 0.697, r = 1 at 2.202; floor and ceiling 0 and 3, a ramp 0, 1/3, 2/3, 1.
  knobs = {'factor': 4.0, 'original_max_position_embeddings': 1000}
  found, factor = table(8, 1e4, 'yarn', **knobs)
  np.testing.assert_allclose(found, [1, 0.075, 0.005, 0.00025], rtol=1e-6)
  assert factor == pytest.approx(0.1 * math.log(4) + 1)
  # Without rounding the ramp is (i - 0.697) / 1.505: 0, 0.2012, 0.8657, 1.
  found, _ = table(8, 1e4, 'yarn', **knobs, truncate=False)
  np.testing.assert_allclose(found, [1, 0.08491, 0.0035075, 0.00025], rtol=1e-3)
  # Both scales: the quotient of their two factors; a given factor is taken as it is.
  _, factor = table(8, 1e4, 'yarn', **knobs, mscale=2.0, mscale_all_dim=1.0)
  assert factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
  assert table(8, 1e4, 'yarn', **knobs, attention_factor=1.5)[1] == 1.5


@pytest.mark.parametrize(
  ('rule', 'knobs', 'name'),
  [
    ('dynamic', {'factor': 2.0}, 'dynamic'),
    ('linear', {}, 'factor'),
    ('linear', {'factor': 0}, 'factor'),
    ('linear', {'factor': [2.0] * 4}, '[2.0, 2.0'),
    ('llama3', {**LLAMA3, 'low_freq_factor': None}, 'llama3'),
    ('yarn', {'factor': 4.0, 'short_factor': 1}, 'short_factor'),
    ('default', {'mrope_section': 1}, 'mrope_section'),
  ],
)
def test_unknown_and_missing_knobs_are_named(rule, knobs, name):
  with pytest.raises(ValueError) as error:
    table(8, 1e4, rule, **knobs)
  assert name in str(error.value) and '\n' not in str(error.value)
