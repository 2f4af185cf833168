"""Problems on disk, as tensorflow-datasets writes them without TensorFlow.

1. `store` writes rows to the data directory, under a hash of them: the problems that a
   run was trained on stay in its workdir, whatever becomes of their source;
2. `problems` reads a split of them, `read` a split of any other data set.

Files are array_record: the library's default, tfrecord, needs TensorFlow to be written.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from bapo_jax.data.row import Row
from bapo_jax.runtime.progress import quiet_absl


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

  VERSION = tfds.core.Version('1.1.0')

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
  digest = hashlib.sha256(json.dumps(splits).encode()).hexdigest()
  name = re.sub(r'\W+', '_', name)
  config = RowsConfig(name=f'{name[:40]}-{digest[:12]}', splits=splits)
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
