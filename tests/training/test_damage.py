"""A damaged workdir: the run goes on from what is whole, or ends in one sentence."""

import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import runs
from runs import copied, last_run, same, tiny

from bapo_jax.run import experiment, resume
from bapo_jax.runtime import metrics, workdir
from bapo_jax.tools import eval_checkpoint, export, viewer
from bapo_jax.training import checkpoint
from bapo_jax.training.state import Trainer, TrainState

pytestmark = pytest.mark.slow

LAST = 4
KNOBS = {'checkpoint.keep': 3, 'checkpoint.best': 1, 'steps': LAST}
KNOBS |= {'batch.rule': 'adapted'}  # a checkpoint has a buffer, too
KNOBS |= {'rollout.weight_sync_interval': 3}  # and the newest an actor of its own
Damage = Callable[[pathlib.Path], None]


@pytest.fixture(scope='session')
def unbroken(warm_start, tmp_path_factory) -> pathlib.Path:
  """The workdir of a run of LAST steps; checkpoints 2, 3 and 4."""

  def make(path):
    runs.copied(warm_start, path)
    with runs.one_device():
      assert experiment.train(tiny(**KNOBS), str(path)) == 0

  return runs.shared(tmp_path_factory, 'undamaged', make)


@pytest.fixture
def broken(unbroken, tmp_path) -> pathlib.Path:
  """A copy of it, for one test to damage."""
  return copied(unbroken, tmp_path / 'run')


@pytest.fixture
def resumed(
  monkeypatch, one_device
) -> Callable[[pathlib.Path], tuple[Trainer, TrainState]]:
  """Runs the command up to the first step that it would train; returns its state."""

  def state(path):
    found = []

    def loop(self, first):
      found.append((self.t, first))
      return first, 128

    with monkeypatch.context() as patch:
      patch.setattr(experiment, 'compiled', lambda t, s: t)  # nothing runs
      patch.setattr(experiment.Run, 'loop', loop)
      experiment.train(tiny(**KNOBS), str(path))
    return found[0]

  return state


def assert_at(t: Trainer, s: TrainState, unbroken: pathlib.Path, step: int) -> None:
  """The state is, to the last bit, that of the unbroken run after the step."""
  whole = last_run(unbroken, step)
  assert resume.scalars(s) == whole.scalars
  flat = checkpoint._solid(resume.arrays(t, s))
  assert flat.keys() == whole.arrays.keys()
  assert same(flat, whole.arrays)


def flip(path: pathlib.Path, count: int = 50) -> None:
  """Changes bytes in the middle of a file; its length stays."""
  data = bytearray(path.read_bytes())
  middle = len(data) // 2
  for i in range(middle, min(middle + count, len(data))):
    data[i] ^= 0xFF
  path.write_bytes(bytes(data))


