"""Names of data sets: found in the cache, downloaded, or refused in one sentence."""

import json
import os
import socket
import types

import huggingface_hub
import numpy as np
import pytest
import tensorflow_datasets as tfds

from bapo_jax.data import hub as hub_lib
from bapo_jax.data import sources
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.row import Row
from bapo_jax.rewards import gold

ROWS = [{'question': f'{i}+1', 'answer': f'so\n#### {i + 1}'} for i in range(6)]
PARSED = [Row(f'{i}+1', str(i + 1), 'gsm8k') for i in range(6)]


def problems(source):
  return ProblemsConfig(source=source, test_source=source)


def lay_out(folder, files):
  """Files of rows under `folder`, each a path and its rows."""
  for name, rows in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(map(json.dumps, rows)))
  return str(folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
  """A hub with the data set some/data, which has a tag v1.

  Records of each call whether it was local.
  """
  local = []

  def snapshot_download(name, *, repo_type, revision, allow_patterns, local_files_only):
    assert repo_type == 'dataset' and all('main/train' in p for p in allow_patterns)
    local.append(local_files_only)
    if local_files_only:
      raise OSError('not in the cache')
    if name != 'some/data':
      raise OSError('404: no such data set.\nmore words')
    if revision not in (None, 'v1'):
      raise OSError('404: no such revision.')
    return str(tmp_path / ('tagged' if revision else 'snapshot'))

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
  lay_out(tmp_path / 'tagged', {'main/train.jsonl': ROWS[:3]})
  return local


def test_a_hub_name_is_downloaded_and_read(hub, tmp_path):
  knobs = problems('hub:some/data:main/train')
  assert sources.missing(knobs, 'source') == []
  assert hub == [], 'nothing is downloaded while other things may be wrong'
  assert sources.load(knobs, 'source', str(tmp_path / 'data')) == PARSED
  assert hub == [True, False]  # the cache comes first


def test_a_revision_is_pinned(hub, tmp_path):
  knobs = problems('hub:some/data@v1:main/train')
  assert sources.missing(knobs, 'source') == []
  assert sources.load(knobs, 'source', str(tmp_path / 'data')) == PARSED[:3]
  with pytest.raises(ValueError) as error:
    sources.download(problems('hub:some/data@v2:main/train'), 'source')
  assert str(error.value).startswith(
    '--config.problems.source=hub:some/data@v2:main/train: no main/train*'
  )
  assert '(404: no such revision)' in str(error.value)
  assert '`hf download some/data --revision v2 --repo-type' in str(error.value)


@pytest.mark.parametrize('name', ['some/data', 'some/data@v1', 'some/data.jsonl'])
def test_a_path_is_never_looked_up_on_the_hub(hub, name, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (absent,) = sources.missing(problems(name), 'source')
  hint = '' if name.endswith('.jsonl') else f' (or hub:{name}?)'
  assert absent == f'--config.problems.source={name}{hint}'
  with pytest.raises(ValueError, match=f'no file {name!r}'):
    sources.load(problems(name), 'source', str(tmp_path))
  assert hub == []


def test_an_answer_of_a_data_set_that_no_verifier_can_use_is_refused(hub, tmp_path):
  lay_out(tmp_path, {'snapshot/main/train.jsonl': [{'problem': '1', 'answer': 'two'}]})
  for part in (tmp_path / 'snapshot/main').glob('train-*'):
    part.unlink()
  message = r"main/train\.jsonl, line 1: the right answer 'two' is not one number"
  with pytest.raises(ValueError, match=message):
    sources.download(
      problems('hub:some/data:main/train'), 'source', gold.check('gsm8k')
    )


def test_an_unknown_hub_name_is_one_sentence(hub):
  with pytest.raises(ValueError) as error:
    sources.download(problems('hub:some/other:main/train'), 'source')
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
    sources.download(problems('hub:some/data'), 'source')


class Gsm8kLike(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A builder as the library's own: other features, no id."""

  name = 'gsm8k_like'
  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    text = tfds.features.Text()
    features = tfds.features.FeaturesDict({'question': text, 'answer': text})
    return tfds.core.DatasetInfo(builder=self, features=features)

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    yield from enumerate(ROWS)


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
  knobs = problems('tfds:gsm8k_like:train')
  message = 'gsm8k_like: not in .* no network to download it; copy'
  with pytest.raises(ValueError, match=message):
    sources.download(knobs, 'source')
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_: [])
  rows = sources.load(knobs, 'source', str(tmp_path / 'data'))
  assert sorted(rows) == sorted(PARSED)
  with pytest.raises(ValueError, match=r"no split 'dev'; choose one of \['train'\]"):
    sources.download(problems('tfds:gsm8k_like:dev'), 'source')


def test_pictures_of_the_library_are_not_left_out(monkeypatch):
  texts = {'question': 'Q', 'answer': '1', 'image': None}
  rows = [texts, texts | {'image': np.zeros((4, 4, 3), np.uint8)}]
  monkeypatch.setattr(hub_lib.builder_lib, 'read', lambda *_: rows)
  with pytest.raises(ValueError) as error:
    hub_lib.read_tfds(types.SimpleNamespace(name='seen'), 'train')
  assert str(error.value) == (
    "tfds:seen:train, row 2: field 'image' holds pictures, which are read from files "
    'and from the hub alone; give a parquet file, or hub:owner/name:split'
  )


def test_a_data_set_that_the_library_lacks_or_cannot_make_is_named(
  library, monkeypatch
):
  with pytest.raises(ValueError, match="tensorflow-datasets has no data set 'sums'"):
    sources.download(problems('tfds:sums'), 'source')
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_: [])

  def fail(self):
    raise RuntimeError('the server refused\nat length')

  monkeypatch.setattr(Gsm8kLike, '_generate_examples', fail)
  with pytest.raises(ValueError, match=r'cannot be prepared \(.*the server refused\)'):
    sources.download(problems('tfds:gsm8k_like'), 'source')


def test_the_librarys_own_gsm8k_is_known_without_tensorflow():
  # The library itself lists it only where TensorFlow is.
  assert hub_lib._builder('gsm8k', 'problems.source').name == 'gsm8k'


@pytest.mark.parametrize(
  'source',
  [
    'hub:gsm8k',
    'hub:',
    'tfds:',
    'tfds:a/b',
    'hub:a/b@:train',
    'hub:a/b/c',
    'hub:../b!',
  ],
)
def test_a_name_of_no_form_is_refused(source):
  with pytest.raises(ValueError, match='write hub:owner/name:split, hub:owner'):
    sources.missing(problems(source), 'source')
