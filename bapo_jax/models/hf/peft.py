"""Writes adapters to a directory that peft can load on top of the base model."""

import json
import os
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from bapo_jax.models import lora
from bapo_jax.models.hf import safetensors_io, weights
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import hub_names


def save(
  path: str,
  get: Callable[[str], Any],
  spec: ModelSpec,
  knobs: LoraConfig,
  model: str,
  dtype: str,
) -> None:
  """Writes adapter_model.safetensors and adapter_config.json to a directory.

  `get` returns the array at a path such as 'layers/q/a', and `model` is model.path. The
  `dtype` of all tensors is 'float32', 'float16' or 'bfloat16'.
  """
  kind, hub = jnp.dtype(dtype), hub_names.parse(model)
  modules, arrays = [], {}
  for parameter in lora.shapes(spec, knobs.rank, knobs.targets):
    module = weights.MODULES[parameter]
    if spec.vision:  # the module name in transformers' class
      module = module.replace('model.', 'model.language_model.', 1)
    modules.append(module)
    # A is [rank, in] and B is [out, rank]; heads and head width are one axis.
    a, b = (np.asarray(get(f'{parameter}/{side}')) for side in 'ab')
    for i in range(spec.layers):
      name = f'base_model.model.{module.format(i)}'
      arrays[f'{name}.lora_A.weight'] = a[i].reshape(-1, knobs.rank).T.astype(kind)
      arrays[f'{name}.lora_B.weight'] = b[i].reshape(knobs.rank, -1).T.astype(kind)
  targets: list[str] | str = sorted(name.rpartition('.')[2] for name in modules)
  if spec.vision:  # the tower's projections have the same last names
    patterns = [re.escape(name).replace(r'\{\}', r'\d+') for name in sorted(modules)]
    targets = '|'.join(patterns)
  config = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': hub.repository if hub else model,
    'revision': hub.revision if hub else None,
    'r': knobs.rank,
    'lora_alpha': knobs.alpha,
    'lora_dropout': 0.0,
    'target_modules': targets,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  with open(os.path.join(path, 'adapter_config.json'), 'w') as file:
    json.dump(config, file, indent=2)
  file_name = os.path.join(path, 'adapter_model.safetensors')
  shapes = {name: array.shape for name, array in arrays.items()}
  safetensors_io.write(file_name, kind.name, shapes, arrays.values())
