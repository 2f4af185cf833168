"""config.json of Qwen2.5-VL to ModelSpec and back; no option is ignored silently.

1. `spec_of` reads the language model as a Qwen2 with three-part positions, the tower,
   and how pixels are resized and normalised, which `read_pixels` finds;
2. `config_of` and `preprocessor_of` write both files, as published.

Published files hold the language model's options beside the tower's, transformers 5
writes them as `text_config`; both are read. The same holds for pictures: a file of
their own, or an object within that of the whole processor.
"""

import dataclasses
import math
import os
from typing import Any

from bapo_jax.models import hf_config, vision_spec
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.runtime import json_files

NAME, KIND = 'Qwen2_5_VLForConditionalGeneration', hf_config.SEES
PIXELS, PROCESSOR = 'preprocessor_config.json', 'processor_config.json'
THETA = 1_000_000.0  # of the language model, where config.json names none
# Field of VisionSpec -> its names in vision_config, the first that is there counts, and
# the value where none is, that of transformers' class.
SIZES: dict[str, tuple[tuple[str, ...], int]] = {
  'width': (('hidden_size',), 3584),
  'layers': (('depth',), 32),
  'heads': (('num_heads',), 16),
  'ffn': (('intermediate_size',), 3420),
  'out': (('out_hidden_size',), 3584),
  'window': (('window_size',), 112),
  'patch': (('patch_size', 'spatial_patch_size'), 14),
  'frames': (('temporal_patch_size',), 2),
  'merge': (('spatial_merge_size',), 2),
}
FULL_LAYERS = (7, 15, 23, 31)  # likewise, of those that the tower has
IMAGE_TOKEN = 151655  # likewise
LARGEST = 10**6  # of any of these sizes
# Options that would change the computation -> the values that are implemented.
ONLY = {
  'hidden_act': ('silu',),
  'in_channels': (vision_spec.CHANNELS,),
  'in_chans': (vision_spec.CHANNELS,),
}
# Options of a preprocessor -> the only value that is implemented.
ONLY_PIXELS = {
  'do_resize': True,
  'resample': 3,  # cubic interpolation
  'do_rescale': True,
  'rescale_factor': 1 / 255,
  'do_normalize': True,
}
# Its options that config.json has as well -> the field of VisionSpec.
REPEATED = {
  'patch_size': 'patch',
  'temporal_patch_size': 'frames',
  'merge_size': 'merge',
}
LIMITS = {  # field of VisionSpec -> the option, and its name within `size`
  'least_pixels': ('min_pixels', 'shortest_edge'),
  'most_pixels': ('max_pixels', 'longest_edge'),
}


def read_pixels(path: str) -> dict[str, Any]:
  """How the pixels of pictures are made, as a model directory says; {} if it does not.

  Of both files that of the whole processor counts, as in transformers 5.

  Raises:
    ValueError: a file is damaged.
  """
  found: dict[str, dict[str, Any]] = {}
  for name in (PROCESSOR, PIXELS):
    file = os.path.join(path, name)
    found[name] = json_files.read(file) if os.path.exists(file) else {}
  if found[PROCESSOR].get('image_processor') is None:
    return found[PIXELS]
  return _object(found[PROCESSOR], 'image_processor', PROCESSOR)


def spec_of(c: dict[str, Any], compute: str, pixels: dict[str, Any]) -> ModelSpec:
  """The ModelSpec of these files.

  Args:
    c: the contents of config.json.
    compute: dtype of the matrix products.
    pixels: what `read_pixels` found.

  Raises:
    ValueError: an architecture or an option is not supported, by its name.
  """
  if c.get('model_type') != KIND or c.get('architectures') not in (None, [NAME]):
    raise ValueError(
      f'model_type {c.get("model_type")!r} with architectures '
      f'{c.get("architectures")!r:.60} is not supported here; choose a {NAME}'
    )
  text, sections = _text(c)
  model = hf_config.spec_of(text, compute)
  if 2 * sum(sections) != model.head_width:
    raise ValueError(
      f'mrope_section={list(sections)} does not add up to {model.head_width // 2}, '
      'half of the width of a head'
    )
  vision = _vision(c, pixels)
  if vision.out != model.width:
    raise ValueError(
      f'out_hidden_size={vision.out} of its vision_config is not '
      f'hidden_size={model.width} of the language model'
    )
  return dataclasses.replace(model, mrope=sections, vision=vision)


