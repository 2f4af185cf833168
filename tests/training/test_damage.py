"""A damaged checkpoint is set aside, and the run resumes from the one before."""

import contextlib
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from runs import copied, last_run, same

from bapo_jax.runtime import digests
from bapo_jax.training import checkpoint
from bapo_jax.types import Tree

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
  'a file of the arrays deleted': lambda run: arrays(run).unlink(),
  'the arrays a file': lambda run: replaced_by_file(newest(run, 'arrays')),
  'no digests': lambda run: newest(run, 'digests.json').unlink(),
  'digests are no record': lambda run: newest(run, 'digests.json').write_text('[]'),
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


def test_files_that_orbax_writes_later_are_not_needed(broken):
  changed = [p for p in newest(broken, '').rglob('*') if p.name in LATER]
  assert changed
  for path in changed:
    path.write_text('x')
  step, found = restored(broken)
  assert step == STEPS[-1] and same(found, state(step))


def test_an_older_checkpoint_is_read_whole_before_it_is_taken(broken):
  for step in (3, 2):
    flip(arrays(broken, step))
  assert restored(broken)[0] == 1


def test_without_a_whole_checkpoint_nothing_is_moved(broken):
  for step in STEPS:
    flip(arrays(broken, step))
  for _ in range(2):
    with pytest.raises(ValueError, match='no whole checkpoint'):
      restored(broken)
  assert sorted(os.listdir(broken / 'checkpoints')) == ['1', '2', '3']


def test_tools_refuse_a_damaged_checkpoint_and_move_nothing(broken):
  flip(arrays(broken))
  with pytest.raises(ValueError, match=r'/3 is damaged .*\[1, 2, 3\]'):
    checkpoint.read_params(str(broken), STEPS[-1])
  assert newest(broken, '').is_dir()


def test_weights_of_a_warm_start_are_read_back_or_refused(tmp_path):
  params, path = state(1)['params'], tmp_path / 'warmstart' / 'aa'
  checkpoint.save_params(str(path), params)
  assert same(checkpoint.restore_params(str(path), params), params)
  np.testing.assert_array_equal(checkpoint.read_saved(str(path))('w'), params['w'])
  for file in filter(lambda file: file.stat().st_size, files(path)):
    flip(file)
    with pytest.raises(ValueError, match=file.name):
      checkpoint.restore_params(str(path), params)
    with pytest.raises(ValueError, match=file.name):
      checkpoint.read_saved(str(path))
    flip(file)
  checkpoint.save_params(str(path), params)  # in place of the old ones
  assert same(checkpoint.restore_params(str(path), params), params)
  with pytest.raises(ValueError, match='is missing'):
    checkpoint.read_saved(str(tmp_path / 'none'))


LAST = 4  # step of `whole_run`


def content(run: pathlib.Path) -> dict[str, dict]:
  """The evaluations, which a repair leaves as they were."""
  return {p.name: json.loads(p.read_text()) for p in (run / 'eval').glob('*.json')}


@pytest.fixture(scope='module')
def repaired(whole_run, tmp_path_factory) -> tuple[pathlib.Path, str]:
  """A copy of a run that resumed with five kinds of damage, and what it printed."""
  run = copied(whole_run.workdir, tmp_path_factory.mktemp('damaged') / 'run')
  flip(arrays(run, LAST))
  (warm,) = (run / 'warmstart').iterdir()
  flip(max(files(warm), key=lambda path: path.stat().st_size))
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
  for words in (f'checkpoints/{LAST} is damaged', 'The warm start', 'eval/0.json'):
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
  with pytest.raises(ValueError, match='another config'):
    runs.train(config.model_copy(update={'seed': 1}), run)
