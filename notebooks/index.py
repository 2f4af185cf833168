"""Lists the notebooks: the cell that `notebooks.execute` writes into each of them."""

from typing import NamedTuple


class Entry(NamedTuple):
  """A line of the list."""

  name: str
  sentence: str
  seconds: int  # from the first cell to the last, on two cores


LOSS = 'The loss: what a rule does to a token'
MACHINE = 'The machine, and runs'
NOTEBOOKS = {
  LOSS: (
    Entry('2_clip_rule', 'how clip bounds are searched, on one minibatch', 13),
    Entry('5_counterfactual', 'every rule on the tokens of a recorded run', 28),
    Entry('9_records', 'the same for a published model and for TRL', 9),
    Entry('6_microscope', 'rules against the true gradient of a tiny task', 38),
    Entry('7_your_own_loss', 'a loss of your own: curve, tokens, ten steps', 54),
  ),
  MACHINE: (
    Entry('1_one_prompt', 'one step of training, function by function', 31),
    Entry('3_batch_rule', 'the batch rule and the replay buffer', 17),
    Entry('4_your_run', 'curves, tokens and responses of any workdir', 4),
    Entry('8_three_rules', 'three rules trained side by side', 108),
    Entry('10_recorded_run', 'three rules trained on one recorded run of TRL', 50),
  ),
}


def text(name: str) -> str:
  """Returns the list as markdown; the notebook `name` has no link to itself."""
  lines = ['**All notebooks**, with the seconds that each takes on two cores.']
  for title, entries in NOTEBOOKS.items():
    lines += ['', f'*{title}*', '']
    for entry in entries:
      number, _, words = entry.name.partition('_')
      label = f'{number}, {words.replace("_", " ")}'
      here = entry.name == name
      link = f'**{label} (this one)**' if here else f'[{label}]({entry.name}.ipynb)'
      lines.append(f'- {link}: {entry.sentence}; {entry.seconds} s')
  return '\n'.join(lines)