def _text(c: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
  """(options of the language model as those of a Qwen2, its mrope_section)."""
  text = dict(_object(c, 'text_config') or c)
  text['model_type'], text['architectures'] = 'qwen2', None
  tied = c.get('tie_word_embeddings') or text.get('tie_word_embeddings')
  text['tie_word_embeddings'] = tied
  name = 'rope_scaling' if text.get('rope_scaling') else 'rope_parameters'
  scaling = dict(_object(text, name))
  sections = scaling.pop('mrope_section', None)
  fits = isinstance(sections, list) and len(sections) == 3
  if not fits or not all(type(n) is int and n >= 0 for n in sections):
    raise ValueError(f'mrope_section={sections!r:.60}: three integers are wanted')
  for key in ('type', 'rope_type'):
    if scaling.get(key) == 'mrope':
      scaling[key] = 'default'
  text[name] = scaling
  if not (text.get('rope_theta') or scaling.get('rope_theta')):
    text['rope_theta'] = THETA
  return text, tuple(sections)


def _vision(c: dict[str, Any], pixels: dict[str, Any]) -> vision_spec.VisionSpec:
  tower = _object(c, 'vision_config')
  for option, values in ONLY.items():
    if tower.get(option) not in (None, *values):
      raise ValueError(
        f'{option}={tower[option]!r:.60} of its vision_config is not supported, only '
        f'{values[0]!r}; choose another model'
      )
  sizes: dict[str, Any] = {f: _size(tower, *names) for f, names in SIZES.items()}
  whole = tower.get('fullatt_block_indexes')
  if whole is None:
    whole = [i for i in FULL_LAYERS if i < sizes['layers']]
  if not isinstance(whole, list) or not all(type(i) is int for i in whole):
    raise ValueError(
      f'fullatt_block_indexes={whole!r:.60}: a list of integers is wanted'
    )
  _check_pixels(pixels, sizes)
  rope = _object(tower, 'rope_parameters')
  if rope.get('rope_type', 'axial') != 'axial':
    raise ValueError(
      f'rope_type {rope["rope_type"]!r:.60} of its vision_config is not supported, '
      "only 'axial'"
    )
  v = vision_spec.VisionSpec(
    **sizes,
    full_layers=tuple(whole),
    image_token=_size(c, ('image_token_id',), IMAGE_TOKEN),
    rope_theta=_number(rope, 'rope_theta', 10_000.0),
    **_preprocessing(pixels),
  )
  vision_spec.check(v)
  return v


def _preprocessing(pixels: dict[str, Any]) -> dict[str, Any]:
  """Fields of VisionSpec from what `read_pixels` found."""
  found: dict[str, Any] = {}
  for field, name in (('mean', 'image_mean'), ('std', 'image_std')):
    if (values := pixels.get(name)) is not None:
      if not isinstance(values, list) or len(values) != vision_spec.CHANNELS:
        raise ValueError(f'{name}={values!r:.60}: three numbers are wanted')
      channels = dict(enumerate(values))
      found[field] = tuple(_number(channels, i, 0.0, name) for i in channels)
  if 0.0 in found.get('std', ()):
    raise ValueError('image_std holds 0, by which pixels would be divided')
  limits = _object(pixels, 'size', 'preprocessor')
  for field, (option, edge) in LIMITS.items():
    # Where both stand there, transformers reads min_pixels and max_pixels.
    name = edge if pixels.get(option) is None else option
    value = limits.get(edge) if name == edge else pixels[option]
    if value is None and limits:
      raise ValueError(
        f'size={limits!r:.60} of its preprocessor lacks {edge}, a number of pixels; '
        'add it, or take size out'
      )
    if value is not None:
      found[field] = _size({name: value}, (name,), None, 2**40)
  return found


def _check_pixels(pixels: dict[str, Any], sizes: dict[str, int]) -> None:
  """Raises ValueError where pixels would be made in another way than they are here."""
  same = {name: sizes[field] for name, field in REPEATED.items()}
  for option, wanted in (ONLY_PIXELS | same).items():
    value = pixels.get(option)
    if value is not None and not _same(value, wanted):
      of = ' as in its config.json' if option in REPEATED else ''
      raise ValueError(
        f'{option}={value!r:.60} of its preprocessor is not supported, only '
        f'{wanted!r}{of}; correct it there, or choose another model'
      )


def _same(value: Any, wanted: Any) -> bool:
  """Whether an option has this value; numbers to eight digits, as files are rounded."""
  if type(value) is float and type(wanted) is float:
    return math.isclose(value, wanted, rel_tol=1e-8)
  return type(value) is type(wanted) and value == wanted


def _object(c: dict[str, Any], name: str, file: str = 'config.json') -> dict[str, Any]:
  """The object in an option; {} for none."""
  value = c.get(name)
  if value is not None and not isinstance(value, dict):
    raise ValueError(f'{name}={value!r:.60} in its {file}: an object is wanted')
  return value or {}


def _size(
  c: dict[str, Any], names: tuple[str, ...], default: int | None, most: int = LARGEST
) -> int:
  """The integer in the first of these options that is there."""
  name = next((name for name in names if c.get(name) is not None), names[0])
  value = default if c.get(name) is None else c[name]
  if type(value) is not int or not 1 <= value <= most:
    raise ValueError(
      f'{name}={value!r:.60}: an integer from 1 to {most} is wanted; fetch its '
      'config.json again'
    )
  return value


def _number(c: dict[Any, Any], key: Any, default: float, name: str = '') -> float:
  """The finite number in an option."""
  value = default if c.get(key) is None else c[key]
  if type(value) not in (int, float) or not 0 <= value < 1e30:
    raise ValueError(f'{name or key}={value!r:.60}: a number from 0 on is wanted')
  return float(value)


def config_of(spec: ModelSpec) -> dict[str, Any]:
  """The contents of config.json, as published."""
  v = spec.vision
  if v is None:
    raise ValueError('this model has no vision tower: hf_config.config_of writes it')
  text = hf_config.config_of(dataclasses.replace(spec, vision=None))
  scaling = text.pop('rope_scaling', {}) or {'type': 'mrope'}
  sizes = {names[0]: getattr(v, field) for field, (names, _) in SIZES.items()}
  return text | {
    'architectures': [NAME],
    'model_type': KIND,
    'image_token_id': v.image_token,
    'rope_scaling': scaling | {'mrope_section': list(spec.mrope)},
    'vision_config': sizes
    | {
      'model_type': KIND,
      'hidden_act': 'silu',
      'in_chans': vision_spec.CHANNELS,
      'fullatt_block_indexes': list(v.full_layers),
      'rope_parameters': {'rope_type': 'axial', 'rope_theta': v.rope_theta},
    },
  }


def preprocessor_of(v: vision_spec.VisionSpec) -> dict[str, Any]:
  """The contents of preprocessor_config.json."""
  return {
    'image_processor_type': 'Qwen2VLImageProcessor',
    'image_mean': list(v.mean),
    'image_std': list(v.std),
    'min_pixels': v.least_pixels,
    'max_pixels': v.most_pixels,
    'patch_size': v.patch,
    'temporal_patch_size': v.frames,
    'merge_size': v.merge,
  }
