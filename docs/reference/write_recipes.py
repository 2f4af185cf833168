"""Writes recipes.md: the longest responses and the limits of every machine.

python -m docs.reference.write_recipes > docs/reference/recipes.md

Searches all meshes of a machine by hand counts, as benchmarks/meshes.py does. Nothing
is compiled, and no model is needed.
"""

import functools
import json
import pathlib
import tempfile
from typing import Any, NamedTuple

from bapo_jax.runtime import markdown
from bapo_jax.tools.plan import programs
from bapo_jax.tools.plan.chips import GIB, Chip
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from benchmarks import meshes
from benchmarks.meshes import Choice
from configs import aime

# Topology -> heading. Names of v5e and v6e count chips, those of v5p count cores.
MACHINES = {
  'rtx4090:1': 'One RTX 4090 (24 GB)',
  'h100:1': 'One H100',
  'h100:8': '8 x H100',
  'h100:2x8': '2 hosts of 8 x H100',
  'v5e:2x4': 'v5e-8',
  'v5e:4x4': 'v5e-16',
  'v6e:2x4': 'v6e-8',
  'v5p:2x2x2': 'v5p-16 (8 chips)',
  'v5p:4x4x4': 'v5p-128 (64 chips)',
}
LENGTHS = (2048, 4096, 8192, 16384, 32768)  # most tokens of a response
PAPER = 8192  # of the paper's preliminary runs
RANK = 32  # of adapters
SHARE = 0.83  # of the usable memory; hand counts err by 17 %, see training/budget.py
QWEN = {
  'model_type': 'qwen2',
  'rope_theta': 1e6,
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
  'vocab_size': 151936,
  'max_position_embeddings': 131072,
}
LARGE = QWEN | {'tie_word_embeddings': False, 'vocab_size': 152064}
GEMMA = {
  'model_type': 'gemma3_text',
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
  'vocab_size': 262144,
  'max_position_embeddings': 32768,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'hidden_activation': 'gelu_pytorch_tanh',
  'sliding_window': 512,
  'sliding_window_pattern': 6,  # every sixth layer has no window
  'rope_theta': 1e6,
  'rope_local_base_freq': 1e4,
}
OLMO = {
  'model_type': 'olmo2',
  'rms_norm_eps': 1e-6,
  'rope_theta': 5e5,
  'tie_word_embeddings': False,
  'vocab_size': 100352,
  'max_position_embeddings': 4096,
}
SMOL = {
  'model_type': 'smollm3',
  'rms_norm_eps': 1e-6,
  'rope_theta': 5e6,
  'tie_word_embeddings': True,
  'vocab_size': 128256,
  'max_position_embeddings': 65536,
  'no_rope_layer_interval': 4,  # every fourth layer has no rotation
}
KEYS = (
  'hidden_size',
  'num_hidden_layers',
  'num_attention_heads',
  'num_key_value_heads',
  'intermediate_size',
)
# The published config.json, by repository: options of the family, and values of KEYS.
MODELS: dict[str, tuple] = {
  'Qwen2.5-0.5B': (QWEN | {'max_position_embeddings': 32768}, 896, 24, 14, 2, 4864),
  'Qwen2.5-1.5B': (QWEN, 1536, 28, 12, 2, 8960),
  'Qwen2.5-7B': (LARGE, 3584, 28, 28, 4, 18944),
  'Qwen2.5-14B': (LARGE, 5120, 48, 40, 8, 13824),
  'Qwen2.5-32B': (LARGE, 5120, 64, 40, 8, 27648),
  'gemma-3-270m': (GEMMA, 640, 18, 4, 1, 2048),
  'gemma-3-1b': (GEMMA, 1152, 26, 4, 1, 6912),
  'OLMo-2-0425-1B': (OLMO, 2048, 16, 16, 16, 8192),
  'OLMo-2-1124-7B': (OLMO, 4096, 32, 32, 32, 11008),
  'SmolLM3-3B': (SMOL, 2048, 36, 16, 4, 11008),
}
HEADER = (
  'model',
  'trained',
  'longest response',
  'data x fsdp x tensor',
  'micro-batches',
  'slots',
  'GiB, update',
  'GiB, decoding',
  'decoded tokens/s, at most',
  'update tokens/s, at most',
  "paper's run, h, at least",
)
INTRODUCTION = """\
# Recipes per machine

Written by `python -m docs.reference.write_recipes > docs/reference/recipes.md` from the
counts of `python -m benchmarks.meshes` ([scaling.md](../system/scaling.md#which-mesh)).
**Nothing here was measured on these machines:** memory is counted by hand, and times
are bounds by the roofline.

- **model**: the name of its repository. Instruction-tuned versions have equal shapes,
  and so have DeepSeek-R1-Distill-Qwen-7B, -14B and -32B. Layers of Gemma 3 with a
  window of 512 tokens cache the whole row, as the others do.
- **trained**: all weights, in float32; or LoRA, adapters of rank {rank} beside frozen
  weights in bfloat16. Products are in bfloat16.
- **longest response**: the longest of {lengths} tokens after a
  prompt of 1k for which update and decoding need at most {share:.0f} % of the usable
  memory, by count. The other 17 % are for the error of the count, which was larger for
  some rows ([compiled rows](../system/scaling.md#compiled-recipes)). Qwen2.5-0.5B and
  Gemma 3 have 32k positions, too few for a prompt and a response of 32k, and OLMo 2 has
  4k. Mesh, micro-batches and slots are those with the lowest bound on the time of a
  step.
- **GiB**: per device, counted by hand. The programs of prefill and of log-probabilities
  are not counted; they have the remaining memory.
- **tokens/s**: upper limits of the whole machine. When decoding, every slot is busy and
  reads its whole cache, in a layer with a window the window; in an update, every row
  has the full length.
- **paper's run**: a lower bound for Balanced PO
  ([2510.18927](https://arxiv.org/abs/2510.18927)) as in
  `configs/aime.py:balanced_paper`: {steps} steps of {prompts} problems x {group}
  responses, {updates} updates per step. The paper gives none of these numbers: the
  number of steps is ours, the others are those of its public script. Every response is
  assumed to have 8k tokens, the limit of its preliminary runs; if only fewer tokens
  fit, their number is in brackets. Prefill, evaluation and verification are assumed to
  take no time. The setting is the fastest for this length, not always the row's.
- **TPUs**: v5e-8, v5e-16 and v6e-8 count chips. v5p-16 and v5p-128 count cores, two per
  chip, as Google does: they have 8 and 64 chips. JAX counts each chip as one device.
- **too much**: the least excess over {share:.0f} % of a device's memory among all
  meshes, with the smallest batches. The smallest machine has the least memory.

The command of a row compiles its programs for the absent machine. It needs
`requirements/plan.txt` and the model's config.json:
`hf download Qwen/Qwen2.5-7B config.json --local-dir models/Qwen2.5-7B`. If nothing
fits, the command is that of the search, which compiles nothing and gives a reason per
mesh. A run with adapters also needs a higher learning rate
([lora.md](../system/lora.md)).
"""


