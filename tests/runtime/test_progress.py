"""Where the wall time goes, told by a clock that the tests move by hand."""

import io
import sys

import pytest

from bapo_jax.runtime import progress


class Hand:
  """A clock's hand: call it for the time, add to `t` to let time pass."""

  t = 100.0

  def __call__(self):
    return self.t


def test_inner_phase_is_not_counted_in_the_outer():
  hand = Hand()
  clock = progress.PhaseTimer(hand)
  hand.t += 1  # in no phase
  with clock('sample'):
    hand.t += 2
    with clock('score'):
      hand.t += 4
    hand.t += 8
    with clock('sample'):  # a phase inside itself is charged once
      hand.t += 16
  # sample 2 + 8 + 16, score 4; the second outside belongs to nobody
  assert clock.seconds == {'sample': 26.0, 'score': 4.0}
  # 1 + 2 + 4 + 8 + 16 = 31 seconds have passed
  assert clock.since() == {'sample': 26.0, 'score': 4.0, 'other': 1.0}


def test_since_tells_what_is_new_even_in_an_open_phase():
  hand = Hand()
  clock = progress.PhaseTimer(hand)
  with clock('update'):
    hand.t += 3
    assert clock.since() == {'update': 3.0, 'other': 0.0}
    hand.t += 5
  hand.t += 0.5
  assert clock.since() == {'update': 5.0, 'other': 0.5}
  assert clock.since() == {'other': 0.0}
  assert clock.seconds == {'update': 8.0}


def test_a_phase_that_raises_is_closed():
  hand = Hand()
  clock = progress.PhaseTimer(hand)
  with pytest.raises(KeyError), clock('save'):
    hand.t += 2
    raise KeyError
  hand.t += 7
  with clock('eval'):
    hand.t += 1
  assert clock.seconds == {'save': 2.0, 'eval': 1.0}


@pytest.mark.parametrize('log_s, drawn', [(0.0, True), (1000.0, False)])
def test_a_log_gets_whole_lines_and_none_from_a_short_bar(monkeypatch, log_s, drawn):
  stream = io.StringIO()
  monkeypatch.setattr(sys, 'stderr', stream)
  monkeypatch.setattr(progress, 'LOG_S', log_s)
  with progress.progress_bar(3, 'train', 'step') as bar:
    for _ in range(3):
      bar.update(1)
  text = stream.getvalue()
  assert '\r' not in text
  assert ('3/3' in text) == drawn
  assert drawn or text == ''


def test_say_prints_a_line(capsys):
  progress.log('step 1')
  assert capsys.readouterr().out == 'step 1\n'
