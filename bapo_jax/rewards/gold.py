r"""Checks the right answers of a data set when they are read.

1. `check` refuses rows whose verifier cannot read their right answer. It runs the
   verifier itself on an empty response: an answer that stays undecided there would stay
   undecided for every response. `math` is too slow for that and may hang, so only the
   nesting of its answers is limited;
2. `stating` writes a response that states the right answer. If even that response is
   not verified as right, no response can be.
"""

import functools
import json
from collections.abc import Callable

from bapo_jax.data.made import countdown
from bapo_jax.data.row import Row
from bapo_jax.rewards import verifiers

DEPTH = 100  # nested LaTeX brackets; the parser uses at least one stack frame for each


def check(rule: str) -> Callable[[Row], None]:
  """Returns a function that checks a row for a run with this rewards.rule.

  The function raises a ValueError if the verifier of the row (`rule`, unless the row
  names its own) cannot use the right answer.

  Args:
    rule: a key of verifiers.RULES.
  """
  return functools.partial(_check_row, rule=rule)


def _check_row(row: Row, rule: str) -> None:
  name = row.verifier or rule
  fault = FAULTS[name](row.answer) if name in FAULTS else ''
  reason = fault and f'the right answer {row.answer[:40]!r} {fault}'
  if not reason and name not in verifiers.POOLED:
    try:
      verdict = verifiers.RULES[name](row.answer, '')
      reason = verdict.reason if verdict.right is None else ''
    except (ValueError, ArithmeticError, RecursionError) as error:
      reason = f'the right answer {row.answer[:40]!r} raises {type(error).__name__}'
  if reason:
    raise ValueError(
      f'{reason}, so the verifier {name!r} cannot use it; correct or remove the row, '
      'or choose another rewards.rule'
    )


def stating(rule: str, answer: str) -> str:
  r"""Returns a response that states the right answer where the verifier looks for it.

  For `math` the answer gets extra braces; otherwise the verifier would compare the
  characters and never parse it. For `countdown`, whose right answer is the problem, the
  response is empty.

  Args:
    rule: a key of verifiers.RULES.
    answer: the right answer.
  """
  if rule == 'countdown':
    return ''
  if rule == 'gsm8k':
    return f'#### {answer.rpartition("####")[2].strip()}'
  return f'\\boxed{{{{{answer}}}}}' if rule == 'math' else f'\\boxed{{{answer}}}'


def _countdown(answer: str) -> str:
  try:
    problem = json.loads(answer)
    countdown.row(problem['numbers'], problem['target'], 'short')
  except (ValueError, KeyError, TypeError, RecursionError):
    return 'is not {"numbers": [3, 5, 8], "target": 24} with integers'
  digits = sum(len(str(n)) for n in problem['numbers'])
  # An expression has at least one operator between two numbers.
  if digits + len(problem['numbers']) - 1 > verifiers.LONGEST:
    return f'needs an expression of more than {verifiers.LONGEST} characters'
  return ''


def _math(answer: str) -> str:
  depth = deepest = 0
  for character in answer:
    depth += (character in '([{') - (character in ')]}')
    deepest = max(deepest, depth)
  return f'nests brackets more than {DEPTH} deep' if deepest > DEPTH else ''


# Faults of a right answer that the verifier itself does not report; '' for none.
FAULTS: dict[str, Callable[[str], str]] = {'countdown': _countdown, 'math': _math}
