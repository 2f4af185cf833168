"""Lists the knobs of a run for the first screen and the check.

The list has the rule of every part of the loop (such as clip and loss) with the knobs
that this rule uses, then every knob that differs from its default, then the knobs among
these that have no effect.
"""

from bapo_jax import knobs
from bapo_jax.autosetup.derive import shown, wrapped
from bapo_jax.training import config as config_lib
from bapo_jax.training import needs
from bapo_jax.training.config import Config

PARTS = ('batch', 'buffer', 'advantage', 'clip', 'mask', 'loss')
LABEL = 11  # columns of a label on the first screen


def lines(user: Config, config: Config, indent: str = '  ') -> str:
  """Returns lines of the first screen: rules, changed knobs, knobs without effect.

  A rule is listed with the knobs that have an effect: 'fixed: low 0.8, high 1.2, dual
  inf'. The buffer is omitted if the batch rule does not use it, and the mask if the
  mask rule is none. `user` is the config that the user wrote, and `config` has every
  knob decided.
  """
  inert = needs.inert(config)
  rules = []
  for part in PARTS:
    section = getattr(config, part)
    rule = getattr(section, 'rule', '')
    used = [
      f'{name} {value}'
      for name, _, value in knobs.fields(section)
      if name != 'rule' and f'{part}.{name}' not in inert
    ]
    if (rule or used) and not getattr(section, 'identity', False):
      text = ': '.join(filter(None, (rule, ', '.join(used))))
      rules.append(f'{part:<10}{text}')
  given = []
  idle = []
  for name, (value, _) in config_lib.changed(user).items():
    given.append(f'{name}={knobs.shorten(shown(value))}')
    if name in inert:
      idle.append(f'{given[-1]} ({inert[name].because})')
  labels = ['rules', *[''] * (len(rules) - 1), 'warning', 'changed', 'no effect']
  texts = [*rules, config.clip.warning(), ', '.join(given), ', '.join(idle)]
  margin = ' ' * (len(indent) + LABEL)
  return '\n'.join(
    f'{indent}{label:<{LABEL}}{wrapped(text, margin).lstrip()}'
    for label, text in zip(labels, texts, strict=True)
    if text
  )
