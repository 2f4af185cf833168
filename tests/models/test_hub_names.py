"""Names of repositories of the hub."""

import pytest

from bapo_jax.models.hf import directory


@pytest.mark.parametrize('name', ['hub:', 'hub:a', 'hub:a/b/c', 'hub:a/b@', 'hub:a /b'])
def test_a_malformed_name_is_refused_with_the_way_out(name):
  with pytest.raises(ValueError, match='hub:owner/name@revision'):
    directory.parse_hub_name(name)
