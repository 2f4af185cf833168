"""Which values are saved, when a checkpoint is whole, and which stay."""

import contextlib
import io
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from refusals import sentence_of
from runs import copied, last_run, numbers, same, tiny

from bapo_jax.run import resume
from bapo_jax.runtime import digests, jax_options
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


def save_all(
  path, accuracies: dict[int, float | None], *settings, **knobs
) -> list[int]:
  """Saves a checkpoint per step, with its accuracy; returns the steps that stay."""
  knobs |= {'settings': settings[0]} if settings else {}
  with checkpoint.manager(str(path), **knobs) as checkpoints:
    for step, accuracy in accuracies.items():
      arrays = {'x': jnp.full(3, step)}
      checkpoint.save(checkpoints, step, arrays, {}, accuracy, *settings)
    checkpoint.wait(checkpoints)
    return checkpoints.all_steps()


def test_the_newest_and_the_best_stay(tmp_path):
  # 2 and 4 are the best: of equals the newer stays. 5 was not evaluated.
  accuracies = {1: 0.1, 2: 0.5, 3: None, 4: 0.5, 5: None, 6: 0.2}
  assert save_all(tmp_path, accuracies, keep=2, best=1) == [4, 5, 6]
  # In another process the accuracies are those on the disk.
  assert save_all(tmp_path, {7: None, 8: 0.4}, keep=2, best=1) == [4, 7, 8]
  choose = checkpoint.choose
  which = [choose(str(tmp_path), name) for name in ('newest', 'best', '7')]
  assert which == [8, 4, 7]
  assert max(checkpoint_steps(str(tmp_path))) == 8
  with pytest.raises(ValueError, match=r'=6 .* \[4, 7, 8\] \(evaluated: \[4, 8\]\)'):
    choose(str(tmp_path), '6')
  assert 'give newest, best or a step' in sentence_of(choose, str(tmp_path), 'last')
  assert save_all(tmp_path, {9: 0.1}, keep=1, best=0) == [9]
  save_all(tmp_path, {10: None}, keep=1, best=0)
  assert '[10] (evaluated: none)' in sentence_of(choose, str(tmp_path), 'best')
  assert choose(str(tmp_path / 'none'), 'best') is None


def test_accuracies_of_other_settings_are_not_ranked_together(tmp_path):
  save_all(tmp_path, {1: 0.9, 2: 0.8}, 7.0, keep=1, best=1)
  # 3 is the best with these settings, though 1 has a higher accuracy.
  assert save_all(tmp_path, {3: 0.3, 4: 0.2}, 8.0, keep=1, best=1) == [3, 4]
  assert checkpoint.choose(str(tmp_path), 'best') == 3
  save_all(tmp_path, {5: 0.25}, keep=9, best=1)  # of an old version
  assert checkpoint.choose(str(tmp_path), 'best') == 3


def started(sizes) -> tuple[Trainer, TrainState]:
  """A trainer and its state at step 0, on a mesh of these sizes."""
  knobs = dict(zip(('mesh.data', 'mesh.fsdp', 'mesh.tensor'), sizes, strict=True))
  knobs |= {'rollout.max_off_policy_steps': 1, 'rollout.weight_sync_interval': 2}
  config = tiny(**{'batch.rule': 'adapted', **knobs})
  with runs.on_devices(math.prod(sizes)):
    return build.start(config, PhaseTimer())


def filled(tree: Tree) -> Tree:
  """The same tree laid out the same way, with something to tell each number apart."""
  rng = np.random.default_rng(0)

  def fill(x):
    value = rng.integers(0, 100, x.shape).astype(x.dtype)
    return jax.device_put(value, x.sharding) if isinstance(x, jax.Array) else value

  return jax.tree.map(fill, tree)


def test_another_mesh_restores_the_same_values(tmp_path):
  workdir = tmp_path / 'run'
  t, old = started((1, 1, 1))
  arrays = filled(resume.arrays(t, old.replace(step=3)))
  scalars = numbers(old) | {'step': 3, 'actor_version': 2}
  with checkpoint.manager(str(workdir), 1) as checkpoints:
    meta = {'run': scalars, 'weights_only': False, 'queue': []}
    meta['generator'] = jax_options.generator()
    checkpoint.save(checkpoints, 3, arrays, meta)
    checkpoint.wait(checkpoints)
    t, fresh = started((2, 2, 2))
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


