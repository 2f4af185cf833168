"""Problems on disk, as tensorflow-datasets writes them without TensorFlow.

1. `store` writes rows to the data directory, under a hash of them: the problems that a
   run was trained on stay in its workdir, whatever becomes of their source;
2. `stored` reads a split of them back, and writes them again where they are damaged;
3. `read` reads a split of any other data set.

Files are array_record: the library's default, tfrecord, needs TensorFlow to be written.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from bapo_jax.data.row import Row
from bapo_jax.runtime.progress import log, quiet_absl


@dataclasses.dataclass
class RowsConfig(tfds.core.BuilderConfig):
  """The rows of each split; the name holds a hash of them."""

  name: str = ''
  splits: Mapping[str, Sequence[Row]] = dataclasses.field(
    default_factory=dict, repr=False
  )


class StoredInfo(tfds.core.DatasetInfo):
  """Of rows that no server has: the library's own asks one, and leaves a folder in the
  system's temporary directory."""

  def initialize_from_bucket(self) -> None:
    """Asks nobody."""


class StoredProblems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Rows with ids, which count through all splits from 0."""

  VERSION = tfds.core.Version('1.2.0')

  def __init__(self, **knobs: Any):
    with quiet_absl():  # the library warns of a config that no list of its own names
      super().__init__(**knobs)

  def _info(self) -> tfds.core.DatasetInfo:
    text = {name: tfds.features.Text() for name in Row._fields}
    features = tfds.features.FeaturesDict({'id': tfds.features.Scalar(np.int64)} | text)
    # Built in place: dataset_info_from_configs would look for a metadata folder.
    return StoredInfo(builder=self, features=features)

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    start, generators = 0, {}
    for split, rows in self.builder_config.splits.items():
      generators[split] = self._generate_examples(start, rows)
      start += len(rows)
    return generators

  def _generate_examples(
    self, start: int, rows: Sequence[Row]
  ) -> Iterator[tuple[int, dict]]:
    for i, row in enumerate(rows, start):
      yield i, {'id': i, **row._asdict()}


def store(
  data_dir: str, name: str, splits: Mapping[str, Sequence[Row]]
) -> tfds.core.DatasetBuilder:
  """The builder of these rows, written to `data_dir` unless they are there already.

  Args:
    name: of the directory, with the hash of the rows.
  """
  config = RowsConfig(name=_named(name, splits), splits=splits)
  return prepare(
    StoredProblems(data_dir=data_dir, config=config, file_format='array_record')
  )


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
  """Temporary files go to a folder that ends here: the library leaves some behind."""
  before = tempfile.tempdir
  with tempfile.TemporaryDirectory() as tempfile.tempdir:
    try:
      yield
    finally:
      tempfile.tempdir = before


def _named(name: str, splits: Mapping[str, Sequence[Row]]) -> str:
  """The name of the directory of these rows."""
  digest = hashlib.sha256(json.dumps(splits).encode()).hexdigest()
  name = re.sub(r'\W+', '_', name)
  return f'{name[:40]}-{digest[:12]}'


def stored(
  data_dir: str, name: str, splits: Mapping[str, Sequence[Row]], split: str
) -> dict[int, Row]:
  """From id to row, of one of these splits, read back from `data_dir`.

  In the order of the file: array_record shuffles, by the ids alone. Files that cannot
  be read, or hold other rows, are written again.

  Raises:
    OSError: the system refused.
    ValueError: they differ from these rows when they were written again, too.
  """
  start = 0
  for other, rows in splits.items():
    if other == split:
      break
    start += len(rows)
  expected = dict(enumerate(splits[split], start))
  home = os.path.join(data_dir, 'stored_problems', _named(name, splits))
  for last in (not os.path.lexists(home), True):
    try:
      found = problems(store(data_dir, name, splits), split)
      if found == expected:
        return found
      problem = 'other rows'
    except Exception as error:  # a damaged file makes the library raise anything
      if last:
        raise
      problem = f'{type(error).__name__}: {error!s:.80}'
    if last:
      break
    log(f'{home} is damaged ({" ".join(problem.split())}): it is written again.')
    if os.path.islink(home) or not os.path.isdir(home):
      os.remove(home)
    else:
      shutil.rmtree(home)
  raise ValueError(f'{home} does not give back what was written; remove it')


def prepare(builder: tfds.core.DatasetBuilder) -> tfds.core.DatasetBuilder:
  """The builder, its data written unless they are there already."""
  # The library reports a download that does not happen, and draws bars for 0.2 s.
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):
    builder.download_and_prepare()
  return builder


def problems(builder: tfds.core.DatasetBuilder, split: str) -> dict[int, Row]:
  """From id to row, in the order of the split's file: array_record shuffles them."""
  return {row.pop('id'): Row(**row) for row in read(builder, split)}


def read(builder: tfds.core.DatasetBuilder, split: str) -> list[dict[str, Any]]:
  """The rows of a split of any data set, in the order of its file."""
  return [
    {name: _text(value) for name, value in row.items()}
    for row in builder.as_data_source(split)
  ]


def _text(value: Any) -> Any:
  """Text comes back from array_record as bytes."""
  return value.decode() if isinstance(value, bytes) else value