def largest(path: pathlib.Path) -> pathlib.Path:
  """The largest file below a directory."""
  return max(
    (p for p in path.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size
  )


def arrays(run: pathlib.Path) -> pathlib.Path:
  """The largest file of the newest checkpoint's arrays."""
  return largest(run / 'checkpoints' / str(LAST) / 'arrays')


def newest(run: pathlib.Path, name: str) -> pathlib.Path:
  """A file of the newest checkpoint."""
  return run / 'checkpoints' / str(LAST) / name


def poisoned(part: str, value: float) -> Damage:
  """Saves the newest checkpoint again, digests and all, with one number changed."""

  def damage(run):
    whole = last_run(run)
    meta = json.loads(newest(run, 'meta/metadata').read_text())
    arrays = {name: np.array(x) for name, x in whole.arrays.items()}
    name = next(
      n
      for n, x in arrays.items()
      if n.startswith(f'{part}/') and x.dtype == np.float32 and x.size > 1
    )
    arrays[name].flat[0] = value
    shutil.rmtree(run / 'checkpoints' / str(LAST))
    with checkpoint.manager(str(run), 9) as checkpoints:
      checkpoint.save(checkpoints, LAST, arrays, meta)
      checkpoint.wait(checkpoints)

  return damage


def replaced_by_file(path: pathlib.Path) -> None:
  """A file where a directory was."""
  shutil.rmtree(path)
  path.write_text('not a directory')


def edited(path: pathlib.Path, change: Callable[[dict], object]) -> None:
  """Changes a JSON file in place."""
  value = json.loads(path.read_text())
  change(value)
  path.write_text(json.dumps(value))


def wrong_digest(run: pathlib.Path) -> None:
  """The digest of a file is that of another one."""
  edited(
    newest(run, 'digests.json'),
    lambda r: r['files'].update({'meta/metadata': [1, '0' * 32]}),
  )


def copy_of_an_older_one(run: pathlib.Path) -> None:
  """The newest checkpoint is a copy of the one before it."""
  shutil.rmtree(newest(run, ''))
  shutil.copytree(run / 'checkpoints' / '3', run / 'checkpoints' / str(LAST))


def meta_of_an_older_one(run: pathlib.Path) -> None:
  """The scalars are those of another step."""
  older = run / 'checkpoints' / '3' / 'meta' / 'metadata'
  shutil.copy(older, newest(run, 'meta/metadata'))


# The newest checkpoint is damaged; the one before it is taken.
NEWEST: dict[str, Damage] = {
  'fifty bytes of the arrays flipped': lambda run: flip(arrays(run)),
  'one byte of the arrays flipped': lambda run: flip(arrays(run), 1),
  'a file of the arrays cut': lambda run: os.truncate(arrays(run), 10),
  'a file of the arrays emptied': lambda run: os.truncate(arrays(run), 0),
  'a file of the arrays deleted': lambda run: arrays(run).unlink(),
  'the arrays deleted': lambda run: shutil.rmtree(newest(run, 'arrays')),
  'arrays a file': lambda run: replaced_by_file(newest(run, 'arrays')),
  'meta is no JSON': lambda run: newest(run, 'meta/metadata').write_text('{"run": '),
  'meta has another type': lambda run: newest(run, 'meta/metadata').write_text('[1]'),
  'meta of another step': meta_of_an_older_one,
  'accuracy is no JSON': lambda run: newest(run, 'metrics/metrics').write_text('\0'),
  'metadata is no JSON': lambda run: newest(run, '_CHECKPOINT_METADATA').write_text(
    'x'
  ),
  'no digests': lambda run: newest(run, 'digests.json').unlink(),
  'digests are no JSON': lambda run: newest(run, 'digests.json').write_text('{'),
  'digests of another type': lambda run: newest(run, 'digests.json').write_text('[]'),
  'a wrong digest': wrong_digest,
  'a copy of an older checkpoint': copy_of_an_older_one,
  'the checkpoint a file': lambda run: replaced_by_file(newest(run, '')),
  'the checkpoint empty': lambda run: (
    shutil.rmtree(newest(run, '')),
    newest(run, '').mkdir(),
  ),
  'a link to itself': lambda run: (
    arrays(run).unlink(),
    (newest(run, 'arrays/d')).rename(newest(run, 'arrays/e')),
    os.symlink('d', newest(run, 'arrays/d')),
  ),
  'NaN in the weights': poisoned('params', np.nan),
  'infinity in the optimiser': poisoned('opt', np.inf),
  'NaN in the weights of the actor': poisoned('actor', -np.inf),
}


@pytest.mark.parametrize('name', NEWEST)
def test_the_newest_whole_checkpoint_is_taken(name, broken, unbroken, resumed, capsys):
  NEWEST[name](broken)
  t, s = resumed(broken)
  assert_at(t, s, unbroken, LAST - 1)
  out = capsys.readouterr().out
  assert out.count('is damaged (') == 1
  assert f'set aside as {broken}/checkpoints/{LAST}.damaged' in out
  assert f'Resuming after step {LAST - 1}.' in out
  names = sorted(os.listdir(broken / 'checkpoints'))
  assert names == ['2', '3', f'{LAST}.damaged']


def test_from_an_older_checkpoint_the_run_ends_where_an_unbroken_one_does(
  broken, unbroken, one_device
):
  for _ in range(2):  # damaged again, it does not replace what was set aside
    flip(arrays(broken))
    assert experiment.train(tiny(**KNOBS), str(broken)) == 0
    found, whole = last_run(broken), last_run(unbroken)
    assert found.scalars == whole.scalars
    assert same(found.arrays, whole.arrays)
    assert found.rows == whole.rows
  aside = {f'{LAST}.damaged', f'{LAST}.damaged-2'}
  assert aside < set(os.listdir(broken / 'checkpoints'))


def test_an_older_checkpoint_is_read_whole_before_it_is_taken(
  broken, unbroken, resumed
):
  flip(largest(broken / 'checkpoints' / '3' / 'arrays'))
  poisoned('params', np.nan)(broken)
  assert_at(*resumed(broken), unbroken, 2)


@pytest.mark.parametrize('kind', ['digests', 'not finite'])
def test_with_no_whole_checkpoint_one_sentence_says_what_to_do(
  kind, broken, unbroken, resumed
):
  if kind == 'not finite':
    poisoned('params', np.nan)(broken)
    wanted = f'{LAST}: params/.* is not finite'
  else:
    flip(arrays(broken))
    wanted = f'{LAST}: arrays/.* differs from its digest'
  for step in (2, 3):
    flip(largest(broken / 'checkpoints' / str(step) / 'arrays'))
  for _ in range(2):  # and again: nothing was set aside, and nothing is trained
    with pytest.raises(ValueError, match=rf'no whole checkpoint \(.*{wanted}.*remove'):
      resumed(broken)
  assert sorted(os.listdir(broken / 'checkpoints')) == ['2', '3', '4']
  shutil.rmtree(broken / 'checkpoints')  # the way out
  assert resumed(broken)[1].step == 0


def append(path: pathlib.Path, data: bytes) -> None:
  """Writes at the end of a file."""
  with open(path, 'ab') as file:
    file.write(data)


def warm(run: pathlib.Path) -> pathlib.Path:
  """The directory of the warm start."""
  (found,) = (run / 'warmstart').iterdir()
  return found


NO_STEPS = ('notes', '007', '\u0667', '-1')  # int() reads all but the first

# Nothing is lost: (damage, what is logged). The run is as if nothing had happened.
REPAIRED: dict[str, tuple[Damage, str]] = {
  'a torn last line': (
    lambda run: append(run / 'metrics.jsonl', b'{"step": 5, "loss/'),
    '',
  ),
  'a binary last line': (
    lambda run: append(run / 'metrics.jsonl', b'\xff\x00\xfe'),
    '',
  ),
  'rows of the future': (
    lambda run: append(run / 'metrics.jsonl', b'{"step": 9, "loss/kl": 1.0}\n'),
    '',
  ),
  'a warm start flipped': (lambda run: flip(largest(warm(run))), 'made again'),
  'half a warm start': (lambda run: largest(warm(run)).unlink(), 'made again'),
  'a warm start a file': (lambda run: replaced_by_file(warm(run)), 'made again'),
  'no warm start': (lambda run: shutil.rmtree(run / 'warmstart'), ''),
  'the first evaluation torn': (
    lambda run: os.truncate(run / 'eval' / '0.json', 100),
    'Step 0 is evaluated again',
  ),
  'the first evaluation absent': (
    lambda run: (run / 'eval' / '0.json').unlink(),
    'Step 0 is evaluated again',
  ),
  'the first evaluation of another type': (
    lambda run: (run / 'eval' / '0.json').write_text('{"result": 1, "samples": [2]}'),
    'Step 0 is evaluated again',
  ),
  'the last evaluation empty': (
    lambda run: os.truncate(run / 'eval' / f'{LAST}.json', 0),
    f'Step {LAST} is evaluated again',
  ),
  'other names among the checkpoints': (
    lambda run: [(run / 'checkpoints' / n).mkdir() for n in NO_STEPS],
    '',
  ),
  'an older checkpoint without its accuracy': (
    lambda run: (run / 'checkpoints' / '2' / 'metrics' / 'metrics').write_text('{'),
    'checkpoints/2 is damaged',
  ),
}


def content(run: pathlib.Path) -> dict[str, bytes]:
  """The evaluations, which a repair leaves as they were."""
  return {p.name: p.read_bytes() for p in (run / 'eval').glob('*.json')}


@pytest.mark.parametrize('name', REPAIRED)
def test_what_can_be_made_again_is_made_again(name, broken, unbroken, resumed, capsys):
  damage, logged = REPAIRED[name]
  damage(broken)
  assert_at(*resumed(broken), unbroken, LAST)
  out = capsys.readouterr().out
  assert logged in out
  assert last_run(broken).rows == last_run(unbroken).rows
  assert content(broken) == content(unbroken)
  # And the next start finds nothing to repair.
  assert_at(*resumed(broken), unbroken, LAST)
  out = capsys.readouterr().out
  assert not re.search('(written|made|evaluated) again|is damaged', out)


def test_the_report_is_written_from_evaluations_made_again(broken, one_device):
  shutil.rmtree(broken / 'eval')
  (broken / 'report.json').unlink()
  assert experiment.train(tiny(**KNOBS), str(broken)) == 0
  assert json.loads((broken / 'report.json').read_text())['eval_before']['n'] == 16


def test_a_warm_start_made_again_is_the_same(broken, resumed, capsys):
  shutil.rmtree(broken / 'checkpoints')
  _, before = resumed(broken)
  flip(largest(warm(broken)))
  _, after = resumed(broken)
  assert 'it is made again' in capsys.readouterr().out
  assert same(before.params, after.params)


def test_lost_rows_are_counted_and_the_file_is_kept(broken, resumed, capsys):
  path = broken / 'metrics.jsonl'
  path.write_bytes(b'\x00\xff' * 40)
  assert resumed(broken)[1].step == LAST
  out = capsys.readouterr().out
  assert f'lacks {LAST + 1} rows of the steps 0 to {LAST}' in out
  assert (broken / 'metrics-damaged.jsonl').read_bytes() == b'\x00\xff' * 40
  path.unlink()
  assert resumed(broken)[1].step == LAST
  assert f'lacks {LAST + 1} rows' in capsys.readouterr().out
  with pytest.raises(ValueError, match='holds a run with another config'):
    experiment.train(tiny(**KNOBS | {'seed': 1}), str(broken))


def insert_line(run: pathlib.Path, line: bytes) -> None:
  """A line before the last of metrics.jsonl."""
  path = run / 'metrics.jsonl'
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join([*lines[:-1], line + b'\n', lines[-1]]))


