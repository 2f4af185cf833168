import pytest

from bapo_jax.runtime import hub_names


def test_a_name_has_a_repository_and_perhaps_a_revision():
  assert hub_names.parse('hub:Qwen/Qwen3-4B') == ('Qwen/Qwen3-4B', None)
  assert hub_names.parse('hub:a/b.c@refs/pr/1') == ('a/b.c', 'refs/pr/1')
  for path in ('Qwen/Qwen3-4B', 'models/mine', '', '/hub:a/b'):
    assert hub_names.parse(path) is None


@pytest.mark.parametrize('name', ['hub:', 'hub:a', 'hub:a/b/c', 'hub:a/b@', 'hub:a /b'])
def test_a_malformed_name_is_refused_with_the_way_out(name):
  with pytest.raises(ValueError, match='hub:owner/name@revision'):
    hub_names.parse(name)
