"""Notes the results of the stages, and prints them.

  python -m benchmarks.on_gpu.table COMMAND ARGUMENT...

note FILE STAGE NAME STATUS SECONDS [OUTPUT]   adds a line to FILE
run WORKDIR                   prints the figures of a run, as one JSON object
memory FILE PLANNED.json      prints measured memory beside the planned
show FILE                     prints a line per stage
"""

import json
import os
import statistics
import sys
from typing import Any

WORDS = {0: 'passed', 124: 'out of time', 125: 'skipped', 137: 'killed', 143: 'ended'}


def note(
  file: str, stage: str, name: str, status: str, seconds: str, *output: str
) -> None:
  """Adds a line with what the last line of the output holds."""
  figures = None
  for path in output:
    try:
      with open(path) as f:
        figures = json.loads(f.read().strip().splitlines()[-1])
    except (OSError, ValueError, IndexError):
      pass
  row = {'stage': stage, 'name': name, 'status': int(status), 'seconds': int(seconds)}
  line = json.dumps(row | {'figures': figures}) + '\n'
  with open(file, 'ab', buffering=0) as f:  # one write: stages run side by side
    f.write(line.encode())


def read(file: str) -> list[dict[str, Any]]:
  """Returns the newest line of every stage and name."""
  found = {}
  with open(file) as f:
    for line in f:
      row = json.loads(line)
      found[row['stage'], row['name']] = row
  return sorted(found.values(), key=lambda row: row['stage'])


def run(workdir: str) -> dict[str, Any]:
  """Returns the figures of a run, finished or not."""
  result: dict[str, Any] = {}
  path = os.path.join(workdir, 'report.json')
  if os.path.exists(path):
    with open(path) as f:
      report = json.load(f)
    result = {
      'finished': True,
      'steps': report['steps'],
      'wall_s': report['wall_s'],
      'before': report['eval_before']['accuracy'],
      'after': report['eval_after']['accuracy'],
      'n': report['eval_after']['n'],
    }
  rows = []
  path = os.path.join(workdir, 'metrics.jsonl')
  if os.path.exists(path):
    with open(path) as f:
      rows = [row for row in map(json.loads, f) if 'time/step' in row]
  if rows:
    result |= {'rows': len(rows)}
    for key in ('step', 'sample', 'update', 'verify', 'log', 'save'):
      values = [row.get(f'time/{key}', 0.0) for row in rows[2:] or rows]
      result[f'{key}_s'] = statistics.median(values)
    result['reward_last'] = rows[-1].get('rollout/accuracy')
  return result


def memory(file: str, planned: str) -> dict[str, Any]:
  """Returns lines of measured and planned GiB, and the kernels of a traced step."""
  lines, top = [], []
  with open(planned) as f:
    plans = json.load(f)
  for row in read(file):
    figures = row['figures'] or {}
    for section in figures.get('sections', ()):
      values = {x['name']: x for x in section['figures']}
      if 'compiled program' in values:
        peak, compiled = values['peak memory'], values['compiled program']
        lines.append({
          'what': section['name'],
          'peak_gib': peak['value'],
          'compiled_gib': compiled['value'],
          'estimate_gib': compiled['reference'],
        })  # fmt: skip
    if figures.get('who') == 'ours':
      plan = plans.get(figures['device'], {}).get(figures['model'], {})
      lines.append({
        'what': f'RL step, {figures["model"]}',
        'schedule': figures['schedule'],
        'as_planned': figures['schedule'] == plan.get('schedule'),
        'peak_gib': figures['peak_gib'],
        'planned_gib': plan.get('gib', {}),
      })  # fmt: skip
      top = figures['kernels'] or top
  return {'memory': lines, 'kernels': top}


def number(x: Any, form: str = '.3g') -> str:
  """Formats a number that may be missing."""
  return '-' if x is None else format(x, form)


