"""Whose directory it is, and what an error of writing says."""

import fcntl
import json
import operator
import os
import pathlib
import pwd
import subprocess
import sys

import processes
import pytest
from refusals import sentence_of

from bapo_jax import custom_code
from bapo_jax import knobs as knobs_lib
from bapo_jax.runtime import digests, files, workdir
from bapo_jax.training import config
from bapo_jax.training.schema import Config

ROOT = pathlib.Path(__file__).parents[2]


def opened(path, now, free=(), code='my.py 1f', **given):
  """Opens a workdir for the values of a run, of which some were given otherwise."""
  found = {'config': now, 'code': {'problems.source': code}}
  workdir.open_workdir(path, now | given, found, free)


def values(**sections):
  plain = {'seed': 0, 'steps': 4, 'mesh': {'data': 1}, 'clip': {'rule': 'fixed'}}
  return plain | {'sampler': {}} | sections


def test_a_directory_belongs_to_one_config(tmp_path):
  path = str(tmp_path / 'runs' / 'one')
  free = ('steps', 'mesh', 'clip.target')
  opened(path, values(seed=1), free)
  # Nothing is measured yet: a command that was refused may be corrected.
  opened(path, values(), free)
  (tmp_path / 'runs' / 'one' / 'metrics.jsonl').write_text('{"step": 0}\n')
  # What is free may change, a whole section or a knob, and is written down.
  changed = values(steps=9, mesh={'data': 2}, clip={'rule': 'fixed', 'target': 0.4})
  opened(path, changed, free)
  with open(os.path.join(path, 'config.json')) as file:
    assert json.load(file) == changed
  assert "clip.rule: 'fixed' then, 'balanced' now" in sentence_of(
    opened, path, values(clip={'rule': 'balanced'}), free
  )
  with open(os.path.join(path, 'config.json')) as file:
    assert json.load(file) == changed  # refused, and left as it was
  # A value that was derived is given, and the other way round.
  opened(path, changed, steps=None)
  assert workdir.read_config(path)['steps'] == 9
  opened(path, changed)
  assert "code.problems.source: 'my.py 1f' then" in sentence_of(
    opened, path, changed, code='my.py 2a'
  )
  opened(path, changed, ('problems',), code='my.py 2a')
  (tmp_path / 'runs' / 'one' / 'resolved.json').unlink()
  with pytest.raises(ValueError, match=r'an older version.* the commit that began'):
    workdir.check_version(path)
  # A tuple is a list once it was written, and no change.
  for _ in range(2):
    opened(str(tmp_path), values(low=(0.6, 0.9)))
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')


OTHERS = {  # files of another program, and what the sentence names
  'config.json': ('{"model_type": "qwen2", "steps": 3}', 'is not the config of a run'),
  'metrics.jsonl': ('{"loss": 2.5}\n', 'metrics.jsonl, which a run would replace'),
  'report.html': ('<h1>Mine</h1>', 'report.html, which a run would replace'),
}


@pytest.mark.parametrize('name', OTHERS)
def test_a_directory_with_files_of_others_is_refused_and_stays(tmp_path, name):
  text, sentence = OTHERS[name]
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=sentence), workdir.locked(str(tmp_path)):
    pass
  assert {x.name: x.read_text() for x in tmp_path.iterdir()} == {name: text}


def test_a_directory_with_files_that_no_run_writes_is_accepted(tmp_path):
  (tmp_path / 'README.md').write_text('notes')
  with workdir.locked(str(tmp_path)):
    opened(str(tmp_path), values())
  with workdir.locked(str(tmp_path)):  # its own run
    pass


# ------------------------------------------------------------------ paths of a user


def test_a_home_directory_is_expanded(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert files.local('~/x') == f'{tmp_path}/x'
  assert files.local('~/a.jsonl,b,~/c') == f'{tmp_path}/a.jsonl,b,{tmp_path}/c'
  for name in ('', 'a~b', './~', 'hub:owner/name@main', 'tfds:gsm8k:train', 'a.py:f'):
    assert files.local(name) == name
  # An empty HOME is none, and not the root directory.
  home = pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir)
  monkeypatch.setenv('HOME', '')
  assert files.local('~/x') == str(home / 'x')


@pytest.mark.parametrize(
  'path', ['gs://bucket/run', 's3://b/a', 'https://a.b/c', 'a,hf://o/n', '~nobody-here']
)
def test_a_path_of_another_machine_is_refused(path):
  with pytest.raises(ValueError, match=r'--to=.* is not a path on this .*gcsfuse'):
    files.local(path, flag='--to=')


