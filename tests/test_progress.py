"""Phases never overlap, and a bar in a log stays quiet."""

import pytest

from bapo_jax.progress import Clock, bar


class Hands:
  """A clock face that the test turns."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_an_inner_phase_is_not_counted_in_the_outer():
  # sample 0..10, with score 3..7 inside: 6 s of sample, 4 s of score
  hands = Hands()
  clock = Clock(hands)
  with clock('sample'):
    hands.now = 3
    with clock('score'):
      hands.now = 7
    hands.now = 10
  assert clock.seconds == {'sample': 6, 'score': 4}


def test_since_tells_what_is_new_and_the_rest():
  hands = Hands()
  clock = Clock(hands)
  with clock('sample'):
    hands.now = 2
  hands.now = 5
  assert clock.since() == {'sample': 2, 'other': 3}
  with clock('update'):
    hands.now = 9
  assert clock.since() == {'update': 4, 'other': 0}


def test_a_phase_that_raises_is_closed():
  hands = Hands()
  clock = Clock(hands)
  with pytest.raises(RuntimeError), clock('sample'):
    hands.now = 1
    raise RuntimeError
  hands.now = 5
  assert clock.seconds == {'sample': 1}


def test_a_short_phase_leaves_nothing_in_a_log(capsys):
  with bar(3, 'training', 'step') as progress:
    progress.update(3)
  assert capsys.readouterr().err == ''
