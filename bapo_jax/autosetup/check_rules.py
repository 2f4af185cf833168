"""Finds likely mistakes in the config of a run, and explains how to correct them.

1. `of_config` reads only config and facts, in milliseconds;
2. `of_responses` reads responses that were sampled and verified.

A `mistake` certainly makes the run useless, a `warning` probably does.
"""

import functools
import re
import statistics
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from bapo_jax.autosetup import derive_sizes, derive_text
from bapo_jax.autosetup.facts import Facts
from bapo_jax.custom_code import paths_in
from bapo_jax.data import dedup
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.training.config import Config
from bapo_jax.training.evaluate import mean_of_decided
from bapo_jax.training.resolve import Resolved

FEW = 1 / 4  # fewest groups with mixed verdicts without a warning
CUT = 1 / 3  # most dropped prompts, or fewest complete responses, without a warning
OFF = 10  # largest factor between the learning rate and the usual learning rate
ASKED = re.compile(r'\\boxed|answer\W{0,3}(?:is\W{0,3})?:', re.IGNORECASE)


class Finding(NamedTuple):
  """One problem of a run, and its remedy."""

  kind: Literal['mistake', 'warning']
  name: str  # a short name, for programs
  text: str  # what is wrong; what to do


warning = functools.partial(Finding, 'warning')


class Sampled(NamedTuple):
  """Responses of the model before any training: P problems by G responses."""

  correct_PG: np.ndarray  # 1: right, 0: wrong, nan: undecided
  truncated_PG: np.ndarray  # bool, no end token
  read_PG: np.ndarray  # bool, the verifier found an answer
  undecided: list[str]  # the reason of each undecided response

  @property
  def mixed(self) -> int:
    """The number of groups with mixed verdicts, which alone produce a gradient."""
    return int(((self.correct_PG == 1).any(1) & (self.correct_PG == 0).any(1)).sum())


def of_config(r: Resolved, known: Facts, free: int) -> list[Finding]:
  """Returns the findings about a new run's config; `free` is the free disk in bytes."""
  rules = _template, _verifier, _box, _learning_rate, _lengths, _overlap
  found = [finding for rule in rules for finding in rule(r.config, known)]
  return [*found, *_room(r, known.memory, free)]


def _template(config: Config, known: Facts):
  """Finds an unused chat template, special tokens, and a missing end token."""
  template = config.tokenizer.template
  chat = template.startswith('chat:')
  if known.chat and not chat:
    yield warning(
      'chat template',
      f'the model has a chat template, but tokenizer.template={template[:40]!r} does '
      "not use it; give --config.tokenizer.template='chat:{problem}'",
    )
  special = tokenizer_lib.special_tokens(known.tokenizer.backend)
  written = special.search(template)
  if chat and written:
    yield warning(
      'chat template',
      f'tokenizer.template contains {written[0]!r}, which the chat template adds '
      'itself; remove this token from --config.tokenizer.template',
    )
  found = [special.search('\n'.join(row.texts)) for row in known.rows]
  if inner := list(filter(None, found)):
    yield warning(
      'special tokens',
      f'{len(inner)} problems contain special tokens, such as {inner[0][0]!r} in '
      f'{inner[0].string[:60]!r}; their prompts contain them as text. Remove them, or '
      'write what belongs to every prompt in --config.tokenizer.template',
    )
  end = tokenizer_lib.turn_end(known.tokenizer) if chat else None
  if end and not end[1]:
    yield warning(
      'end token',
      f'the chat template ends an answer with {end[0]!r}, which is not among the end '
      'tokens, so responses do not stop there; add its id to eos_token_id in the '
      "model's generation_config.json",
    )


def _verifier(config: Config, known: Facts):
  """Finds right answers that fail their verifier, or that another verifier accepts."""
  given = config.rewards.rule
  check = known.verified(config.rewards.rule)
  if check.right < check.tried:
    yield Finding(
      'warning' if check.right else 'mistake',
      'verifier',
      f'{check.tried - check.right} of {check.tried} right answers fail their own '
      f'verifier, such as {check.wrong}; give another --config.rewards.rule, or '
      'correct these rows',
    )
  unnamed = [row.answer for row in known.rows if not row.verifier]
  best = derive_text.by_answers(unnamed)[0] if unnamed else given
  if given == 'exact' and best != 'exact':
    yield warning(
      'verifier',
      "rewards.rule='exact' compares letter by letter, which is too strict for answers "
      f'such as {unnamed[0]!r}; give --config.rewards.rule={best}',
    )


def _box(config: Config, known: Facts):
  """Finds a verifier that expects a boxed answer although no prompt asks for one."""
  rules = {row.verifier or config.rewards.rule for row in known.training}
  texts = (text for row in known.training for text in row.texts)
  asking = any(map(ASKED.search, (config.tokenizer.template, *texts)))
  if (boxed := rules & {'aime', 'math'}) and not asking:
    yield warning(
      'no box',
      rf'the verifier {min(boxed)} reads the answer in \boxed{{}} or after `Answer:`, '
      'but no prompt asks for it; add a request to --config.tokenizer.template, such '
      rf"as 'chat:{{problem}}{derive_text.REQUEST.strip()}'",
    )


