"""Which values are saved, when a checkpoint is whole, which stay, how a save fails."""

import contextlib
import errno
import json
import math
import os
import resource
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import copied, numbers, same, tiny

from bapo_jax.run import resume
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.runtime.workdir import checkpoint_steps
from bapo_jax.training import build, checkpoint
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import Tree


def host(tree: Tree) -> Tree:
  """A copy on the host."""
  return jax.tree.map(lambda x: np.array(x, copy=True), tree)


@pytest.mark.parametrize('devices', [1, 8])
def test_values_are_those_held_when_the_save_began(devices, tmp_path):
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

  uid_B = np.arange(100)  # of partial rollouts, whose host arrays change in place
  with checkpoint.manager(str(tmp_path), 3) as checkpoints:
    for number in range(3):
      now, then, meta = host(arrays), uid_B.copy(), {'phases': {'sample': 1.0}}
      checkpoint.save(checkpoints, number, arrays | {'uid_B': uid_B}, meta)
      uid_B += 1
      meta['phases']['sample'] = 2.0  # the timer goes on
      for _ in range(3):
        arrays = step(arrays)
      jax.block_until_ready(arrays)
      checkpoint.wait(checkpoints)
      like = arrays | {'uid_B': uid_B}
      found, meta = checkpoint.restore(checkpoints, number, like)
      assert meta == {'phases': {'sample': 1.0}}
      assert same({k: found[k] for k in now}, now)
      np.testing.assert_array_equal(found['uid_B'], then)


def save_all(checkpoints, accuracies: dict[int, float | None]) -> None:
  """Saves a checkpoint per step, with its accuracy."""
  for step, accuracy in accuracies.items():
    checkpoint.save(checkpoints, step, {'x': jnp.full(3, step)}, {}, accuracy)
  checkpoint.wait(checkpoints)


def test_the_newest_and_the_best_stay(tmp_path):
  # 2 and 4 are the best: of equals the newer stays. 5 was not evaluated.
  accuracies = {1: 0.1, 2: 0.5, 3: None, 4: 0.5, 5: None, 6: 0.2}
  with checkpoint.manager(str(tmp_path), keep=2, best=1) as checkpoints:
    save_all(checkpoints, accuracies)
    assert checkpoints.all_steps() == [4, 5, 6]
  # In another process the accuracies are those on the disk.
  with checkpoint.manager(str(tmp_path), keep=2, best=1) as checkpoints:
    assert checkpoints.latest_step() == 6
    save_all(checkpoints, {7: None, 8: 0.4})
    assert checkpoints.all_steps() == [4, 7, 8]
  choose = checkpoint.choose
  which = [choose(str(tmp_path), name) for name in ('newest', 'best', '7')]
  assert which == [8, 4, 7]
  assert max(checkpoint_steps(str(tmp_path))) == 8
  with pytest.raises(ValueError, match=r'=6 .* \[4, 7, 8\] \(evaluated: \[4, 8\]\)'):
    choose(str(tmp_path), '6')
  with pytest.raises(ValueError, match='give newest, best or a step'):
    choose(str(tmp_path), 'last')
  with checkpoint.manager(str(tmp_path), keep=1, best=0) as checkpoints:
    save_all(checkpoints, {9: 0.1})
    assert checkpoints.all_steps() == [9]
    save_all(checkpoints, {10: None})
  with pytest.raises(ValueError, match=r'\[10\] \(evaluated: none\)'):
    choose(str(tmp_path), 'best')
  assert choose(str(tmp_path / 'none'), 'best') is None


