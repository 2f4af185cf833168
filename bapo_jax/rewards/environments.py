"""Built-in environments, which answer a turn of the policy: text in, text out.

Each receives a `score.Sample`, and returns its message, or None if the response is
finished. A user's environment is called in the same way; if it is a class, `Games`
keeps its objects.
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


class Games:
  """Answers turns by objects of a user's class, one for each response.

  An object that is not in this process (its worker died, or the run was resumed) is
  made again and hears the recorded turns. So it must depend on the row and on
  `response`, `messages` and `number` of the turns alone.
  """

  MOST = 4096  # objects; the oldest belong to responses that have ended

  def __init__(self, make: Callable[[], Any]):
    self._make = make
    # What was said up to the last turn that an object has answered -> the object.
    self._games: dict[str, Any] = {}

  def __call__(self, turn: Any) -> str | None:
    """Returns the message of the response's object, or None at the end."""
    said = turn.messages
    game = self._games.pop(repr((turn.row, said[:-2])), None)
    if turn.number == 1 or game is None:
      game = self._replayed(turn)
    message = None
    try:
      message = game.step(turn)
    finally:
      if message is None:  # the response ends, or `step` failed
        _close(game)
    if message is not None:
      key = repr((turn.row, said))
      # An equal response of the group may be here: the later one replays.
      _close(self._games.pop(key, None))
      self._games[key] = game
      if len(self._games) > self.MOST:
        _close(self._games.pop(next(iter(self._games))))
    return message

  def _replayed(self, turn: Any) -> Any:
    """Returns a new object that has heard the turns before this one."""
    game = self._make()
    first = game.start(turn.row)
    if first is not None:
      raise ValueError(
        f'start returned {first!r:.60}; a first message belongs into the problem, '
        'return None'
      )
    for number in range(1, turn.number):
      said = turn.messages[: 2 * (number - turn.number)]
      response = said[-1]['content']
      game.step(turn._replace(response=response, messages=said, number=number))
    return game


def _close(game: Any):
  """Calls the optional method `close` of an object."""
  if close := getattr(game, 'close', None):
    close()


BUILT_IN: dict[str, Callable[[Any], str | None]] = {
  'feedback': feedback,
  'calculator': calculator,
}
