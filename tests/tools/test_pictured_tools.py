"""Tools that cannot read pictures refuse a run with pictures."""

import pytest

from bapo_jax.tools import counterfactual, entropy_change


def test_the_change_of_entropy_is_not_computed_without_the_pictures():
  fields = dict.fromkeys(counterfactual.Recorded._fields)
  recorded = counterfactual.Recorded(**fields | {'pictured': True})
  with pytest.raises(ValueError, match='the recorded problems have pictures'):
    entropy_change.changes(recorded, {}, None, 1e-3)
