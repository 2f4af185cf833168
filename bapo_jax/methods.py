"""Lists published methods: what each of them sets in a config.

`--config=configs/aime.py:icepop` applies the overrides of `icepop` to a config file.
docs/algorithms.md explains every method, with the sources of its values.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple


class Method(NamedTuple):
  """A published method, as overrides of a config."""

  title: str
  overrides: Mapping[str, Any]  # dotted knob -> value
  papers: Mapping[str, str] = {}  # text -> arXiv number or address


FIXED = {'clip.rule': 'fixed'}
UNCLIPPED = {'clip.rule': 'unclipped'}
UNCAPPED = {'loss.rule': 'tis', 'loss.cap': math.inf, **UNCLIPPED}
DPPO = {'loss.rule': 'tis', 'loss.cap': 20.0, **UNCLIPPED}
DECOUPLED = {'loss.rule': 'decoupled', **FIXED}

METHODS: dict[str, Method] = {
  # clip rules
  'balanced': Method(
    'Balanced PO', {'clip.rule': 'balanced'}, {'Xi et al.': '2510.18927'}
  ),
  'grpo': Method('PPO, GRPO', FIXED, {'PPO': '1707.06347', 'GRPO': '2402.03300'}),
  'clip_higher': Method(
    'DAPO (clip-higher)', FIXED | {'clip.high': 1.28}, {'DAPO': '2503.14476'}
  ),
  'dual_clip': Method(
    'dual clip', FIXED | {'clip.dual': 3.0}, {'Ye et al.': '1912.09729'}
  ),
  'unclipped': Method('unclipped', UNCLIPPED),
  'recipe': Method(
    'Balanced PO, public code',
    {'clip.rule': 'recipe', 'loss.limit': 20.0},
    {'BAPO': 'https://github.com/WooooDyy/BAPO'},
  ),
  'dcpo': Method('DCPO', {'clip.rule': 'dcpo'}, {'DCPO': '2509.02333'}),
  # loss rules
  'decoupled': Method(
    'decoupled PPO (AReaL)',
    DECOUPLED,
    {'Hilton et al.': '2110.00641', 'AReaL': '2505.24298'},
  ),
  'decoupled_mask': Method(
    "decoupled PPO with AReaL's mask",
    DECOUPLED | {'loss.beyond_cap': 'mask'},
    {'AReaL': 'https://github.com/inclusionAI/AReaL'},
  ),
  'gspo': Method(
    'GSPO',
    {
      'loss.rule': 'sequence',
      'loss.aggregate': 'sequence',
      **FIXED,
      'clip.low': 0.9997,
      'clip.high': 1.0004,
    },
    {'GSPO': '2507.18071'},
  ),
  'gmpo': Method(
    'GMPO',
    {
      'loss.rule': 'gmpo',
      'loss.aggregate': 'sequence',
      **FIXED,
      'clip.low': math.exp(-0.4),
      'clip.high': math.exp(0.4),
    },
    {'GMPO': '2507.20673'},
  ),
  'cispo': Method(
    'CISPO',
    {'loss.rule': 'cispo', **FIXED, 'clip.low': 0.0},
    {'MiniMax-M1': '2506.13585'},
  ),
  'tis': Method(
    'TIS',
    {'loss.rule': 'tis', **UNCLIPPED},
    {'Yao et al.': 'https://fengyao.notion.site/off-policy-rl'},
  ),
  'reinforce': Method('REINFORCE', {'loss.rule': 'reinforce', **UNCLIPPED}),
  'dro': Method(
    'DRO',
    {
      'loss.rule': 'reinforce',
      **UNCLIPPED,
      'loss.kl': 0.05,
      'loss.kl_direction': 'squared',
    },
    {'Richemond et al.': '2405.19107'},
  ),
  # mask rules
  'dppo_tv': Method(
    'DPPO, binary TV', DPPO | {'mask.rule': 'dppo_tv'}, {'DPPO': '2602.04879'}
  ),
  'dppo_kl': Method(
    'DPPO, binary KL', DPPO | {'mask.rule': 'dppo_kl'}, {'DPPO': '2602.04879'}
  ),
  'icepop': Method(
    'IcePop', UNCAPPED | {'mask.rule': 'icepop'}, {'Ring-1T': '2510.18855'}
  ),
  'kpop': Method(
    'KPop',
    UNCAPPED | {'mask.rule': 'kpop'},
    {'Guo et al.': 'https://ringtech.notion.site/kpop'},
  ),
  'm2po': Method('M2PO', UNCLIPPED | {'mask.rule': 'm2po'}, {'M2PO': '2510.01161'}),
  'opsm': Method(
    'DeepSeek-V3.2 (sequence masking)',
    FIXED | {'mask.rule': 'opsm'},
    {'DeepSeek-V3.2': '2512.02556'},
  ),
  # more loss rules
  'vespo': Method(
    'VESPO', {'loss.rule': 'vespo', **UNCLIPPED}, {'VESPO': '2602.10693'}
  ),
  'aspo': Method('ASPO', {'loss.rule': 'aspo', **FIXED}, {'ASPO': '2510.06062'}),
  'fipo': Method('FIPO', {'loss.rule': 'fipo', **FIXED}, {'FIPO': '2603.19835'}),
  'sapo': Method(
    'SAPO',
    {'loss.rule': 'sapo', 'loss.aggregate': 'sequence', **UNCLIPPED},
    {'SAPO': '2511.20347'},
  ),
  # penalties
  'kl_behavior': Method(
    'KL(mu, pi)', {'loss.kl': 0.01}, {'k3': 'http://joschu.net/blog/kl-approx.html'}
  ),
  'kl_policy': Method(
    'KL(pi, mu)',
    {'loss.kl': 0.01, 'loss.kl_direction': 'policy_behavior'},
    {'Wan et al.': '2602.20722'},
  ),
  # advantage rules
  'group_relative': Method(
    'GRPO', {'advantage.rule': 'group_relative'}, {'GRPO': '2402.03300'}
  ),
  'rloo': Method('RLOO', {'advantage.rule': 'leave_one_out'}, {'RLOO': '2402.14740'}),
  'dr_grpo': Method(
    'Dr. GRPO',
    {'advantage.rule': 'group_centred', 'loss.aggregate': 'constant'},
    {'Dr. GRPO': '2503.20783'},
  ),
  'max_rl': Method(
    'MaxRL', {'advantage.rule': 'max_rl'}, {'Tajwar et al.': '2602.02710'}
  ),
  # batch rules
  'fresh_only': Method(
    'fresh groups', {'batch.rule': 'fresh_only'}, {'GRPO': '2402.03300'}
  ),
  'dynamic_sampling': Method(
    'dynamic sampling', {'batch.rule': 'learnable_only'}, {'DAPO': '2503.14476'}
  ),
  'replay': Method(
    'experience replay',
    {'batch.rule': 'replay', 'buffer.thresholds.rule': 'everything'},
  ),
  'batch_adaptation': Method(
    'Batch Adaptation PO',
    {'batch.rule': 'adapted', **FIXED},
    {'Wan et al.': '2602.20722'},
  ),
  'both': Method(
    'both',
    {
      'batch.rule': 'adapted',
      'clip.rule': 'balanced',
      'clip.sources': ('fresh', 'reevaluated'),
      'clip.reused_high': 1.2,
    },
  ),
}

# Values of TRL and verl that are no names of methods.
OTHERS = {
  'bnpo': 'loss.aggregate=token, the default',
  'vanilla': 'loss.rule=clipped, the default',
  'geo_mean': 'GMPO, --config=FILE:gmpo',
  'gspo_token': 'loss.rule=sequence with advantages by token, --config=FILE:gspo',
  'gae': 'absent, because it needs a value function',
}


def advice(name: Any, rules: Container[Any]) -> str:
  """Says which knobs the method of a name sets; '' for another name.

  Args:
    name: a name in METHODS, or the first word of a title.
    rules: of the part whose rule was to have this name; of several methods, the first
      that sets one of them counts.
  """
  word = str(name).lower().replace('-', '_')
  named = [
    (key, method)
    for key, method in METHODS.items()
    if word in (key, *(x.split()[0] for x in method.title.lower().split(', ')))
  ]
  if word in OTHERS:
    return f'{name} is {OTHERS[word]}; '
  if not named:
    return ''
  named.sort(key=lambda x: not any(v in rules for v in x[1].overrides.values()))
  key, method = named[0]
  knobs = ', '.join(f'{knob}={value}' for knob, value in method.overrides.items())
  return f'{method.title} is {knobs}, or --config=FILE:{key}; '
