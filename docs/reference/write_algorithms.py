"""Writes the tables of docs/reference/algorithms.md.

  python -m docs.reference.write_algorithms

1. ROWS has, for each method of bapo_jax/methods.py, the weight of a token or the chosen
   groups, the published value of every knob with its source, and the tests that check
   the method;
2. `row` reads the values of the knobs from the config of the method's overrides, and
   refuses a value that is not the one beside its source;
3. `status` says how far a method was tried here: by published code, in recorded runs,
   in a claim;
4. `parity` measures how far the rules are from their published code on the tokens of
   tests/algorithms/published.json.
"""

import collections
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from bapo_jax import knobs
from bapo_jax.algorithms import clip
from bapo_jax.methods import METHODS, Method
from bapo_jax.runtime import files, markdown
from bapo_jax.training.config import Config, merged, parse
from lab import claims
from tests import making
from tests.algorithms import test_published

PAGE = pathlib.Path(__file__).parent / 'algorithms.md'
SLOTS = ('clip', 'mask', 'loss', 'advantage', 'batch')
WHAT = {'advantage': 'advantage', 'batch': 'groups in the batch'}
PUBLISHED = 'rules_equal_their_published_code'
PAPER, CODE = 'paper', 'public code'
RESULTS = pathlib.Path(__file__).parents[2] / 'papers'
# Arm of an experiment -> the method whose name differs.
ARMS = {'dapo': 'dynamic_sampling', 'adapted': 'batch_adaptation'}
# Tests that compare with published code, or with its loop.
BY_CODE = {PUBLISHED, 'recipe_is_the_public_loop'}
DEFAULTS = {'group_relative', 'fresh_only'}  # rules of nearly all arms
CLAIMED = {  # method -> the page with the verdict on its paper's claims
  'balanced': 'bench/README.md',
  'recipe': 'bench/README.md#s2-again-the-search-of-the-public-code',
  'batch_adaptation': 'batch_adaptation/README.md',
}


class Row(NamedTuple):
  """What a row of the page says of a method."""

  what: str  # the weight of grad log pi, or the chosen tokens or groups
  values: dict[str, tuple[Any, str]]  # knob -> (published value, source)
  tests: tuple[str, ...]  # names without `test_`


