"""Writes docs/reference/config.md from the descriptions of the knobs.

python -m docs.reference.write_config > docs/reference/config.md
"""

import re

from bapo_jax import knobs
from bapo_jax.knobs import Section
from bapo_jax.runtime import markdown
from bapo_jax.training.config import PARTS, Config
from lab.own_table import about

INTRODUCTION = """\
# Knobs

Written by `python -m docs.reference.write_config`; edit the classes of the knobs.

Every knob is an override on the command line: `--config.clip.rule=fixed`. A config file
(`configs/*.py`) changes any of them; the defaults are the embedded run. A value outside
its range is refused in one sentence before anything is written or compiled. An integer
is below 2^31.

A rule is a section with its own knobs: `clip.low` is a number for `clip.rule=fixed` and
a range for `clip.rule=balanced`. Another rule starts from its own defaults.
"""


def document() -> str:
  """Returns the page: a table per section and per rule, in the order of the flow."""
  config = Config()
  of_rules = {
    f'{part}.{knob}'
    for part, rules in PARTS.items()
    for kind in rules.names.values()
    for knob in kind.model_fields.keys() - rules.base.model_fields.keys()
  }
  rows = [row for row in described(config) if '.' not in row[0]]
  page = INTRODUCTION + titled('## The run', '', rows)
  for name, _, section in knobs.fields_of(config):
    if not isinstance(section, Section):
      continue
    kind = PARTS[name].base if name in PARTS else type(section)
    rows = [row for row in described(section, name) if row[0] not in of_rules]
    page += titled(f'## {name}', about(kind), rows)
    for part in PARTS:
      if f'{part}.'.startswith(f'{name}.'):
        for rule, default in PARTS[part].at_defaults().items():
          rows = [row for row in described(default, part) if row[0] in of_rules]
          page += titled(f'### `{part}.rule={rule}`', about(type(default)), rows)
  return page


def described(section: Section, name: str = '') -> list[tuple[str, str, str, str]]:
  """Returns (knob, default, range, sentence) of every knob of a section."""
  rows = []
  for path, field, value in knobs.fields(section, name):
    limits = re.sub(f' (to|at most) {knobs.LARGEST}', '', knobs.expected(field))
    rows.append((path, repr(value), limits, field.description or ''))
  return rows


def titled(title: str, text: str, rows: list[tuple[str, str, str, str]]) -> str:
  """Returns a heading, what it is about, and a table of knobs."""
  cells = [[f'`{knob}`', f'`{default}`', *others] for knob, default, *others in rows]
  table = markdown.table(cells, ['knob', 'default', 'range', 'meaning'], 'llll')
  return '\n' + '\n\n'.join(filter(None, [title, text, table if rows else ''])) + '\n'


if __name__ == '__main__':
  print(document(), end='')