def test_every_knob_with_a_path_refuses_a_url_and_expands_the_home_directory():
  knobs = 'cache model.path tokenizer.path teacher.path problems.source '
  knobs += 'problems.test_source'
  for name in knobs.split():
    values = {'problems': {'source': 'a', 'test_source': 'a'}}
    found = knobs_lib.validate(Config, config.merged(values, {name: '~/x'}))
    assert operator.attrgetter(name)(found) == os.path.expanduser('~/x')
    with pytest.raises(ValueError, match=f'^{name}=gs://b/x is not a path on this'):
      knobs_lib.validate(Config, config.merged(values, {name: 'gs://b/x'}))
  assert 'gs://b/my.py is not a path on this ' in sentence_of(
    custom_code.load, 'gs://b/my.py:f'
  )


def test_a_second_run_is_refused_while_the_first_is_alive(tmp_path):
  source = 'import sys; from bapo_jax.runtime.workdir import locked\n'
  source += 'with locked(sys.argv[1]): print("held", flush=True); sys.stdin.read()'
  command, pipe = [sys.executable, '-c', source, str(tmp_path)], subprocess.PIPE
  holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
  assert holder.stdout and holder.stdout.readline() == 'held\n'
  refusal = pytest.raises(ValueError, match=f'is in use by process {holder.pid} on ')
  with refusal, workdir.locked(str(tmp_path)):
    pass
  holder.kill()  # the kernel then releases the lock
  holder.wait()
  with workdir.locked(str(tmp_path)):
    refusal = pytest.raises(ValueError, match=f'process {os.getpid()} on')
    with refusal, workdir.locked(str(tmp_path)):
      pass


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise OSError(38, 'Function not implemented')

  monkeypatch.setattr(fcntl, 'flock', refuse)
  with workdir.locked(str(tmp_path)):
    pass
  assert 'cannot be locked (Function not implemented)' in capsys.readouterr().out


# --------------------------------- a file is whole or as it was, and an error names it


def test_a_write_replaces_the_whole_file(tmp_path):
  path = tmp_path / 'new' / 'a.json'
  files.write(path, 'é')
  assert path.read_bytes() == 'é'.encode()
  files.write_json(path, {'x': [1]})
  assert json.loads(path.read_text()) == {'x': [1]}
  with pytest.raises(UnicodeEncodeError):
    files.write(path, 'cannot be encoded: \ud800')
  assert json.loads(path.read_text()) == {'x': [1]}
  assert os.listdir(path.parent) == ['a.json']


def test_a_write_that_fails_leaves_nothing(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text('before')
  with processes.small_files(1000), pytest.raises(OSError) as error:
    files.write(path, 'x' * 5000)
  assert error.value.filename == str(path)
  assert {x.name: x.read_text() for x in tmp_path.iterdir()} == {'a.json': 'before'}


def test_an_error_without_a_message_is_named_by_its_type():
  assert files.first_line(EOFError()) == 'EOFError'


@pytest.mark.parametrize('content', [None, b'{"a": ', b'[' * 100_000, b'\xff', b'[1]'])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
  path = tmp_path / 'a.json'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=r'a\.json.*download it again'):
    files.read_object(str(path))
  path.write_text('{"a": 1}')
  assert files.read_object(str(path)) == {'a': 1}


# --- digests of parts of a file -------------------------------------------------------


@pytest.mark.parametrize('size', [1, 100, 5000, 256 * 2**10])
def test_of_a_short_file_every_byte_counts(tmp_path, size):
  path = tmp_path / 'file'
  content = bytes(i * 31 % 251 for i in range(size))
  path.write_bytes(content)
  whole = digests.sampled(str(path))
  assert whole[0] == size
  for at in {0, size // 3, size // 2, size - 1}:
    changed = bytearray(content)
    changed[at] ^= 1
    path.write_bytes(changed)
    assert digests.sampled(str(path)) != whole, at


def test_of_a_long_file_64_blocks_from_end_to_end_are_read(tmp_path):
  path = tmp_path / 'file'
  with open(path, 'wb') as file:
    file.truncate(10**8)  # no block of it is on the disk
  before = digests.sampled(str(path))
  for at, seen in ((0, True), (10**8 - 1, True), (10**6, False)):
    with open(path, 'r+b') as file:
      file.seek(at)
      file.write(b'\1')
    assert (digests.sampled(str(path)) != before) == seen, at
    before = digests.sampled(str(path))
