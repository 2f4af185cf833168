"""Derives the knobs that a config sets to None, each with the reason for its value.

1. `config.decided` lists the knobs that are None in a config file in `derived`;
2. `derive` applies RULES in order; a rule reads the knobs that earlier rules derived;
3. `prepare` derives the knobs once per run and resolves the config; for a run that has
   begun, it reads the derived values from config.json.
"""

import operator
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from bapo_jax.autosetup import derive_sizes, derive_text, facts
from bapo_jax.autosetup.facts import Facts
from bapo_jax.runtime import hosts, jax_options
from bapo_jax.runtime import workdir as workdir_lib
from bapo_jax.runtime.progress import log
from bapo_jax.training import config as config_lib
from bapo_jax.training import inputs, resolve
from bapo_jax.training.config import Config
from bapo_jax.training.resolve import Resolved

WIDTH = 100  # columns of the first screen

Rule = Callable[[Config, Facts], tuple[Any, str]]
# Ordered so that a rule reads only knobs that are decided before it.
RULES: dict[str, Rule] = {
  'model.compute': derive_sizes.compute,
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
  'model.remat': derive_sizes.backward,
  'learner.bounds_pass': derive_sizes.bounds_pass,
  'optimizer.lr': derive_sizes.learning_rate,
}


class Derived(NamedTuple):
  """One derived knob with the reason for its value."""

  knob: str
  value: Any  # as derived by the rule
  reason: str
  given: Any = None  # the user's value, which takes precedence; None: no such value


def shown(value: Any) -> str:
  """Formats a value for the command line; puts a string in quotes if it needs them."""
  quoted = isinstance(value, str) and not value.isidentifier()
  return repr(value) if quoted else f'{value}'


def derive(config: Config, known: Facts) -> tuple[Config, list[Derived]]:
  """Returns the config with all derived knobs, and a `Derived` for every rule."""
  found: list[Derived] = []
  for knob, rule in RULES.items():
    derived = Derived(knob, *rule(config, known))
    if knob not in config.derived:
      derived = derived._replace(given=operator.attrgetter(knob)(config))
    else:
      section, _, key = knob.rpartition('.')
      values = {key: derived.value}  # validated when all knobs are decided
      if section:
        values = {section: getattr(config, section).model_copy(update=values)}
      config = config.model_copy(update=values)
    found.append(derived)
  return config, found


def prepare(config: Config, workdir: str, *, trains: bool = True) -> Resolved:
  """Derives the knobs that a config sets to None, and returns the `Resolved` run.

  If a run has begun in the workdir, its config.json gives the derived values; an empty
  `workdir` stands for no run. With trains=False (an evaluation), held-out problems
  replace the training problems. Raises ValueError if files are missing, knobs do not
  fit together, or JAX has options that a run cannot work with.
  """
  jax_options.check()
  undecided = bool(config.derived) and not workdir_lib.has_begun(workdir)
  held_out = {} if trains else {'source': config.problems.test_source}
  if not undecided:
    config = config.with_values(problems=held_out)
  with hosts.first_ahead():  # one process downloads
    read = inputs.read(config)
  if undecided:
    # An evaluation may have no training problems of its own.
    asked = config if trains else config.with_values(problems={'overlap': 'keep'})
    config, derived = derive(config, facts.gather(asked, read))
    config = config_lib.parse(config.model_dump())
    hosts.same_everywhere({'derived': config.model_dump()})
    log(screen(derived))
    if not trains:
      config = config.with_values(problems=held_out)
      data = read.data._replace(training=read.data.held_out)
      read = read._replace(data=data)
  elif config.derived:
    config = _read(config, workdir)
  return resolve.resolve(config, read)


def decide(config: Config, workdir: str) -> Config:
  """Returns the config with all derived knobs; raises the errors of `prepare`."""
  if workdir_lib.has_begun(workdir):
    return _read(config, workdir)
  return prepare(config, workdir).config


def screen(derived: list[Derived]) -> str:
  """Lists all derived knobs, each with its reason."""
  lines = ['Derived from model, problems and machine; override by --config.<knob>=...:']
  for knob, value, reason, given in derived:
    line = f'{knob}={shown(value)}: {reason}'
    if given is not None:
      other = 'as derived' if given == value else f'derived: {shown(value)}, {reason}'
      line = f'{knob}={shown(given)}, GIVEN ({other})'
    lines.append(wrapped(line))
  return '\n'.join(lines)


def wrapped(line: str, indent: str = '  ') -> str:
  """Breaks a line at the width of the screen."""
  wrapper = textwrap.TextWrapper(WIDTH, indent, indent + '    ')
  wrapper.break_long_words = wrapper.break_on_hyphens = False
  return wrapper.fill(line)


def _read(config: Config, workdir):
  """Returns the config with the derived knobs of the workdir's config.json."""
  stored = config_lib.from_json(workdir_lib.read_config(workdir))
  values = {knob: operator.attrgetter(knob)(stored) for knob in config.derived}
  text = ', '.join(f'{knob}={shown(value)}' for knob, value in values.items())
  log(wrapped(f'Derived when this run began ({workdir}): {text}', ''))
  return config_lib.parse(config_lib.merged(config.model_dump(), values))
