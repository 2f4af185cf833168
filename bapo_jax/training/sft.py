"""Makes the embedded policy, a model directory, by the knobs of the section `sft`.

1. `directory` names it by everything that its weights depend on, and finds it in the
   package or in the cache. A new one has sizes and a tokenizer, but no weights;
2. `complete` adds the weights by a supervised warm start, `fit`. The policy is trained
   on clean worked solutions until it can reason, then briefly on solutions with slips
   and repeats, so that it is sometimes right and sometimes wrong.

From then on the directory is like that of a published model.
"""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bapo_jax import sharding
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.data import sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.gallery import Gallery, capacity
from bapo_jax.data.row import Row
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.learner import accumulation, optimizer, pictured
from bapo_jax.learner.pictured import Variables
from bapo_jax.models import logprobs, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import directory as hf_directory
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime import cache, digests, files, jax_options
from bapo_jax.runtime.progress import log, progress_bar
from bapo_jax.training.knobs import TOWER_HEADS, SftConfig
from bapo_jax.training.schema import Config
from bapo_jax.types import Pictures, Tree

MICRO_BATCHES = 4  # most per step, reached if all rows have full length
CHUNK = 50  # steps whose solutions are tokenized at once, which is faster

# Raise it with every change of the weights that a warm start gives: directories of
# other versions are not used. test_a_warm_start_gives_the_weights_of_its_version
# notices.
VERSION = 1
SHIPPED = pathlib.Path(__file__).parents[1] / 'policies'
# The same on every machine: another tile of logits rounds sums differently.
SCHEDULE = Schedule(remat='dots')
# Knobs of the section `sft` that are fields of ModelSpec.
SIZES = {'width', 'layers', 'heads', 'kv_heads', 'head_width', 'ffn'}
SIZES |= {'experts', 'active'}
WINDOW = 28  # pixels along each side of a window of the tower


def rows(
  tokenizer: Tokenizer,
  prompts: Sequence[list[int]],
  imitated: Sequence[Row],
  length: int,
  seed: int | tuple[int, ...],
  slip: float,
  repeat: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens_NT, weight_NT) of prompts with worked solutions, cut at `length`.

  A token of the answer has four times the weight of a token of the work: answers are a
  twentieth of the tokens, and a policy that never ends a response earns no reward.
  Messages of an environment have no weight. `prompts` are lists of token ids, a list
  per row of `imitated`.
  """
  rng = np.random.default_rng(seed)
  parts = (row.solution(rng, slip, repeat) for row in imitated)
  parts = ([text] if isinstance(text, str) else text for text in parts)
  turns = [[x if i % 2 else f'{x}<eos>' for i, x in enumerate(each)] for each in parts]
  ids = iter(tokenizer_lib.encode(tokenizer, list(itertools.chain(*turns))))
  ((box,),) = tokenizer_lib.encode(tokenizer, ['\\boxed{'])
  tokens_NT = np.zeros((len(imitated), length), np.int32)
  weight_NT = np.zeros((len(imitated), length), np.float32)
  for i, (prompt, each) in enumerate(zip(prompts, turns, strict=True)):
    row = list(prompt)
    weights = [0] * len(prompt)
    for number, part in zip(range(len(each)), ids, strict=False):
      work = part.index(box) if box in part else len(part)
      row += part
      of_turn = [1] * work + [4] * (len(part) - work)
      weights += [0] * len(part) if number % 2 else of_turn
    tokens_NT[i, : len(row)] = row[:length]
    weight_NT[i, : len(row)] = weights[:length]
  return tokens_NT, weight_NT


@functools.partial(
  jax.jit, static_argnames=('tx', 'spec', 'schedule'), donate_argnames=('params', 'opt')
)
def imitate(
  params: Tree,
  opt: Tree,
  tokens_BT: Array,
  weight_BT: Array,
  pictures: Pictures | None = None,
  *,
  tx: optax.GradientTransformation,
  spec: ModelSpec,
  schedule: Schedule = Schedule(),
) -> tuple[Tree, Tree, Array]:
  """Runs one supervised step; returns (params, opt, nats per weighted token).

  A vision tower is trained too if `pictures` are given.
  """
  trained, seen, of_params = pictured.variables(params, pictures, spec, schedule)
  packed = pictured.pack(tokens_BT, weight_BT > 0, MICRO_BATCHES, spec, seen)
  total = jnp.maximum(weight_BT.sum(), 1)

  def objective(trained: Variables, n: Array) -> tuple[Array, None]:
    cells = packed.cells(n)
    patch_XD = trained.patches(seen)
    stats = logprobs.packed_stats(
      trained.params, cells, spec, 1.0, patch_XD=patch_XD, schedule=schedule
    )
    return -(packed.unpack(stats.logp_BT, n) * weight_BT).sum() / total, None

  value, grads, _ = accumulation.summed(
    objective, trained, packed.used, None, lambda n, so_far, found: None
  )
  updates, opt = tx.update(of_params(grads), opt, params)
  params = optax.apply_updates(params, updates)
  params, opt = sharding.constrain_state(params, opt)
  return params, opt, value


def fit(
  tokenizer: Tokenizer,
  spec: ModelSpec,
  length: int,
  imitated: Sequence[Row],
  k: SftConfig,
) -> Tree:
  """Returns the parameters after k.clean + k.noisy steps of k.batch solutions each.

  `imitated` are rows with solutions. One device of this process computes all.
  """
  # Norms and biases decay here too: recorded runs start from such weights.
  adamw = optimizer.AdamW(lr=k.lr, warmup=20, b2=0.98, weight_decay=0.01, decays='all')
  tx = optimizer.make(adamw)
  params = transformer.init(spec, jax.random.key(k.seed))
  opt = jax.jit(tx.init)(params)
  rng = np.random.default_rng(k.seed)
  encoded = prompts_lib.encode(tokenizer, imitated, spec.vision)
  grids = [x.grids for x in encoded]
  gallery = None
  if spec.vision is not None and any(grids):
    gallery = Gallery(imitated, spec.vision, capacity(grids, spec.vision))

  def batches() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens_BT, weight_BT, problem index_B) per step, with new solutions."""
    for name, steps, *chances in (
      ('clean', k.clean, 0, 0),
      ('noisy', k.noisy, k.slip, k.repeat),
    ):
      for start in range(0, steps, CHUNK):
        count = min(CHUNK, steps - start)
        index = rng.integers(len(imitated), size=count * k.batch)
        prompts = [encoded[i].tokens for i in index]
        drawn = [imitated[i] for i in index]
        purpose = (k.seed, start, len(name))
        numbers = rows(tokenizer, prompts, drawn, length, purpose, *chances)
        tokens, weights = (x.reshape(count, k.batch, -1) for x in numbers)
        yield from zip(tokens, weights, index.reshape(count, k.batch), strict=True)

  with progress_bar(k.clean + k.noisy, 'warm start', 'step') as progress:
    for tokens_BT, weight_BT, index_B in batches():
      pictures = gallery and jax.device_put(gallery.of(index_B))
      params, opt, value = imitate(
        params,
        opt,
        tokens_BT,
        weight_BT,
        pictures,
        tx=tx,
        spec=spec,
        schedule=SCHEDULE,
      )
      nats = float(value)
      if not math.isfinite(nats):
        raise ValueError(f'the warm start diverged with sft.lr={k.lr}; lower it')
      progress.update()
      progress.set_postfix_str(f'{nats:.3f} nats', refresh=False)
  return params