# ---------- a damaged checkpoint is set aside, and the run resumes from the one before


STEPS = (1, 2, 3)
LATER = digests.WRITTEN_LATER  # files without a digest
Damage = Callable[[pathlib.Path], object]


def state(step: int) -> Tree:
  """The arrays of a run after a step: sharded, whole, and on the host."""
  rng = np.random.default_rng(step)
  rows = jax.sharding.NamedSharding(
    jax.make_mesh((8,), ('x',)), jax.sharding.PartitionSpec('x')
  )
  w = rng.normal(size=(64, 32)).astype(np.float32)
  return {
    'params': {'w': jax.device_put(w, rows), 'b': jnp.full(3, step, jnp.bfloat16)},
    'opt': {'mu': jnp.asarray(w) * 0.1, 'count': jnp.asarray(step)},
    'actor': {'w': jnp.asarray(w) + 1},
    'buffer': rng.integers(0, 9, (5, 7), np.int32),
  }


def saved(path: pathlib.Path, step: int, arrays: Tree) -> None:
  """Adds a checkpoint to a workdir."""
  with checkpoint.manager(str(path), len(STEPS)) as checkpoints:
    checkpoint.save(checkpoints, step, arrays, {'run': {'step': step}}, 0.5)
    checkpoint.wait(checkpoints)


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
  """A workdir with a checkpoint of each of STEPS."""
  path = tmp_path_factory.mktemp('checkpoints') / 'whole'
  for step in STEPS:
    saved(path, step, state(step))
  return path


@pytest.fixture
def broken(whole, tmp_path) -> pathlib.Path:
  """A copy for one test to damage."""
  return copied(whole, tmp_path / 'run')


def restored(path: pathlib.Path) -> tuple[int, Tree]:
  """(step, arrays) that a run in this workdir resumes from."""
  with checkpoint.manager(str(path), len(STEPS)) as checkpoints:
    step = checkpoints.latest_step()
    assert step is not None
    arrays, meta = checkpoint.restore(checkpoints, step, state(step))
  assert meta == {'run': {'step': step}}
  return step, arrays


def files(path: pathlib.Path) -> list[pathlib.Path]:
  """All files below a directory that have digests."""
  found = sorted(p for p in path.rglob('*') if p.is_file())
  return [p for p in found if p.name not in (digests.NAME, *LATER)]


def newest(run: pathlib.Path, name: str) -> pathlib.Path:
  """A path in the newest checkpoint."""
  return run / 'checkpoints' / str(STEPS[-1]) / name


