"""Tables are one line per row, whatever their cells contain."""

import pytest

from bapo_jax.runtime.tables import markdown


def test_a_table_is_a_header_a_rule_and_its_rows():
  text = markdown([['grpo', '0.5'], ['|x|', 'two\nlines']], ['cell', 'accuracy'], 'lr')
  assert text.split('\n') == [
    '| cell | accuracy |',
    '|:--|--:|',
    '| grpo | 0.5 |',
    '| \\|x\\| | two lines |',
  ]
  with pytest.raises(ValueError, match='1 cells for 2 columns'):
    markdown([['a']], ['a', 'b'], 'lr')
