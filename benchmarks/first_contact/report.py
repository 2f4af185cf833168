"""Formats the results of first contact as one table, made to be sent in an issue."""

from typing import Any

from bapo_jax.runtime import machine

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
