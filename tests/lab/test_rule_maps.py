"""The map of a rule has its weights by hand."""

import numpy as np
import pytest

from lab import rule_maps
from lab.microscope_page import RULES
from lab.rule_maps import PROBABILITY, RATIO


def at(name, sign, ratio, probability):
  """The weight of the grid's point nearest to these values."""
  i = np.abs(np.log(RATIO / ratio)).argmin()
  j = np.abs(np.log(PROBABILITY / probability)).argmin()
  return rule_maps.weights(RULES[name], sign)[i, j], RATIO[i], PROBABILITY[j]


@pytest.mark.parametrize(
  ('name', 'sign', 'ratio', 'probability', 'by_hand'),
  [
    ('GRPO', 1, 0.5, 0.01, lambda r, p: r),
    ('GRPO', 1, 1.5, 0.01, lambda r, p: 0),
    ('GRPO', -1, 0.5, 0.01, lambda r, p: 0),
    ('GRPO', -1, 5, 0.01, lambda r, p: -r),
    ('dual clip', -1, 5, 0.01, lambda r, p: 0),
    ('TIS', 1, 5, 0.01, lambda r, p: 2),
    ('REINFORCE', -1, 0.5, 0.01, lambda r, p: -1),
    ('DPPO-TV', 1, 3, 0.01, lambda r, p: r),  # p - q is .007
    ('DPPO-TV', 1, 3, 0.9, lambda r, p: 0),  # p - q is .6, above .2
    ('IcePop', 1, 7, 0.01, lambda r, p: 0),
  ],
)
def test_weights_by_hand(name, sign, ratio, probability, by_hand):
  found, r, p = at(name, sign, ratio, probability)
  assert found == pytest.approx(by_hand(r, p), rel=1e-4)


def test_a_ratio_that_no_token_has_is_empty():
  assert np.isnan(at('GRPO', 1, 0.2, 0.9)[0])  # mu would be 4.5
