"""The embedded problems as a tensorflow-datasets builder; no network, no TensorFlow."""

import dataclasses

import tensorflow_datasets as tfds

from bapo_jax.data import builder, families


@dataclasses.dataclass
class SyntheticConfig(tfds.core.BuilderConfig):
  """Family, difficulty and sizes; training and test problems never coincide."""

  family: str = 'search'
  level: int = 2
  seed: int = 0
  train: int = 2048
  test: int = 512


class Synthetic(builder.Builder):
  """Problems with an integer answer in 0..999."""

  def splits(self):
    c = self.builder_config
    found = families.generate(c.family, c.level, c.seed, c.train + c.test)
    rows = [
      {'id': i, 'problem': p.text, 'answer': str(p.answer), 'verifier': ''}
      for i, p in enumerate(found)
    ]
    return {'train': rows[: c.train], 'test': rows[c.train :]}


def prepare(data_dir: str, **config) -> tfds.core.DatasetBuilder:
  """The builder of these problems, written to `data_dir` unless it is there already."""
  families.check(config['family'], config['level'])
  name = '-'.join(str(value) for value in config.values())
  return builder.write(
    Synthetic(
      data_dir=data_dir,
      config=SyntheticConfig(name=name, **config),
      file_format='array_record',
    )
  )
