"""Runs one section of first contact in a process of its own.

A crash, a hang or a full device then ends that section alone, the peak of a device's
memory is the section's, and a TPU, which a single process may use, is free again.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from benchmarks.first_contact import job, kernels, parity, rates, speed
from benchmarks.first_contact.figures import Context, Figure, Section, Skip

# In the order of running, the largest last. The seconds are what each takes at most on
# two CPU cores or, for the models that a CPU skips, what compiling them may take.
SECTIONS: dict[str, Section] = {
  'rates': Section(rates.run, 20),
  'parity': Section(parity.run, 90, decides=True),
  'kernels': Section(kernels.run, 40, decides=True),
  'experts': Section(parity.run_experts, 90, decides=True),
  'decode 0.1M': Section(functools.partial(speed.decode, model=speed.EMBEDDED), 20),
  'train 0.1M': Section(functools.partial(speed.train, model=speed.EMBEDDED), 30),
  'main job': Section(job.run, 90, decides=True),
  'decode given model': Section(functools.partial(speed.decode, model=speed.GIVEN), 40),
  'train given model': Section(functools.partial(speed.train, model=speed.GIVEN), 60),
  'decode 1.5B': Section(functools.partial(speed.decode, model=speed.LARGE), 60),
  'train 1.5B': Section(functools.partial(speed.train, model=speed.LARGE), 90),
}
STATES = ('passed', 'failed', 'skipped')


def perform(section: Section, context: Context) -> dict[str, Any]:
  """Runs a section here; returns its state, reason, figures and facts."""
  figures, facts, state, reason = [], {}, 'passed', ''
  try:
    for found in section.run(context):
      if isinstance(found, Figure):
        figures.append(found)
      else:
        facts.update(found)
  except Skip as skip:
    state, reason = 'skipped', str(skip)
  except Exception as error:  # the others go on, whatever this one raised
    traceback.print_exc()
    text = ' '.join(f'{type(error).__name__}: {error}'.split())
    state, reason = 'failed', text[:500]
  if beyond := [figure.name for figure in figures if not figure.passed]:
    state, reason = 'failed', f'beyond the limit: {"; ".join(beyond)}'
  records = [figure.record() for figure in figures]
  return {'state': state, 'reason': reason, 'figures': records, 'machine': facts}


def ended(state: str, reason: str) -> dict[str, Any]:
  """Returns the result of a section without figures."""
  return {'state': state, 'reason': reason, 'figures': [], 'machine': {}}


def start(
  name: str, context: Context, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
  """Runs a section in a new process, stopped after context.seconds."""
  values = json.dumps(context._asdict())
  command = [sys.executable, '-m', 'benchmarks.first_contact']
  command += [f'--section={name}', f'--context={values}']
  with subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | (environment or {}),
    start_new_session=True,  # so that a run that the section started ends with it
  ) as process:
    try:
      output, errors = process.communicate(timeout=context.seconds)
    except subprocess.TimeoutExpired:
      return ended('skipped', f'stopped after {context.seconds:.0f} s, out of time')
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
  lines = errors.strip().splitlines() or ['no message']
  try:
    result = json.loads(output.splitlines()[-1])
  except (IndexError, ValueError):
    status = f'ended with status {process.returncode}: {lines[-1][:300]}'
    result = ended('failed', status)
  if result['state'] == 'failed':
    print('\n'.join(lines[-40:]), file=sys.stderr, flush=True)
  return result
