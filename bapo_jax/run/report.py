"""Writes one page about a run: what happened, in words, curves, tables and samples.

1. numbers: means over steps, and the wall time by phase;
2. words: report.md for people, around the figures of report_plots;
3. facts: report.json for programs.
"""

import html
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bapo_jax.run.report_plots import (
  draw_curves,
  draw_phases,
  duration,
  mean,
  series,
)
from bapo_jax.runtime import files, markdown, metrics
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.runtime.metrics import Row

MAIN = """
  rollout/reward rollout/accuracy rollout/length rollout/length_right
  rollout/length_wrong rollout/truncated rollout/tokens_per_s rollout/logp_diff
  batch/filled batch/learnable batch/age clip/share_start clip/share clip/low clip/high
  clip/moved clip/target_met clip/fraction loss/entropy loss/kl learner/grad_norm
  time/step
"""
SHOWN = 1500  # characters of a problem or a response
IDLE = 10  # steps without anything to learn, after which a run says so


def fifths(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
  """Returns the first and the last fifth of the training steps, at least one each."""
  steps = [r for r in rows if any(name.startswith('rollout/') for name in r)]
  n = max(1, len(steps) // 5)
  return steps[:n], steps[-n:]


def length_ratio(rows: Sequence[Row]) -> float:
  """Returns mean wrong length over mean right length; nan if either is missing."""
  right = mean(rows, 'rollout/length_right')
  return mean(rows, 'rollout/length_wrong') / right if right else math.nan


def with_rest(phases: Mapping[str, float], wall_s: float) -> dict[str, float]:
  """Sorts the phases, longest first, and adds the remaining wall time as 'other'."""
  named = {k: float(v) for k, v in phases.items() if k != 'other'}
  named = dict(sorted(named.items(), key=lambda item: -item[1]))
  return {**named, 'other': max(0.0, wall_s - sum(named.values()))}


def plain(tree: Any) -> Any:
  """Converts to plain Python values; numbers that are not finite become JSON's null."""
  if isinstance(tree, dict):
    return {k: plain(v) for k, v in tree.items()}
  if hasattr(tree, 'item'):  # a NumPy or JAX scalar
    tree = tree.item()
  return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def summary(
  before: Mapping[str, Any],
  after: Mapping[str, Any],
  steps: int,
  wall_s: float,
  peak_rss_bytes: int,
) -> str:
  """Describes the change of accuracy and the cost of the run.

  Args:
    before, after: accuracy, stderr and n of the first and the last evaluation.
  """
  change = after['accuracy'] - before['accuracy']
  clear = abs(change) > 2 * math.hypot(before['stderr'], after['stderr'])
  was, now = (f'{e["accuracy"]:.3f} ± {e["stderr"]:.3f}' for e in (before, after))
  n = ' and '.join(dict.fromkeys(str(e['n']) for e in (before, after)))
  return (
    f'Accuracy went from {was} to {now} on {n} held-out problems (± is one standard '
    f'error): a change of {change:+.3f}, which is '
    f'{"more than" if clear else "within"} two standard errors of the difference'
    f'{"" if clear else ", so it may be chance"}. The run took {steps} steps, '
    f'{duration(wall_s)} of wall time and {peak_rss_bytes / 2**30:.2f} GiB of memory '
    'at its peak.'
  )


def target_sentence(rows: Sequence[Row], target: float | None) -> str:
  """Says how often the positive share met its target; '' without a target."""
  met, share = mean(rows, 'clip/target_met'), mean(rows, 'clip/share')
  if target is None or not math.isfinite(met):
    return ''
  text = f'The positive share met its target of {target:.2f} in {100 * met:.1f} % of '
  text += 'the updates'
  if met == 1:
    return f'{text}.'
  text += f', and was {share:.2f} on average.' if math.isfinite(share) else '.'
  blind = mean(rows, 'clip/no_evidence')
  if blind > 0:
    text += (
      f' {100 * blind:.1f} % had no token with an advantage: their bounds stayed at '
      'their start.'
    )
  if met + (blind if blind > 0 else 0) > 1 - 1e-9:
    return text
  return (
    f'{text} In the others the bound search ended at the limits of both bounds: even '
    'there the tokens with positive advantage contributed less than the target to the '
    'gradient.'
  )


def idle_sentence(rows: Sequence[Row]) -> str:
  """Says where nothing was learned for IDLE steps or more, and where to look; or ''."""
  steps, idle = series(rows, 'learner/idle_steps')
  longest = int(max(idle, default=0))
  if longest < IDLE:
    return ''
  last = int(steps[list(idle).index(longest)])
  among = [row for row in rows if last - longest < row['step'] <= last]
  accuracy = mean(among, 'rollout/accuracy')
  text = (
    f'Nothing was learned in steps {last - longest + 1} to {last}: no group of a batch '
    f'had responses of different rewards, at an accuracy of {accuracy:.3f}. '
  )
  if accuracy == 0:
    return text + (
      'No response is right: look at the verifier (rewards.rule), at the prompt '
      'template (tokenizer.template) and at the length limit (rollout/truncated) '
      'beside some responses in eval/, or take easier problems.'
    )
  if accuracy == 1:
    return text + 'Every response is right: the problems are too easy.'
  return text + (
    'Each problem is always solved or never: take problems between the two, or more '
    'responses per problem (sampler.group_size).'
  )


def _remarks(rows: Sequence[Row], target: float | None) -> Iterator[str]:
  yield target_sentence(rows, target)
  yield idle_sentence(rows)


def _sample_blocks(
  before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> Iterator[str]:
  for i, pair in enumerate(itertools.zip_longest(before, after), 1):
    yield f'### Sample {i}'
    problem = None
    for when, sample in zip(('Before', 'After'), pair, strict=True):
      if sample is None:
        continue
      if sample['problem'] != problem:
        problem = sample['problem']
        yield f'Problem (answer: {markdown.inline(sample["answer"])})'
        yield markdown.fence(problem, SHOWN)
        for number, path in enumerate(sample.get('pictures', ()), 1):
          yield f'![Picture {number}]({path})'
      yield f'{when}: **{"right" if sample["correct"] else "wrong"}**'
      yield markdown.fence(sample['response'], SHOWN)


def _change_table(rows: Sequence[Row]) -> str:
  first, last = fifths(rows)
  reported = [name for name in MAIN.split() if len(series(rows, name)[0])]
  cells = (
    (f'`{n}`', f'{mean(first, n):.4g}', f'{mean(last, n):.4g}', GLOSSARY[n])
    for n in reported
  )
  return markdown.table(
    cells, ('metric', 'first fifth', 'last fifth', 'meaning'), 'lrrl'
  )


def _times(phases: Mapping[str, float], wall_s: float) -> Iterator[str]:
  yield '## Where the time went'
  yield '![Wall time by phase](phases.png)'
  cells = (
    (name, f'{s:.1f}', f'{100 * s / wall_s:.1f}')
    for name, s in {**phases, '**wall**': wall_s}.items()
  )
  yield markdown.table(cells, ('phase', 'seconds', 'percent of wall'), 'lrr')


def _config(fingerprint: str, text: str) -> Iterator[str]:
  """Folds the config away; empty lines between the blocks enable Markdown inside."""
  yield '## Config'
  name = html.escape(markdown.visible(fingerprint, keep=''))
  yield f'<details>\n<summary>Fingerprint {name}</summary>'
  yield markdown.fence(text)
  yield '</details>'


def write(
  workdir: str | os.PathLike[str],
  *,
  title: str,
  config_text: str,
  config_hash: str,
  eval_before: dict[str, Any],
  eval_after: dict[str, Any],
  samples_before: list[dict[str, Any]],
  samples_after: list[dict[str, Any]],
  phases: dict[str, float],
  wall_s: float,
  peak_rss_bytes: int,
  steps: int,
  target: float | None = None,
) -> pathlib.Path:
  """Writes curves.png, phases.png, report.md and report.json; returns report.md's path.

  Texts of the config, the data and the model are escaped in report.md.

  Args:
    workdir: contains metrics.jsonl.
    eval_before, eval_after: accuracy, stderr, n.
    samples_before, samples_after: dicts of problem, answer, response, correct.
    phases: name -> seconds; the remaining part of wall_s is shown as 'other'.
    target: the target of the positive share; None without a target.

  Raises:
    OSError: the system refused to write one of the files.
  """
  workdir = pathlib.Path(workdir)
  rows = metrics.read(workdir)
  full = with_rest(phases, wall_s)
  draw_curves(workdir / 'curves.png', rows, target)
  draw_phases(workdir / 'phases.png', full, wall_s)
  blocks = [
    f'# {markdown.escape(title)}',
    summary(eval_before, eval_after, steps, wall_s, peak_rss_bytes),
    *_remarks(rows, target),
    '![Curves over the training steps](curves.png)',
    *_times(full, wall_s),
    '## First fifth against last fifth of the steps',
    _change_table(rows),
    '## Responses before and after',
    *_sample_blocks(samples_before, samples_after),
    *_config(config_hash, config_text),
  ]
  files.write(workdir / 'report.md', '\n\n'.join(filter(None, blocks)) + '\n')
  facts = {
    'eval_before': eval_before,
    'eval_after': eval_after,
    'wall_s': wall_s,
    'peak_rss_bytes': peak_rss_bytes,
    'phases': phases,
    'steps': steps,
    'config_hash': config_hash,
  }
  text = json.dumps(plain(facts | _from_rows(rows)), indent=2, allow_nan=False)
  files.write(workdir / 'report.json', text + '\n')
  return workdir / 'report.md'


def _from_rows(rows: Sequence[Row]) -> dict[str, Any]:
  """Computes the facts that come from the rows of metrics."""
  first, last = fifths(rows)
  return {
    'clip_moved_fraction': mean(rows, 'clip/moved'),
    'length_ratio': {
      'first_fifth': length_ratio(first),
      'last_fifth': length_ratio(last),
    },
    'responses': rows[-1].get('rollout/responses') if rows else None,
  }
