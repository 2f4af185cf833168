"""Finds model directories on this machine, or downloads them from the hub."""

import glob
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from bapo_jax.models.hf import safetensors_io
from bapo_jax.runtime import digests
from bapo_jax.runtime.files import first_line

# A name without 'hub:' is a local path, so a mistyped path is never downloaded.
NAME = re.compile(r'hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?', re.ASCII)
MODEL_FILES = ('config.json', 'tokenizer.json', '*.safetensors')
OPTIONAL_FILES = (  # read if present; `identity` covers these and the weights
  'config.json',
  'generation_config.json',
  'preprocessor_config.json',
  'processor_config.json',
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
)
# Rewrites the weights of a model as safetensors, in PyTorch.
CONVERT = (
  'python -c "from transformers import AutoModelForCausalLM as M; '
  "M.from_pretrained('{0}').save_pretrained('{0}')\""
)
# Merges adapters of peft into their base model.
MERGE = (
  'python -c "from peft import AutoPeftModelForCausalLM as M; '
  "M.from_pretrained('{0}').merge_and_unload().save_pretrained('{0}-merged')\""
)
# Pattern of a file {1} in a directory {0} without safetensors -> what {0} is, and the
# way out. The first pattern that matches counts.
KINDS = {
  'adapter_config.json': (
    f'contains adapters of peft, without their model; merge both: `{MERGE}`, then copy '
    'the tokenizer to {0}-merged and set model.path to it'
  ),
  **dict.fromkeys(
    ('_CHECKPOINT_METADATA', '*/_CHECKPOINT_METADATA', '*/*/_CHECKPOINT_METADATA'),
    'contains a checkpoint of a run ({1}), not a model; write the model with '
    'python -m bapo_jax export --workdir=<directory of the run> --to=<new directory>, '
    'and give the new directory',
  ),
  '*.gguf': (
    'has its weights only in {1}, quantized for llama.cpp; download the safetensors '
    'files of the model that it was made from'
  ),
  'pytorch_model*.bin': (
    'has its weights only in {1}, a pickle, which could run code and is never read; '
    f'save them as safetensors, in an environment with PyTorch: `{CONVERT}`'
  ),
  'zero_to_fp32.py': (
    'is a checkpoint of DeepSpeed; gather its weights, in an environment with '
    'DeepSpeed: `python {0}/{1} {0} {0} --safe_serialization`'
  ),
  'pytorch_model_fsdp_*': (
    'is a checkpoint of FSDP; gather its weights, in an environment with PyTorch: '
    '`accelerate merge-weights {0}/{1} {0}`'
  ),
  **dict.fromkeys(
    ('*/config.json', '*/*/config.json'),
    'is not a model, but {1} belongs to one; set model.path to the directory of that '
    'file',
  ),
}
# Not models/x: the configs and docs keep local models there.
LOOKS_LIKE_A_NAME = re.compile(
  r'(?!models/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?'
)


class HubName(NamedTuple):
  repository: str  # owner/name
  revision: str | None  # a commit, tag or branch; None: the default branch


def parse_hub_name(name: str) -> HubName | None:
  """Parses a hub name; returns None for a path, raises ValueError if malformed."""
  if not name.startswith('hub:'):
    return None
  if not (match := NAME.fullmatch(name)):
    raise ValueError(
      f'{name[:80]!r} is not a hub name; write hub:owner/name or '
      'hub:owner/name@revision'
    )
  return HubName(match[1], match[2])


def find(name: str, knob: str, needs: Sequence[str] = MODEL_FILES) -> str:
  """Returns the local directory of a model; downloads a hub name if files are missing.

  `name` is a directory, hub:owner/name or hub:owner/name@revision, the value of `knob`.

  Raises:
    ValueError: files are missing; the message names the command that downloads them.
  """
  path = resolve(name)
  where = f'there{hint(name)}'
  source = '<name>'
  revision = ''
  target = name
  if hub := parse_hub_name(name):
    where = 'in the local hub cache'
    source = hub.repository
    revision = f' --revision {hub.revision}' if hub.revision else ''
    target = '<directory>'
    if missing(path, needs):
      try:
        path = _snapshot(hub, local=False, weights='*.safetensors' in needs)
      except (OSError, ValueError) as error:
        # The first line states the failure; the other lines suggest an import.
        where += f' ({first_line(error)})'
  lacking = missing(path, needs)
  if not lacking:
    return path
  only = ' config.json' if lacking == ['config.json'] else ''
  convert = ''
  if hub and lacking == ['*.safetensors']:  # pickles are not downloaded
    convert = CONVERT.format(target)
    convert = f' and, if the model is published as pytorch_model.bin, `{convert}`'
  raise ValueError(
    f'--config.{knob}={name}: found no {", ".join(lacking)} {where}; on a machine with '
    f'a network, run `hf download {source}{only}{revision} --local-dir {target}`'
    f'{convert}, then set {knob} to that directory'
  )


def resolve(name: str) -> str:
  """Returns the local directory of a model without using the network.

  A directory is returned unchanged, as is a hub name that is not in the hub's cache. A
  malformed hub name raises a ValueError.
  """
  hub = parse_hub_name(name)
  try:
    return _snapshot(hub, local=True) if hub else name
  except (OSError, ValueError):
    return name


def missing(path: str, needs: Sequence[str] = MODEL_FILES) -> list[str]:
  """Returns the files of `needs` that are missing from `path`, a result of `resolve`.

  Raises:
    ValueError: the index of the weights is damaged, or the directory is one of KINDS.
  """
  wanted = [file for file in needs if '*' not in file]
  if '*.safetensors' in needs:
    weights = safetensors_io.files(path) if os.path.isdir(path) else []
    wanted += weights or ['*.safetensors']
  lacking = [x for x in wanted if not os.path.isfile(os.path.join(path, x))]
  if '*.safetensors' in lacking:
    for pattern, kind in KINDS.items():
      # A partly downloaded model may contain the directories of other models.
      if pattern.endswith('/config.json') and 'config.json' not in lacking:
        continue
      if files := sorted(glob.glob(pattern, root_dir=path)):
        raise ValueError(f'{path} {kind.format(path, files[0])}')
  return lacking


def identity(path: str) -> dict[str, list[int | str]]:
  """Returns file -> [size, digest] of a model that a run reads; {} for an empty path.

  Of the weights only samples are digested: no process needs to read whole files, and
  two revisions of a model differ everywhere.
  """
  if not path:
    return {}
  options = [n for n in OPTIONAL_FILES if os.path.isfile(os.path.join(path, n))]
  return {n: digests.of_file(path, n) for n in options} | {
    n: digests.sampled(os.path.join(path, n)) for n in safetensors_io.files(path)
  }


def hint(name: str) -> str:
  """Returns a hint if a path does not exist and looks like a hub name, else ''."""
  if os.path.exists(name) or not LOOKS_LIKE_A_NAME.fullmatch(name):
    return ''
  return f' (to use a model of the hub, write hub:{name})'


def _snapshot(hub: HubName, local, weights=True):
  import huggingface_hub

  patterns = ['*.json', '*.txt', '*.model', '*.jinja']
  # No pickles: a model without safetensors is reported as missing.
  return huggingface_hub.snapshot_download(
    hub.repository,
    revision=hub.revision,
    allow_patterns=patterns + ['*.safetensors'] * weights,
    ignore_patterns=['original/*', 'consolidated*'],  # Llama's original format
    local_files_only=local,
  )
