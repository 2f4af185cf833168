r"""Checks the right answers of a data set when they are read.

`check` verifies an empty response: if this is undecided, every response would be, so
the right answer is refused. For `math`, which is slow and may hang, `check` only limits
the depth of brackets. `stating` writes a response that states the right answer: if this
is not verified as right, no response can be.
"""

import itertools
import json
from collections.abc import Callable

from bapo_jax.data.made import countdown
from bapo_jax.data.row import Row
from bapo_jax.rewards import verifiers

DEPTH = 100  # nested LaTeX brackets; the parser uses at least one stack frame for each


def check(rule: str) -> Callable[[Row], None]:
  """Returns a function that raises a ValueError if a row's answer cannot be used.

  The verifier is named by the row, or else by `rule`, a key of verifiers.RULES.
  """

  def check_row(row: Row) -> None:
    name = row.verifier or rule
    if fault := _fault(name, row.answer):
      raise ValueError(
        f'{fault}, so the verifier {name!r} cannot use it; correct or remove the row, '
        'or choose another rewards.rule'
      )

  return check_row


def _fault(rule: str, answer: str) -> str:
  """Returns the reason why a verifier cannot use a right answer; '' if it can."""
  shown = f'the right answer {answer[:40]!r}'
  if rule == 'math':
    depths = itertools.accumulate((c in '([{') - (c in ')]}') for c in answer)
    deep = max(depths, default=0) > DEPTH
    return f'{shown} nests brackets more than {DEPTH} deep' if deep else ''
  if rule == 'countdown':
    try:
      problem = json.loads(answer)
      numbers = problem['numbers']
      countdown.row(numbers, problem['target'], 'short')
    except (ValueError, KeyError, TypeError, RecursionError):
      return f'{shown} is not {{"numbers": [3, 5, 8], "target": 24}} with integers'
    # An expression has at least one operator between two numbers.
    if sum(len(str(n)) + 1 for n in numbers) - 1 > verifiers.LONGEST:
      return f'{shown} needs an expression of more than {verifiers.LONGEST} characters'
  try:
    verdict = verifiers.RULES[rule](answer, '')
  except (ValueError, ArithmeticError, RecursionError) as error:
    return f'{shown} raises {type(error).__name__}'
  return verdict.reason if verdict.right is None else ''


def stating(rule: str, answer: str) -> str:
  r"""Returns a response that states the right answer where the verifier looks for it.

  For `math`, extra braces make the verifier parse the answer instead of comparing it by
  characters. For `countdown`, whose right answer is the problem, the response is empty.
  """
  if rule == 'countdown':
    return ''
  if rule == 'gsm8k':
    return f'#### {answer.rpartition("####")[2].strip()}'
  return f'\\boxed{{{{{answer}}}}}' if rule == 'math' else f'\\boxed{{{answer}}}'
