"""Runs chosen sections of benchmarks.first_contact, whatever time they may take.

  python -m benchmarks.on_gpu.contact SECONDS FILE.json SECTION...

Writes the document of the sections to FILE.json, prints the table and, as the last
line, the document. The main job is not run: it is stage b.
"""

import json
import signal
import sys

from benchmarks.first_contact import __main__ as program
from benchmarks.first_contact import figures, section
from benchmarks.first_contact.figures import Context
from benchmarks.on_gpu.sizes import IS_SMALL

LEAST_S = 5.0  # a section starts with this much time left; on_gpu.sh limits the stage


def main() -> int:
  """Returns the status of the document."""
  seconds, out, *names = sys.argv[1:]
  # A section leads a process group of its own, which ends when `section.start` does.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  context = Context(small=IS_SMALL, seconds=float(seconds))
  sections = {name: section.SECTIONS[name]._replace(seconds=LEAST_S) for name in names}
  document = program.contact(context, section.start, sections)
  print(figures.table(document))
  with open(out, 'w') as file:
    json.dump(document, file)
  print(json.dumps(document))
  return document['status']


if __name__ == '__main__':
  sys.exit(main())
