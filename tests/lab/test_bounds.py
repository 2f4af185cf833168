"""The clip rules of protocol 3: a run yoked to itself is the run, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from bapo_jax.runtime import metrics
from bapo_jax.types import Batch
from lab import experiments
from lab.experiments import RunSpec
from papers.bench import bounds
from papers.bench.experiments import LIMIT, REPLAYING, get_experiment, of_run

SEARCHING = {
  'clip.rule': 'recipe',
  **LIMIT,
  'learner.minibatches': 8,
  'optimizer.lr': 0.01,
  'prompts.count': 16,
  'sampler.group_size': 8,
  'sft.clean': 400,
  'steps': 3,
}


def train(workdir, **knobs):
  config = runs.tiny(**SEARCHING | knobs)
  assert runs.train(config, workdir) == 0
  return config


@pytest.fixture(scope='module')
def donor(tmp_path_factory):
  """A searching run, whose result is stored; returns (workdir, folder of results)."""
  folder = tmp_path_factory.mktemp('donor')
  run = RunSpec('recipe', {}, 3, train(folder / 'run'), {})
  made = experiments.outcome(run, str(folder / 'run'), 'c0ffee', {}, False)
  experiments.write(str(folder / 'results'), 'recipe-seed3', made)
  return folder / 'run', folder / 'results'


def yoked_to(results):
  return REPLAYING | {'clip.results': str(results), 'clip.donor': 'recipe-seed3'}


def test_a_run_yoked_to_itself_is_bit_identical_also_resumed(donor, tmp_path):
  searching, results = donor
  whole = runs.last_run(searching)
  states = {row['clip/low'] for row in metrics.read(searching, metrics.UPDATES)}
  assert len(states) > 1  # the search moved, and not always
  for steps in (2, 3):
    train(tmp_path, **yoked_to(results), steps=steps)
  again = runs.last_run(tmp_path)
  assert again.scalars == whole.scalars and runs.same(again.arrays, whole.arrays)
  # Only an update without evidence has other bounds: those of the next one with some.
  both = [metrics.read(x, metrics.UPDATES) for x in (tmp_path, searching)]
  for mine, theirs in zip(*both, strict=True):
    if mine['clip/no_evidence']:
      mine |= {bound: theirs[bound] for bound in ('clip/low', 'clip/high')}
    assert repr(mine) == repr(theirs)  # nan != nan


def test_updates_without_evidence_have_the_next_bounds_with_evidence(tmp_path):
  # Update 1 was not needed, 2 and 5 had no evidence; worked out by hand.
  updates = {
    'number': [0, 2, 3, 4, 5],
    'low': [0.8, 0.8, 0.95, 0.85, 0.8],
    'high': [1.2, 1.2, 2.0, 1.2, 1.2],
    'no_evidence': [0, 1, 0, 0, 1],
  }
  experiments.write(str(tmp_path), 'a', {'updates': updates})
  low_U, high_U = bounds.sequence(str(tmp_path), 'a')
  assert low_U.tolist() == np.float32([0.8, 0.95, 0.95, 0.95, 0.85, 0.85]).tolist()
  assert high_U.tolist() == np.float32([1.2, 2, 2, 2, 1.2, 1.2]).tolist()
  with pytest.raises(ValueError, match='no result of the donor b; run it first'):
    bounds.sequence(str(tmp_path), 'b')


def test_the_coin_is_as_often_wide_as_it_says():
  f32 = jnp.ones((2, 3))

  def low(update, draw):
    batch = batch_of(f32)._replace(update_B=update[None])
    return bounds.coin(f32, batch, weigh, wide=0.3, draw=draw).low

  over_updates = jax.vmap(low, (0, None))
  lows_DU = jax.vmap(over_updates, (None, 0))(jnp.arange(400), jnp.asarray([7, 8]))
  assert set(lows_DU.reshape(-1).tolist()) == set(np.float32([0.8, 0.95]).tolist())
  assert abs((lows_DU > 0.9).mean() - 0.3) < 3 * (0.3 * 0.7 / 800) ** 0.5
  assert (lows_DU[0] != lows_DU[1]).any()


def weigh(_):
  return jnp.ones((2, 3))


def batch_of(f32):
  flags = f32 > 0
  i32 = f32.astype(jnp.int32)
  adv_BT = jnp.broadcast_to(jnp.float32([[1], [-1]]), f32.shape)
  return Batch(i32, flags, f32, f32, adv_BT, i32[:, 0], flags)


def test_every_arm_has_the_protocol_s_search_and_a_partner_as_donor():
  made = get_experiment('yoked_s1')
  run = experiments.runs(made)
  assert run['balanced-seed640'].config.clip == bounds.SEARCHES['balanced']
  assert of_run('yoked', 'yoked', {'rate': 'lr0.0006'}, 601) == {
    'problems.custom.seed': 601,
    'clip.results': 'papers/bench/results/yoked',
    'clip.donor': 'recipe-lr0.0006-seed600',
  }
  for name, count in (('yoked', 392), ('yoked_s1', 96), ('yoked_depths', 64)):
    run = experiments.runs(get_experiment(name))
    names = list(run)
    assert len(names) == count
    for yoked in (x for x in names if x.startswith('yoked')):
      donor = run[yoked].config.clip.donor
      # Two runs train at once: the donor of a run is over when the run begins.
      assert names.index(donor) < names.index(yoked) - 3