PPO_BOUNDS = {'clip.low': (0.8, 'PPO'), 'clip.high': (1.2, 'PPO')}
CUT = 'r A; 0 if A > 0 and r >= high, or A < 0 and r <= low'
FORMULA, CLIPPED = 'what_float32_can_represent_is_right', 'clipped_golden'
REPLAYED = {'buffer.max_off_policy_steps': (3, PAPER), 'buffer.max_reuse': (3, 'ours')}
SEARCHED = {
  'clip.target': (0.42, 'ours; paper .4'),
  'clip.low': ((0.6, 0.9), PAPER),
  'clip.high': ((1.2, 3.0), PAPER),
  'clip.low_step': (0.02, PAPER),
  'clip.high_step': (0.05, PAPER),
}
ROWS: dict[str, dict[str, Row]] = {
  'clip': {
    'grpo': Row(
      CUT,
      PPO_BOUNDS,
      (CLIPPED, 'a_token_at_its_bound_is_cut'),
    ),
    'clip_higher': Row(
      'the same with a higher bound',
      {'clip.low': (0.8, PAPER), 'clip.high': (1.28, PAPER)},
      (CLIPPED,),
    ),
    'dual_clip': Row(
      'also 0 if A < 0 and r >= dual',
      {**PPO_BOUNDS, 'clip.dual': (3.0, PAPER)},
      (CLIPPED,),
    ),
    'unclipped': Row(
      'r A: importance weights',
      {},
      (FORMULA,),
    ),
    'balanced': Row(
      'as PPO, with bounds that every update searches; all settings of the paper: '
      '`configs/aime.py:balanced_paper`',
      SEARCHED,
      ('balanced_is_algorithm_1_to_the_last_bit', 'share_golden'),
    ),
    'recipe': Row(
      'as dual clip; the search balances the clipped surrogate',
      {
        **{f'recipe.{k}': (x, CODE) for k, x in clip.Recipe.settings._asdict().items()},
        'loss.limit': (20.0, CODE),
      },
      ('recipe_is_the_public_loop',),
    ),
    'dcpo': Row(
      'as dual clip, with bounds by token: (1 + sqrt(max(1 - 4 low / q, 0))) / 2 and '
      '(1 + sqrt(1 + 4 high / q)) / 2, at most cap',
      {
        'clip.low': (0.16, PAPER),
        'clip.high': (0.2, PAPER),
        'clip.cap': (10.0, CODE),
        'clip.dual': (3.0, CODE),
      },
      (PUBLISHED,),
    ),
  },
  'mask': {
    'dppo_tv': Row(
      'min(r, 20) A; 0 if A > 0 and p - q > high, or A < 0 and q - p > low (Eq. 13)',
      {
        'mask.low': (0.2, 'SkyRL'),
        'mask.high': (0.2, 'SkyRL'),
        'loss.cap': (20.0, PAPER),
      },
      (PUBLISHED, 'binary_total_variation_golden'),
    ),
    'dppo_kl': Row(
      'the same with KL(Bernoulli(q), Bernoulli(p)), if p moved in the direction of A '
      '(Eq. 14)',
      {
        'mask.low': (0.05, 'SkyRL'),
        'mask.high': (0.05, 'SkyRL'),
        'loss.cap': (20.0, PAPER),
      },
      (PUBLISHED,),
    ),
    'icepop': Row(
      'r A if low <= r <= high, else 0',
      {'mask.low': (0.5, PAPER), 'mask.high': (5.0, PAPER)},
      (PUBLISHED,),
    ),
    'kpop': Row(
      'r A; 0 if KL(Bernoulli(p), Bernoulli(q)) or its reverse is above the limit',
      {'mask.limit': (0.1, 'blog')},
      ('kpop_masks_by_both_divergences',),
    ),
    'm2po': Row(
      'r A; 0 for the tokens of the minibatch with the largest (log r)^2, until the '
      'mean of the others is below the limit',
      {'mask.limit': (0.04, 'AReaL')},
      (PUBLISHED, 'm2po_keeps_as_many_tokens_as_a_sort_allows'),
    ),
    'opsm': Row(
      'as PPO; 0 if A < 0 and the mean of log q - log p over the response is above the '
      'limit; a mask on top of any other rule',
      {
        'mask.limit': (0.1, 'ours; TRL .5, slime .0001'),
        **PPO_BOUNDS,
      },
      (PUBLISHED,),
    ),
  },
  'loss': {
    'decoupled': Row(
      'min(prox / mu, cap) times the weight of PPO, with r = pi / prox; PPO with TIS',
      {**PPO_BOUNDS, 'loss.cap': (2.0, 'ours')},
      (FORMULA,),
    ),
    'decoupled_mask': Row(
      'the same; 0 if prox / mu is above the cap',
      {**PPO_BOUNDS, 'loss.cap': (2.0, 'ours')},
      (FORMULA,),
    ),
    'gspo': Row(
      'as PPO, with one ratio per response: (pi(y) / mu(y))^(1 / length)',
      {'clip.low': (0.9997, PAPER), 'clip.high': (1.0004, PAPER)},
      (FORMULA, 'sequence_is_the_gradient_of_the_papers_objective'),
    ),
    'gmpo': Row(
      's A, s = exp of the mean over the response of log r, at most log high if A > 0, '
      'else at least log low; 0 for a token beyond this bound',
      {'clip.low': (math.exp(-0.4), PAPER), 'clip.high': (math.exp(0.4), PAPER)},
      (FORMULA, 'gmpo_is_the_gradient_of_the_papers_objective'),
    ),
    'cispo': Row(
      'clip(r, low, high) A: the bounds cut no token',
      {'clip.low': (0.0, PAPER), 'clip.high': (1.2, 'ours')},
      (FORMULA,),
    ),
    'tis': Row(
      'min(r, cap) A: truncated importance sampling, Ionides (2008)',
      {'loss.cap': (2.0, 'slime')},
      (FORMULA,),
    ),
    'reinforce': Row(
      'A: no correction for stale data; Williams (1992)',
      {},
      (FORMULA,),
    ),
    'dro': Row(
      'A - kl log r, with advantages instead of a value function',
      {'loss.kl': (0.05, 'ours')},
      (FORMULA, 'a_penalty_that_float32_can_represent_is_right'),
    ),
    'sapo': Row(
      '4 s (1 - s) r A, s = sigmoid(tau (r - 1)), tau by the sign of A',
      {'loss.positive': (1.0, PAPER), 'loss.negative': (1.05, PAPER)},
      (PUBLISHED, FORMULA),
    ),
    'vespo': Row(
      'W^a e^(b (1 - W)) A, W = pi(y) / mu(y), (a, b) by the sign of A',
      {
        'loss.positive': ((2.0, 3.0), PAPER),
        'loss.negative': ((3.0, 2.0), PAPER),
      },
      (PUBLISHED,),
    ),
    'aspo': Row(
      'as PPO with weight 1 / r for A > 0; weights above cap are limited to it',
      {**PPO_BOUNDS, 'loss.cap': (3.0, CODE)},
      (PUBLISHED, FORMULA),
    ),
    'fipo': Row(
      "as PPO, times exp of the discounted sum of log r over this and the response's "
      'later tokens, limited; at most 1 if A < 0 and r > safety',
      {
        **PPO_BOUNDS,
        'loss.half_life': (32.0, 'ms-swift'),
        'loss.limits': ((0.8, 1.2), 'ms-swift'),
        'loss.safety': (4.0, 'ms-swift'),
      },
      (PUBLISHED,),
    ),
    'kl_behavior': Row(
      'a cost kl on r - 1 - log r, added to any rule',
      {'loss.kl': (0.01, 'ours; 0 unless set')},
      ('the_divergence_has_the_value_and_the_gradient_of_an_exact_kl',),
    ),
    'kl_policy': Row(
      'a cost kl on r log r - (r - 1), added to any rule',
      {'loss.kl': (0.01, 'ours; paper .001 to .01')},
      ('the_divergence_has_the_value_and_the_gradient_of_an_exact_kl',),
    ),
  },
  'advantage': {
    'group_relative': Row(
      '(reward - mean) / sqrt(var + 1e-6) over the group',
      {},
      ('group_relative_golden',),
    ),
    'rloo': Row(
      'reward - mean of the other responses',
      {},
      ('centred_goldens',),
    ),
    'dr_grpo': Row(
      'reward - mean; sums of tokens are divided by a constant',
      {},
      ('centred_goldens', 'row_scale_golden'),
    ),
    'max_rl': Row(
      '(reward - mean) / mean; 0 without a right response',
      {},
      ('max_rl_golden',),
    ),
  },
  'batch': {
    'fresh_only': Row(
      'all groups of this step',
      {},
      ('fresh_only_is_the_identity',),
    ),
    'dynamic_sampling': Row(
      "this step's groups with right and wrong responses; more rounds of prompts while "
      'seats are empty',
      {'batch.max_extra_rounds': (2, 'ours')},
      ('learnable_only_golden',),
    ),
    'replay': Row(
      "this step's groups and replay_ratio times as many older ones, drawn at random",
      {'batch.replay_ratio': (1, 'ours'), **REPLAYED},
      ('replay_takes_all_fresh_groups_and_as_many_older_ones',),
    ),
    'batch_adaptation': Row(
      'fresh groups with right and wrong responses, then re-evaluated hard problems '
      'that are now sometimes solved, then reusable groups (Definition 3.1); all '
      'settings of the paper: `configs/aime.py:batch_paper`',
      {
        **PPO_BOUNDS,
        'buffer.thresholds.hard': (1 / 8, PAPER),
        'buffer.thresholds.reusable': ((1 / 8, 5 / 8), PAPER),
        **REPLAYED,
        'buffer.reeval_interval': (2, 'ours; paper 5'),
        'buffer.reevaluate': (16, 'ours; paper 128'),
      },
      ('adapted_golden', 'every_property_holds_over_random_histories'),
    ),
    'both': Row(
      'Batch Adaptation PO with bounds searched without the reused rows, which have a '
      'cap',
      {**SEARCHED, 'clip.reused_high': (1.2, 'ours')},
      (
        'the_search_may_leave_reused_rows_out',
        'reused_rows_may_have_a_cap_of_their_own',
      ),
    ),
  },
}


