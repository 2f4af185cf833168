"""Writes docs/reference/config.md from the descriptions of the knobs.

python -m docs.reference.write_config > docs/reference/config.md
"""

from bapo_jax import knobs
from bapo_jax.runtime import markdown
from bapo_jax.training.config import Config

INTRODUCTION = """\
# Knobs

Written by `python -m docs.reference.write_config`; edit the knobs.py of a folder.

Every knob is an override on the command line: `--config.clip.rule=fixed`. A config file
(`configs/*.py`) changes any of them; the defaults are the embedded run. A value outside
its range is refused in one sentence before anything is written or compiled.
"""


def document() -> str:
  """Returns the page: a table per top-level section, in the order of the flow."""
  config = Config()
  rows: dict[str, list[list[str]]] = {}  # by section; '' for the knobs of the run
  for knob, default, allowed, meaning in knobs.describe(config):
    section, _, inner = knob.partition('.')
    row = [f'`{knob}`', f'`{default}`', allowed, meaning]
    rows.setdefault(section if inner else '', []).append(row)
  page = INTRODUCTION
  for name, found in rows.items():
    table = markdown.table(found, ['knob', 'default', 'range', 'meaning'], 'llll')
    about = f'{name}\n\n{type(getattr(config, name)).__doc__}' if name else 'The run'
    page += f'\n## {about}\n\n{table}\n'
  return page


if __name__ == '__main__':
  print(document(), end='')
