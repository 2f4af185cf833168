"""Finds likely mistakes in the config of a run, and says how to correct them.

1. `of_config` reads config and facts alone, in milliseconds;
2. `of_responses` reads responses that were sampled and verified.

A `mistake` makes the run useless for certain, a `warning` probably; a `note` is for
information.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from bapo_jax.autosetup import derive_sizes, derive_text
from bapo_jax.autosetup.facts import Facts
from bapo_jax.data import prompts
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.runtime.statistics import clustered_error
from bapo_jax.training.config import Config

Kind = Literal['mistake', 'warning', 'note']
CUT = 1 / 3  # share of training prompts that are left out, or of truncated responses
OFF = 10  # times the learning rate of the papers
GIB = 2**30
ASKED = re.compile(r'\\boxed|answer\W{0,3}(?:is\W{0,3})?:', re.IGNORECASE)


class Finding(NamedTuple):
  """One problem of a run, and the way out."""

  kind: Kind
  name: str  # in two words, for a program
  sentence: str
  way_out: str

  @property
  def line(self) -> str:
    """The finding as a line of the screen."""
    return f'{self.kind.upper()} ({self.name}): {self.sentence}; {self.way_out}'


class Sampled(NamedTuple):
  """Responses of the model before any training: P problems by G responses."""

  correct_PG: np.ndarray  # bool
  truncated_PG: np.ndarray  # bool, no end token
  read_PG: np.ndarray  # bool, the verifier found an answer
  undecided: int  # responses

  @property
  def mixed(self) -> int:
    """The number of groups with mixed verdicts, which alone produce a gradient."""
    return int((self.correct_PG.any(1) & ~self.correct_PG.all(1)).sum())


def of_config(config: Config, known: Facts, free: int) -> list[Finding]:
  """Returns the findings about the config of a new run.

  Args:
    free: free bytes where the run writes.
  """
  rules: Sequence[Callable[[Config, Facts], Iterator[Finding]]] = (
    _template,
    _end_token,
    _verifier,
    _box,
    _learning_rate,
    _lengths,
    _overlap,
    _memory,
  )
  return [x for rule in rules for x in rule(config, known)] + list(
    _disk(config, known, free)
  )


def _template(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds a chat model without its template, and special tokens written twice."""
  template = config.tokenizer.template
  if known.chat and not template.startswith('chat:'):
    yield Finding(
      'warning',
      'chat template',
      f'the model has a chat template, and tokenizer.template={template[:40]!r} does '
      'not use it',
      "give --config.tokenizer.template='chat:{problem}'",
    )
  added = map(str, known.tokenizer.backend.added_tokens_decoder.values())
  written = [token for token in added if token in template]
  if template.startswith('chat:') and written:
    yield Finding(
      'warning',
      'chat template',
      f'tokenizer.template writes {written[0]!r} inside the message of a chat, which '
      'the chat template writes itself',
      'take it out of --config.tokenizer.template',
    )


