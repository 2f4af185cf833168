"""Names of data sets: found in the cache, downloaded, or refused in one sentence."""

import json
import os
import socket

import huggingface_hub
import pytest
import tensorflow_datasets as tfds

from bapo_jax.data import builder, sources
from bapo_jax.data import hub as hub_lib

ROWS = [{'question': f'{i}+1', 'answer': f'so\n#### {i + 1}'} for i in range(6)]
TAKEN = [
  {'problem': f'{i}+1', 'answer': str(i + 1), 'verifier': 'gsm8k'} for i in range(6)
]


def lay_out(folder, files):
  """Files of rows under `folder`, each a path and its rows."""
  for name, rows in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(map(json.dumps, rows)))
  return str(folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
  """A hub with the data set some/data, and a record of what was asked of it."""
  asked = []

  def snapshot_download(name, *, repo_type, allow_patterns, local_files_only):
    assert repo_type == 'dataset' and all('main/train' in p for p in allow_patterns)
    asked.append(local_files_only)
    if local_files_only:
      raise OSError('not in the cache')
    if name != 'some/data':
      raise OSError('404: no such data set.\nmore words')
    return str(tmp_path / 'snapshot')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
  lay_out(
    tmp_path / 'snapshot',
    {
      'main/train-00000-of-00002.jsonl': ROWS[:4],
      'main/train-00001-of-00002.jsonl': ROWS[4:],
      'main/test.jsonl': ROWS[:1],
      'socratic/train.jsonl': ROWS[:1],
    },
  )
  return asked


def test_a_hub_name_is_downloaded_and_read(hub, tmp_path):
  source = 'hub:some/data:main/train'
  assert sources.check('source', source, {'train': 0, 'test': 0}) == []
  assert hub == [], 'nothing is downloaded while other things may be wrong'
  knobs = {'source': source, 'duplicates': 'drop'}
  rows = sources.rows('source', str(tmp_path / 'data'), knobs)
  assert rows == [{'id': i, **row} for i, row in enumerate(TAKEN)]
  assert hub == [True, False]  # the cache is asked first


def test_an_unknown_hub_name_is_one_sentence(hub):
  with pytest.raises(ValueError) as error:
    sources.find('source', 'hub:some/other:main/train')
  assert str(error.value) == (
    '--config.problems.source=hub:some/other:main/train: no main/train*.parquet or '
    '.jsonl there, nor in the local cache of the hub (404: no such data set); fetch it '
    'where there is a network, `hf download some/other --repo-type dataset --local-dir '
    '<directory>`, and give the file'
  )


def test_files_of_a_split_are_found_and_a_missing_part_is_noticed(tmp_path):
  folder = lay_out(
    tmp_path,
    {
      'data/train-00000-of-00001.parquet': [],
      'data/trainer.jsonl': [],
      'test.jsonl': [],
      'a/val.jsonl': [],
      'b/val.jsonl': [],
      'part-00001-of-00002.jsonl': [],
    },
  )

  def found(split):
    return [
      os.path.relpath(p, folder) for p in hub_lib._of_split(folder, split, 'knob')
    ]

  assert found('train') == ['data/train-00000-of-00001.parquet']
  assert found('test') == ['test.jsonl']
  assert found('b/val') == ['b/val.jsonl']
  assert found('dev') == found('part') == []
  with pytest.raises(ValueError, match=r"stand in \['a', 'b'\]; .* such as a/val"):
    found('val')


def test_without_a_network_the_hub_is_one_sentence(monkeypatch, tmp_path):
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(
    ValueError, match=r'hub:some/data:train: no train\*.*`hf download'
  ):
    sources.find('source', 'hub:some/data')


class Gsm8kLike(builder.Builder, skip_registration=True):
  """A builder of the library's own kind: its own features, no id."""

  name = 'gsm8k_like'

  def _info(self):
    text = tfds.features.Text()
    features = tfds.features.FeaturesDict({'question': text, 'answer': text})
    return tfds.core.DatasetInfo(builder=self, features=features)

  def splits(self):
    return {'train': ROWS}

  def _generate_examples(self, rows):
    yield from enumerate(rows)


@pytest.fixture
def library(monkeypatch, tmp_path):
  """tensorflow-datasets with one data set, and no network."""

  def make(name, file_format):
    if name != 'gsm8k_like':
      raise tfds.core.DatasetNotFoundError(name)
    return Gsm8kLike(data_dir=str(tmp_path), file_format=file_format)

  def refuse(*_):
    raise OSError('no network')

  monkeypatch.setattr(tfds, 'builder', make)
  monkeypatch.setattr(socket, 'getaddrinfo', refuse)
  for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy'):
    monkeypatch.delenv(name, raising=False)
  return make


def test_a_library_name_is_prepared_and_read(library, monkeypatch, tmp_path):
  source = 'tfds:gsm8k_like:train'
  says = 'gsm8k_like: not in .* no network to download it; copy'
  with pytest.raises(ValueError, match=says):
    sources.find('source', source)
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_: [])
  knobs = {'source': source, 'duplicates': 'drop'}
  rows = sources.rows('source', str(tmp_path / 'data'), knobs)
  rows = [{k: v for k, v in row.items() if k != 'id'} for row in rows]
  assert sorted(rows, key=str) == sorted(TAKEN, key=str)
  with pytest.raises(ValueError, match=r"no split 'dev'; choose one of \['train'\]"):
    sources.find('source', 'tfds:gsm8k_like:dev')


def test_what_the_library_does_not_have_or_cannot_make_is_said(library, monkeypatch):
  with pytest.raises(ValueError, match="tensorflow-datasets has no data set 'sums'"):
    sources.find('source', 'tfds:sums')
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_: [])

  def fail(self):
    raise RuntimeError('the server said no\nat length')

  monkeypatch.setattr(Gsm8kLike, 'splits', fail)
  with pytest.raises(ValueError, match=r'cannot be prepared \(.*the server said no\)'):
    sources.find('source', 'tfds:gsm8k_like')


def test_the_librarys_own_gsm8k_is_known_without_tensorflow():
  # The library itself lists it only where TensorFlow is.
  assert hub_lib._builder('gsm8k', 'problems.source').name == 'gsm8k'


@pytest.mark.parametrize('source', ['hub:gsm8k', 'hub:', 'tfds:', 'tfds:a/b'])
def test_a_name_of_no_form_is_refused(source):
  with pytest.raises(ValueError, match='write hub:owner/name:split or tfds:name:split'):
    sources.check('source', source, {'train': 0, 'test': 0})
