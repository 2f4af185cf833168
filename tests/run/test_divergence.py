"""A run whose weights are lost stops, saved, with its own exit status."""

import numpy as np
import runs
from runs import last_run, tiny

from bapo_jax.run import experiment
from bapo_jax.training import checkpoint


def beyond(config, **sections):
  """Returns the config with values that no config of a user can have."""
  for name, values in sections.items():
    section = getattr(config, name).model_copy(update=values)
    config = config.model_copy(update={name: section})
  return config


def test_a_run_that_diverges_stops_saved_and_says_so(warm, capsys):
  # An update or two overflow every later forward pass.
  knobs = {'steps': 9, 'optimizer.warmup': 0, 'learner.max_consecutive_skips': 3}
  knobs |= {'checkpoint.keep': 9, 'evaluate.every': 99}
  config, workdir = beyond(tiny(**knobs), optimizer={'lr': 1e30}), warm()
  assert runs.train(config, workdir) == experiment.DIVERGED == 3
  run = last_run(workdir)
  step, skips = run.scalars['step'], run.scalars['consecutive_skips']
  out = capsys.readouterr().out
  assert 'learner.max_consecutive_skips=3' in out and 'Saved.' in out
  assert not (workdir / 'report.html').exists()
  assert step < config.steps

  # Two updates per step: it stops with the step in which the third was skipped.
  skipped = [int(float(run.rows[i]['learner/skipped'])) for i in range(1, step + 1)]
  assert 3 <= skips <= 4
  updates = [int(float(run.rows[i]['learner/updates'])) for i in range(1, step + 1)]
  applied = [2 * i - sum(skipped[:i]) for i in range(1, step + 1)]
  assert updates == applied and run.scalars['updates'] == applied[-1]
  assert skipped[-2:] == [skips - 2, 2] and sum(skipped[:-2]) < 2
  # The saved weights are those before the skips: changed, and finite.
  for name in ('embed', 'final_norm'):
    before, last = (
      checkpoint.read_params(str(workdir), n)(name) for n in (step - 1, step)
    )
    assert np.isfinite(last).all() and np.abs(last).max() > 1e20
    np.testing.assert_array_equal(last, before)


def test_a_run_whose_first_update_is_not_finite_says_so_at_once(warm, capsys):
  config = beyond(tiny(**{'steps': 9, 'evaluate.every': 50}), loss={'kl': 1e39})
  workdir = warm()
  assert config.learner.max_consecutive_skips > 2
  assert runs.train(config, workdir) == experiment.DIVERGED
  assert 'The first update of the run is not finite' in capsys.readouterr().out
  run = last_run(workdir)
  assert (run.scalars['step'], run.scalars['updates']) == (1, 0)
  assert run.scalars['consecutive_skips'] == 2
