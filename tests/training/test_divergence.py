"""A run whose weights are lost stops, saved, with a status of its own."""

import numpy as np
import pytest
from test_experiment import last_run, tiny

from bapo_jax.runtime import metrics
from bapo_jax.training import checkpoint, experiment


@pytest.mark.slow
def test_a_run_that_diverges_stops_saved_and_says_so(tmp_path, one_device, capsys):
  # A learning rate at which an update or two overflow every later forward pass.
  config = tiny(
    **{
      'steps': 9,
      'optimizer.lr': 1e30,
      'optimizer.warmup': 0,
      'learner.max_consecutive_skips': 3,
      'checkpoint.keep': 9,
    }
  )
  assert experiment.train(config, str(tmp_path)) == experiment.DIVERGED == 3
  out = capsys.readouterr().out
  run, _ = last_run(tmp_path, config)
  assert f'{run.skipped} updates in a row were skipped' in out
  assert '(learner.max_consecutive_skips=3)' in out and 'Saved. The same command' in out
  assert not (tmp_path / 'report.md').exists()
  assert run.step == checkpoint.newest(str(tmp_path)) < config.steps

  # Two updates a step: it stops with the step in which the third of them was skipped.
  skipped = [int(row['learner/skipped']) for row in metrics.read(tmp_path)[1:]]
  assert len(skipped) == run.step and 3 <= run.skipped <= 4
  assert skipped[-2:] == [run.skipped - 2, 2] and sum(skipped[:-2]) < 2
  # What is saved are the weights before: they were changed, and are finite.
  for name in ('embed', 'final_norm'):
    before, last = (
      checkpoint.read_params(str(tmp_path), step)(name)
      for step in (run.step - 1, run.step)
    )
    assert np.isfinite(last).all() and np.abs(last).max() > 1e20
    np.testing.assert_array_equal(last, before)
