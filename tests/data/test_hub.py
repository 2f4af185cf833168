"""Names of data sets: found in the cache, downloaded, or refused in one sentence."""

import os
import socket
import subprocess
import sys

import huggingface_hub
import pytest
import recordings
import tensorflow_datasets as tfds
from refusals import sentence_of

from bapo_jax.data import hub as hub_lib
from bapo_jax.data import sources
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.row import Row

ROWS = [{'question': f'{i}+1', 'answer': f'so\n#### {i + 1}'} for i in range(6)]
PARSED = [Row(f'{i}+1', str(i + 1), 'gsm8k') for i in range(6)]


def problems(source):
  return ProblemsConfig(source=source, test_source=source)


def lay_out(folder, files):
  """Files of rows under `folder`, each a path and its rows."""
  for name, rows in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    recordings.jsonl(path, rows)
  return str(folder)


def load(knobs):
  """The rows of the training problems."""
  return sources.read(knobs).training


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


def test_a_hub_name_is_downloaded_and_read(hub):
  knobs = problems('hub:some/data:main/train')
  assert sources.absent(knobs, 'source') == []
  assert hub == [], 'nothing is downloaded while other things may be wrong'
  assert load(knobs) == PARSED
  assert hub == [True, False]  # the cache comes first


def test_a_revision_is_pinned(hub):
  knobs = problems('hub:some/data@v1:main/train')
  assert sources.absent(knobs, 'source') == []
  assert load(knobs) == PARSED[:3]
  sentence = sentence_of(sources.read, problems('hub:some/data@v2:main/train'))
  assert '--config.problems.source=hub:some/data@v2:main/train' in sentence
  assert '(404: no such revision)' in sentence
  assert '`hf download some/data --revision v2 --repo-type' in sentence


@pytest.mark.parametrize('name', ['some/data', 'some/data@v1', 'some/data.jsonl'])
def test_a_path_is_never_looked_up_on_the_hub(hub, name, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (absent,) = sources.absent(problems(name), 'source')
  hint = '' if name.endswith('.jsonl') else f' (or hub:{name}?)'
  assert absent == f'--config.problems.source={name}{hint}'
  with pytest.raises(ValueError, match=name):
    load(problems(name))
  assert hub == []


def test_files_of_a_split_are_found_and_a_missing_part_is_noticed(tmp_path):
  names = ['data/train-00000-of-00001.parquet', 'data/trainer.jsonl', 'test.jsonl']
  names += ['a/val.jsonl', 'b/val.jsonl', 'part-00001-of-00002.jsonl']
  names += ['both.csv', 'both-0.jsonl', 'both-1.jsonl', 'zipped.csv.gz', 'both.txt']
  folder = lay_out(tmp_path, dict.fromkeys(names, ()))

  def found(split):
    paths = hub_lib._of_split(folder, split, 'knob')
    return [os.path.relpath(path, folder) for path in paths]

  assert found('train') == ['data/train-00000-of-00001.parquet']
  assert found('test') == ['test.jsonl']
  assert found('b/val') == ['b/val.jsonl']
  assert found('dev') == found('part') == []
  assert found('both') == ['both-0.jsonl', 'both-1.jsonl']
  assert found('zipped') == ['zipped.csv.gz']
  with pytest.raises(ValueError, match=r"val: \['a', 'b'\]; .* such as a/val"):
    found('val')


class Gsm8kLike(tfds.core.GeneratorBasedBuilder):
  """A data set as a user builds it: its own features, no id."""

  name = 'gsm8k_like'
  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    texts = {name: tfds.features.Text() for name in ('question', 'answer')}
    features = tfds.features.FeaturesDict(texts)
    return tfds.core.DatasetInfo(builder=self, features=features)

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    yield from enumerate(ROWS)


@pytest.fixture
def network(monkeypatch, tmp_path):
  """tensorflow-datasets with these builders; network(False) cuts the network."""
  builder = tfds.builder
  data_dir = {'data_dir': str(tmp_path)}
  monkeypatch.setattr(tfds, 'builder', lambda name, **k: builder(name, **k | data_dir))
  for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy'):
    monkeypatch.delenv(name, raising=False)

  def refuse(*_):
    raise OSError('no network')

  def switch(on):
    monkeypatch.setattr(socket, 'getaddrinfo', (lambda *_: []) if on else refuse)

  switch(True)
  return switch


def test_a_data_set_of_ones_own_is_prepared_and_read(network):
  rows = load(problems('tfds:gsm8k_like:train'))
  assert sorted(rows) == sorted(PARSED)
  assert "no split 'dev'; choose one of ['train']" in sentence_of(
    sources.read, problems('tfds:gsm8k_like:dev')
  )

  def check(row):
    if row.answer == '3':
      raise ValueError('not this one')

  with pytest.raises(ValueError, match=r'tfds:gsm8k_like:train, row \d: not this one'):
    knobs = problems('tfds:gsm8k_like')
    sources.check(knobs, sources.read(knobs), check)


def test_a_data_set_is_downloaded_once_and_read_without_a_network(network):
  name = problems('tfds:gsm8k_like')
  network(False)
  with pytest.raises(ValueError, match=r'the data is not in .* no network to download'):
    sources.read(name)
  network(True)
  first = load(name)
  network(False)
  assert load(name) == first


def test_only_a_tfds_source_needs_the_library(monkeypatch):
  code = 'import sys; sys.modules["tensorflow_datasets"] = None; import {}'
  for module in ('bapo_jax.run.experiment', 'bapo_jax.data.hub'):
    subprocess.run([sys.executable, '-c', code.format(module)], check=True)
  monkeypatch.setitem(sys.modules, 'tensorflow_datasets', None)
  assert 'tfds:sums needs tensorflow-datasets' in sentence_of(
    sources.read, problems('tfds:sums')
  )


def test_a_data_set_that_the_library_lacks_or_cannot_make_is_named(
  network, monkeypatch
):
  def fail(self):
    raise RuntimeError('the server refused\nat length')

  # The reason is the library's: it need not be the lack of TensorFlow.
  reason = r"has no data set 'sums'.* without TensorFlow \(Dataset sums not found"
  with pytest.raises(ValueError, match=reason):
    sources.read(problems('tfds:sums'))
  monkeypatch.setattr(Gsm8kLike, '_generate_examples', fail)
  with pytest.raises(ValueError, match=r'cannot be prepared \(.*the server refused\)'):
    sources.read(problems('tfds:gsm8k_like'))


def test_the_librarys_own_gsm8k_is_known_without_tensorflow():
  # The library itself lists the data set only if TensorFlow is installed.
  assert hub_lib._builder('gsm8k', 'problems.source').name == 'gsm8k'
  assert 'tensorflow' not in sys.modules


@pytest.mark.parametrize(
  'source', ['hub:gsm8k', 'tfds:', 'tfds:a/b', 'hub:a/b@:train', 'hub:a/b/c']
)
def test_a_name_of_no_form_is_refused(source):
  assert 'write hub:owner/name:split' in sentence_of(
    sources.absent, problems(source), 'source'
  )