@contextlib.contextmanager
def limited(size):
  """No file may grow beyond so many bytes: the system refuses as a full disk does."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The other parts of a refused write report to a loop that has ended.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_refused_write_is_an_oserror_that_names_the_checkpoint(tmp_path, capfd):
  noise = np.random.default_rng(0).normal(size=(2, 100_000))
  small, large = {'x': jnp.arange(3.0)}, {'x': noise[0], 'y': noise[1]}
  with checkpoint.manager(str(tmp_path), 2) as checkpoints:
    checkpoint.save(checkpoints, 1, small, {})
    checkpoint.wait(checkpoints)
    with limited(50_000):
      checkpoint.save(checkpoints, 2, large, {})
      with pytest.raises(OSError) as at_the_next:
        checkpoint.save(checkpoints, 3, small, {})
      checkpoint.save(checkpoints, 4, large, {})
      with pytest.raises(OSError) as at_the_end:
        checkpoint.wait(checkpoints)
    for caught, step in ((at_the_next, 2), (at_the_end, 4)):
      assert caught.value.errno == errno.EFBIG
      assert caught.value.filename == str(tmp_path / 'checkpoints' / str(step))
    # The space is given back, the last one is whole, and the next one can be written.
    assert os.listdir(tmp_path / 'checkpoints') == ['1']
    found, _ = checkpoint.restore(checkpoints, 1, small)
    assert same(found, small)
    checkpoint.save(checkpoints, 5, large, {})
    checkpoint.wait(checkpoints)
    assert max(checkpoint_steps(str(tmp_path))) == 5
  with limited(50_000), pytest.raises(OSError) as refused:
    checkpoint.save_params(str(tmp_path / 'weights'), large)
  assert refused.value.errno == errno.EFBIG
  assert refused.value.filename == str(tmp_path / 'weights')


def test_an_interrupt_does_not_wait_for_the_write():
  manager = unittest.mock.Mock(directory='/nowhere')
  with pytest.raises(KeyboardInterrupt), checkpoint.closing(manager):
    raise KeyboardInterrupt
  assert not manager.mock_calls
  with checkpoint.closing(manager):
    pass
  with pytest.raises(ZeroDivisionError), checkpoint.closing(manager):
    raise ZeroDivisionError
  calls = [name for name, *_ in manager.mock_calls if name != 'latest_step']
  assert calls == ['wait_until_finished', 'close'] * 2


def started(sizes, workdir, monkeypatch) -> tuple[Trainer, TrainState]:
  """A trainer and its state at step 0, on a mesh of these sizes."""
  devices = jax.devices()[: math.prod(sizes)]
  knobs = dict(zip(('mesh.data', 'mesh.fsdp', 'mesh.tensor'), sizes, strict=True))
  knobs |= {'rollout.max_off_policy_steps': 1, 'rollout.weight_sync_interval': 2}
  config = tiny(**{'batch.rule': 'adapted', **knobs})
  with monkeypatch.context() as patch:
    patch.setattr(jax, 'devices', lambda *_: devices)
    return build.start(config, str(workdir), PhaseTimer())


def filled(tree: Tree) -> Tree:
  """The same tree laid out the same way, with something to tell each number apart."""
  rng = np.random.default_rng(0)

  def fill(x):
    value = rng.integers(0, 100, x.shape).astype(x.dtype)
    return jax.device_put(value, x.sharding) if isinstance(x, jax.Array) else value

  return jax.tree.map(fill, tree)


def test_another_mesh_restores_the_same_values(warm_start, tmp_path, monkeypatch):
  workdir = copied(warm_start, tmp_path / 'run')
  t, old = started((1, 1, 1), workdir, monkeypatch)
  arrays = filled(resume.arrays(t, old.replace(step=3)))
  scalars = numbers(old) | {'step': 3, 'actor_version': 2}
  with checkpoint.manager(str(workdir), 1) as checkpoints:
    checkpoint.save(checkpoints, 3, arrays, {'run': scalars})
    checkpoint.wait(checkpoints)
    t, fresh = started((2, 2, 2), workdir, monkeypatch)
    layout = jax.tree.map(lambda x: x.sharding, fresh.params)
    s, _ = resume.resume(checkpoints, t, fresh)
  assert (s.step, s.actor_version) == (3, 2)
  found = resume.arrays(t, s)
  assert found.keys() == {'params', 'opt', 'actor', 'buffer', 'partial'}
  for part, value in found.items():
    assert same(value, arrays[part]), part
  # And they lie as the new mesh wants them.
  assert jax.tree.map(lambda x: x.sharding, s.params) == layout
  devices = {len(x.sharding.device_set) for x in jax.tree.leaves(s.params)}
  assert devices == {8}
  assert json.dumps(numbers(s)) == json.dumps(scalars)
