"""Where the wall time goes, by a clock that the tests move by hand."""

import io
import sys

import numpy as np
import pytest
from absl import logging

from bapo_jax.runtime import progress
from bapo_jax.training import checkpoint


class Hand:
  """A clock's hand: call it for the time, add to `t` to let time pass."""

  t = 100.0

  def __call__(self):
    return self.t


def test_inner_phase_is_not_counted_in_the_outer():
  hand = Hand()
  timer = progress.PhaseTimer(hand)
  hand.t += 1  # in no phase
  with timer('sample'):
    hand.t += 2
    with timer('verify'):
      hand.t += 4
    hand.t += 8
    with timer('sample'):  # a phase inside itself is charged once
      hand.t += 16
  # sample 2 + 8 + 16, verify 4; the second outside is of no phase
  assert timer.seconds == {'sample': 26.0, 'verify': 4.0}
  # 1 + 2 + 4 + 8 + 16 = 31 seconds have passed
  assert timer.since() == {'sample': 26.0, 'verify': 4.0, 'other': 1.0}


def test_since_counts_what_is_new_even_in_an_open_phase():
  hand = Hand()
  timer = progress.PhaseTimer(hand)
  with timer('update'):
    hand.t += 3
    assert timer.since() == {'update': 3.0, 'other': 0.0}
    hand.t += 5
  hand.t += 0.5
  assert timer.since() == {'update': 5.0, 'other': 0.5}
  assert timer.since() == {'other': 0.0}
  assert timer.seconds == {'update': 8.0}


def test_a_phase_that_raises_is_closed():
  hand = Hand()
  timer = progress.PhaseTimer(hand)
  with pytest.raises(KeyError), timer('save'):
    hand.t += 2
    raise KeyError
  hand.t += 7
  with timer('eval'):
    hand.t += 1
  assert timer.seconds == {'save': 2.0, 'eval': 1.0}


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


def test_a_resumed_bar_counts_from_where_it_is(monkeypatch):
  stream = io.StringIO()
  monkeypatch.setattr(sys, 'stderr', stream)
  monkeypatch.setattr(progress, 'LOG_S', 0.0)
  with progress.progress_bar(400, 'training', 'step', initial=300) as bar:
    bar.update(1)
    assert bar.n == 301
    # The rate is of this part of the run: one step, not 301.
    assert bar.format_dict['initial'] == 300
  assert '301/400' in stream.getvalue()


def test_absl_warns_outside_and_is_quiet_within(caplog):
  before = logging.get_verbosity()
  with progress.quiet_absl():
    logging.warning('meant')
    logging.error('an error')
  assert [record.message for record in caplog.records] == ['an error']
  with pytest.raises(KeyError), progress.quiet_absl():
    raise KeyError
  assert logging.get_verbosity() == before
  logging.set_verbosity(logging.FATAL)
  try:
    with progress.quiet_absl():  # never louder than outside
      assert logging.get_verbosity() == logging.FATAL
  finally:
    logging.set_verbosity(before)


def test_orbax_does_not_warn_of_what_is_meant(tmp_path, caplog):
  # Its warnings are on the console wherever main.py has not silenced absl.
  with checkpoint.manager(str(tmp_path), keep=1, best=1) as checkpoints:
    checkpoint.save(checkpoints, 1, {'x': np.ones(3)}, {})
    checkpoint.save(checkpoints, 2, {'x': np.ones(3)}, {}, accuracy=0.5)
    checkpoint.wait(checkpoints)
    checkpoint.restore(checkpoints, 2, {'x': np.ones(3)})
  assert checkpoint.choose(str(tmp_path), 'best') == 2
  assert not [record for record in caplog.records if record.levelname != 'INFO']
