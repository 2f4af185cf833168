"""Writes the tables of docs/reference/algorithms.md.

  python -m docs.reference.write_algorithms

1. METHODS lists the published methods of each slot: the paper, the weight of a token or
   the chosen groups, the published value of every knob with its source, the tests that
   check the method, and the overrides that select it;
2. `row` reads the values of the knobs from the config of these overrides, and refuses a
   value that is not the one beside its source;
3. `parity` measures how far the rules are from their published code on the tokens of
   tests/algorithms/published.json.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from bapo_jax import knobs
from bapo_jax.algorithms import clip
from bapo_jax.runtime import files, markdown
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from lab import claims
from lab.explorer import METHODS as PRESETS
from tests.algorithms import test_published

PAGE = pathlib.Path(__file__).parent / 'algorithms.md'
SLOTS = ('clip', 'mask', 'loss', 'advantage', 'batch')
WHAT = {'advantage': 'advantage', 'batch': 'groups in the batch'}
PUBLISHED = 'rules_equal_their_published_code'
PAPER, CODE = 'paper', 'public code'


class Method(NamedTuple):
  """One row: a method as its paper defines it."""

  papers: dict[str, str]  # text -> arXiv number or address
  what: str  # the weight of grad log pi, or the chosen tokens or groups
  overrides: dict[str, Any] | str  # or the flags of a config file
  values: dict[str, tuple[Any, str]]  # knob -> (published value, source)
  tests: tuple[str, ...]  # names without `test_`


def preset(name: str, **more: Any) -> dict[str, Any]:
  """Returns the overrides of a method of the loss explorer."""
  chosen = PRESETS[name] | {key.replace('__', '.'): x for key, x in more.items()}
  return {key: value for key, value in chosen.items() if key != 'range'}


PPO_BOUNDS = {'clip.low': (0.8, 'PPO'), 'clip.high': (1.2, 'PPO')}
CUT = 'r A; 0 if A > 0 and r >= high, or A < 0 and r <= low'
GOLDEN, CLIPPED = 'rules_that_weigh_log_pi_golden', 'clipped_golden'
REPLAYED = {'buffer.max_off_policy_steps': (3, PAPER), 'buffer.max_reuse': (3, 'ours')}
METHODS: dict[str, dict[str, Method]] = {
  'clip': {
    'PPO, GRPO': Method(
      {'PPO': '1707.06347', 'GRPO': '2402.03300'},
      CUT,
      preset('PPO, GRPO'),
      PPO_BOUNDS,
      (CLIPPED, 'a_token_at_its_bound_is_cut'),
    ),
    'clip-higher': Method(
      {'DAPO': '2503.14476'},
      'the same with a higher bound',
      preset('DAPO (clip-higher)'),
      {'clip.low': (0.8, PAPER), 'clip.high': (1.28, PAPER)},
      (CLIPPED,),
    ),
    'dual clip': Method(
      {'Ye et al.': '1912.09729'},
      'also 0 if A < 0 and r >= dual',
      preset('dual clip'),
      {**PPO_BOUNDS, 'clip.dual': (3.0, PAPER)},
      (CLIPPED,),
    ),
    'unclipped': Method(
      {},
      'r A: importance weights',
      {'clip.rule': 'unclipped'},
      {},
      ('at_ratio_one_every_rule_has_the_gradient_of_reinforce',),
    ),
    'Balanced PO': Method(
      {'Xi et al.': '2510.18927'},
      'as PPO, with bounds that every update searches; all settings of the paper: '
      '`configs/aime.py:balanced_paper`',
      {'clip.rule': 'balanced'},
      {
        'clip.target': (0.42, 'ours; paper .4'),
        'clip.low': ((0.6, 0.9), PAPER),
        'clip.high': ((1.2, 3.0), PAPER),
        'clip.low_step': (0.02, PAPER),
        'clip.high_step': (0.05, PAPER),
      },
      ('balanced_is_algorithm_1_to_the_last_bit', 'share_golden'),
    ),
    "Balanced PO's code": Method(
      {'BAPO': 'https://github.com/WooooDyy/BAPO'},
      'as dual clip; the search balances the clipped surrogate',
      '--config=configs/aime.py:recipe',
      {
        **{f'recipe.{k}': (x, CODE) for k, x in clip.Recipe()._asdict().items()},
        'loss.limit': (20.0, CODE),
      },
      ('recipe_is_the_public_loop',),
    ),
    'DCPO': Method(
      {'DCPO': '2509.02333'},
      'as dual clip, with bounds by token: (1 + sqrt(max(1 - 4 low / q, 0))) / 2 and '
      '(1 + sqrt(1 + 4 high / q)) / 2, at most cap',
      preset('DCPO'),
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
    'DPPO-TV': Method(
      {'DPPO': '2602.04879'},
      'min(r, 20) A; 0 if A > 0 and p - q > high, or A < 0 and q - p > low (Eq. 13)',
      preset('DPPO, binary TV'),
      {
        'mask.low': (0.2, 'SkyRL'),
        'mask.high': (0.2, 'SkyRL'),
        'loss.cap': (20.0, PAPER),
      },
      (PUBLISHED, 'binary_total_variation_golden'),
    ),
    'DPPO-KL': Method(
      {'DPPO': '2602.04879'},
      'the same with KL(Bernoulli(q), Bernoulli(p)), if p moved in the direction of A '
      '(Eq. 14)',
      preset('DPPO, binary KL'),
      {
        'mask.low': (0.05, 'SkyRL'),
        'mask.high': (0.05, 'SkyRL'),
        'loss.cap': (20.0, PAPER),
      },
      (PUBLISHED,),
    ),
    'IcePop': Method(
      {'Ring-1T': '2510.18855'},
      'r A if low <= r <= high, else 0',
      preset('IcePop'),
      {'mask.low': (0.5, PAPER), 'mask.high': (5.0, PAPER)},
      (PUBLISHED,),
    ),
    'KPop': Method(
      {'Guo et al.': 'https://ringtech.notion.site/kpop'},
      'r A; 0 if KL(Bernoulli(p), Bernoulli(q)) or its reverse is above the limit',
      preset('KPop'),
      {'mask.limit': (0.1, 'blog')},
      ('kpop_masks_by_both_divergences',),
    ),
    'M2PO': Method(
      {'M2PO': '2510.01161'},
      'r A; 0 for the tokens of the minibatch with the largest (log r)^2, until the '
      'mean of the others is below the limit',
      preset('M2PO'),
      {'mask.limit': (0.04, 'AReaL')},
      (PUBLISHED, 'm2po_keeps_as_many_tokens_as_a_sort_allows'),
    ),
    'OPSM': Method(
      {'DeepSeek-V3.2': '2512.02556'},
      'as PPO; 0 if A < 0 and the mean of log q - log p over the response is above the '
      'limit; a mask on top of any other rule',
      preset('DeepSeek-V3.2 (sequence masking)'),
      {
        'mask.limit': (0.1, 'ours; TRL .5, slime .0001'),
        **PPO_BOUNDS,
      },
      (PUBLISHED,),
    ),
  },
  'loss': {
    'decoupled PPO': Method(
      {'Hilton et al.': '2110.00641', 'AReaL': '2505.24298'},
      'min(prox / mu, cap) times the weight of PPO, with r = pi / prox; PPO with TIS',
      preset('decoupled PPO (AReaL)'),
      {**PPO_BOUNDS, 'loss.cap': (2.0, 'ours')},
      ('decoupled_golden',),
    ),
    "AReaL's mask": Method(
      {'AReaL': 'https://github.com/inclusionAI/AReaL'},
      'the same; 0 if prox / mu is above the cap',
      preset('decoupled PPO (AReaL)', loss__beyond_cap='mask'),
      {**PPO_BOUNDS, 'loss.cap': (2.0, 'ours')},
      ('decoupled_golden',),
    ),
    'GSPO': Method(
      {'GSPO': '2507.18071'},
      'as PPO, with one ratio per response: (pi(y) / mu(y))^(1 / length)',
      preset('GSPO'),
      {'clip.low': (0.9997, PAPER), 'clip.high': (1.0004, PAPER)},
      ('sequence_golden', 'sequence_is_the_gradient_of_the_papers_objective'),
    ),
    'CISPO': Method(
      {'MiniMax-M1': '2506.13585'},
      'clip(r, low, high) A: the bounds cut no token',
      preset('CISPO'),
      {'clip.low': (0.0, PAPER), 'clip.high': (1.2, 'ours')},
      (GOLDEN, 'cispo_has_no_dual_clip'),
    ),
    'TIS': Method(
      {'Yao et al.': 'https://fengyao.notion.site/off-policy-rl'},
      'min(r, cap) A: truncated importance sampling, Ionides (2008)',
      preset('TIS'),
      {'loss.cap': (2.0, 'slime')},
      (GOLDEN,),
    ),
    'REINFORCE': Method(
      {},
      'A: no correction for stale data; Williams (1992)',
      {'loss.rule': 'reinforce', 'clip.rule': 'unclipped'},
      {},
      (GOLDEN,),
    ),
    'DRO': Method(
      {'Richemond et al.': '2405.19107'},
      'A - kl log r, with advantages instead of a value function',
      {
        'loss.rule': 'reinforce',
        'clip.rule': 'unclipped',
        'loss.kl': 0.05,
        'loss.kl_direction': 'squared',
      },
      {'loss.kl': (0.05, 'ours')},
      ('reinforce_with_a_squared_penalty_is_direct_reward_optimisation',),
    ),
    'SAPO': Method(
      {'SAPO': '2511.20347'},
      '4 s (1 - s) r A, s = sigmoid(tau (r - 1)), tau by the sign of A',
      preset('SAPO'),
      {'loss.positive': (1.0, PAPER), 'loss.negative': (1.05, PAPER)},
      (PUBLISHED, 'sapo_golden'),
    ),
    'VESPO': Method(
      {'VESPO': '2602.10693'},
      'W^a e^(b (1 - W)) A, W = pi(y) / mu(y), (a, b) by the sign of A',
      preset('VESPO'),
      {
        'loss.positive': ((2.0, 3.0), PAPER),
        'loss.negative': ((3.0, 2.0), PAPER),
      },
      (PUBLISHED,),
    ),
    'ASPO': Method(
      {'ASPO': '2510.06062'},
      'as PPO with weight 1 / r for A > 0; weights above cap are limited to it',
      preset('ASPO'),
      {**PPO_BOUNDS, 'loss.cap': (3.0, CODE)},
      (PUBLISHED, 'an_infinite_cap_leaves_finite_weights'),
    ),
    'FIPO': Method(
      {'FIPO': '2603.19835'},
      "as PPO, times exp of the discounted sum of log r over this and the response's "
      'later tokens, limited; at most 1 if A < 0 and r > safety',
      preset('FIPO'),
      {
        **PPO_BOUNDS,
        'loss.half_life': (32.0, 'ms-swift'),
        'loss.limits': ((0.8, 1.2), 'ms-swift'),
        'loss.safety': (4.0, 'ms-swift'),
      },
      (PUBLISHED,),
    ),
    'KL(mu, pi)': Method(
      {'k3': 'http://joschu.net/blog/kl-approx.html'},
      'a cost kl on r - 1 - log r, added to any rule',
      {'loss.kl': 0.01},
      {'loss.kl': (0.01, 'ours; 0 unless set')},
      ('the_divergence_has_the_value_and_the_gradient_of_an_exact_kl',),
    ),
    'KL(pi, mu)': Method(
      {'Wan et al.': '2602.20722'},
      'a cost kl on r log r - (r - 1), added to any rule',
      {'loss.kl': 0.01, 'loss.kl_direction': 'policy_behavior'},
      {'loss.kl': (0.01, 'ours; paper .001 to .01')},
      ('the_divergence_has_the_value_and_the_gradient_of_an_exact_kl',),
    ),
  },
  'advantage': {
    'GRPO': Method(
      {'GRPO': '2402.03300'},
      '(reward - mean) / sqrt(var + 1e-6) over the group',
      {'advantage.rule': 'group_relative'},
      {},
      ('group_relative_golden',),
    ),
    'RLOO': Method(
      {'RLOO': '2402.14740'},
      'reward - mean of the other responses',
      {'advantage.rule': 'leave_one_out'},
      {},
      ('centred_goldens',),
    ),
    'Dr. GRPO': Method(
      {'Dr. GRPO': '2503.20783'},
      'reward - mean; sums of tokens are divided by a constant',
      {'advantage.rule': 'group_centred', 'loss.aggregate': 'constant'},
      {},
      ('centred_goldens', 'row_scale_golden'),
    ),
  },
  'batch': {
    'fresh groups': Method(
      {'GRPO': '2402.03300'},
      'all groups of this step',
      {'batch.rule': 'fresh_only'},
      {},
      ('fresh_only_is_the_identity',),
    ),
    'dynamic sampling': Method(
      {'DAPO': '2503.14476'},
      "this step's groups with right and wrong responses; more rounds of prompts while "
      'seats are empty',
      {'batch.rule': 'learnable_only'},
      {'batch.max_extra_rounds': (2, 'ours')},
      ('learnable_only_golden',),
    ),
    'experience replay': Method(
      {},
      "this step's groups and replay_ratio times as many older ones, drawn at random",
      {'batch.rule': 'replay', 'buffer.thresholds.rule': 'everything'},
      {'batch.replay_ratio': (1, 'ours'), **REPLAYED},
      ('replay_takes_all_fresh_groups_and_as_many_older_ones',),
    ),
    'Batch Adaptation PO': Method(
      {'Wan et al.': '2602.20722'},
      'fresh groups with right and wrong responses, then re-evaluated hard problems '
      'that are now sometimes solved, then reusable groups (Definition 3.1); all '
      'settings of the paper: `configs/aime.py:batch_paper`',
      {'batch.rule': 'adapted', 'clip.rule': 'fixed'},
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
    'both': Method(
      {},
      'Batch Adaptation PO with bounds searched without the reused rows, which have a '
      'cap',
      {
        'batch.rule': 'adapted',
        'clip.sources': ('fresh', 'reevaluated'),
        'clip.reused_high': 1.2,
      },
      {'clip.reused_high': (1.2, 'ours')},
      (
        'the_search_may_leave_reused_rows_out',
        'reused_rows_may_have_a_cap_of_their_own',
      ),
    ),
  },
}


def row(name: str, method: Method) -> list[str]:
  """Returns the cells of a method.

  Raises:
    ValueError: a value of the config is not the published one, or a value of the
      method's rules has no source.
  """
  flags = method.overrides
  overrides = {} if isinstance(flags, str) else flags
  config = config_lib.parse(config_lib.merged(Config().model_dump(), overrides))
  links = ', '.join(f'[{text}]({address(x)})' for text, x in method.papers.items())
  named = ', '.join(method.papers) == name
  return [
    links if named else f'{name} ({links})' if links else name,
    method.what,
    defaults(method, {name: x for name, _, x in knobs.fields(config)}),
    ', '.join(f'`test_{test}`' for test in method.tests),
    f'`{flags if isinstance(flags, str) else given(flags)}`',
  ]


def address(paper: str) -> str:
  """Returns the address of an arXiv number, or the address itself."""
  return paper if '://' in paper else f'https://arxiv.org/abs/{paper}'


def given(overrides: dict[str, Any]) -> str:
  """Returns the overrides as they are written on the command line."""

  def text(value: Any) -> str:
    return f'"{value}"'.replace(' ', '') if isinstance(value, tuple) else str(value)

  return ' '.join(f'--config.{name}={text(x)}' for name, x in overrides.items())


def defaults(method: Method, values: dict[str, Any]) -> str:
  """Returns the values of the method's knobs, by source."""
  constants = {f'recipe.{k}': x for k, x in clip.Recipe()._asdict().items()}
  by_source: dict[str, list[str]] = {}
  for name, (published, source) in method.values.items():
    value = (values | constants)[name]
    # A config file of the method's own has its sources beside its values.
    if value != published and not isinstance(method.overrides, str):
      raise ValueError(f'{name}={value}, but {published} has the source {source!r}')
    knob = name.rpartition('.')[2]
    shown = ', '.join(map(number, np.atleast_1d(published)))
    shown = f'({shown})' if isinstance(published, tuple) else shown
    by_source.setdefault(source, []).append(f'{knob} {shown}')
  return '; '.join(f'{", ".join(found)}: {s}' for s, found in by_source.items())


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
      value, weight_BT = test_published.applied(
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
    head = ('method', what, 'defaults', 'tests', 'overrides')
    rows = [row(*item) for item in METHODS[slot].items()]
    text = claims.between(text, f'{slot} rules', markdown.table(rows, head, 'lllll'))
  rows = [parity_row(*x) for x in parity()]
  head = ('rule', 'published code', 'function', 'objective', 'gradient')
  return claims.between(text, 'parity', markdown.table(rows, head, 'lllrr'))


if __name__ == '__main__':
  files.write(PAGE, document(PAGE.read_text()))