def headline(row: dict[str, Any]) -> str:
  """Returns the figure of a stage that matters most."""
  x = row['figures']
  if not x:
    return ''
  if 'first_product_s' in x:
    return (
      f'{x["devices"]} x {x["device"]} ({x["platform"]}), {x["memory_gib"]:.1f} GiB, '
      f'jax {x["versions"]["jax"]}, first product after {x["first_product_s"]:.1f} s'
    )
  if 'sections' in x:
    return '; '.join(map(of_section, x['sections']))
  if 'who' in x:
    return (
      f'step {x["step_s"]:.2f} s: sample {x["sample_s"]:.2f}, score '
      f'{x["score_s"]:.2f}, update {x["update_s"]:.2f}; {x["sampled_tps"]:,.0f} '
      f'sampled and {x["trained_tps"]:,.0f} trained tokens/s, MFU '
      f'{number(x["update_mfu"])}, '
      f'peak {number(x["peak_gib"].get("trained"))} GiB'
      + (f', compiled in {x["compile_s"]:.0f} s' if 'compile_s' in x else '')
    )
  if 'memory' in x:
    return (
      '; '.join(f'{y["what"]}: {of_peak(y)}' for y in x['memory'])
      or 'nothing was measured'
    )
  if 'failed' in x:
    beyond = f'{len(x["failed"])} beyond: {x["failed"][0][:90]}' if x['failed'] else ''
    worst = [f'{k} {v:.2g}' for k, v in x['figures'].items() if 'beside' in k]
    return beyond or 'all within; ' + ', '.join(worst[:3])
  if 'step_s' in x:
    accuracy = f'{number(x.get("before"))} -> {number(x.get("after"))}'
    return (
      f'accuracy {accuracy}, {x.get("steps", x["rows"])} steps, '
      f'{number(x.get("wall_s"))} s in all, {x["step_s"]:.3f} s a step'
    )
  return ''


def of_section(section: dict[str, Any]) -> str:
  """Returns a few words about a section of first contact."""
  values = {x['name']: x for x in section['figures']}
  text = f'{section["name"]} {section["state"]}'
  for x in values.values():
    if x['unit'] == 'tokens/s':
      share = f' ({x["value"] / x["reference"]:.0%} of bound)' if x['reference'] else ''
      return f'{text}, {x["value"]:,.0f} tokens/s{share}'
  if 'product bfloat16' in values:
    return (
      f'{text}, {values["product bfloat16"]["value"]:.0f} TFLOP/s, '
      f'{values["copy"]["value"]:.0f} GB/s'
    )
  return text + (f' ({section["reason"][:80]})' if section['reason'] else '')


def of_peak(x: dict[str, Any]) -> str:
  """Returns measured and planned GiB in few words."""
  if isinstance(x['peak_gib'], dict):
    most = max(x['planned_gib'].values(), default=None)
    other = '' if x['as_planned'] or most is None else ', with another schedule'
    return f'{number(x["peak_gib"].get("trained"))} GiB, planned {number(most)}{other}'
  return f'{number(x["peak_gib"])} GiB, compiled {number(x["compiled_gib"])}'


def show(file: str) -> None:
  """Prints a line per stage, and the kernels of the traced step."""
  for row in read(file):
    word = WORDS.get(row['status'], f'failed ({row["status"]})')
    place = f'{row["stage"]} {row["name"]:20} {word:12} {row["seconds"]:4d} s'
    print(f'{place}  {headline(row)}')
  for row in read(file):
    for name, ms, calls in (row['figures'] or {}).get('kernels', [])[:12]:
      if row['stage'] == 'f':
        print(f'    {ms:10.2f} ms {calls:7d} x {name}')


def main() -> None:
  """Does what the first argument says."""
  what, *rest = sys.argv[1:]
  result = {'note': note, 'run': run, 'memory': memory, 'show': show}[what](*rest)
  if result is not None:
    print(json.dumps(result))


if __name__ == '__main__':
  main()