class Recipe(NamedTuple):
  """The outcome of a search for one machine, model and length."""

  config: Config
  choice: Choice | None  # the fastest setting; None if nothing fits
  excess: float = 0.0  # bytes per device too much on the best mesh, if nothing fits


def room(chip: Chip) -> float:
  """Returns the bytes of a device that a count may reach."""
  return SHARE * chip.hbm * GIB


@functools.cache
def config_of(topology: str, model: str, lora: bool, length: int) -> Config:
  """Returns the paper's config for responses of `length` tokens of a model."""
  made = aime.balanced_paper(model)
  made.sampler.max_new_tokens = length
  # All shards of any mesh admit equally many prompts, and one device few at once.
  made.sampler.prefill_batch_size = max(8, len(meshes.count(topology)[1]))
  if lora:
    made.lora.rank, made.model.dtype = RANK, 'bfloat16'
  return config_lib.parse(made.to_dict())


def options(model: str) -> dict[str, Any]:
  """Returns the options of a model's config.json."""
  family, *sizes = MODELS[model]
  return family | dict(zip(KEYS, sizes, strict=True))


def with_model(config: Config, model: str, directory: str) -> Config:
  """Writes the model's config.json to the directory; returns the config with it."""
  pathlib.Path(directory, 'config.json').write_text(json.dumps(options(model)))
  return config.with_values(model={'path': directory})


@functools.cache
def searched(topology: str, model: str, lora: bool, length: int) -> Recipe:
  """Searches the meshes of a machine for the fastest setting that fits."""
  config = config_of(topology, model, lora, length)
  chip, found = meshes.count(topology)
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.device_spec(with_model(config, model, directory), found[0].platform)
  choices, refused = meshes.search(config, spec, chip, found, room(chip))
  if choices:
    return Recipe(config, choices[0])
  excess = [e.excess for e in refused.values() if isinstance(e, meshes.TooLarge)]
  return Recipe(config, None, min(excess))


def longest(topology: str, model: str, lora: bool) -> Recipe:
  """Returns the recipe of the longest response that fits, or else of the shortest."""
  positions = options(model)['max_position_embeddings']
  for length in sorted(LENGTHS, reverse=True):
    config = config_of(topology, model, lora, length)
    if config.row_length <= positions:
      recipe = searched(topology, model, lora, length)
      if recipe.choice:
        return recipe
  return searched(topology, model, lora, LENGTHS[0])


