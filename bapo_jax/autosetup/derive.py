"""Derives the knobs that a config sets to None, each with the reason for its value.

1. `derive` applies RULES in order; a rule reads the knobs that earlier rules derived;
2. `prepare` derives the knobs once per run and resolves the config; for a run that has
   begun, it takes the values of the run.
"""

import dataclasses
import operator
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from bapo_jax import knobs
from bapo_jax.autosetup import derive_sizes, derive_text, facts
from bapo_jax.autosetup.facts import Facts
from bapo_jax.runtime import hosts, jax_options
from bapo_jax.runtime import workdir as workdir_lib
from bapo_jax.runtime.progress import log
from bapo_jax.training import config as config_lib
from bapo_jax.training import inputs, needs, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Derived, Resolved

WIDTH = 100  # columns of the first screen

Rule = Callable[[Config, Facts], tuple[Any, str]]
# Ordered so that a rule reads only knobs that are decided before it.
RULES: dict[str, Rule] = {
  'cache': derive_sizes.cache_folder,
  'model.compute': derive_sizes.compute,
  'model.attention': derive_sizes.attention_kernel,
  'model.experts_kernel': derive_sizes.experts_kernel,
  'mesh.fsdp': derive_sizes.fsdp,
  'mesh.data': derive_sizes.data,
  'rewards.rule': derive_text.rule,
  'tokenizer.template': derive_text.template,
  'prompts.max_prompt_tokens': derive_text.prompt_tokens,
  'sampler.max_new_tokens': derive_text.response_tokens,
  'prompts.count': derive_sizes.prompts,
  'learner.minibatches': derive_sizes.minibatches,
  'steps': derive_sizes.steps,
  'sampler.max_num_seqs': derive_sizes.slots,
  'sampler.prefill_batch_size': derive_sizes.prefill,
  'sampler.tokens_per_dispatch': derive_sizes.dispatch,
  'sampler.cache_segments': derive_sizes.segments,
  'sampler.done_check_lag': derive_sizes.lag,
  'learner.grad_accum_steps': derive_sizes.micro_batches,
  'learner.share_prompts': derive_sizes.share_prompts,
  'model.remat': derive_sizes.backward,
  'learner.bounds_pass': derive_sizes.bounds_pass,
  'model.sequence_sharding': derive_sizes.columns,
  'learner.recompute_logprobs': derive_sizes.logprobs,
  'optimizer.lr': derive_sizes.learning_rate,
}


def shown(value: Any) -> str:
  """Formats a value for the command line; puts a string in quotes if it needs them."""
  quoted = isinstance(value, str) and not value.isidentifier()
  return repr(value) if quoted else f'{value}'


def derive(config: Config, known: Facts) -> tuple[Config, list[Derived]]:
  """Returns the config with every knob decided, and a `Derived` per decision."""
  found: list[Derived] = []
  for knob, rule in RULES.items():
    if operator.attrgetter(knob)(config) is not None:
      continue
    derived = Derived(knob, *rule(config, known))
    found.append(derived)
    section, _, key = knob.rpartition('.')
    values = {key: derived.value}  # validated when all knobs are decided
    if section:
      values = {section: getattr(config, section).model_copy(update=values)}
    config = config.model_copy(update=values)
  return config, found


def prepare(config: Config, workdir: str, *, trains: bool = True) -> Resolved:
  """Derives the knobs that a config sets to None, and returns the `Resolved` run.

  If a run has begun in the workdir, its values are used; an empty `workdir` stands for
  no run. With trains=False (an evaluation), held-out problems replace the training
  problems. Raises ValueError if files are missing, knobs do not fit together, or JAX
  has options that a run cannot work with.
  """
  jax_options.check()
  given = config
  config = as_begun(config, workdir)
  if not trains:
    held_out = {'problems.source': config.problems.test_source}
    held_out['problems.overlap'] = 'keep'
    config = config_lib.parse(config_lib.merged(config.model_dump(), held_out))
  kept = undecided(config)
  with hosts.first_ahead():  # one process downloads
    read = inputs.read(config)
  config, derived = derive(config, facts.gather(config, read))
  config = config_lib.parse(config.model_dump())
  same = {x.knob: x.value for x in derived if x.knob in kept}
  hosts.same_everywhere({'derived': same})
  r = resolve.resolve(config, read)
  return dataclasses.replace(r, given=given, derived=derived)


def decide(config: Config, workdir: str) -> Config:
  """Returns the config with every knob that a run keeps; raises as `prepare` does."""
  config = as_begun(config, workdir)
  return (
    filled(config, prepare(config, workdir).config) if undecided(config) else config
  )


def undecided(config: Config) -> list[str]:
  """Returns the knobs that are None now, and that a run keeps once it has begun.

  A knob that is None by default follows from the machine, so that every start decides
  it: elsewhere, the results differ by rounding at most.
  """
  return [
    name
    for name, field, value in knobs.fields(config)
    if value is None and field.default is not None
  ]


def as_begun(config: Config, workdir: str) -> Config:
  """Returns the config with the values of the run in the workdir for knobs of None."""
  if not workdir_lib.has_begun(workdir):
    return config
  stored = workdir_lib.read_config(workdir)
  workdir_lib.check_version(workdir)
  kept = undecided(config)
  if not kept:
    return config
  ran = config_lib.from_json(stored)
  text = ', '.join(f'{knob}={shown(operator.attrgetter(knob)(ran))}' for knob in kept)
  log(wrapped(f'Derived when this run began ({workdir}): {text}', ''))
  return filled(config, ran)


def filled(config: Config, ran: Config) -> Config:
  """Returns the config with a run's values in place of None, where a run keeps them."""
  values = {knob: operator.attrgetter(knob)(ran) for knob in undecided(config)}
  return config_lib.parse(config_lib.merged(config.model_dump(), values))


def screen(config: Config, derived: Sequence[Derived]) -> str:
  """Lists the derived knobs that have an effect, each with its reason."""
  inert = needs.inert(config)
  lines = ['Derived from model, problems and machine; override by --config.<knob>=...:']
  for knob, value, reason in derived:
    if knob not in inert:
      lines.append(wrapped(f'{knob}={shown(value)}: {reason}'))
  return '\n'.join(lines)


def wrapped(line: str, indent: str = '  ') -> str:
  """Breaks a line at the width of the screen."""
  wrapper = textwrap.TextWrapper(WIDTH, indent, indent + '    ')
  wrapper.break_long_words = wrapper.break_on_hyphens = False
  return wrapper.fill(line)
