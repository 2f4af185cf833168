"""Defines the knobs of the policy, its adapters, its log-probabilities and the mesh."""

import re
from typing import Any, Literal

import pydantic

from bapo_jax.knobs import Auto, LocalPath, Section, knob

DType = Literal['float32', 'bfloat16']
# model.compute -> JAX's name for the precision of float32 products. JAX's own default
# would be TF32 on a GPU, and one pass of bfloat16 on a TPU.
PRECISION = {'float32': 'highest', 'tf32': 'high', 'bfloat16': 'default'}
# Projections that may have adapters -> number of input axes of the weight.
PROJECTIONS = {f'layers/{name}': 1 for name in ('q', 'k', 'v', 'gate', 'up', 'down')}
PROJECTIONS |= {'layers/o': 2}


class MeshConfig(Section):
  """Devices along each axis of the mesh; one axis may be -1 (all remaining devices)."""

  data: Auto[int] = knob(
    -1, 'Devices that split the rows; -1: all remaining.', least=-1
  )
  fsdp: Auto[int] = knob(
    1, 'Devices that split the weights and the rows; -1: all remaining.', least=-1
  )
  tensor: int = knob(
    1, 'Devices that split the heads and the vocabulary; -1: all remaining.', least=-1
  )
  rollout: int = knob(
    0,
    'Devices that only sample, the last ones; the axes above divide the others. 0: all '
    'devices sample and train in turn.',
    least=0,
  )

  @pydantic.model_validator(mode='after')
  def _fills(self):
    sizes = self.data, self.fsdp, self.tensor
    if 0 in sizes or sizes.count(-1) > 1:
      raise ValueError(
        f'data={self.data}, fsdp={self.fsdp}, tensor={self.tensor} is not a mesh; set '
        'every axis to 1 or more; one of them may be -1 (all remaining devices)'
      )
    return self


class ModelConfig(Section):
  """The policy: a model from a directory or the hub."""

  path: LocalPath = knob(
    '',
    'Hugging Face directory or hub:owner/name@revision; empty: the embedded policy, '
    'which the section sft describes.',
  )
  experts_kernel: Auto[Literal['blocks', 'ragged', 'tokamax', 'dense']] = knob(
    None,
    'Products of experts. None: ragged on a TPU, tokamax on a GPU that has it, else '
    'blocks; dense: every token by every expert, for tests.',
    needs='routed',
  )
  replay_routes: Literal['off', 'measure', 'on'] = knob(
    'on',
    'Uses in training the experts that the sampler used. measure: only compares them '
    'with those of the learner; off: does not record them.',
    needs='routed',
  )
  train_tower: bool = knob(
    False, 'Trains the vision tower with the other weights; off: the tower is frozen.'
  )
  dtype: DType = knob(
    'float32',
    'Type of the parameters; with bfloat16 the optimiser keeps float32 copies.',
  )
  compute: Auto[Literal['float32', 'tf32', 'bfloat16']] = knob(
    'float32',
    'Precision of the matrix products. tf32: of float32 arrays, in TF32 on a GPU, in '
    'three passes of bfloat16 on a TPU; a CPU has no such products.',
  )
  attention: Auto[Literal['plain', 'flash', 'splash']] = knob(
    None,
    'Attention kernel of rows and of decoding; None: by platform.',
  )
  remat: Auto[Literal['full', 'dots', 'none']] = knob(
    None,
    'Activations that the backward pass recomputes. full: all; dots: all but products; '
    'none: no activation; None: as few as memory allows (on a CPU, dots or full).',
  )
  sequence_sharding: Auto[Literal['on', 'off']] = knob(
    None,
    'Splits columns between layers over mesh.tensor; None: only if memory is short.',
    needs='tensor',
  )

  @property
  def types(self) -> dict[str, Any]:
    """The dtypes and kernels of a ModelSpec that do not depend on the model."""
    names = 'dtype', 'attention', 'experts_kernel', 'replay_routes'
    # Float32 until the program has decided.
    compute = 'bfloat16' if self.compute == 'bfloat16' else 'float32'
    return {name: getattr(self, name) for name in names} | {'compute': compute}


class LoraConfig(Section):
  """Low-rank adapters, trained while the weights stay frozen."""

  rank: int = knob(0, 'Rank of the adapters; 0: all weights are trained.', least=0)
  alpha: float = knob(
    32.0,
    'The adapters are scaled by alpha / rank.',
    above=0,
    most=65536,
    needs='lora.rank',
  )
  targets: str = knob(
    'layers/(q|k|v|o|gate|up|down)',
    'Projections with an adapter: a regular expression that matches the whole path.',
    needs='lora.rank',
  )

  @pydantic.model_validator(mode='after')
  def _matches(self):
    try:
      if any(re.fullmatch(self.targets, path) for path in PROJECTIONS):
        return self
    except re.error as error:
      raise ValueError(
        f'targets={self.targets!r} is not a valid regular expression ({error}); set an '
        "expression such as 'layers/(q|v)'"
      ) from None
    raise ValueError(
      f'targets={self.targets!r} matches no projection; match at least one of '
      f'{", ".join(PROJECTIONS)}'
    )


class LogprobsConfig(Section):
  """Limits the memory that log-probabilities need."""

  tile_mib: int = knob(
    0,
    'MiB per device of the logits computed at once; 0: 4 on a CPU, 2 % of the memory '
    'of a GPU or TPU.',
    least=0,
    most=1 << 16,
  )