def memory(topology: str) -> float:
  """Returns the usable GiB of all devices of a machine."""
  chip, found = meshes.count(topology)
  return chip.hbm * len(found)


def smallest(model: str, lora: bool) -> str:
  """Names the machine with the least memory on which the shortest response fits."""
  for topology in sorted(MACHINES, key=memory):
    if searched(topology, model, lora, LENGTHS[0]).choice:
      return f'smallest machine here: `{topology}`'
  return 'it fits on no machine here'


def thousands(tokens: int) -> str:
  """Formats a power of two such as 8192 as '8k'."""
  return f'{tokens >> 10}k'


def rounded(value: float) -> str:
  """Formats a number with three digits, without an exponent."""
  return f'{float(f"{value:.3g}"):,.7g}'


def row(topology: str, model: str, lora: bool) -> list[str]:
  """Formats the row of a machine, a model and what is trained."""
  config, choice, excess = longest(topology, model, lora)
  cells = [model, 'LoRA' if lora else 'all']
  if choice is None:
    needed = f'{excess / GIB:.1f} GiB too much per device at {thousands(LENGTHS[0])}'
    cells.append(f'none, {needed}; {smallest(model, lora)}')
    return cells + [''] * (len(HEADER) - len(cells))
  length = config.sampler.max_new_tokens
  run = searched(topology, model, lora, min(length, PAPER)).choice
  assert run is not None, 'a shorter response fits, too'
  tokens = config.minibatch_rows * config.row_length
  short = f' ({thousands(length)})' if length < PAPER else ''
  return [
    *cells,
    thousands(length),
    ' x '.join(map(str, choice.shape.values())),
    str(choice.grad_accum_steps),
    str(choice.slots),
    f'{choice.update_bytes / GIB:.1f}',
    f'{choice.decode_bytes / GIB:.1f}',
    rounded(choice.slots / max(choice.token.values())),
    rounded(tokens / max(choice.update.values())),
    rounded(config.steps * run.seconds / 3600) + short,
  ]


def command(topology: str, model: str, lora: bool) -> str:
  """Returns the command that plans a row, or that searches if nothing fits."""
  config, choice, _ = longest(topology, model, lora)
  knobs: dict[str, object] = {
    'model.path': config.model.path,
    'sampler.max_new_tokens': config.sampler.max_new_tokens,
    'sampler.prefill_batch_size': config.sampler.prefill_batch_size,
  }
  if lora:
    knobs |= {'lora.rank': RANK, 'model.dtype': config.model.dtype}
  if choice:  # a plan would fill more of the memory
    knobs['model.remat'] = choice.schedule.remat
    if choice.grad_accum_steps > 1:
      knobs['learner.bounds_pass'] = choice.schedule.bounds_pass
    if choice.shape['tensor'] > 1:
      split = 'on' if choice.schedule.sequence_sharding else 'off'
      knobs['model.sequence_sharding'] = split
  flags = ' '.join(f'--config.{name}={value}' for name, value in knobs.items())
  program = 'bapo_jax.main --mode=plan' if choice else 'benchmarks.meshes'
  mesh = f' {choice.flags}' if choice else ''
  return (
    f'.venv/bin/python -m {program} --config=configs/aime.py:balanced_paper '
    f'--topology={topology} {flags}{mesh}'
  )


def section(topology: str) -> str:
  """Formats a machine: its table and, folded, the commands in the table's order."""
  chip, found = meshes.count(topology)
  kinds = [(model, lora) for model in MODELS for lora in (False, True)]
  rows = [row(topology, *kind) for kind in kinds]
  commands = '\n'.join(command(topology, *kind) for kind in kinds)
  return (
    f'\n## {MACHINES[topology]}\n\n`--topology={topology}`, {len(found)} x '
    f'{chip.hbm:.1f} GiB usable, of which a row may fill {room(chip) / GIB:.1f}.'
    '\n\n'
    f'{markdown.table(rows, HEADER, "ll" + "r" * (len(HEADER) - 2))}\n\n'
    f'<details><summary>Commands, one per row</summary>\n\n```bash\n{commands}\n```\n\n'
    '</details>\n'
  )


def introduction() -> str:
  """Formats the explanation of the columns."""
  config = config_of('h100:8', 'Qwen2.5-7B', lora=False, length=PAPER)
  return INTRODUCTION.format(
    rank=RANK,
    lengths=', '.join(map(thousands, LENGTHS)),
    share=100 * SHARE,
    steps=config.steps,
    prompts=config.prompts.count,
    group=config.sampler.group_size,
    updates=config.updates_per_step,
  )


def document() -> str:
  """Returns the page: how to read a row, and a section per machine."""
  return introduction() + ''.join(section(topology) for topology in MACHINES)


if __name__ == '__main__':
  print(document(), end='')
