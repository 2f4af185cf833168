"""The embedded problems as a tensorflow-datasets builder; no network, no TensorFlow.

Files are array_record: the library's default, tfrecord, needs TensorFlow to be written.
"""

import contextlib
import dataclasses
import io

import numpy as np
import tensorflow_datasets as tfds

from bapo_jax.problems import families


@dataclasses.dataclass
class SyntheticConfig(tfds.core.BuilderConfig):
  """Family, difficulty and sizes; training and test problems never coincide."""

  family: str = 'search'
  level: int = 2
  seed: int = 0
  train: int = 2048
  test: int = 512


class Synthetic(tfds.core.GeneratorBasedBuilder):
  """Problems with an integer answer in 0..999."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    features = tfds.features.FeaturesDict(
      {
        'id': tfds.features.Scalar(np.int64),
        'problem': tfds.features.Text(),
        'answer': tfds.features.Text(),
      }
    )
    # Built in place: dataset_info_from_configs would look for a metadata folder.
    return tfds.core.DatasetInfo(builder=self, features=features)

  def _split_generators(self, dl_manager):
    c = self.builder_config
    found = families.generate(c.family, c.level, c.seed, c.train + c.test)
    return {
      'train': self._generate_examples(found, 0, c.train),
      'test': self._generate_examples(found, c.train, c.train + c.test),
    }

  def _generate_examples(self, found, start, stop):
    for i in range(start, stop):
      yield i, {'id': i, 'problem': found[i].text, 'answer': str(found[i].answer)}


def prepare(data_dir: str, **config) -> tfds.core.DatasetBuilder:
  """The builder of these problems, written to `data_dir` unless it is there already."""
  families.check(config['family'], config['level'])
  name = '-'.join(str(value) for value in config.values())
  builder = Synthetic(
    data_dir=data_dir,
    config=SyntheticConfig(name=name, **config),
    file_format='array_record',
  )
  # The library reports a download that does not happen, and draws bars for 0.2 s.
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):
    builder.download_and_prepare()
  return builder
