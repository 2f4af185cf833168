"""Checks and measures an accelerator that this project has never run on.

  python -m benchmarks.first_contact [--minutes=10] [--model=DIR] [--out=FILE.json]

Rates of the devices; parity of a tiny model, of the attention kernels and of a tiny
mixture of experts with float64 on the CPU; decoding, training and their memory beside
the roofline and the plan; the main job of the README. The sections run one after the
other, each in a process of its own; a section that does not fit the minutes is skipped.
Prints a table and, as the last line, one JSON object, described by schema.json.

The exit status is 1 if parity, a kernel or the main job fails, else 0. Skipped sections
do not change the status.
"""

import argparse
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.first_contact import figures, section
from benchmarks.first_contact.figures import Context, Section

START_S = 10  # to start Python, JAX and the devices, once per section
Start = Callable[[str, Context], dict[str, Any]]


def contact(
  context: Context, start: Start, sections: Mapping[str, Section] = section.SECTIONS
) -> dict[str, Any]:
  """Runs the sections within context.seconds; returns the document.

  Args:
    start: (name, context) -> result of the section, as `section.perform` returns it.
  """
  begun, results, machine = time.monotonic(), [], {}
  for name, known in sections.items():
    began = time.monotonic()
    left = context.seconds - (began - begun)
    if left < known.seconds + START_S:
      reason = f'takes up to {known.seconds + START_S:.0f} s, {max(left, 0):.0f} s left'
      result = section.ended('skipped', reason)
    else:
      result = start(name, context._replace(seconds=left))
    if facts := result.pop('machine'):
      machine = facts
      context = context._replace(platform=facts['platform'])
    if name == 'rates':
      rates = {figure['name']: figure['value'] for figure in result['figures']}
      context = context._replace(rates=rates)
    results.append({'name': name, 'seconds': time.monotonic() - began} | result)
    print(f'{name}: {result["state"]} {result["reason"]}', file=sys.stderr, flush=True)
  wrong = [x for x in results if x['state'] == 'failed' and sections[x['name']].decides]
  return {
    'schema': 1,
    'when': time.strftime('%Y-%m-%d', time.gmtime()),
    'minutes': (time.monotonic() - begun) / 60,
    'status': int(bool(wrong)),
    'machine': machine,
    'sections': results,
  }


def main(argv: list[str] | None = None) -> int:
  """Prints the table and the JSON line; returns the exit status."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.first_contact')
  parser.add_argument(
    '--minutes', type=float, default=10.0, help='limit of all sections'
  )
  parser.add_argument('--model', default='', help='a directory with config.json')
  parser.add_argument('--out', default='', help='a file for the JSON object')
  parser.add_argument('--small', action='store_true', help='tiny sizes, for tests')
  # Used by `section.start` alone.
  parser.add_argument('--section', default='', help=argparse.SUPPRESS)
  parser.add_argument('--context', default='{}', help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.section:
    given = Context(**json.loads(args.context))
    print(json.dumps(section.perform(section.SECTIONS[args.section], given)))
    return 0
  context = Context(args.model, args.small, 60 * args.minutes)
  with tempfile.TemporaryDirectory() as cache:
    # Programs that several sections compile, and that a section compiles twice.
    shared = {'JAX_COMPILATION_CACHE_DIR': cache}
    document = contact(context, functools.partial(section.start, environment=shared))
  print(figures.table(document))
  line = json.dumps(document)
  if args.out:
    path = pathlib.Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + '\n')
  print(line)
  return document['status']


if __name__ == '__main__':
  sys.exit(main())
