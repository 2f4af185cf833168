"""Writes adapters as a directory that peft loads beside the model they belong to.

1. `stored` lists the tensors: A and B of each projection of each layer;
2. `config_of` returns the contents of adapter_config.json;
3. `save` writes both.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from bapo_jax.models import lora
from bapo_jax.models.hf import safetensors_io, tensors
from bapo_jax.models.hf.tensors import Shape
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

  Args:
    get: returns the array at a path such as 'layers/q/a'.
    knobs: rank, alpha and targets of the adapters.
    model: model.path of the run.
    dtype: the dtype of all tensors: 'float32', 'float16' or 'bfloat16'.
  """
  with open(os.path.join(path, 'adapter_config.json'), 'w') as file:
    json.dump(config_of(spec, knobs, model), file, indent=2)
  weights, kind = os.path.join(path, 'adapter_model.safetensors'), jnp.dtype(dtype)
  arrays = _as_stored(get, spec, knobs, kind)
  safetensors_io.write(weights, kind.name, stored(spec, knobs), arrays)


def config_of(spec: ModelSpec, knobs: LoraConfig, model: str) -> dict[str, Any]:
  """Returns the contents of adapter_config.json."""
  hub = hub_names.parse(model)
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': hub.repository if hub else model,
    'revision': hub.revision if hub else None,
    'r': knobs.rank,
    'lora_alpha': knobs.alpha,
    'lora_dropout': 0.0,
    'target_modules': _targets(spec, knobs),
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }


def _targets(spec: ModelSpec, knobs: LoraConfig) -> list[str] | str:
  """Returns the adapted modules by last name, or as a pattern of whole names."""
  adapted = lora.shapes(spec, knobs.rank, knobs.targets)
  modules = sorted(tensors.module(path, spec) for path in adapted)
  if spec.vision is None:
    return sorted(name.rpartition('.')[2] for name in modules)
  # The tower's layers have projections of the same last names.
  return '|'.join(re.escape(name).replace(r'\{\}', r'\d+') for name in modules)


def stored(spec: ModelSpec, knobs: LoraConfig) -> dict[str, Shape]:
  """Lists every tensor: name -> shape, [rank, in] for A and [out, rank] for B."""
  shapes: dict[str, Shape] = {}
  for path, (a, b) in lora.shapes(spec, knobs.rank, knobs.targets).items():
    for i in range(spec.layers):
      name = f'base_model.model.{tensors.module(path, spec).format(i)}'
      shapes[f'{name}.lora_A.weight'] = (knobs.rank, math.prod(a[1:-1]))
      shapes[f'{name}.lora_B.weight'] = (math.prod(b[2:]), knobs.rank)
  return shapes


def _as_stored(
  get: Callable[[str], Any], spec: ModelSpec, knobs: LoraConfig, dtype: np.dtype
) -> Iterator[np.ndarray]:
  """Yields the tensors in the order of `stored`, heads and head width as one axis."""
  for path in lora.shapes(spec, knobs.rank, knobs.targets):
    a, b = (np.asarray(get(f'{path}/{side}')) for side in 'ab')
    for i in range(spec.layers):
      yield np.ascontiguousarray(a[i].reshape(-1, knobs.rank).T.astype(dtype))
      yield np.ascontiguousarray(b[i].reshape(knobs.rank, -1).T.astype(dtype))
