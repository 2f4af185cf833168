"""Writes a checkpoint as a directory that transformers and vLLM load: `bapo export`.

Tensors are read and written one parameter at a time, without a device or a second copy
of the model in memory. The directory gets its final name only once it is complete.
"""

import os
import shutil
from typing import Literal

from bapo_jax.autosetup import derive
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.runtime import files
from bapo_jax.runtime.hosts import differences
from bapo_jax.runtime.progress import log
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import inputs, policy
from bapo_jax.training.checkpoint import choose, read_params
from bapo_jax.training.config import Config
from bapo_jax.training.inputs import Model


def export(
  config: Config,
  workdir: str = 'runs/default',
  to: str = '',
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  shard_gb: float = 5.0,
  checkpoint: str = 'newest',
  adapter: bool = False,
) -> int:
  """Writes a checkpoint of `workdir` to the new directory `to`; returns 0.

  An empty `to` means <workdir>/export/<step>.

  Args:
    config: the config of the run.
    workdir: directory of all results
    checkpoint: newest, best or a step
    to: what to write; empty: in <workdir>/export
    dtype: type of the exported numbers; float32 is exact
    shard_gb: limit of an exported file, 10^9 bytes
    adapter: exports LoRA adapters alone, as peft reads them; else they are merged

  Raises:
    ValueError: there is no such checkpoint, the run has another model, or `to` is not
      empty.
    OSError: a write failed; the error names the file, and nothing is left.
  """
  shard_bytes = round(shard_gb * 1e9)
  if shard_bytes < 1:
    raise ValueError(f'--shard_gb={shard_gb:g}: give a number above 0')
  step = choose(workdir, checkpoint)
  if step is None:
    raise ValueError(f'--workdir={workdir} has no checkpoint; train there first')
  config = derive.decide(config, workdir)
  check_config(config, workdir)
  if adapter and not config.lora.rank:
    raise ValueError('--adapter needs lora.rank >= 1; omit --adapter with lora.rank=0')
  to = to or os.path.join(workdir, 'export', str(step))
  check_empty(to)
  model = inputs.open_model(config)
  part = to.rstrip('/') + '.bapo_jax.part'
  shutil.rmtree(part, ignore_errors=True)  # left by a killed export
  try:
    with files.naming(part):
      os.makedirs(part)
      source = inputs.tokenizer_directory(config, model.directory)
      tokenizer_lib.save(source, part)
      if adapter:
        get = read_params(workdir, step)
        name = config.model.path or model.directory
        hf_weights.save_adapters(part, get, model.spec, config.lora, name, dtype)
      else:
        read = policy.reader(config, model, workdir, step, exact=True)
        hf_weights.save(part, read, model.spec, dtype, shard_bytes)
        write_configs(part, config, model, dtype)
      os.replace(part, to)
  finally:
    shutil.rmtree(part, ignore_errors=True)
  log(f'Step {step} exported to {to}')
  return 0


def check_empty(path: str) -> None:
  """Raises ValueError if anything but an empty directory is at a path."""
  if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
    raise ValueError(f'--to={path} is not an empty directory; give a new directory')


def check_config(config: Config, workdir: str) -> None:
  """Raises ValueError unless the workdir's run has the config's model and tokenizer."""
  before = read_config(workdir)
  now = config.model_dump(mode='json')
  defaults = Config().model_dump(mode='json')
  for section in ('model', 'lora', 'tokenizer', 'sft'):
    # A run that predates a knob used its default.
    was = defaults[section] | before.get(section, {})
    for name, old, new in differences(was, now[section], section):
      raise ValueError(
        f'--workdir={workdir} was trained with {name}={old!r}, not {new!r}; '
        'give the config of that run'
      )


def write_configs(path: str, config: Config, model: Model, dtype: str) -> None:
  """Writes the JSON files of an export, adapted from the model's files."""
  source, tokenizer, spec = model

  def read(name):
    file = os.path.join(source, name)
    return files.read_object(file) if os.path.exists(file) else {}

  described = read('config.json')
  # Only torch_dtype: transformers 4 and 5 both read it.
  described.pop('dtype', None)
  ends = {'eos_token_id': list(tokenizer.eos)}
  padding = {'pad_token_id': tokenizer.backend.pad_token_id}
  sampled = {'do_sample': True, 'temperature': config.sampler.temperature}
  written = {
    'config.json': described | {'torch_dtype': dtype},
    # All tokens at which responses of the run end: some models list fewer.
    'generation_config.json': (read('generation_config.json') or padding | sampled)
    | ends,
  }
  if spec.vision:
    # transformers 4 reads only this file, 5 also the processor's file.
    pixels = hf_config.read_pixels(source) or hf_config.preprocessor_of(spec.vision)
    written[hf_config.PIXELS] = pixels
    if processor := read(hf_config.PROCESSOR):
      written[hf_config.PROCESSOR] = processor
  for name, value in written.items():
    files.write_json(os.path.join(path, name), value)
