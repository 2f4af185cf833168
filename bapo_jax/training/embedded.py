"""Makes the model directories of the embedded policy, by the section `sft`.

1. `directory` names a directory by everything that its weights depend on, and finds it
   in the package or in the cache. A new one has sizes and a tokenizer, but no weights;
2. `complete` adds the weights, by a supervised warm start.

From then on the directory is like that of a published model.
"""

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from bapo_jax import custom_code, sharding
from bapo_jax.data import sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.knobs import (
  MERGE,
  TOWER_HEADS,
  TOWER_PATCH,
  TOWER_WINDOW,
)
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime import cache, digests, files, jax_options
from bapo_jax.runtime.progress import log
from bapo_jax.training import sft
from bapo_jax.training.knobs import SftConfig, TowerConfig
from bapo_jax.training.schema import Config
from bapo_jax.types import Tree

# Raise it with every change of the weights that a warm start gives: directories of
# other versions are not used. test_a_warm_start_gives_the_weights_of_its_version
# notices.
VERSION = 1
SHIPPED = pathlib.Path(__file__).parents[1] / 'policies'
# Of the problems, these knobs do not reach the warm start.
LATER = {'test_source', 'duplicates', 'overlap', 'changed', 'whole'}
# The same on every machine: another tile of logits rounds sums differently.
SCHEDULE = Schedule(remat='dots')


def directory(config: Config) -> str:
  """Returns the model directory of the embedded policy; its weights may be missing."""
  name = fingerprint(config)
  if (SHIPPED / name).is_dir():
    return str(SHIPPED / name)
  path = os.path.join(
    cache.home(config.cache) or _unshared(), 'policies', name, 'model'
  )
  if not is_described(path):
    describe(config, path)
  return path


def fingerprint(config: Config) -> str:
  """Returns twelve digits that change with anything that the weights depend on.

  Neither the processor nor the mesh count: everyone may use the same directory.
  """
  source = config.problems.source
  return digests.fingerprint(
    {
      'version': VERSION,
      'sft': config.sft.model_dump(),
      'tokenizer': config.tokenizer.model_dump(),
      'problems': config.problems.model_dump(exclude=LATER),
      'code': custom_code.digest(source) if custom_code.is_path(source) else '',
      'length': config.row_length,
      'generator': jax_options.generator(),
    }
  )


@functools.cache
def _unshared() -> str:
  """Returns a folder that is removed with this process, for runs without a cache."""
  folder = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return folder


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
  """Makes a directory, and waits until no other process writes there."""
  with files.naming(path):
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, '.lock'), 'w') as file:
      with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
      yield


def describe(config: Config, path: str) -> None:
  """Writes what a directory has beside weights: tokenizer, image options, config.json.

  The last file, config.json, shows that the others are complete.
  """
  template = config.tokenizer.template
  tokenizer = tokenizer_lib.embedded(template)
  source = tokenizer_lib.directory(config.tokenizer.path)
  if source:
    tokenizer = tokenizer_lib.load(source, template)
  spec = spec_of(config.sft, tokenizer)
  ends = {'eos_token_id': list(tokenizer.eos)}
  ends |= {'pad_token_id': tokenizer.backend.pad_token_id}
  written = {'generation_config.json': ends | {'do_sample': True, 'temperature': 1.0}}
  if spec.vision:
    written[hf_config.PIXELS] = hf_config.preprocessor_of(spec.vision)
  described = hf_config.config_of(spec) | ends
  written['config.json'] = described | {'torch_dtype': 'float32'}
  with _alone(path):
    if not is_described(path):
      tokenizer_lib.save(tokenizer, source, path)
      for name, value in written.items():
        files.write_json(os.path.join(path, name), value)


def is_described(path: str) -> bool:
  """Returns whether a directory has all files beside its weights."""
  return os.path.isfile(os.path.join(path, 'config.json'))


def has_weights(path: str) -> bool:
  """Returns whether the warm start of a directory is done."""
  return not hf_directory.missing(path, ('*.safetensors',))


def complete(config: Config, tokenizer: Tokenizer, data: Data, path: str) -> None:
  """Adds the weights, as float32, to the directory at `path` if it has none.

  The first device of this process computes them; other processes wait. The file appears
  when it is complete. Raises ValueError if the warm start diverges.
  """
  with _alone(path):
    if not has_weights(path):
      _train(config, tokenizer, data, path)


def _train(config: Config, tokenizer: Tokenizer, data: Data, path: str) -> None:
  log(f'Warm start of the embedded policy, once, by the section sft: {path}')
  spec = hf_config.read_spec(path, 'float32')
  mesh = sharding.make(devices=jax.local_devices()[:1])
  material = sources.sft_problems(config.problems, data)
  with jax.default_matmul_precision('highest'):
    params = sharding.under(mesh, sft.fit)(
      tokenizer,
      spec,
      mesh,
      config.row_length,
      *material,
      config.sft,
      config.sft.seed,
      SCHEDULE,
    )
  if not _finite(params):
    raise ValueError(f'the warm start diverged with sft.lr={config.sft.lr}; lower it')
  flat = transformer.flatten(params)
  hf_weights.save(path, flat.__getitem__, spec)


@jax.jit  # one program, not two per shape
def _finite(tree: Tree) -> Array:
  return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


# Knobs of the section `sft` that are fields of ModelSpec.
SIZES = (
  'width',
  'layers',
  'heads',
  'kv_heads',
  'head_width',
  'ffn',
  'experts',
  'active',
)


def spec_of(knobs: SftConfig, tokenizer: Tokenizer) -> ModelSpec:
  """Returns the sizes of the embedded policy: a Qwen2, or a Qwen3 with experts."""
  # Rounded up as in published models, so that the vocabulary divides over devices.
  vocab = -(-len(tokenizer.backend) // 8) * 8
  kind = {'qkv_bias': not knobs.experts, 'qk_norm': knobs.experts > 0}
  spec = ModelSpec(
    vocab=vocab, **{name: getattr(knobs, name) for name in SIZES}, **kind
  )
  return _with_tower(knobs.tower, spec, tokenizer) if knobs.tower.layers else spec


def _with_tower(knobs: TowerConfig, spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
  """Adds a vision tower.

  The rotary pairs of a head are split as in Qwen2.5-VL: a quarter rotate by time, the
  rest by row and column.
  """
  tower = VisionSpec(
    **knobs.model_dump(),
    heads=TOWER_HEADS,
    patch=TOWER_PATCH,
    window=TOWER_WINDOW,
    out=spec.width,
    full_layers=(knobs.layers - 1,),
    image_token=tokenizer.backend.convert_tokens_to_ids(tokenizer_lib.IMAGE),
    merge=MERGE,
    least_pixels=TOWER_WINDOW**2,  # a picture smaller than a window is enlarged
  )
  side = 3 * spec.head_width // 16
  sections = spec.head_width // 2 - 2 * side, side, side
  return dataclasses.replace(spec, vision=tower, mrope=sections)
