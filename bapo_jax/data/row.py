"""The record of this folder: one problem and its answer, as text."""

from typing import NamedTuple


class Row(NamedTuple):
  """A problem of any source; made, read and stored in this form."""

  problem: str  # as the data set states it; the template is applied later
  answer: str  # as the verifier reads it
  verifier: str = ''  # the rule that verifies the answer; '': rewards.rule
  system: str = ''  # the system message before the problem; '': none
