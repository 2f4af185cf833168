"""Model directories are found here, or fetched from the hub when the name says so."""

import json
import os
import pathlib
import socket

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from refusals import sentence_of
from safetensors.numpy import save_file

from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import safetensors_io


def test_missing_files_of_a_directory_are_listed(tmp_path):
  everything = ['config.json', 'tokenizer.json', '*.safetensors']
  assert hf_directory.missing(str(tmp_path / 'nowhere')) == everything
  (tmp_path / 'config.json').write_text('{}')
  assert hf_directory.missing(str(tmp_path)) == everything[1:]
  (tmp_path / 'tokenizer.json').write_text('{}')
  (tmp_path / 'model-00001-of-00002.safetensors').touch()
  assert hf_directory.missing(str(tmp_path)) == []
  # An index lists the files of the model.
  files = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
  listed = {'weight_map': {'a': files[0], 'b': files[1]}}
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(listed))
  assert hf_directory.missing(str(tmp_path)) == files[1:]
  assert hf_directory.missing(str(tmp_path), needs=('tokenizer.json',)) == []


@pytest.fixture
def offline(monkeypatch, tmp_path):
  """An empty cache of the hub and no network; the hosts that were looked up."""

  def refuse(host, *args, **kwargs):
    hosts.append(host)
    raise socket.gaierror('out of reach')

  hosts = []
  monkeypatch.setattr(socket, 'getaddrinfo', refuse)
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
  monkeypatch.chdir(tmp_path)
  return hosts


def cached(path, name, **files):
  """Puts files into the hub's cache as the hub's own client does."""
  place = path / 'hub' / f'models--{name.replace("/", "--")}'
  snapshot = place / 'snapshots' / ('0' * 40)
  snapshot.mkdir(parents=True)
  (place / 'refs').mkdir()
  (place / 'refs' / 'main').write_text('0' * 40)
  for file, text in files.items():
    (snapshot / file.replace('__', '.')).write_text(text)
  return str(snapshot)


def test_a_hub_name_offline_names_the_files_and_the_command(offline, tmp_path):
  cached(tmp_path, 'some/model', config__json='{}', tokenizer__json='{}')
  assert hf_directory.missing(hf_directory.resolve('hub:some/model')) == [
    '*.safetensors'
  ]
  assert not offline  # until it is needed
  for name, lacks in (
    ('some/model', '*.safetensors'),
    ('other/model', 'config.json, tokenizer.json, *.safetensors'),
  ):
    message = sentence_of(hf_directory.find, f'hub:{name}', 'model.path')
    assert message.startswith(f'--config.model.path=hub:{name}: found no {lacks} ')
    assert f'`hf download {name} --local-dir <directory>`' in message
    # A model without weights may have pickles, which are not downloaded.
    assert ('pytorch_model.bin' in message) == (name == 'some/model')
  assert offline


def test_a_cached_hub_name_is_found_at_its_revision_without_the_network(
  offline, tmp_path
):
  files = {'config__json': '{}', 'tokenizer__json': '{}', 'model__safetensors': ''}
  snapshot = cached(tmp_path, 'some/model', **files)
  other = pathlib.Path(snapshot).parent / ('1' * 40)
  other.mkdir()
  for file in os.listdir(snapshot):
    (other / file).touch()
  assert hf_directory.missing(hf_directory.resolve('hub:some/model')) == []
  assert hf_directory.find('hub:some/model', 'model.path') == snapshot
  for revision in ('0' * 40, '1' * 40):
    found = hf_directory.find(f'hub:some/model@{revision}', 'model.path')
    assert os.path.basename(found) == revision
  assert not offline
  assert 'hf download some/model --revision v2' in sentence_of(
    hf_directory.find, 'hub:some/model@v2', 'model.path'
  )


def test_a_path_is_never_looked_up_at_the_hub(offline, tmp_path):
  cached(tmp_path, 'Qwen/Qwen3-4B', config__json='{}', tokenizer__json='{}')
  os.makedirs(tmp_path / 'some' / 'model')
  paths = 'some/model', './no/model', '/no/such', 'a/b/c', 'models/Qwen3-4B'
  for name in (*paths, 'Qwen/Qwen3-4B'):
    assert hf_directory.resolve(name) == name
    message = sentence_of(
      hf_directory.find, name, 'tokenizer.path', needs=('tokenizer.json',)
    )
    assert f'`hf download <name> --local-dir {name}`' in message
    assert (f'hub:{name}' in message) == (name == 'Qwen/Qwen3-4B')
  assert not offline


def test_only_what_is_needed_is_downloaded(monkeypatch, tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  asked = []

  def download(name, *, local_files_only, allow_patterns, **_):
    asked.append((local_files_only, '*.safetensors' in allow_patterns))
    if local_files_only:
      raise OSError('not cached')
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  found = hf_directory.find('hub:some/model', 'model.path', ('config.json',))
  assert found == str(tmp_path) and asked == [(True, True), (False, False)]
  assert 'tokenizer.json, *.safetensors' in sentence_of(
    hf_directory.find, 'hub:some/model', 'model.path'
  )
  assert asked[-1] == (False, True)


@pytest.mark.parametrize('name', ['hub:', 'hub:a', 'hub:a/b/c', 'hub:a/b@', 'hub:a /b'])
def test_a_malformed_name_is_refused_with_the_way_out(name):
  assert 'hub:owner/name@revision' in sentence_of(hf_directory.parse_hub_name, name)


# ----------------------- our reader and writer of safetensors agree with the library's


def test_an_index_lists_the_files_of_the_model(tmp_path):
  for name in ('1', '2', 'consolidated'):
    save_file({name: np.ones(2, np.float32)}, tmp_path / f'{name}.safetensors')
  listed = {'1': '1.safetensors', '2': '2.safetensors'}
  (tmp_path / safetensors_io.INDEX).write_text(json.dumps({'weight_map': listed}))
  assert safetensors_io.files(str(tmp_path)) == sorted(listed.values())
  assert set(safetensors_io.index(str(tmp_path))) == set(listed)
  (tmp_path / safetensors_io.INDEX).unlink()
  save_file({'one': np.ones(2, np.float32)}, tmp_path / safetensors_io.ONE_FILE)
  assert safetensors_io.files(str(tmp_path)) == [safetensors_io.ONE_FILE]


def test_a_tensor_in_two_files_is_refused(tmp_path):
  for name in ('a', 'b'):
    save_file({'x': np.ones(2, np.float32)}, tmp_path / f'{name}.safetensors')
  assert 'a.safetensors and b.safetensors' in sentence_of(
    safetensors_io.index, str(tmp_path)
  )
