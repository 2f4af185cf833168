"""Built-in environments, which answer a turn of the policy: text in, text out.

Each receives a `score.Sample`, and returns its message, or None if the response is
finished. A user's environment is called in the same way.
"""

import re
from collections.abc import Callable
from typing import Any

from bapo_jax.rewards import verifiers

CALL = re.compile(r'([0-9+*/() -]+)=\s*$')


def feedback(turn: Any) -> str | None:
  """Answers a wrong expression of a countdown problem with its value, such as '=17'."""
  verdict = verifiers.verify('countdown', turn.answer, turn.response)
  return None if verdict.right else _value(verdict.answer or '', '={}\n')


def calculator(turn: Any) -> str | None:
  """Calculates the expression before '=' at the end of a turn, such as '37*8='."""
  call = CALL.search(turn.response[-2 * verifiers.LONGEST :])
  return _value(call[1], '{}\n') if call else None


def _value(expression: str, message: str):
  """Returns the message with the value of an expression; None without a value."""
  try:
    return message.format(verifiers.calculate(expression.strip())[0])
  except (ValueError, ZeroDivisionError):
    return None


BUILT_IN: dict[str, Callable[[Any], str | None]] = {
  'feedback': feedback,
  'calculator': calculator,
}
