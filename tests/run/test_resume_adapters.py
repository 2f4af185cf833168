"""What a checkpoint of adapters holds, and that a run goes on from it bit by bit."""

import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import command, copied, last_run, one_device, same, tiny

from bapo_jax.models import lora, transformer
from bapo_jax.run import experiment, resume
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.training import build, checkpoint, policy, weights

# The actor of a checkpoint at an odd step is older than its parameters.
LORA = {
  'steps': 6,
  'lora.rank': 2,
  'optimizer.lr': 1e-2,
  'rollout.weight_sync_interval': 2,
  'rollout.max_off_policy_steps': 1,
  'checkpoint.keep': 9,
}


def frozen(workdir, knobs=LORA):
  """(trainer, state) at the start of the run in the workdir."""
  with one_device():
    return build.start(tiny(**knobs), str(workdir), PhaseTimer())


@pytest.mark.slow
def test_a_killed_run_ends_where_an_unbroken_one_does(warm_start, tmp_path):
  unbroken = copied(warm_start, tmp_path / 'unbroken')
  subprocess.run(**command(unbroken, **LORA), check=True)
  broken = copied(warm_start, tmp_path / 'broken')
  process = subprocess.Popen(**command(broken, **LORA), stdout=subprocess.DEVNULL)
  while not checkpoint_steps(str(broken)) and process.poll() is None:
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert 1 <= max(checkpoint_steps(str(broken))) < LORA['steps']
  subprocess.run(**command(broken, **LORA), check=True)
  for step in checkpoint_steps(str(broken)):
    ours, theirs = last_run(broken, step), last_run(unbroken, step)
    assert same(ours.arrays, theirs.arrays) and ours.scalars == theirs.scalars
    assert ours.rows == theirs.rows
    names = [name for name in ours.arrays if not name.startswith(('buffer', 'partial'))]
    sides = {name.rpartition('/')[2] for name in names}
    # Adapters and their moments, the older ones that decode, and no weight.
    assert sides <= {'a', 'b', 'count'}
    assert any(name.startswith('actor') for name in names) == bool(step % 2)
  _, s = frozen(unbroken)
  first, last = transformer.flatten(s.params), last_run(unbroken).arrays
  for path, adapter in first.items():
    assert not np.array_equal(last[f'params/{path}/b'], adapter.b)


@pytest.fixture(scope='module')
def trained(warm_start, tmp_path_factory):
  """A workdir with a run of adapters of two steps."""
  workdir = copied(warm_start, tmp_path_factory.mktemp('lora') / 'run')
  with one_device():
    assert experiment.train(tiny(**LORA | {'steps': 2}), str(workdir)) == 0
  return workdir


def test_adapters_are_read_merged_into_the_warm_start(trained):
  made = tiny(**LORA | {'steps': 2})
  t, s = frozen(trained, LORA | {'steps': 2})
  with one_device(), checkpoint.manager(str(trained), 9, 1) as checkpoints:
    s, _ = resume.resume(checkpoints, t, s)
  read = policy.reader(made, str(trained), 2)
  for path, w in transformer.flatten(lora.merge(t.weights(s.params))).items():
    np.testing.assert_array_equal(read(path), w)
  # An evaluation of another problem set has another config, and the same base.
  other = made.with_values(problems={'test': 7}, prompts={'max_prompt_tokens': 99})
  np.testing.assert_array_equal(
    policy.reader(other, str(trained), 2)('embed'), read('embed')
  )


def test_adapters_of_other_frozen_weights_are_refused(trained, tmp_path):
  workdir = copied(trained, tmp_path / 'run')
  t, s = frozen(workdir)
  other = jax.tree.map(jnp.copy, t.base)
  embed = other['embed']
  other['embed'] = embed.at[1, 2].set(jnp.nextafter(embed[1, 2], jnp.float32(9)))
  object.__setattr__(t, 'base', other)
  with (
    checkpoint.manager(str(workdir), 9, 1) as checkpoints,
    pytest.raises(ValueError, match='the frozen weights of this run are not') as error,
  ):
    resume.resume(checkpoints, t, s)
  assert 'those beside which step 2 was trained' in str(error.value)
  assert 'bring back its folder warmstart/, or' in str(error.value)


def test_a_fingerprint_is_of_the_numbers_and_their_places():
  rng = np.random.default_rng(0)
  tree = {'a': jnp.asarray(rng.normal(size=(4, 8, 6)), jnp.float32), 'b': jnp.ones(3)}
  found = weights.fingerprint(tree)
  assert found == weights.fingerprint(jax.tree.map(jnp.copy, tree))
  swapped = tree['a'].at[0, 0, 0].set(tree['a'][3, 7, 5])
  swapped = swapped.at[3, 7, 5].set(tree['a'][0, 0, 0])
  others = [
    {'a': swapped, 'b': tree['b']},
    {'a': tree['a'].reshape(8, 4, 6).reshape(4, 8, 6)[::-1], 'b': tree['b']},
    {'a': tree['a'], 'c': tree['b']},
    {'a': tree['a'].astype(jnp.bfloat16), 'b': tree['b']},
    {'a': tree['a'], 'b': -tree['b']},
  ]
  assert len({found, *map(weights.fingerprint, others)}) == 6
  mesh = jax.make_mesh((4, 2), ('x', 'y'))
  layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x', None, 'y'))
  spread = {'a': jax.device_put(tree['a'], layout), 'b': tree['b']}
  assert weights.fingerprint(spread) == found
  assert weights.fingerprint(None) == ''


def test_a_finished_run_may_leave_its_optimiser_out(warm_start, tmp_path):
  workdir = copied(warm_start, tmp_path / 'run')
  knobs = {'steps': 1, 'checkpoint.final': 'weights', 'model.dtype': 'bfloat16'}
  with one_device():
    assert experiment.train(tiny(**knobs), str(workdir)) == 0
    names = set(last_run(workdir).arrays)
    assert not any(name.startswith(('opt/inner', 'actor')) for name in names)
    assert {'params/embed', 'opt/master/embed'} <= names
    # Again, it is finished: nothing is lacking. More steps would lack the moments.
    assert experiment.train(tiny(**knobs), str(workdir)) == 0
    with pytest.raises(ValueError, match='holds no optimiser state'):
      experiment.train(tiny(**knobs | {'steps': 2}), str(workdir))


def test_a_checkpoint_with_an_actor_that_nobody_needs_is_restored(warm_start, tmp_path):
  """As versions before 2026-11-22 left them."""
  workdir = copied(warm_start, tmp_path / 'run')
  with one_device():
    t, s = build.start(tiny(), str(workdir), PhaseTimer())
    arrays = resume.arrays(t, s)
    assert 'actor' not in arrays
    old = arrays | {'actor': jax.tree.map(lambda x: x + 1, s.params)}
    with checkpoint.manager(str(workdir), 1) as checkpoints:
      checkpoint.save(checkpoints, 1, old, {'run': resume.scalars(s) | {'step': 1}})
      checkpoint.wait(checkpoints)
      found, _ = resume.resume(checkpoints, t, s)
      assert same(resume.arrays(t, found), arrays)
      with pytest.raises(ValueError, match='step 1 has no lost: another version'):
        checkpoint.restore(checkpoints, 1, arrays | {'lost': jnp.ones(2)})
