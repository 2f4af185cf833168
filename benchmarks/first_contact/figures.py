"""Defines what a section of first contact receives and reports, and its table."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bapo_jax.runtime import machine


class Context(NamedTuple):
  """Holds what a section may read; it travels to the section's process as JSON."""

  model: str = ''  # directory with the config.json of a model; '': none
  small: bool = False  # tiny sizes, to test the program and not the machine
  seconds: float = 600.0  # until the section is stopped
  platform: str = ''  # 'cpu', 'gpu' or 'tpu'; '' if no section has found out
  rates: Mapping[str, float] = {}  # figures of the section `rates`, by name


class Figure(NamedTuple):
  """One measured number."""

  name: str
  value: float | None  # None: the platform does not report it
  unit: str
  limit: float | None = None  # the largest value that passes; None: nothing is checked
  reference: float | None = None  # a number to compare the value with
  of: str = ''  # where the reference comes from

  @property
  def passed(self) -> bool:
    """Returns whether the value is within its limit; a missing value is not."""
    return self.limit is None or (
      self.value is not None and bool(self.value <= self.limit)
    )

  def record(self) -> dict[str, Any]:
    """Returns the figure for JSON, with None for numbers that are not finite."""

    def plain(x: float | None) -> float | None:  # NumPy's numbers are no JSON
      return None if x is None or not math.isfinite(x) else float(x)

    numbers = {k: plain(getattr(self, k)) for k in ('value', 'limit', 'reference')}
    return self._asdict() | numbers | {'passed': self.passed}


class Skip(Exception):
  """Ends a section that this machine or command gives no reason to run."""


# A section yields figures as it goes, and facts about the machine as a dict.
Run = Callable[[Context], Iterator[Figure | dict[str, Any]]]


class Section(NamedTuple):
  run: Run
  seconds: float  # not started with less time left
  decides: bool = False  # a failure makes the exit status 1


HEADER = '| section | figure | value | beside |\n|---|---|--:|---|'


def cell(figure: dict[str, Any]) -> tuple[str, str]:
  """Returns (value, what is beside it) of a figure."""
  value = figure['value']
  shown = 'not reported' if value is None else f'{value:.4g} {figure["unit"]}'
  if figure['limit'] is not None:
    verdict = 'within' if figure['passed'] else '**beyond**'
    return shown, f'{verdict} {figure["limit"]:.2g}'
  if figure['reference'] is None:
    return shown, ''
  reference = f'{figure["reference"]:.4g}, {figure["of"]}'
  if value is None:
    return shown, reference
  return shown, f'{value / figure["reference"]:.0%} of {reference}'


def table(document: dict[str, Any]) -> str:
  """Formats a document in Markdown: the machine, then a line per figure."""
  m = document['machine']
  lines = ['First contact']
  if m:
    memory = f' of {m["memory_gib"]:.4g} GiB' if m['memory_gib'] else ''
    lines = [
      f'First contact with {m["devices"]} x {m["kind"]}{memory} ({m["platform"]}), '
      f'{m["host_cores"]} cores, {m["host_memory_gib"]:.3g} GiB; commit {m["commit"]}, '
      f'jax {m["versions"]["jax"]}'
    ]
  lines += ['', HEADER]
  for section in document['sections']:
    name = section['name']
    for figure in section['figures']:
      value, beside = cell(figure)
      lines.append(f'| {name} | {figure["name"]} | {value} | {beside} |')
      name = ''
    verdict = f'**{section["state"]}**' if section['state'] != 'passed' else 'passed'
    reason = section['reason'].replace('|', '/')
    end = f'{verdict}, {section["seconds"]:.0f} s'
    lines.append(f'| {name} | {end} | | {reason} |')
  lines += ['', f'{document["minutes"]:.1f} minutes, status {document["status"]}']
  lines.append(f'Before: {machine.CONFIRMED}')
  return '\n'.join(lines)