def _end_token(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds a chat template whose turn end does not end a response."""
  if not config.tokenizer.template.startswith('chat:'):
    return
  found = tokenizer_lib.turn_end(known.tokenizer)
  if found and not found[1]:
    yield Finding(
      'warning',
      'end token',
      f'the chat template ends an answer with {found[0]!r}, which is not among the end '
      'tokens: responses go on after it',
      "add its id to eos_token_id in the model's generation_config.json",
    )


def _verifier(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds right answers that fail their verifier, or suit another one better."""
  given, check = config.rewards.rule, known.verified(config.rewards.rule)
  if check.right < check.tried:
    yield Finding(
      'mistake' if not check.right else 'warning',
      'verifier',
      f'{check.tried - check.right} of {check.tried} right answers are not right by '
      f'their own verifier, such as {check.wrong}',
      'give another --config.rewards.rule, or correct these rows',
    )
  unnamed = [row.answer for row in known.rows if not row.verifier]
  best = derive_text.by_answers(unnamed)[0] if unnamed else given
  if given == 'exact' and best != 'exact':
    yield Finding(
      'warning',
      'verifier',
      '`exact` compares letter by letter, which is too strict for answers such as '
      f'{unnamed[0]!r}',
      f'give --config.rewards.rule={best}',
    )


def _box(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds a verifier that reads boxes although no prompt asks for a box."""
  rules = {row.verifier or config.rewards.rule for row in known.training}
  asking = ASKED.search(config.tokenizer.template) or any(
    ASKED.search(row.problem) or ASKED.search(row.system) for row in known.training
  )
  if rules & {'aime', 'math'} and not asking:
    rule = min(rules & {'aime', 'math'})
    yield Finding(
      'warning',
      'no box',
      rf'{rule} reads the answer in \boxed{{}} or after `Answer:`, and no prompt asks '
      'for either',
      'add a request to --config.tokenizer.template, such as '
      rf"'chat:{{problem}}{derive_text.REQUEST.strip()}'",
    )


def _learning_rate(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds a learning rate that is off by a factor of ten."""
  usual, reason = derive_sizes.learning_rate(config, known)
  times = config.optimizer.lr / usual
  if not 1 / OFF < times < OFF:
    yield Finding(
      'warning',
      'learning rate',
      f'optimizer.lr={config.optimizer.lr:g} is {times:.3g} times the usual '
      f'{usual:g} ({reason})',
      f'give --config.optimizer.lr={usual:g}, unless you chose the value on purpose',
    )


def _lengths(config: Config, known: Facts) -> Iterator[Finding]:
  """Counts training prompts that are too long and dropped."""
  training, _ = known.lengths(config.tokenizer.template)
  most = config.prompts.max_prompt_tokens
  cut = sum(n > most for n in training)
  if cut:
    yield Finding(
      'warning' if cut >= CUT * len(training) else 'note',
      'long prompts',
      f'{cut} of {len(training)} training prompts are longer than '
      f'prompts.max_prompt_tokens={most} and are dropped',
      f'give --config.prompts.max_prompt_tokens={max(training)} to keep all prompts',
    )


def _overlap(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds held-out problems among the training problems."""
  both, message = prompts.overlap(config.problems, known.training, known.held_out)
  if not both:
    return
  drop = config.problems.overlap == 'drop'
  if drop and len(known.training) - len(both) < config.prompts.count:
    yield Finding(
      'mistake',
      'overlap',
      f'{message}; they are not trained on, and {len(known.training) - len(both)} are '
      'left',
      'give other problems.source or problems.test_source',
    )
  elif drop:
    yield Finding('note', 'overlap', message, 'they are not trained on')
  else:
    yield Finding(
      'warning',
      'overlap',
      message,
      'give --config.problems.overlap=drop, or the held-out accuracy means little',
    )


def _memory(config: Config, known: Facts) -> Iterator[Finding]:
  """Finds an update that does not fit the memory of a device."""
  needed = derive_sizes.budget_of(config, known)[1].update
  if needed > known.memory:
    yield Finding(
      'warning',
      'memory',
      f'an update needs about {needed / GIB:.3g} GiB per device, but a run may use '
      f'only {known.memory / GIB:.3g} GiB',
      'raise --config.learner.grad_accum_steps, lower '
      '--config.sampler.max_new_tokens, or use more devices (--config.mesh.fsdp)',
    )


def _disk(config: Config, known: Facts, free: int) -> Iterator[Finding]:
  """Finds checkpoints that do not fit the disk."""
  _, b = derive_sizes.budget_of(config, known)
  each, wanted = sum(b.checkpoint.values()), b.disk
  if wanted > free:
    yield Finding(
      'mistake' if each > free else 'warning',
      'disk',
      f'checkpoints take {wanted / 1e9:.3g} GB ({each / 1e9:.3g} each, '
      f'{config.checkpoint.keep} newest, {config.checkpoint.best} best, one being '
      f'written), and {free / 1e9:.3g} GB are free',
      'give another --workdir, or fewer --config.checkpoint.keep and '
      '--config.checkpoint.best',
    )


def of_responses(config: Config, sampled: Sampled) -> list[Finding]:
  """Returns the findings about responses of the model before any training."""
  correct_PG, n = sampled.correct_PG, sampled.correct_PG.size
  groups = len(correct_PG)
  found = list(_learnable(correct_PG, sampled.mixed))
  truncated = float(sampled.truncated_PG.mean())
  most = config.sampler.max_new_tokens
  if truncated > 1 - CUT:
    found.append(
      Finding(
        'warning',
        'truncated',
        f'{truncated:.0%} of the responses are cut at sampler.max_new_tokens={most}',
        f'raise the limit, such as --config.sampler.max_new_tokens={2 * most}, and '
        'check that an end token is trained (a base model may have none)',
      )
    )
  if not sampled.read_PG.any():
    found.append(
      Finding(
        'warning',
        'no answer',
        f'the verifier found no answer in any of {n} responses',
        'ask for its format in --config.tokenizer.template, or give another '
        '--config.rewards.rule',
      )
    )
  if sampled.undecided:
    found.append(
      Finding(
        'warning',
        'undecided',
        f'{sampled.undecided} of {n} responses could not be verified, and count as '
        f'wrong, in {groups} groups',
        'see the reasons above; a right answer may be malformed',
      )
    )
  return found


def _learnable(correct_PG: np.ndarray, mixed: int) -> Iterator[Finding]:
  """Finds that no group has mixed verdicts."""
  groups, accuracy = len(correct_PG), float(correct_PG.mean())
  if mixed:
    return
  if 0 < accuracy < 1:
    sentence = 'in every group all responses are right, or all are wrong'
  else:
    sentence = f'all {correct_PG.size} responses are {"right" if accuracy else "wrong"}'
  yield Finding(
    'mistake',
    'nothing to learn',
    f'{sentence}: of {groups} groups none has an advantage, and nothing is learned',
    'take easier problems, a larger --config.sampler.group_size or another template'
    if accuracy < 0.5
    else 'take harder problems',
  )


def accuracy(sampled: Sampled) -> str:
  """Formats the accuracy before training with its standard error."""
  error = clustered_error(sampled.correct_PG)
  return f'{sampled.correct_PG.mean():.3f} ± {error:.3f}'