def directory(config: Config) -> str:
  """Returns the model directory of the embedded policy; its weights may be missing."""
  name = fingerprint(config)
  if (SHIPPED / name).is_dir():
    return str(SHIPPED / name)
  home = cache.home(config.cache) or _unshared().name
  path = os.path.join(home, 'policies', name, 'model')
  if not is_described(path):
    describe(config, path)
  return path


def fingerprint(config: Config) -> str:
  """Returns twelve digits that change with anything that the weights depend on.

  Neither the processor nor the mesh count: everyone may use the same directory.
  """
  problems = config.problems.model_dump(include={'source', 'custom'})
  # Neutral values have the directories of before.
  problems |= config.problems.columns.model_dump(exclude_defaults=True)
  return digests.fingerprint(
    {
      'version': VERSION,
      'sft': config.sft.model_dump(),
      'tokenizer': config.tokenizer.model_dump(),
      'problems': problems | {'files': sources.file_digests(config.problems)},
      'lengths': [config.prompts.max_prompt_tokens, config.sampler.max_new_tokens],
      'generator': jax_options.generator(),
    }
  )


@functools.cache
def _unshared() -> tempfile.TemporaryDirectory[str]:
  """Returns a folder that is removed with this process, for runs without a cache."""
  return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


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
  source = tokenizer_lib.directory(config.tokenizer.path) or tokenizer_lib.EMBEDDED
  tokenizer = tokenizer_lib.load(source, '{problem}')
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
      tokenizer_lib.save(source, path)
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
    if has_weights(path):
      return
    log(f'Warm start of the embedded policy, once, by the section sft: {path}')
    spec = hf_config.read_spec(path, 'float32')
    imitated = sources.imitated(config.problems, data)
    with jax.default_matmul_precision('highest'):
      params = fit(tokenizer, spec, config.row_length, imitated, config.sft)
    hf_weights.save(path, transformer.flatten(params).__getitem__, spec)


def spec_of(knobs: SftConfig, tokenizer: Tokenizer) -> ModelSpec:
  """Returns the sizes of the embedded policy: a Qwen2, or a Qwen3 with experts.

  With a tower, the rotary pairs of a head are split as in Qwen2.5-VL: a quarter rotate
  by time, the rest by row and column.
  """
  spec = ModelSpec(
    # Rounded up as in published models, so that the vocabulary divides over devices.
    vocab=-(-len(tokenizer.backend) // 8) * 8,
    qkv_bias=not knobs.experts,
    qk_norm='head' if knobs.experts else '',
    **knobs.model_dump(include=SIZES),
  )
  if not knobs.tower.layers:
    return spec
  tower = VisionSpec(
    **knobs.tower.model_dump(),
    heads=TOWER_HEADS,
    patch=7,
    window=WINDOW,
    out=knobs.width,
    full_layers=(knobs.tower.layers - 1,),
    image_token=tokenizer.backend.convert_tokens_to_ids(tokenizer_lib.IMAGE),
    least_pixels=WINDOW**2,  # a picture smaller than a window is enlarged
  )
  side = 3 * knobs.head_width // 16
  sections = knobs.head_width // 2 - 2 * side, side, side
  return dataclasses.replace(spec, vision=tower, mrope=sections)
