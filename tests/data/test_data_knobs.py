"""The sections of the data: bad values are one sentence."""

import typing

import pytest

from bapo_jax import knobs
from bapo_jax.data import countdown, synthetic
from bapo_jax.data.knobs import (
  CountdownConfig,
  ProblemsConfig,
  PromptsConfig,
  TokenizerConfig,
)

TWO_TO_SIX = 'give a tuple of integers, each from 2 to 6'
BAD = [  # section, its name, values, the error
  (
    ProblemsConfig,
    'problems',
    {'family': 'maze'},
    "family='maze': give one of 'trial'",
  ),
  (ProblemsConfig, 'problems', {'level': 9}, 'level=9: give an integer from 1 to 4'),
  (ProblemsConfig, 'problems', {'source': ''}, "source='': give synthetic, countdown,"),
  (
    ProblemsConfig,
    'problems',
    {'source': 'x.jsonl'},
    "test_source='synthetic' beside problems.source='x.jsonl': name held-out problems "
    'of the same kind',
  ),
  (ProblemsConfig, 'problems', {'duplicates': 'no'}, "duplicates='no': give one of 'd"),
  (ProblemsConfig, 'problems', {'overlap': 'no'}, "overlap='no': give one of 'keep', "),
  (PromptsConfig, 'prompts', {'overlong': 'cut'}, "overlong='cut': give one of 'drop'"),
  (
    TokenizerConfig,
    'tokenizer',
    {'template': 'Answer!'},
    "template='Answer!' does not contain {problem}",
  ),
  *(
    (ProblemsConfig, 'problems', {'countdown': values}, 'countdown.' + message)
    for values, message in (
      ({'numbers': ()}, 'numbers=(): give how many numbers a problem has, as in (3,)'),
      ({'numbers': (1, 3)}, f'numbers=(1, 3): {TWO_TO_SIX}'),
      ({'numbers': (7,)}, f'numbers=(7,): {TWO_TO_SIX}'),
      ({'largest': 4}, 'largest=4: give an integer from 5 to 10000'),
      ({'target': 0}, 'target=0: give an integer from 10 to 1000000'),
      ({'wording': 'terse'}, "wording='terse': give one of 'sentence', 'short'"),
    )
  ),
]


@pytest.mark.parametrize(('section', 'name', 'values', 'message'), BAD)
def test_a_bad_value_is_refused_in_one_sentence(section, name, values, message):
  with pytest.raises(ValueError) as error:
    knobs.validate(section, values, name)
  assert str(error.value).startswith(f'{name}.{message}')
  assert '\n' not in str(error.value)


def test_the_choices_are_those_that_the_code_knows():
  def choices(section, name):
    return set(typing.get_args(section.model_fields[name].annotation))

  assert choices(ProblemsConfig, 'family') == set(synthetic.FAMILIES)
  assert choices(CountdownConfig, 'wording') == set(countdown.WORDINGS)
  for levels in (
    synthetic.TRIAL_LEVELS,
    synthetic.CHAIN_LEVELS,
    synthetic.PAIR_LEVELS,
  ):
    for level in levels:
      knobs.validate(ProblemsConfig, {'level': level})
    for level in (min(levels) - 1, max(levels) + 1):
      with pytest.raises(ValueError, match=f'level={level}: give'):
        knobs.validate(ProblemsConfig, {'level': level})