def _learning_rate(config: Config, known: Facts):
  """Finds a learning rate at least ten times larger or smaller than the usual one."""
  usual, reason = derive_sizes.learning_rate(config, known)
  times = config.optimizer.lr / usual
  if not 1 / OFF < times < OFF:
    yield warning(
      'learning rate',
      f'optimizer.lr={config.optimizer.lr:g} is {times:.3g} times the usual '
      f'{usual:g} ({reason}); give --config.optimizer.lr={usual:g}, unless you chose '
      'the value on purpose',
    )


def _lengths(config: Config, known: Facts):
  """Finds a limit on prompt length that drops many of the training prompts."""
  training, _ = known.lengths(config.tokenizer.template)
  limit = config.prompts.max_prompt_tokens
  cut = sum(n > limit for n in training)
  if cut >= CUT * len(training):
    yield warning(
      'long prompts',
      f'{cut} of {len(training)} training prompts are longer than '
      f'prompts.max_prompt_tokens={limit} and are dropped; give '
      f'--config.prompts.max_prompt_tokens={max(training)} to keep all prompts',
    )


def _overlap(config: Config, known: Facts):
  """Finds held-out problems that are training problems too."""
  both, message = dedup.overlap(known.training, known.held_out)
  if both and config.problems.overlap != 'drop':
    yield warning(
      'overlap',
      f'{message}; give --config.problems.overlap=drop to train without them, '
      'else the held-out accuracy means little',
    )


def _room(r: Resolved, memory, free):
  """Finds an update that exceeds device memory, or checkpoints that exceed the disk."""
  needed = r.budget.update
  each = sum(r.budget.checkpoint.values())
  if needed > memory:
    yield warning(
      'memory',
      f'an update needs about {needed / 2**30:.3g} GiB per device, but a run may use '
      f'only {memory / 2**30:.3g} GiB; raise --config.learner.grad_accum_steps, lower '
      '--config.sampler.max_new_tokens, or use more devices (--config.mesh.fsdp)',
    )
  knobs = r.config.checkpoint
  if r.budget.disk > free:
    yield Finding(
      'mistake' if each > free else 'warning',
      'disk',
      f'checkpoints take {r.budget.disk / 2**30:.3g} GiB ({each / 2**30:.3g} each, '
      f'{knobs.keep} newest, {knobs.best} best, one being written), but only '
      f'{free / 2**30:.3g} GiB are free; use a --workdir with more space, or lower '
      '--config.checkpoint.keep or --config.checkpoint.best',
    )


def of_responses(config: Config, sampled: Sampled) -> Iterator[Finding]:
  """Yields the findings about responses of the model before any training."""
  correct_PG = sampled.correct_PG
  n = correct_PG.size
  groups = len(correct_PG)
  accuracy = mean_of_decided(correct_PG)['mean']
  way_out = 'use harder problems'
  if accuracy < 0.5:
    way_out = (
      'use easier problems, raise --config.sampler.group_size, or change '
      '--config.tokenizer.template'
    )
  batch = config.batch
  more = ', or give --config.batch.rule=learnable_only, which samples more prompts'
  if batch.only_learnable or batch.uses_buffer:
    more = ''
  if 0 < sampled.mixed < FEW * groups:
    yield warning(
      'little to learn',
      f'only {sampled.mixed} of {groups} groups have right and wrong responses '
      f'(accuracy {accuracy:.3f}), fewer than {FEW:.0%}, and only these produce a '
      f'gradient; {way_out}'
      f'{more}',
    )
  if not sampled.mixed:
    kind = {1.0: 'right', 0.0: 'wrong'}.get(accuracy, 'undecided')
    verdict = f'all {n} responses are {kind}'
    if 0 < accuracy < 1:
      verdict = 'in every group, either all responses are right or all are wrong'
    yield Finding(
      'mistake',
      'nothing to learn',
      f'{verdict}: none of the {groups} groups has a nonzero advantage, so nothing is '
      f'learned; {way_out}',
    )
  truncated = float(sampled.truncated_PG.mean())
  limit = config.sampler.max_new_tokens
  if truncated > 1 - CUT:
    yield warning(
      'truncated',
      f'{truncated:.0%} of the responses are cut at sampler.max_new_tokens={limit}; '
      f'give a higher limit, such as --config.sampler.max_new_tokens={2 * limit}, and '
      'check that the model can write an end token (a base model may not)',
    )
  # A custom function may return a number without an answer.
  if not (sampled.read_PG.any() or paths_in(config.rewards.rule)):
    yield warning(
      'no answer',
      f'the verifier found no answer in any of {n} responses; ask for its format '
      'in --config.tokenizer.template, or give another --config.rewards.rule',
    )
  if sampled.undecided:
    yield warning(
      'undecided',
      f'{len(sampled.undecided)} of {n} responses in {groups} groups could not be '
      'verified and are left out; the most frequent reason: '
      f'{statistics.mode(sampled.undecided)}; remove this cause, or give another '
      '--config.rewards.rule',
    )
