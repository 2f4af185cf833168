"""What a new run decides by itself, each value with its reason.

1. a config file leaves knobs None, `overrides.decided` lists them in `derived`;
2. `derive` runs through RULES in their order, each of which sees what is decided;
3. `resolve` does so once: a run that has begun reads its values from its config.json.
"""

import json
import os
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from bapo_jax.autosetup import derive_sizes, derive_text, facts
from bapo_jax.autosetup.facts import Facts
from bapo_jax.runtime import hosts, workdir
from bapo_jax.runtime.progress import log
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config

WIDTH = 100  # columns of the first screen

Rule = Callable[[Config, Facts], tuple[Any, str]]
# In the order in which one depends on another.
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
  """One knob, and why it has its value."""

  knob: str
  value: Any  # that the rule gives
  reason: str
  given: Any = None  # what the user has set in its place; None: nothing

  @property
  def line(self) -> str:
    """For the first screen."""
    if self.given is None:
      return f'{self.knob}={shown(self.value)}: {self.reason}'
    same = self.given == self.value
    else_ = 'as derived' if same else f'derived: {shown(self.value)}, {self.reason}'
    return f'{self.knob}={shown(self.given)}, GIVEN ({else_})'


def shown(value: Any) -> str:
  """A value as the command line takes it; a text in quotes."""
  quoted = isinstance(value, str) and not value.isidentifier()
  return repr(value) if quoted else f'{value}'


def derive(config: Config, known: Facts) -> tuple[Config, list[Derived]]:
  """The config with the knobs of `derived` decided; all rules with their reasons."""
  found = []
  for knob, rule in RULES.items():
    value, reason = rule(config, known)
    if knob in config.derived:
      config = set_knob(config, knob, value)
      found.append(Derived(knob, value, reason))
    else:
      found.append(Derived(knob, value, reason, value_of(config, knob)))
  return config, found


def resolve(config: Config, directory: str) -> Config:
  """The config with nothing left to derive; logs what was decided, and why.

  Args:
    directory: the workdir: a run that has begun there has decided.

  Raises:
    ValueError: one sentence, where something is missing or broken.
  """
  if wrong := [name for name in config.derived if name not in RULES]:
    raise ValueError(f'derived={wrong[0][:60]!r}: give some of {", ".join(RULES)}')
  path = os.path.join(directory, 'config.json')
  if workdir.has_begun(directory) and os.path.lexists(path):
    found = read(config, path)
    names = ', '.join(f'{k}={shown(value_of(found, k))}' for k in config.derived)
    log(wrapped(f'Derived when this run began ({path}): {names}', ''))
    return found
  with hosts.first_ahead():  # it downloads
    known = facts.gather(config)
  decided, derived = derive(config, known)
  decided = config_lib.parse(config_lib.plain(decided))
  hosts.same_everywhere({'derived': config_lib.plain(decided)})
  log(screen(derived))
  return decided


def screen(derived: list[Derived]) -> str:
  """All knobs that are derived, each with its reason."""
  lines = '\n'.join(wrapped(each.line) for each in derived)
  return (
    f'Derived from model, problems and machine (--config.<knob>=... wins):\n{lines}'
  )


def wrapped(line: str, indent: str = '  ') -> str:
  """The line, broken where the screen ends."""
  return textwrap.fill(
    line,
    WIDTH,
    initial_indent=indent,
    subsequent_indent=indent + '    ',
    break_long_words=False,
    break_on_hyphens=False,
  )


def read(config: Config, path: str) -> Config:
  """The config with the values that its run has derived, from config.json.

  Raises:
    ValueError: the file holds no config, or one without these knobs.
  """
  stored = workdir.read_config(path)
  values = json.loads(json.dumps(config_lib.plain(config)))
  for knob in config.derived:
    *sections, key = knob.split('.')
    section, other = values, stored
    try:
      for name in sections:
        section, other = section[name], other[name]
      section[key] = other[key]
    except (KeyError, TypeError):
      raise ValueError(
        f'{path} has no {knob}; give another --workdir, or put the config back'
      ) from None
  return config_lib.parse(config_lib.plain(config_lib.from_json(values)))


def value_of(config: Config, knob: str) -> Any:
  """The value of a knob by its dotted name."""
  found: Any = config
  for name in knob.split('.'):
    found = getattr(found, name)
  return found


def set_knob(config: Config, knob: str, value: Any) -> Config:
  """The config with this value of a knob, not checked."""
  section, _, key = knob.rpartition('.')
  if section:
    return config.with_values(**{section: {key: value}})
  return config.model_copy(update={key: value})