def loop_of_links(path: pathlib.Path) -> None:
  """A link to itself."""
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink()
  os.symlink(path.name, path)


CONFIG = 'config.json.*(put the config of the run back|put it back)'
# Something that nobody can put right but the user: (damage, the sentence).
REFUSED: dict[str, tuple[Damage, str]] = {
  'a garbage line': (
    lambda run: insert_line(run, b'\x00\xff{'),
    r'metrics\.jsonl, line 5 of 6 is no row .* delete the line',
  ),
  'a line without a step': (
    lambda run: insert_line(run, b'{"loss/kl": 1}'),
    'line 5 of',
  ),
  'an infinite step': (
    lambda run: insert_line(run, b'{"step": Infinity}'),
    'line 5 of',
  ),
  'metrics a directory': (
    lambda run: ((run / 'metrics.jsonl').unlink(), (run / 'metrics.jsonl').mkdir()),
    r'metrics\.jsonl cannot be read .* move it away',
  ),
  'config is no JSON': (lambda run: flip(run / 'config.json'), CONFIG),
  'config cut': (lambda run: os.truncate(run / 'config.json', 50), CONFIG),
  'config empty': (lambda run: os.truncate(run / 'config.json', 0), CONFIG),
  'config a list': (lambda run: (run / 'config.json').write_text('[1]'), CONFIG),
  'config absent': (lambda run: (run / 'config.json').unlink(), CONFIG),
  'config a link to itself': (lambda run: loop_of_links(run / 'config.json'), CONFIG),
  'config of other types': (
    lambda run: edited(run / 'config.json', lambda c: c.update(model=3)),
    'another config .*model: 3 then',
  ),
  'checkpoints a file': (
    lambda run: replaced_by_file(run / 'checkpoints'),
    'checkpoints cannot be read as a directory .*put the checkpoints back',
  ),
  'checkpoints a link to itself': (
    lambda run: loop_of_links(run / 'checkpoints'),
    'checkpoints cannot be read as a directory .*put the checkpoints back',
  ),
  'eval a file': (
    lambda run: replaced_by_file(run / 'eval'),
    'eval is not the file or directory that belongs there .*move it away',
  ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_only_the_user_can_put_right_is_one_sentence(name, broken, resumed):
  damage, sentence = REFUSED[name]
  damage(broken)
  before = sorted(os.listdir(broken))
  for _ in range(2):  # no attempt changes what the next one finds
    with pytest.raises(ValueError, match=sentence) as caught:
      resumed(broken)
    assert 'Make room' not in str(caught.value)
  assert sorted(os.listdir(broken)) == before


def test_a_second_process_is_refused_while_the_first_is_alive(broken, one_device):
  held = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import sys; from bapo_jax.runtime.workdir import locked\n'
      f'with locked({str(broken)!r}): print("held", flush=True); sys.stdin.read()',
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    cwd=runs.ROOT,
  )
  assert held.stdout and held.stdout.readline() == 'held\n'
  before = {p: p.stat().st_mtime_ns for p in broken.rglob('*')}
  call = runs.command(broken, **KNOBS) | {'capture_output': True, 'text': True}
  second = subprocess.run(**call)
  assert second.returncode == 2
  assert second.stderr.count('\n') == 1
  assert f'is in use by process {held.pid} on ' in second.stderr
  assert {p: p.stat().st_mtime_ns for p in broken.rglob('*')} == before
  held.kill()  # as the kernel's killer would
  held.wait()
  with workdir.locked(str(broken)), open(broken / '.lock') as file:
    with pytest.raises(BlockingIOError):
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ValueError, match=f'process {os.getpid()} on'):
      experiment.train(tiny(**KNOBS), str(broken))


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise OSError(38, 'Function not implemented')

  monkeypatch.setattr(fcntl, 'flock', refuse)
  with workdir.locked(str(tmp_path)):
    pass
  assert 'cannot be locked (Function not implemented)' in capsys.readouterr().out