@functools.cache
def trained() -> collections.Counter[str]:
  """Returns method -> recorded runs of papers/ in arms of its name."""
  runs = collections.Counter()
  for path in RESULTS.glob('*/results/*.jsonl'):
    for line in path.read_text().splitlines():
      # Arms of several learning rates have them in their names.
      arm = (json.loads(line).get('arm') or '').partition('_lr')[0]
      runs[ARMS.get(arm, arm)] += 1
  return runs


def status(name: str, said: Row) -> str:
  """Returns what was done with a method here beyond a test of its formula."""
  done = ['equal to published code'] * (not BY_CODE.isdisjoint(said.tests))
  if name in DEFAULTS:
    done.append('the rule of nearly all recorded runs')
  if count := trained()[name]:
    done.append(f'{count} recorded runs')
  if name in CLAIMED:
    done.append(f'[claims tested](../../papers/{CLAIMED[name]})')
  return ', '.join(done) or 'formula only'


def row(name: str, said: Row) -> list[str]:
  """Returns the cells of a method.

  Raises:
    ValueError: a value of the config is not the published one, or a value of the
      method's rules has no source.
  """
  method = METHODS[name]
  return [
    f'`{name}`',
    linked(method),
    said.what,
    defaults(said, parse(merged(Config().model_dump(), method.overrides))),
    ', '.join(f'`test_{test}`' for test in said.tests),
    status(name, said),
    f'`{given(method.overrides)}`',
  ]


