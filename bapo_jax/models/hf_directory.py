"""Directories of models: found on this machine, or fetched from the hub by name.

1. `missing` lists the files that this machine lacks, `here` gives the directory;
2. `find` downloads a name of the hub, `hub:owner/name@revision`, if files are missing;
3. `hint` says how to spell a path that looks like a hub's name;
4. `identity` says whether two machines have the same model.
"""

import os
import re
from collections.abc import Sequence

from bapo_jax.models import safetensors_io
from bapo_jax.runtime import digests, hub_names

MODEL_FILES = ('config.json', 'tokenizer.json', '*.safetensors')
BESIDE_WEIGHTS = (  # what a run reads of a model, where it is there
  'config.json',
  'generation_config.json',
  'preprocessor_config.json',
  'processor_config.json',
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
)
LOOKS_LIKE_A_NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?')


def find(name: str, knob: str, needs: Sequence[str] = MODEL_FILES) -> str:
  """The directory of a model; downloads it if files are missing.

  Args:
    name: a directory, or a hub's name: hub:owner/name or hub:owner/name@revision.
    knob: the knob that holds the name, for errors.
    needs: the files that must be there.

  Raises:
    ValueError: files are missing, with the command that fetches them.
  """
  path, why, hub = here(name), '', hub_names.parse(name)
  if hub and missing(path, needs):
    try:
      path = _snapshot(hub, local=False)
    except (OSError, ValueError) as error:
      # Its first line gives the failure, the second one a hint for importing code.
      why = f' ({str(error).strip().splitlines()[0].rstrip(".: ")})'
  if lacks := missing(path, needs):
    where = f', nor in the local cache of the hub{why}' if hub else hint(name)
    at = f' --revision {hub.revision}' if hub and hub.revision else ''
    command = f'{hub.repository if hub else "<name>"}{at}'
    raise ValueError(
      f'--config.{knob}={name}: no {", ".join(lacks)} there{where}; fetch it where '
      f'there is a network, `hf download {command} --local-dir '
      f'{"<directory>" if hub else name}`, and give that directory'
    )
  return path


def missing(path: str, needs: Sequence[str] = MODEL_FILES) -> list[str]:
  """Lists the files that a model's directory, as `here` returns it, lacks.

  Raises:
    ValueError: the index of the weights is damaged.
  """
  present = os.path.isdir(path)
  lacks = [n for n in needs if '*' not in n and not _is_file(path, n)]
  if '*.safetensors' in needs:
    wanted = safetensors_io.files(path) if present else []
    lacks += [n for n in wanted or ['*.safetensors'] if not _is_file(path, n)]
  return lacks


def _is_file(path: str, name: str) -> bool:
  """Whether a file of that name lies in the directory itself."""
  return '\0' not in name and os.path.isfile(os.path.join(path, name))


def here(name: str) -> str:
  """A model's directory on this machine; of a hub's name the one in the hub's cache.

  Raises:
    ValueError: the name begins with hub: and is malformed.
  """
  hub = hub_names.parse(name)
  if hub is None:
    return name
  try:
    return _snapshot(hub, local=True)
  except (OSError, ValueError):
    return name


def identity(path: str) -> dict[str, list[int | str]]:
  """Returns file -> size and digest of what a run reads of a model; {} for ''.

  Of weights parts alone: a process reads no more than its own shards of them, and two
  revisions of a model differ everywhere.
  """
  if not path:
    return {}
  beside = {n: digests.of_file(path, n) for n in BESIDE_WEIGHTS if _is_file(path, n)}
  weights = safetensors_io.files(path)
  return beside | {n: digests.sampled(os.path.join(path, n)) for n in weights}


def hint(name: str) -> str:
  """How to spell a path that does not exist and looks like a hub's name, else ''."""
  if os.path.exists(name) or not LOOKS_LIKE_A_NAME.fullmatch(name):
    return ''
  return f' (a model of the hub is written hub:{name})'


def _snapshot(hub: hub_names.HubName, local: bool) -> str:
  import huggingface_hub

  return huggingface_hub.snapshot_download(
    hub.repository,
    revision=hub.revision,
    allow_patterns=['*.json', '*.safetensors', '*.txt', '*.model', '*.jinja'],
    ignore_patterns=['original/*', 'consolidated*'],  # Llama's own format
    local_files_only=local,
  )