TOOLS = {
  'eval': lambda config, run: eval_checkpoint.eval_checkpoint(config, run, ''),
  'export': lambda config, run: export.export(config, run, '', 'float32', 10**9),
  'show': lambda config, run: viewer.show(config, run, 1, ''),
}


@pytest.mark.parametrize('tool', TOOLS)
@pytest.mark.parametrize('kind', ['bytes', 'NaN'])
def test_tools_refuse_a_damaged_checkpoint(tool, kind, broken, one_device):
  if kind == 'bytes':
    flip(arrays(broken))
  elif tool == 'show':
    pytest.skip('reads no weights before a ratio is wanted')
  else:
    poisoned('params', np.nan)(broken)
  with pytest.raises(ValueError, match=r'step 4 is damaged .*\[2, 3, 4\] are there'):
    TOOLS[tool](tiny(**KNOBS), str(broken))
  assert (broken / 'checkpoints' / '4').is_dir()  # reading moves nothing


@pytest.mark.parametrize('tool', TOOLS)
def test_tools_name_a_config_that_is_none(tool, broken, one_device):
  (broken / 'config.json').write_text('{"model": ')
  with pytest.raises(ValueError, match=r'config\.json is no JSON'):
    TOOLS[tool](tiny(**KNOBS), str(broken))


def test_the_viewer_names_an_evaluation_that_is_none(broken):
  (broken / 'eval' / f'{LAST}.json').write_text('{"result": {')
  with pytest.raises(ValueError, match=r'eval/4\.json is no JSON'):
    viewer.show(tiny(**KNOBS), str(broken), 1, '')


def test_rows_that_were_read_are_those_that_were_written(unbroken):
  assert [row['step'] for row in metrics.read(unbroken)] == list(range(LAST + 1))
