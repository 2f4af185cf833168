"""A run whose weights are lost stops, saved, with a status of its own."""

import numpy as np
import pytest
from runs import last_run, tiny

from bapo_jax.run import experiment
from bapo_jax.training import weights


@pytest.mark.slow
def test_a_run_that_diverges_stops_saved_and_says_so(warm, one_device, capsys):
  # An update or two overflow every later forward pass.
  config = tiny(
    **{
      'steps': 9,
      'optimizer.warmup': 0,
      'learner.max_consecutive_skips': 3,
      'checkpoint.keep': 9,
    }
  )
  # A learning rate beyond the knob's range, which a config of a user cannot have.
  optimizer = config.optimizer.model_copy(update={'lr': 1e30})
  config = config.model_copy(update={'optimizer': optimizer})
  workdir = warm()
  assert experiment.train(config, str(workdir)) == experiment.DIVERGED == 3
  out = capsys.readouterr().out
  run = last_run(workdir)
  step, skips = run.scalars['step'], run.scalars['consecutive_skips']
  assert f'{skips} updates in a row were skipped' in out
  assert '(learner.max_consecutive_skips=3)' in out and 'Saved. The same command' in out
  assert not (workdir / 'report.md').exists()
  assert step < config.steps

  # Two updates per step: it stops with the step in which the third was skipped.
  skipped = [int(float(run.rows[i]['learner/skipped'])) for i in range(1, step + 1)]
  assert 3 <= skips <= 4
  updates = [int(float(run.rows[i]['learner/updates'])) for i in range(1, step + 1)]
  applied = [2 * i - sum(skipped[:i]) for i in range(1, step + 1)]
  assert updates == applied and run.scalars['updates'] == applied[-1]
  assert skipped[-2:] == [skips - 2, 2] and sum(skipped[:-2]) < 2
  # The weights that are saved are those before: they were changed, and are finite.
  for name in ('embed', 'final_norm'):
    before, last = (
      weights.read_params(str(workdir), n)(name) for n in (step - 1, step)
    )
    assert np.isfinite(last).all() and np.abs(last).max() > 1e20
    np.testing.assert_array_equal(last, before)


@pytest.mark.slow
def test_a_run_whose_first_update_is_not_finite_says_so_at_once(
  warm, one_device, capsys
):
  # A cost beyond float32, which a config of a user cannot have.
  config = tiny(**{'steps': 9, 'evaluate.every': 50})
  loss = config.loss.model_copy(update={'kl': 1e39})
  config = config.model_copy(update={'loss': loss})
  workdir = warm()
  assert experiment.train(config, str(workdir)) == experiment.DIVERGED
  out = capsys.readouterr().out
  assert 'The first update of the run is not finite' in out and 'model.compute' in out
  assert config.learner.max_consecutive_skips == 64
  run = last_run(workdir)
  assert (run.scalars['step'], run.scalars['updates']) == (1, 0)
  assert run.scalars['consecutive_skips'] == 2