def linked(method: Method) -> str:
  """Returns the title with links to the papers, in it or behind it."""
  title = method.title
  others = []
  for text, paper in method.papers.items():
    link = f'[{text}]({address(paper)})'
    if text in title:
      title = title.replace(text, link, 1)
    else:
      others.append(link)
  return f'{title} ({", ".join(others)})' if others else title


def address(paper: str) -> str:
  """Returns the address of an arXiv number, or the address itself."""
  return paper if '://' in paper else f'https://arxiv.org/abs/{paper}'


def given(overrides: Mapping[str, Any]) -> str:
  """Returns the overrides as they are written on the command line."""

  def text(value: Any) -> str:
    return f'"{value}"'.replace(' ', '') if isinstance(value, tuple) else str(value)

  return ' '.join(f'--config.{name}={text(x)}' for name, x in overrides.items())


def defaults(said: Row, config: Config) -> str:
  """Returns the values of the method's knobs, by source."""
  values = {f'recipe.{k}': x for k, x in clip.Recipe.settings._asdict().items()}
  values |= {name: x for name, _, x in knobs.fields(config)}
  by_source: dict[str, list[str]] = {}
  for name, (published, source) in said.values.items():
    if values[name] != published:
      raise ValueError(
        f'{name}={values[name]}, but {published} has the source {source!r}'
      )
    knob = name.rpartition('.')[2]
    shown = ', '.join(map(number, np.atleast_1d(published)))
    shown = f'({shown})' if isinstance(published, tuple) else shown
    by_source.setdefault(source, []).append(f'{knob} {shown}')
  return '; '.join(f'{", ".join(shown)}: {s}' for s, shown in by_source.items())


def number(value: float) -> str:
  """Formats a value as papers do: .8 for 0.8."""
  return f'{value:g}'.replace('0.', '.', 1) if 0 < value < 1 else f'{value:g}'


def parity() -> list[tuple[str, str, float, float]]:
  """Returns rule, source, largest difference of the objective and of its gradient.

  The objective is compared relative to its size, the weight of a token to the largest
  weight.
  """
  rows = []
  for name, wanted in test_published.FOUND['rules'].items():
    with jax.enable_x64(True):
      value, weight_BT = making.applied(
        test_published.RULES[name], *test_published.recorded()
      )
    found_BT, wanted_BT = np.asarray(weight_BT), np.asarray(wanted['weight'])
    gap = np.abs(found_BT - wanted_BT).max() / np.abs(wanted_BT).max()
    rows.append(
      (name, wanted['source'], abs(float(value) / wanted['gain'] - 1), float(gap))
    )
  return rows


def parity_row(name: str, source: str, value: float, weight: float) -> list[str]:
  """Returns the cells of a rule that was compared with its published code."""
  where, functions = source.split(': ')
  repository, path = where.split(' ')
  owner_name, commit = repository.split('@')
  link = f'https://github.com/{owner_name}/blob/{commit}/{path}'
  code = ', '.join(f'`{x}`' for x in functions.split())
  found = f'[{owner_name}@{commit}]({link})', code, f'{value:.0e}', f'{weight:.0e}'
  return [f'`{name}`', *found]


def document(text: str) -> str:
  """Returns the page with its tables updated."""
  for slot in SLOTS:
    what = WHAT.get(slot, 'weight of grad log pi')
    head = ('name', 'method', what, 'defaults', 'tests', 'status', 'overrides')
    rows = [row(*item) for item in ROWS[slot].items()]
    text = claims.between(text, f'{slot} rules', markdown.table(rows, head, 'lllllll'))
  rows = [parity_row(*x) for x in parity()]
  head = ('rule', 'published code', 'function', 'objective', 'gradient')
  return claims.between(text, 'parity', markdown.table(rows, head, 'lllrr'))


if __name__ == '__main__':
  files.write(PAGE, document(PAGE.read_text()))
