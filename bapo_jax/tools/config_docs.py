"""Writes docs/config.md from the descriptions of the knobs.

python -m bapo_jax.tools.config_docs > docs/config.md
"""

from bapo_jax import knobs
from bapo_jax.knobs import Section
from bapo_jax.runtime.tables import markdown
from bapo_jax.training.config import Config

INTRODUCTION = """\
# Knobs

Written by `python -m bapo_jax.tools.config_docs`; edit the knobs.py of a folder.

Every knob is an override on the command line: `--config.clip.rule=fixed`. A config file
(`configs/*.py`) changes any of them; the defaults are the embedded run. A value outside
its range is refused in one sentence before anything is written or compiled.
"""


def document() -> str:
  """Returns the page: a table per top-level section, in the order of the flow."""
  config = Config()
  sections = {
    name: section
    for name in Config.model_fields
    if isinstance(section := getattr(config, name), Section)
  }
  own = [name for name in Config.model_fields if name not in sections]
  parts = [INTRODUCTION, '## The run\n', _table(config, own)]
  for name, section in sections.items():
    parts.append(f'\n## {name}\n\n{type(section).__doc__}\n')
    parts.append(_table(config, [name]))
  return '\n'.join(parts) + '\n'


def _table(config: Config, names: list[str]) -> str:
  """Lists default, range and meaning of the knobs whose first part is in `names`."""
  rows = [
    [f'`{knob}`', f'`{default}`', allowed, meaning]
    for knob, default, allowed, meaning in knobs.describe(config)
    if knob.split('.')[0] in names
  ]
  return markdown(rows, ['knob', 'default', 'range', 'meaning'], 'llll')


if __name__ == '__main__':
  print(document(), end='')
