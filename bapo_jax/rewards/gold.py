r"""Whether a data set's answers can be verified at all, asked when they are read.

The verifier itself reads the answer, beside an empty response: what it cannot read then
it could not read beside any other. `math` is too slow for that, and may hang; its
answers are bounded only.

`stating` writes a response that gives the right answer: where even that is not right,
nothing would be.
"""

import functools
import json
from collections.abc import Callable

from bapo_jax.data.made import countdown
from bapo_jax.data.row import Row
from bapo_jax.rewards import verifiers

DEPTH = 100  # of brackets in LaTeX: its parser takes one frame and more for each


def check(rule: str) -> Callable[[Row], None]:
  """The check of rows for a run with this rewards.rule: `check_row`, its rule bound."""
  return functools.partial(check_row, rule=rule)


def check_row(row: Row, rule: str) -> None:
  """Raises ValueError where the row's verifier cannot use its answer.

  Args:
    rule: of the rows that name no verifier, a key of verifiers.RULES.
  """
  name = row.verifier or rule
  wanted = WANTED[name](row.answer) if name in WANTED else ''
  reason = wanted and f'the right answer {row.answer[:40]!r} {wanted}'
  if not reason and name not in verifiers.POOLED:
    reason = _unread(name, row.answer)
  if reason:
    raise ValueError(
      f'{reason}, so the verifier {name!r} cannot use it; correct it, take the row '
      'out, or choose another rewards.rule'
    )


def _unread(name: str, answer: str) -> str:
  """Why the verifier leaves all responses to this answer undecided; '': it does not."""
  try:
    verdict = verifiers.RULES[name](answer, '')
  except (ValueError, ArithmeticError, RecursionError) as error:
    return f'the right answer {answer[:40]!r} is unreadable ({type(error).__name__})'
  return verdict.reason if verdict.right is None else ''


def stating(rule: str, answer: str) -> str:
  r"""A response that gives the right answer in the place where the verifier reads it.

  In braces of its own for `math`, which else compares the letters before it parses.
  Of countdown, whose answer is the problem, an empty one.

  Args:
    rule: a key of verifiers.RULES.
  """
  if rule == 'countdown':
    return ''
  if rule == 'gsm8k':
    return f'#### {answer.rpartition("####")[2].strip()}'
  return f'\\boxed{{{{{answer}}}}}' if rule == 'math' else f'\\boxed{{{answer}}}'


def _countdown(answer: str) -> str:
  """What is wrong with a countdown problem; '' for nothing."""
  try:
    problem = json.loads(answer)
    countdown.row(problem['numbers'], problem['target'], 'short')
  except (ValueError, KeyError, TypeError, RecursionError):
    return 'is not {"numbers": [3, 5, 8], "target": 24} with integers'
  digits = sum(len(str(n)) for n in problem['numbers'])
  # One sign stands between two numbers; parentheses come on top.
  if digits + len(problem['numbers']) - 1 > verifiers.LONGEST:
    return f'needs an expression of more than {verifiers.LONGEST} characters'
  return ''


def _math(answer: str) -> str:
  """What is wrong with a piece of LaTeX; '' for nothing."""
  depth = deepest = 0
  for character in answer:
    depth += (character in '([{') - (character in ')]}')
    deepest = max(deepest, depth)
  return f'nests brackets more than {DEPTH} deep' if deepest > DEPTH else ''


# Beyond what the verifier itself says of an answer.
WANTED: dict[str, Callable[[str], str]] = {'countdown': _countdown, 'math': _math}
