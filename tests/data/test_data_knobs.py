"""The sections of the data: bad values are one sentence."""

import re
import typing

import pytest

from bapo_jax import knobs
from bapo_jax.data.knobs import (
  CountdownConfig,
  DrawnConfig,
  ProblemsConfig,
  TokenizerConfig,
)
from bapo_jax.data.made import countdown, synthetic

BAD = [  # section, its name, values, start of the error
  (ProblemsConfig, 'problems', {'family': 'maze'}, "family='maze'"),
  (ProblemsConfig, 'problems', {'source': ''}, "source=''"),
  (ProblemsConfig, 'problems', {'source': 'x.jsonl'}, "test_source='synthetic'"),
  (TokenizerConfig, 'tokenizer', {'template': 'Answer!'}, "template='Answer!'"),
  (CountdownConfig, 'problems.countdown', {'numbers': ()}, 'numbers=()'),
  (CountdownConfig, 'problems.countdown', {'numbers': (1, 3)}, 'numbers=(1, 3)'),
  (CountdownConfig, 'problems.countdown', {'numbers': (7,)}, 'numbers=(7,)'),
  (CountdownConfig, 'problems.countdown', {'largest': 4}, 'largest=4'),
  (DrawnConfig, 'problems.drawn', {'terms': 4}, 'terms=4'),
  (DrawnConfig, 'problems.drawn', {'sides': ()}, 'sides=()'),
]


@pytest.mark.parametrize(('section', 'name', 'values', 'message'), BAD)
def test_a_bad_value_is_refused_in_one_sentence(section, name, values, message):
  with pytest.raises(ValueError, match=re.escape(f'{name}.{message}')) as error:
    knobs.validate(section, values, name)
  assert '\n' not in str(error.value)


def test_the_choices_are_those_that_the_code_knows():
  def choices(section, name):
    return set(typing.get_args(section.model_fields[name].annotation))

  assert choices(ProblemsConfig, 'family') == set(synthetic.FAMILIES)
  assert choices(CountdownConfig, 'wording') == set(countdown.WORDINGS)
  levels = synthetic.TRIAL_LEVELS, synthetic.CHAIN_LEVELS, synthetic.PAIR_LEVELS
  assert [list(each) for each in levels] == [[1, 2, 3, 4]] * 3
