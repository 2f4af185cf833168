"""What is saved, when it is whole, which are kept, and what is said when it fails."""

import asyncio
import errno
import json
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_experiment import tiny

from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import checkpoint, experiment, setup, validate


def host(tree):
  return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def equal(a, b):
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves)


@pytest.mark.parametrize('devices', [1, 8])
def test_what_is_written_is_what_was_held_when_the_save_began(devices, tmp_path):
  mesh = jax.make_mesh((devices,), ('x',), devices=jax.devices()[:devices])
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  first = np.random.default_rng(0).normal(size=(12, 1024, 256)).astype(np.float32)
  arrays = {str(i): jax.device_put(x, rows) for i, x in enumerate(first)}
  step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)

  def places(tree):
    shards = [s.data for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return {shard.unsafe_buffer_pointer() for shard in shards}

  arrays = step(arrays)
  before = places(arrays)
  arrays = step(arrays)
  assert places(arrays) & before, 'donated buffers are reused, or nothing is tested'

  uid_B = np.arange(100)  # of a flight, whose host arrays change in place
  with checkpoint.manager(str(tmp_path), 3) as kept:
    for number in range(3):
      now, then = host(arrays), uid_B.copy()
      checkpoint.save(kept, number, arrays | {'uid_B': uid_B}, {})
      uid_B += 1
      for _ in range(3):
        arrays = step(arrays)
      jax.block_until_ready(arrays)
      checkpoint.wait(kept)
      like = arrays | {'uid_B': uid_B}
      found, _ = checkpoint.restore(kept, number, like)
      assert equal({k: found[k] for k in now}, now)
      np.testing.assert_array_equal(found['uid_B'], then)


def test_what_is_noted_beside_it_is_too(tmp_path, monkeypatch):
  write = ocp.JsonCheckpointHandler._save_fn

  async def late(self, *what):
    await asyncio.sleep(0.3)
    await write(self, *what)

  monkeypatch.setattr(ocp.JsonCheckpointHandler, '_save_fn', late)
  phases = {'sample': 1.0}
  with checkpoint.manager(str(tmp_path), 1) as kept:
    checkpoint.save(kept, 1, {'x': jnp.ones(3)}, {'phases': phases})
    phases['sample'] = 2.0  # the clock goes on
    checkpoint.wait(kept)
    assert checkpoint.read_meta(kept, 1) == {'phases': {'sample': 1.0}}


def save_all(kept, accuracies):
  for step, accuracy in accuracies.items():
    checkpoint.save(kept, step, {'x': jnp.full(3, step)}, {}, accuracy)
  checkpoint.wait(kept)


def test_the_newest_and_the_best_are_kept(tmp_path):
  # 2 and 4 are the best: of equals the newer stays. 5 was not evaluated.
  accuracies = {1: 0.1, 2: 0.5, 3: None, 4: 0.5, 5: None, 6: 0.2}
  with checkpoint.manager(str(tmp_path), keep=2, best=1) as kept:
    save_all(kept, accuracies)
    assert kept.all_steps() == [4, 5, 6]
  # In another process the accuracies are those on the disk.
  with checkpoint.manager(str(tmp_path), keep=2, best=1) as kept:
    assert kept.latest_step() == 6
    save_all(kept, {7: None, 8: 0.4})
    assert kept.all_steps() == [4, 7, 8]
  choose = checkpoint.choose
  which = [choose(str(tmp_path), name) for name in ('newest', 'best', '7')]
  assert which == [8, 4, 7]
  assert checkpoint.newest(str(tmp_path)) == 8
  with pytest.raises(ValueError, match=r'checkpoint=6: .* \[4, 7, 8\], \[4, 8\] of'):
    choose(str(tmp_path), '6')
  with pytest.raises(ValueError, match='give newest, best or a step'):
    choose(str(tmp_path), 'last')
  with checkpoint.manager(str(tmp_path), keep=1, best=0) as kept:
    save_all(kept, {9: 0.1})
    assert kept.all_steps() == [9]
  assert choose(str(tmp_path / 'none'), 'best') is None


def test_without_an_evaluation_there_is_no_best(tmp_path):
  with checkpoint.manager(str(tmp_path), keep=2, best=1) as kept:
    save_all(kept, {1: None, 2: None, 3: None})
    assert kept.all_steps() == [2, 3]
  with pytest.raises(ValueError, match=r'\[2, 3\], none of them evaluated'):
    checkpoint.choose(str(tmp_path), 'best')


class Limit:
  """No file may grow beyond so many bytes: the system refuses as a full disk does."""

  def __init__(self, size):
    self.size = size

  def __enter__(self):
    self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

  def __exit__(self, *_):
    resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


# The other parts of a refused write report to a loop that has ended.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_refused_write_is_an_oserror_that_names_the_checkpoint(tmp_path, capfd):
  noise = np.random.default_rng(0).normal(size=(2, 100_000))
  small, large = {'x': jnp.arange(3.0)}, {'x': noise[0], 'y': noise[1]}
  with checkpoint.manager(str(tmp_path), 2) as kept:
    checkpoint.save(kept, 1, small, {})
    checkpoint.wait(kept)
    with Limit(50_000):
      checkpoint.save(kept, 2, large, {})
      with pytest.raises(OSError) as at_the_next:
        checkpoint.save(kept, 3, small, {})
      checkpoint.save(kept, 4, large, {})
      with pytest.raises(OSError) as at_the_end:
        checkpoint.wait(kept)
    for caught, step in ((at_the_next, 2), (at_the_end, 4)):
      assert caught.value.errno == errno.EFBIG
      assert caught.value.filename == str(tmp_path / 'checkpoints' / str(step))
    # The space is given back, the last one is whole, and the next one can be written.
    assert os.listdir(tmp_path / 'checkpoints') == ['1']
    found, _ = checkpoint.restore(kept, 1, small)
    assert equal(found, small)
    checkpoint.save(kept, 5, large, {})
    checkpoint.wait(kept)
    assert checkpoint.newest(str(tmp_path)) == 5
  with Limit(50_000), pytest.raises(OSError) as refused:
    checkpoint.save_params(str(tmp_path / 'weights'), large)
  assert refused.value.errno == errno.EFBIG
  assert refused.value.filename == str(tmp_path / 'weights')


class Slow:
  """Stands for a manager whose write does not end."""

  def __init__(self):
    self.asked = []

  directory = '/nowhere'
  latest_step = all_steps = lambda self: None

  def wait_until_finished(self):
    self.asked.append('wait')

  def close(self):
    self.asked.append('close')


def test_an_interrupt_does_not_wait_for_the_write():
  slow = Slow()
  with pytest.raises(KeyboardInterrupt), checkpoint.closing(slow):
    raise KeyboardInterrupt
  assert not slow.asked
  with checkpoint.closing(slow):
    pass
  with pytest.raises(ZeroDivisionError), checkpoint.closing(slow):
    raise ZeroDivisionError
  assert slow.asked == ['wait', 'close'] * 2


MESHES = {
  'one': (1, {'data': 1}),
  'rows': (8, {'data': 8}),
  'all three': (8, {'data': 2, 'fsdp': 2, 'tensor': 2}),
}


def started(kind, workdir, monkeypatch):
  """A run that has done nothing yet, on a mesh of this kind."""
  count, axes = MESHES[kind]
  devices = jax.devices()[:count]
  knobs = {f'mesh.{axis}': size for axis, size in axes.items()}
  config = tiny(**{'batch.rule': 'adapted', 'rollout.max_off_policy_steps': 1, **knobs})
  with monkeypatch.context() as patched:
    patched.setattr(jax, 'devices', lambda *_: devices)
    patched.setattr(
      RolloutEngine, 'warm_up', lambda *_, **__: None
    )  # nothing is sampled
    return setup.start(config, validate.check(config), str(workdir), PhaseTimer())[1]


def filled(tree):
  """The same tree laid out the same way, with something to tell each number apart."""
  rng = np.random.default_rng(0)

  def fill(x):
    value = rng.integers(0, 100, x.shape).astype(x.dtype)
    return jax.device_put(value, x.sharding) if isinstance(x, jax.Array) else value

  return jax.tree.map(fill, tree)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('then', 'now'),
  [('one', 'rows'), ('one', 'all three'), ('rows', 'one'), ('all three', 'one')],
)
def test_another_mesh_restores_the_same_values(then, now, tmp_path, monkeypatch):
  old = started(then, tmp_path, monkeypatch)
  arrays = filled(experiment.arrays(old))
  scalars = experiment.scalars(old) | {'step': 3, 'actor_version': 2}
  with checkpoint.manager(str(tmp_path), 1) as kept:
    checkpoint.save(kept, 3, arrays, {'run': scalars})
    checkpoint.wait(kept)
    fresh = started(now, tmp_path, monkeypatch)
    layout = jax.tree.map(lambda x: x.sharding, fresh.params)
    run, _ = experiment.resume(kept, fresh)
  assert (run.step, run.actor_version) == (3, 2)
  found = experiment.arrays(run)
  assert found.keys() == {'params', 'opt', 'actor', 'buffer', 'flight'}
  for part, value in found.items():
    assert equal(value, arrays[part]), part
  # And they lie as the new mesh wants them.
  assert jax.tree.map(lambda x: x.sharding, run.params) == layout
  devices = {len(x.sharding.device_set) for x in jax.tree.leaves(run.params)}
  assert devices == {MESHES[now][0]}
  assert json.dumps(experiment.scalars(run)) == json.dumps(scalars)
