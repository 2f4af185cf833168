"""Tables are one line per row, whatever their cells hold."""

import pytest

from bapo_jax.runtime.tables import markdown


def test_a_table_is_a_header_a_rule_and_its_rows():
  text = markdown([['grpo', '0.5'], ['both', '-']], ['cell', 'accuracy'], 'lr')
  assert text.split('\n') == [
    '| cell | accuracy |',
    '|:--|--:|',
    '| grpo | 0.5 |',
    '| both | - |',
  ]


def test_a_bar_or_a_newline_does_not_end_a_cell():
  text = markdown([['|x|', 'two\nlines']], ['a', 'b'], 'll')
  assert text.split('\n')[2] == '| \\|x\\| | two lines |'


def test_a_row_of_another_length_is_refused():
  with pytest.raises(ValueError, match='1 cells for 2 columns'):
    markdown([['a']], ['a', 'b'], 'lr')
