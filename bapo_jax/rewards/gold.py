r"""Checks the right answers of a data set when they are read.

`check` verifies an empty response: if this is undecided, every response would be, so
the right answer is refused. `math` accepts any right answer. `stating` writes a
response that states the right answer: if this is not verified as right, no response can
be.
"""

from collections.abc import Callable

from bapo_jax.custom_code import is_path
from bapo_jax.data.row import Row
from bapo_jax.rewards import verifiers


def check(rule: str) -> Callable[[Row], None]:
  """Returns a function that raises a ValueError if a row's answer cannot be used.

  The verifier is named by the row, or else by `rule`, as in rewards.rule. Custom
  functions accept any answer.
  """
  names = [name for name in rule.split(',') if not is_path(name)]

  def check_row(row):
    for name in dict.fromkeys(row.verifier or name for name in names):
      verdict = verifiers.verify(name, row.answer, '')
      if verdict.right is None:
        raise ValueError(
          f'{verdict.reason}, so the verifier {name!r} cannot use this answer; correct '
          'or remove the row, or choose another rewards.rule'
        )

  return check_row


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
