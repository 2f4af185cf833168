"""What the tensorflow-datasets builders of problems share; no TensorFlow is needed.

Files are array_record: the library's default, tfrecord, needs TensorFlow to be written.
"""

import contextlib
import io
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from bapo_jax.runtime.progress import quiet_absl


class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Problems with an answer; subclasses say in `splits` which."""

  VERSION = tfds.core.Version('1.1.0')

  def __init__(self, **knobs: Any):
    with quiet_absl():  # the library warns of a config that no list of its own names
      super().__init__(**knobs)

  def splits(self) -> dict[str, list[dict]]:
    """From a split to its rows: id, problem, answer, verifier; ids are used once."""
    raise NotImplementedError

  def _info(self):
    features = tfds.features.FeaturesDict(
      {
        'id': tfds.features.Scalar(np.int64),
        'problem': tfds.features.Text(),
        'answer': tfds.features.Text(),
        'verifier': tfds.features.Text(),  # '' leaves it to rewards.rule
      }
    )
    # Built in place: dataset_info_from_configs would look for a metadata folder.
    return tfds.core.DatasetInfo(builder=self, features=features)

  def _split_generators(self, dl_manager):
    return {s: self._generate_examples(rows) for s, rows in self.splits().items()}

  def _generate_examples(self, rows):
    for row in rows:
      yield row['id'], row


def write(builder: tfds.core.DatasetBuilder) -> tfds.core.DatasetBuilder:
  """The builder, its data written unless they are there already."""
  # The library reports a download that does not happen, and draws bars for 0.2 s.
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):
    builder.download_and_prepare()
  return builder


def rows(builder: tfds.core.DatasetBuilder, split: str) -> list[dict[str, Any]]:
  """The rows of a split, in the order of its file: array_record shuffles them."""
  return [
    {name: _text(value) for name, value in row.items()}
    for row in builder.as_data_source(split)
  ]


def _text(value):
  """Text comes back from array_record as bytes."""
  return value.decode() if isinstance(value, bytes) else value
