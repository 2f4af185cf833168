"""Derives the verifier, the template and the length limits from the problems.

A rule takes the config, with the knobs that earlier rules derived, and the facts. It
returns a value and the reason for it, which a run shows when it starts.
"""

import collections
import json
from collections.abc import Sequence

from bapo_jax.autosetup.facts import Facts, Name, Number
from bapo_jax.data import sources
from bapo_jax.data.row import Row
from bapo_jax.rewards import number_rules
from bapo_jax.training.config import Config

# A model with fewer weights is not asked for a box: of 400 responses of SmolLM2-135M to
# such a request none was right; without the request 1 in 40 to 1 in 10
# (log/2026-11-22.md).
SMALL = 400_000_000
BOX = r'\boxed'
REQUEST = '\nPlease reason step by step, and put your final answer within \\boxed{}.'
# Largest response in tokens on an accelerator: for aime and math as in published runs
# (configs/aime.py), for other verifiers enough for a worked solution.
LONGEST = {'aime': 8192, 'math': 8192, 'gsm8k': 1024, 'countdown': 1024, 'exact': 256}
LONGEST_CPU = 512
PER_PROBLEM = 5  # tokens of a response per token of the longest problem, for SHORT
SHORT = ('gsm8k', 'exact')  # verifiers whose answers need no long reasoning
OUTLIER = 2.0  # times the 99th percentile of prompt lengths: longer is an outlier


def rule(config: Config, facts: Facts) -> Name:
  """Derives rewards.rule from the right answers."""
  rows = facts.rows
  unnamed = [row.answer for row in rows if not row.verifier]
  if not unnamed:
    named = collections.Counter(row.verifier for row in rows).most_common()
    counts = ', '.join(f'{name} {n}' for name, n in named)
    return named[0][0], f'each problem names its verifier ({counts})'
  found, reason = by_answers(unnamed)
  if found == 'aime' and facts.parameters < SMALL and not asks_for_box(rows):
    found = 'gsm8k'
    reason += (
      f'; aime reads boxes, which a model of {facts.size} rarely writes; gsm8k also '
      'reads the last number'
    )
  check = facts.verified(found)
  wrong = f', not {check.wrong}' if check.wrong else ''
  verify = f'{check.right} of {check.tried} answers pass this verifier'
  return found, f'{reason}; {verify}{wrong}'


def by_answers(answers: Sequence[str]) -> Name:
  """Returns (verifier, reason): the narrowest verifier that reads every answer."""
  n = len(answers)
  kinds = {
    'countdown': ('{numbers, target}', _countdown),
    'aime': ('integers 0..999', lambda text: number_rules.integer(text) is not None),
    'gsm8k': ('numbers', lambda text: number_rules.number(text) is not None),
  }
  best = ''
  other = ''
  for name, (words, reads) in kinds.items():
    unread = [text for text in answers if not reads(text)]
    if not unread:
      return name, f'all {n} answers are {words}'
    if len(unread) < n:
      best = f', {n - len(unread)} of {n} {words}'
      other = f' ({unread[0][:30]!r} is not)'
  if any(set(text) & set('0123456789\\^_{}') for text in answers):
    return 'math', f'answers in LaTeX{best}{other}'
  return 'exact', f'{n} answers are words'


def _countdown(answer):
  try:
    found = json.loads(answer)
  except (ValueError, RecursionError):
    return False
  return isinstance(found, dict) and {'numbers', 'target'} <= found.keys()


def asks_for_box(rows: Sequence[Row]) -> bool:
  """Returns whether most problems ask for a boxed answer in their own text."""
  asking = sum(any(BOX in text for text in row.texts) for row in rows)
  return 2 * asking > len(rows)


def template(config: Config, facts: Facts) -> Name:
  """Derives tokenizer.template: the model's chat template or a plain template."""
  found = '{problem}'
  end = '\n'
  reason = 'a plain template: the model has no chat template'
  if facts.chat:
    found = 'chat:{problem}'
    end = ''
    reason = 'the chat template of the model'
  verifier = config.rewards.rule
  boxed = verifier in ('aime', 'math')
  boxed |= verifier in SHORT and facts.parameters >= SMALL
  if not boxed:
    reason += f', nothing added for {verifier}'
  elif asks_for_box(facts.rows):
    reason += '; the problems ask for a box themselves'
  else:
    found += REQUEST
    reason += f', with a request for the box that {verifier} reads'
  return found + end, reason


def prompt_tokens(config: Config, facts: Facts) -> Number:
  """Derives prompts.max_prompt_tokens from the distribution of prompt lengths."""
  training, held_out = facts.lengths(config.tokenizer.template)
  lengths = sorted([*training, *held_out])
  longest = lengths[-1]
  most = lengths[99 * (len(lengths) - 1) // 100]
  limit = facts.spec.positions // 2
  if longest <= min(OUTLIER * most, limit):
    return longest, f'the longest of {len(lengths)} prompts'
  # Held-out problems are never left out: the score would be for another set.
  found = max(min(round(OUTLIER * most), limit), *held_out)
  if found >= facts.spec.positions:
    long = facts.held_out[held_out.index(found)]

    def check(row: Row):
      if row == long:
        raise ValueError(
          f'the prompt has {found} tokens, but the model has {facts.spec.positions} '
          'positions; remove the problem, or choose another model'
        )

    sources.check(config.problems, facts.data, check)  # names file and line
  left_out = sum(n > found for n in training)
  return found, (
    f'{OUTLIER:g} times the 99th percentile, at most half of {facts.spec.positions} '
    f'positions: {left_out} of {len(training)} training prompts are longer, up to '
    f'{longest} tokens, and left out'
  )


def response_tokens(config: Config, facts: Facts) -> Number:
  """Derives sampler.max_new_tokens from verifier, problem lengths, model and device."""
  verifier = config.rewards.rule
  positions = facts.spec.positions
  limits = {
    f'the limit for {verifier}': LONGEST.get(verifier, max(LONGEST.values())),
    f"the model's {positions} positions": positions - config.prompts.max_prompt_tokens,
  }
  if facts.cpu:
    limits['the limit on a CPU'] = LONGEST_CPU
  if verifier in SHORT:
    longest = max(max(lengths) for lengths in facts.lengths('{problem}'))
    turns = config.rollout.max_turns if config.rollout.environment else 1
    tokens = turns * max(32, -(-PER_PROBLEM * longest // 16) * 16)
    of_turns = f' x {turns} turns' * (turns > 1)
    limits[f'{PER_PROBLEM} x the longest problem ({longest}){of_turns}'] = tokens
  words = min(limits, key=limits.__getitem__)
  return max(1, limits[words]), words
