"""Runs with a quantised actor: they learn, resume to the bit, record its policy."""

import jax.numpy as jnp
import pytest
import runs
from making import OddVerifier
from runs import tiny

from bapo_jax.models.knobs import PROJECTIONS
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, resolve

KNOBS = runs.PARTIAL | {
  'steps': 2,
  'rollout.weight_sync_interval': 2,
  'checkpoint.keep': 99,
  'evaluate.every': 2,
}


@pytest.mark.parametrize('dtype', ['int8', 'float8_e4m3fn'])
def test_a_run_learns_and_resumes_to_the_bit(dtype, warm, tmp_path):
  config = tiny(**KNOBS, **{'sampler.actor_dtype': dtype})
  whole = runs.Recorded(config, warm('whole'))
  assert runs.train(config, whole.workdir, OddVerifier) == 0
  first, last = (runs.last_run(whole.workdir, step) for step in (1, 2))
  # Step 1 saves the actor of step 0, which samples once more, as it is in memory.
  actor = {name: x for name, x in first.arrays.items() if name.startswith('actor')}
  narrow = [x.dtype for name, x in actor.items() if name.endswith('values')]
  assert narrow == [jnp.dtype(dtype)] * len(PROJECTIONS)
  assert last.scalars['updates'] > 0 and not last.scalars['consecutive_skips']
  broken = runs.truncated(whole, tmp_path / 'broken', 1)
  assert runs.train(config, broken, OddVerifier) == 0
  resumed = runs.last_run(broken)
  assert resumed.scalars == last.scalars and resumed.rows.keys() == last.rows.keys()
  assert runs.same(resumed.arrays, last.arrays)


def test_a_run_records_the_log_probabilities_of_its_actor(warm):
  difference = {}
  for dtype in ('compute', 'int8'):
    knobs = {'steps': 1, 'evaluate.every': 1, 'sampler.actor_dtype': dtype}
    workdir = warm(dtype)
    assert runs.train(tiny(**knobs), workdir, OddVerifier) == 0
    difference[dtype] = float(runs.last_run(workdir).rows[1]['rollout/logp_diff'])
  assert difference['compute'] < 1e-5 and 1e-3 < difference['int8'] < 0.5


@pytest.mark.parametrize(
  ('dtype', 'when', 'recomputes'),
  [
    ('compute', 'auto', True),
    ('int8', 'auto', False),
    ('int8', 'on', True),
    ('compute', 'off', False),
  ],
)
def test_the_policy_of_a_quantised_actor_is_not_taken_for_the_learners(
  dtype, when, recomputes
):
  knobs = {'sampler.actor_dtype': dtype, 'learner.recompute_logprobs': when}
  r = resolve.resolve(tiny(**knobs, **{'model.compute': 'bfloat16', 'mesh.data': -1}))
  data = build.tabulate(r)
  t = build.make_trainer(r, data, build.make_verifier(r.config), PhaseTimer())
  assert (t.sampler.score is not None) == recomputes
