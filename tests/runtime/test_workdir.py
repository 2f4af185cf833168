"""Whose directory it is, and what an error of writing says."""

import errno
import json
import os

import pytest

from bapo_jax.runtime import workdir


def values(**sections):
  return {
    'seed': 0,
    'steps': 4,
    'mesh': {'data': 1},
    'clip': {'rule': 'fixed'},
  } | sections


def test_a_directory_belongs_to_one_config(tmp_path):
  path = str(tmp_path / 'runs' / 'one')
  free = ('steps', 'mesh', 'clip.target')
  workdir.open_workdir(path, values(seed=1), free)
  assert os.listdir(path) == ['config.json']  # no trace of the trial
  # Nothing is measured yet: a command that was refused may be corrected.
  workdir.open_workdir(path, values(), free)
  (tmp_path / 'runs' / 'one' / 'metrics.jsonl').write_text('{"step": 0}\n')
  # What is free may change, a whole section or a knob, and is written down.
  changed = values(steps=9, mesh={'data': 2}, clip={'rule': 'fixed', 'target': 0.4})
  workdir.open_workdir(path, changed, free)
  with open(os.path.join(path, 'config.json')) as file:
    assert json.load(file) == changed
  with pytest.raises(ValueError, match=r"clip\.rule: 'fixed' then, 'balanced' now"):
    workdir.open_workdir(path, values(clip={'rule': 'balanced'}), free)
  with open(os.path.join(path, 'config.json')) as file:
    assert json.load(file) == changed  # refused, and left as it was
  # A tuple is a list once it was written, and no change.
  workdir.open_workdir(str(tmp_path), {'low': (0.6, 0.9)})
  workdir.open_workdir(str(tmp_path), {'low': (0.6, 0.9)})


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='give a directory that you may write to'):
    workdir.open_workdir(str(tmp_path / 'file' / 'run'), values())
  (tmp_path / 'config.json').write_text('{"seed": ')
  with pytest.raises(ValueError, match=r'config\.json is no JSON .*another --workdir'):
    workdir.open_workdir(str(tmp_path), values())


def test_differences_are_dotted_and_a_missing_value_is_none():
  before = {'a': {'b': 1, 'c': {'d': 2}}, 'e': [1]}
  now = {'a': {'b': 1, 'c': {'d': 3, 'f': 4}}}
  assert list(workdir.differences(before, now)) == [
    ('a.c.d', 2, 3),
    ('a.c.f', None, 4),
    ('e', [1], None),
  ]


def refused(home, number, filename):
  """The sentence that an OSError within becomes."""
  with pytest.raises(ValueError) as caught, workdir.writable(home):
    raise OSError(number, os.strerror(number), filename)
  return str(caught.value)


def test_a_refused_write_names_the_file_and_the_last_whole_checkpoint(tmp_path):
  home = str(tmp_path)
  inside = os.path.join(home, 'metrics.jsonl')
  found = refused(home, errno.EIO, inside)
  assert f'{inside} cannot be written (Input/output error)' in found
  assert 'no checkpoint is complete' in found
  for name in ('12', '9', '15.orbax-checkpoint-tmp'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  # No space is about writing, wherever it was.
  found = refused(home, errno.ENOSPC, None)
  assert f'{home} cannot be written (No space left on device)' in found
  assert 'the checkpoint of step 12 is complete' in found
  # An error of reading elsewhere is not the workdir's.
  with pytest.raises(FileNotFoundError), workdir.writable(home):
    raise FileNotFoundError(errno.ENOENT, 'No such file', '/nowhere/model')


def test_checkpoint_steps_are_those_of_whole_checkpoints(tmp_path):
  assert workdir.checkpoint_steps(str(tmp_path)) == []
  assert os.listdir(tmp_path) == []  # nothing is made
  for name in ('10', '9', '11.orbax-checkpoint-tmp', 'notes'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert workdir.checkpoint_steps(str(tmp_path)) == [9, 10]  # as numbers
  assert len(os.listdir(tmp_path / 'checkpoints')) == 4  # nothing is cleared


def test_another_mesh_is_logged(capsys):
  workdir.log_mesh_change(None, {'data': 1})
  workdir.log_mesh_change({'data': 1}, {'data': 1})
  assert capsys.readouterr().out == ''
  workdir.log_mesh_change({'data': 1, 'tensor': 1}, {'data': 4, 'tensor': 2})
  assert 'data 1 x tensor 1 then, data 4 x tensor 2 now' in capsys.readouterr().out
