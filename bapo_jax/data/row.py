"""The record of one problem and its answer, whatever its source."""

from typing import NamedTuple


class Row(NamedTuple):
  problem: str  # as the data set states it; the template is applied later
  answer: str  # as the verifier reads it
  verifier: str = ''  # rule that verifies the answer; '': rewards.rule
  system: str = ''  # system message before the problem; '': none
  pictures: tuple[bytes, ...] = ()  # image files (PNG, JPEG, ...), in order; (): none
  fields: str = ''  # all fields of the data set's row as JSON; '': not kept
