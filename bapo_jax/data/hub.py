"""Loads data sets by name: `hub:owner/name`, or `tfds:name` of tensorflow-datasets.

tensorflow-datasets stores downloads as array_record, because its default format,
tfrecord, needs TensorFlow. For a custom data set, import a builder before the run:
a `tfds.core.GeneratorBasedBuilder` with fields of a layout, such as question, answer.
"""

import contextlib
import importlib
import io
import os
import pathlib
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

from bapo_jax.data import local_files
from bapo_jax.data.local_files import Item
from bapo_jax.runtime.files import first_line


def find_files(name: str, split: str, knob: str) -> tuple[str, ...]:
  """Returns the local paths of the files of a split, in order; may download them.

  `name` is owner/name or owner/name@revision, with a commit, tag or branch as revision.
  File names start with `split`, which may include their folder: `main/train`.

  Raises:
    ValueError: the data set or split does not exist, or there is no network.
  """
  import huggingface_hub

  repository, _, revision = name.partition('@')
  patterns = [f'*{split}*{suffix}' for suffix in local_files.SUFFIXES]
  reason = ''
  for local in (True, False):
    try:
      folder = huggingface_hub.snapshot_download(
        repository,
        repo_type='dataset',
        revision=revision or None,
        allow_patterns=patterns,
        local_files_only=local,
      )
    except (OSError, ValueError) as error:
      # The first line names the failure, later lines give advice on Python calls.
      reason = f' ({first_line(error)})'
      continue
    if files := _of_split(folder, split, knob):
      return files
  options = name.replace('@', ' --revision ')
  raise ValueError(
    f'--config.{knob}=hub:{name}:{split}: no {split}*.parquet, .jsonl, .json or .csv '
    f'on the hub or in the local cache{reason}; download the files on a machine with '
    f'a network, `hf download {options} --repo-type dataset --local-dir <directory>`, '
    'and give their paths'
  )


def _of_split(folder, split, knob):
  """Returns the files of a split; () if the download is missing or incomplete."""
  pattern = re.compile(rf'(?:.*/)?{re.escape(split)}([-.].*)?')
  paths = sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob('*.*'))
  names: list[str] = []
  for suffix in local_files.SUFFIXES:
    # A data set may be published in several formats; the files of one are enough.
    same = [name for name in paths if name.endswith(suffix) and pattern.fullmatch(name)]
    names = names or same
  folders = sorted({os.path.dirname(name) for name in names})
  if len(folders) > 1:
    raise ValueError(
      f'--config.{knob}: several folders have files of the split {split}: {folders}; '
      f'put one of them before the split, such as {folders[0]}/{split}'
    )
  # train-00000-of-00002.parquet: an interrupted download lacks a part.
  parts = [re.search(r'-of-(\d+)', name) for name in names]
  if any(part and int(part[1]) != len(names) for part in parts):
    return ()
  return tuple(os.path.join(folder, name) for name in names)


def tfds_items(name: str, split: str, knob: str) -> Iterator[Item]:
  """Yields (location, fields) of each row of a split from tensorflow-datasets.

  The library downloads the data to ~/tensorflow_datasets if necessary.

  Raises:
    ValueError: no such data set, split, network or library.
  """
  builder = _builder(name, knob)
  source = f'--config.{knob}=tfds:{name}'
  # Without a network the library would retry for minutes. A proxy resolves names.
  if not builder.info.splits and not urllib.request.getproxies():
    try:
      socket.getaddrinfo('github.com', 443)
    except OSError as error:
      raise ValueError(
        f'{source}: the data is not in {builder.data_dir}, and there is no network to '
        'download it; copy this directory from another machine, or give a file'
      ) from error
  try:
    # The library reports a download even if there is none.
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
  except Exception as error:  # of the library, requests or the data set
    raise ValueError(
      f'{source} cannot be prepared ({first_line(error)}); give another data '
      'set or a file'
    ) from error
  if split not in builder.info.splits:
    raise ValueError(
      f'{source}:{split}: no split {split!r}; choose one of '
      f'{sorted(builder.info.splits)}'
    )
  for i, values in enumerate(builder.as_data_source(split), 1):
    # array_record returns text as bytes.
    fields = {k: x.decode() if isinstance(x, bytes) else x for k, x in values.items()}
    yield f'tfds:{name}:{split}, row {i}', fields


def _builder(name, knob) -> Any:
  # Imported late because only this kind of source needs it.
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise ValueError(
      f'--config.{knob}=tfds:{name} needs tensorflow-datasets ({error}); run `pip '
      'install -r requirements.txt`, or give a file or a hub name'
    ) from error
  tfds.disable_progress_bar()
  package = pathlib.Path(tfds.__file__).parent
  for path in package.glob(f'*/{name}/{name}.py') if name.isidentifier() else ():
    # Registers the data set, which the library imports only with TensorFlow.
    module = path.relative_to(package.parent).with_suffix('')
    importlib.import_module('.'.join(module.parts))
  try:
    return tfds.builder(name, file_format='array_record')
  except (tfds.core.DatasetNotFoundError, ValueError, ImportError) as error:
    raise ValueError(
      f'--config.{knob}=tfds:{name}: tensorflow-datasets has no data set {name!r} that '
      f'works without TensorFlow ({first_line(error)}); give a file or a hub name'
    ) from error
