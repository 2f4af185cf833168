"""Problems by name: of the hub (`hub:owner/name`) and of tensorflow-datasets (`tfds:`).

1. `find_files` finds the files of a split in the local cache, else downloads them;
2. `prepare_tfds` has tensorflow-datasets download and write its own, as array_record;
   `read_tfds` reads their rows.

An error is one sentence: the missing thing, the reason, the way to get it.
"""

import importlib
import logging
import os
import pathlib
import re
import socket
import urllib.request
from collections.abc import Callable

import tensorflow_datasets as tfds

from bapo_jax.data import builder as builder_lib
from bapo_jax.data import local_files, schemas
from bapo_jax.data.row import Row

SUFFIX = '|'.join(suffix.removeprefix('.') for suffix in local_files.SUFFIXES)


def find_files(name: str, split: str, knob: str) -> tuple[str, ...]:
  """Local paths of the files of a split of a data set, in their order.

  Args:
    name: owner/name, or owner/name@revision: a commit, tag or branch.
    split: how the files' names begin: `train`, or `main/train` with their folder.

  Raises:
    ValueError: no such data set or split, or no network.
  """
  reason = ''
  for local in (True, False):
    try:
      folder = _snapshot(name, split, local)
    except (OSError, ValueError) as error:
      # The first line names the failure, the second an import.
      reason = f' ({str(error).strip().splitlines()[0].rstrip(".: ")})'
      continue
    if found := _of_split(folder, split, knob):
      return found
  fetched = name.replace('@', ' --revision ')
  raise ValueError(
    f'--config.{knob}=hub:{name}:{split}: no {split}*.parquet or .jsonl there, nor in '
    f'the local cache of the hub{reason}; fetch it where there is a network, `hf '
    f'download {fetched} --repo-type dataset --local-dir <directory>`, and give the '
    'file'
  )


def _snapshot(name: str, split: str, local: bool) -> str:
  import huggingface_hub

  repository, _, revision = name.partition('@')
  return huggingface_hub.snapshot_download(
    repository,
    repo_type='dataset',
    revision=revision or None,
    allow_patterns=[f'*{split}*{suffix}' for suffix in local_files.SUFFIXES],
    local_files_only=local,
  )


def _of_split(folder: str, split: str, knob: str) -> tuple[str, ...]:
  """The split's files, () where there is none or a part is missing."""
  pattern = re.compile(rf'(?:.*/)?{re.escape(split)}(?:[-.].*)?\.(?:{SUFFIX})')
  names = sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob('*.*'))
  names = [name for name in names if pattern.fullmatch(name)]
  folders = sorted({os.path.dirname(name) for name in names})
  if len(folders) > 1:
    raise ValueError(
      f'--config.{knob}: files of {split} stand in {folders}; give the folder with the '
      f'split, such as {folders[0]}/{split}'
    )
  # train-00000-of-00002.parquet: a download that was cut short lacks a part.
  parts = [re.search(r'-of-(\d+)', name) for name in names]
  if any(part and int(part[1]) != len(names) for part in parts):
    return ()
  return tuple(os.path.join(folder, name) for name in names)


def prepare_tfds(name: str, split: str, knob: str) -> tfds.core.DatasetBuilder:
  """A data set that tensorflow-datasets knows, written to ~/tensorflow_datasets.

  Raises:
    ValueError: no such data set or split, or no network.
  """
  builder = _builder(name, knob)
  # Without a network the library retries for minutes before it fails.
  if not builder.info.splits and not _network():
    raise ValueError(
      f'--config.{knob}=tfds:{name}: not in {builder.data_dir}, and there is no '
      'network to download it; copy that directory from a machine that has it, or '
      'give a file'
    )
  try:
    builder_lib.prepare(builder)
  except Exception as error:  # of its own kinds, of requests and of each data set
    raise ValueError(
      f'--config.{knob}=tfds:{name} cannot be prepared ({str(error).splitlines()[0]}); '
      'give another data set or a file'
    ) from error
  if split not in builder.info.splits:
    raise ValueError(
      f'--config.{knob}=tfds:{name}:{split}: no split {split!r}; choose one of '
      f'{sorted(builder.info.splits)}'
    )
  return builder


def read_tfds(
  builder: tfds.core.DatasetBuilder,
  split: str,
  check: Callable[[Row], None] | None = None,
) -> list[Row]:
  """The rows of a split.

  Args:
    check: raises ValueError where an answer cannot be verified.

  Raises:
    ValueError: no schema has its fields, or a row cannot be read.
  """
  found = builder_lib.read(builder, split)
  rows = []
  for i, row in enumerate(found, 1):
    try:
      if field := schemas.pictured_field(row):
        raise ValueError(
          f'field {field!r} holds pictures, which are read from files and from the hub '
          'alone; give a parquet file, or hub:owner/name:split'
        )
      rows.append(schemas.parse(row, schemas.detect(found[0])))
      if check:
        check(rows[-1])
    except ValueError as error:
      raise ValueError(f'tfds:{builder.name}:{split}, row {i}: {error}') from error
  return rows


def _builder(name: str, knob: str) -> tfds.core.DatasetBuilder:
  package = pathlib.Path(tfds.__file__).parent
  for path in package.glob(f'*/{name}/{name}.py') if name.isidentifier() else ():
    # Registered by its import, which the library leaves out without TensorFlow.
    module = path.relative_to(package.parent).with_suffix('')
    importlib.import_module('.'.join(module.parts))
  try:
    with builder_lib.own_temporary_folder():
      return tfds.builder(name, file_format='array_record')
  except (tfds.core.DatasetNotFoundError, ValueError, ImportError) as error:
    logging.debug('%s', error)
    raise ValueError(
      f'--config.{knob}=tfds:{name}: tensorflow-datasets has no data set {name!r} that '
      'it can make without TensorFlow; give a file or a hub name'
    ) from error


def _network() -> bool:
  """Whether a name can be looked up; behind a proxy that is the proxy's business."""
  try:
    socket.getaddrinfo('github.com', 443)
  except OSError:
    return bool(urllib.request.getproxies())
  return True