def arrays(run: pathlib.Path, step: int = STEPS[-1]) -> pathlib.Path:
  """The largest file of a checkpoint's arrays."""
  below = files(run / 'checkpoints' / str(step) / 'arrays')
  return max(below, key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path, at: int | None = None) -> None:
  """Inverts one byte of a file; its length stays."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2 if at is None else at] ^= 0xFF
  path.write_bytes(content)


def test_every_flipped_byte_of_every_file_is_noticed(broken):
  step, rng = broken / 'checkpoints' / str(STEPS[-1]), np.random.default_rng(0)
  below = files(step)
  assert len(below) >= 8 and arrays(broken).stat().st_size > 4_000
  assert digests.damage(str(step), step.name) == ''
  for path in below:
    size = path.stat().st_size
    places = {0, size // 2, size - 1, *rng.integers(0, size, 8).tolist()}
    for at in places if size else ():
      flip(path, at)
      why = digests.damage(str(step), step.name)
      assert why == f'{path.relative_to(step)} differs from its digest', at
      flip(path, at)


def replaced_by_file(path: pathlib.Path) -> None:
  """A file where a directory was."""
  shutil.rmtree(path)
  path.write_text('not a directory')


def copy_of_an_older_one(run: pathlib.Path) -> None:
  """The newest checkpoint is a copy of the one before it."""
  shutil.rmtree(newest(run, ''))
  shutil.copytree(run / 'checkpoints' / '2', newest(run, ''))


NEWEST: dict[str, Damage] = {
  'a byte of the arrays flipped': lambda run: flip(arrays(run)),
  'the arrays a file': lambda run: replaced_by_file(newest(run, 'arrays')),
  'no digests': lambda run: newest(run, 'digests.json').unlink(),
  'a copy of an older checkpoint': copy_of_an_older_one,
  'the checkpoint a file': lambda run: replaced_by_file(newest(run, '')),
}


@pytest.mark.parametrize('name', NEWEST)
def test_the_newest_whole_checkpoint_is_taken(name, broken, capsys):
  NEWEST[name](broken)
  for _ in range(2):  # the second start finds nothing to set aside
    step, found = restored(broken)
    assert step == 2 and same(found, state(2))
  assert capsys.readouterr().out.count('is damaged (') == 1
  names = sorted(os.listdir(broken / 'checkpoints'))
  assert names == ['1', '2', '3.damaged']


def test_an_older_checkpoint_is_read_whole_before_it_is_taken(broken):
  for step in (3, 2):
    flip(arrays(broken, step))
  assert restored(broken)[0] == 1


def test_without_a_whole_checkpoint_nothing_is_moved(broken):
  for step in STEPS:
    flip(arrays(broken, step))
  for _ in range(2):
    assert 'no complete checkpoint' in sentence_of(restored, broken)
  assert sorted(os.listdir(broken / 'checkpoints')) == ['1', '2', '3']


def test_tools_refuse_a_damaged_checkpoint_and_move_nothing(broken):
  flip(arrays(broken))
  with pytest.raises(ValueError, match=r'/3 is damaged .*\[1, 2, 3\]'):
    checkpoint.read_params(str(broken), STEPS[-1])
  assert newest(broken, '').is_dir()


LAST = 4  # step of `whole_run`


def content(run: pathlib.Path) -> dict[str, dict]:
  """The evaluations, which a repair leaves as they were."""
  return {p.name: json.loads(p.read_text()) for p in (run / 'eval').glob('*.json')}


@pytest.fixture(scope='module')
def repaired(whole_run, tmp_path_factory) -> tuple[pathlib.Path, str]:
  """A copy of a run that resumed with four kinds of damage, and what it printed."""
  run = copied(whole_run.workdir, tmp_path_factory.mktemp('damaged') / 'run')
  flip(arrays(run, LAST))
  os.truncate(run / 'eval' / '0.json', 100)
  (run / 'report.json').unlink()
  with open(run / 'metrics.jsonl', 'ab') as file:
    file.write(b'{"step": 9, "loss/kl": 1.0}\n{"step": 5, "loss/')
  with contextlib.redirect_stdout(io.StringIO()) as out:
    assert runs.train(whole_run.config, run) == 0
  return run, out.getvalue()


def test_a_damaged_run_ends_where_an_unbroken_one_does(whole_run, repaired):
  run, out = repaired
  assert f'Resuming after step {LAST - 1}.' in out
  for words in (f'checkpoints/{LAST} is damaged', 'eval/0.json'):
    assert out.count(words) == 1, words
  found, expected = last_run(run), last_run(whole_run.workdir)
  assert found.scalars == expected.scalars
  assert same(found.arrays, expected.arrays)
  assert found.rows == expected.rows
  assert content(run) == content(whole_run.workdir)
  assert (run / 'report.json').exists()


def test_lost_rows_are_counted(whole_run, tmp_path, capsys):
  config, run = whole_run.config, copied(whole_run.workdir, tmp_path / 'run')
  (run / 'metrics.jsonl').write_bytes(b'\x00\xff' * 40)
  assert runs.train(config, run) == 0
  assert f'lacks {LAST + 1} of the steps 0 to {LAST}' in capsys.readouterr().out
  assert 'another config' in sentence_of(
    runs.train, config.model_copy(update={'seed': 1}), run
  )
