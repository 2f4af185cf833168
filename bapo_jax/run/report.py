"""Writes the report of a run as text: a summary, tables and sample responses.

1. report.md is for people; report_page draws the curves;
2. report.json has the main results, for programs.
"""

import datetime
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_jax.autosetup import knob_lists
from bapo_jax.run.series import mean, series
from bapo_jax.runtime import files, markdown, metrics
from bapo_jax.runtime.glossary import GLOSSARY
from bapo_jax.runtime.metrics import Row
from bapo_jax.training import evaluate
from bapo_jax.training.config import Config, fingerprint

MAIN = """
  rollout/reward rollout/accuracy rollout/length rollout/length_right
  rollout/length_wrong rollout/truncated rollout/tokens_per_s rollout/logp_diff
  batch/filled batch/learnable batch/age clip/share_start clip/share clip/low clip/high
  clip/moved clip/target_met clip/fraction loss/entropy loss/kl learner/grad_norm
  time/step
"""
SAMPLES = 6  # responses in the report; eval/ has all responses
SHOWN = 1500  # characters of a problem or a response
IDLE = 10  # steps in a row without anything to learn that have a cause to look for


def finite(tree: Any) -> Any:
  """Replaces non-finite numbers by None, because JSON has no nan and no infinity."""
  if isinstance(tree, dict):
    return {k: finite(v) for k, v in tree.items()}
  return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def summary(
  before: dict[str, Any], after: dict[str, Any], steps: int, spent: dict[str, Any]
) -> str:
  """Describes the change of accuracy and the cost of the run; see `write`."""
  return (
    f'{change_sentence(before, after)} The run took {steps} steps, '
    f'{datetime.timedelta(seconds=round(spent["wall_s"]))} h of wall time and '
    f'{spent["peak_rss_bytes"] / 2**30:.2f} GiB of memory at its peak.'
  )


def change_sentence(before: dict[str, Any], after: dict[str, Any]) -> str:
  """Compares the results of two evaluations, and their errors."""
  change = after['accuracy'] - before['accuracy']
  clear = abs(change) > 2 * math.hypot(before['stderr'], after['stderr'])
  was, now = (f'{e["accuracy"]:.3f} ± {e["stderr"]:.3f}' for e in (before, after))
  n = ' and '.join(dict.fromkeys(str(e['n']) for e in (before, after)))
  return (
    f'Accuracy went from {was} to {now} on {n} held-out problems (± is one standard '
    f'error): a change of {change:+.3f}, which is '
    f'{"more than" if clear else "within"} two standard errors of the difference'
    f'{"" if clear else ", so it may be chance"}.'
  )


REWARDS = ('on held-out problems', 'before', 'after', 'change')


def rewards(
  before: dict[str, Any], after: dict[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
  """Yields the cells of a table that compares the rewards of two evaluations.

  Its header is REWARDS. Without rewards of own functions there are no rows.
  """
  was, now = map(evaluate.rewards_of, (before, after))
  for name in (name for name in was if name in now):
    (old, old_error), (new, new_error) = was[name], now[name]
    change = f'{new - old:+.3f} ± {math.hypot(old_error, new_error):.3f}'
    yield name, f'{old:.3f} ± {old_error:.3f}', f'{new:.3f} ± {new_error:.3f}', change


def share_target(values: dict[str, Any]) -> float | None:
  """Returns the target of the positive share; None if the clip rule has none."""
  clip = values.get('clip', {})
  return clip.get('target') if clip.get('rule') == 'balanced' else None


def target_sentence(rows: Sequence[Row], target: float | None) -> str:
  """Says how often the positive share met its target; '' if there is no target."""
  met = mean(rows, 'clip/target_met')
  if target is None or not math.isfinite(met):
    return ''
  text = (
    f'The positive share met its target of {target:.2f} in {100 * met:.1f} % of the '
    'updates.'
  )
  if met == 1:
    return text
  return (
    f'{text} In the other updates the bound search ended at the limits of both bounds, '
    'or no token had an advantage (clip/no_evidence).'
  )


def idle_sentence(rows: Sequence[Row], latest: bool = False) -> str:
  """Says in which steps nothing was learned, and why; '' if there is no such step.

  Describes the longest series of such steps, or, if `latest`, that of the last row. A
  series of IDLE steps or of the whole run has a cause to look for.
  """
  steps, idle = series(rows, 'learner/idle_steps')
  count = int((idle > 0).sum())
  if not count:
    return ''
  at = -1 if latest else int(idle.argmax())
  last, longest = int(steps[at]), int(idle[at])
  among = [row for row in rows if last - longest < row['step'] <= last]
  accuracy = mean(among, 'rollout/accuracy')
  why = 'no group had right and wrong responses'
  if mean(among, 'batch/learnable') > 0:  # graded rewards
    why = 'the rewards within every group of the batch were equal'
  where = f'steps {last - longest + 1} to {last}' if longest > 1 else f'step {last}'
  text = f'Nothing was learned in {where}: {why} (mean accuracy {accuracy:.3f}).'
  if not latest:
    text += f' In all, nothing was learned in {count} of {len(steps)} steps.'
    if longest < IDLE and count < len(steps):
      return text
  cause = (
    'Each problem is always solved or never solved: use problems of medium difficulty '
    'or raise sampler.group_size.'
  )
  if accuracy == 0:
    cause = (
      'No response is right: check the verifier (rewards.rule), the prompt template '
      '(tokenizer.template), the length limit (rollout/truncated) and some responses '
      'in eval/, or use easier problems.'
    )
  elif accuracy == 1:
    cause = 'Every response is right: the problems are too easy; use harder problems.'
  return f'{text} {cause}'


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
      reward = f', reward {sample["reward"]:.3g}' if sample.get('parts') else ''
      yield f'{when}: **{"right" if sample["correct"] else "wrong"}**{reward}'
      yield markdown.fence(sample['response'], SHOWN)


def _tables(
  rows: Sequence[Row], phases: dict[str, float], wall_s: float
) -> Iterator[str]:
  yield '## Where the time went'
  cells = (
    (name, f'{s:.1f}', f'{100 * s / wall_s:.1f}')
    for name, s in {**phases, '**wall**': wall_s}.items()
  )
  yield markdown.table(cells, ('phase', 'seconds', 'percent of wall'), 'lrr')
  yield '## First fifth against last fifth of the steps'
  cells = ((f'`{name}`', *others) for name, *others in progress(rows))
  yield markdown.table(cells, PROGRESS, 'lrrl')


def _rewards(before: dict[str, Any], after: dict[str, Any]) -> str:
  cells = [(markdown.inline(name), *rest) for name, *rest in rewards(before, after)]
  return markdown.table(cells, REWARDS, 'lrrr') if cells else ''


PROGRESS = ('metric', 'first fifth', 'last fifth', 'meaning')


def progress(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
  """Yields the cells of a table of means; its header is PROGRESS."""
  first, last = fifths(rows)
  for name in MAIN.split():
    if len(series(rows, name)[0]):
      was, now = (f'{mean(part, name):.4g}' for part in (first, last))
      yield name, was, now, GLOSSARY[name]


def overlap_sentence(rows: Sequence[Row]) -> str:
  """Says which share of the steps each side waited for the other; '' without sides."""
  sampler, learner = (mean(rows, f'overlap/{x}_idle') for x in ('sampler', 'learner'))
  if math.isnan(sampler):
    return ''
  return (
    f'Sampling and training ran beside each other: the mesh.rollout devices were idle '
    f'for {sampler:.1%} of the steps, the learner waited for groups for {learner:.1%}.'
  )


def write(
  workdir: str | os.PathLike[str],
  config: Config,
  before: dict[str, Any],
  after: dict[str, Any],
  spent: dict[str, Any],
  steps: int,
) -> None:
  """Writes report.md and report.json to a workdir with metrics.jsonl.

  Strings from the config, the data and the model are escaped in report.md.

  Args:
    before, after: first and last evaluation, from `evaluate.read_recorded`.
    spent: dict with wall_s, peak_rss_bytes and phases (name -> seconds).

  Raises:
    OSError: one of the files cannot be written.
  """
  workdir, rows = pathlib.Path(workdir), metrics.read(workdir)
  values, wall_s = config.model_dump(), spent['wall_s']
  results = before['result'], after['result']
  level = share_target(values)
  phases = {name: s for name, s in spent['phases'].items() if name != 'other'}
  phases = dict(sorted(phases.items(), key=lambda item: -item[1]))  # longest first
  phases['other'] = max(0.0, wall_s - sum(phases.values()))
  blocks = [
    f'# {markdown.escape(f"{config.title}, {workdir.resolve().name}")}',
    summary(*results, steps, spent),
    target_sentence(rows, level),
    idle_sentence(rows),
    _rewards(*results),
    'The curves are in report.html.',
    overlap_sentence(rows),
    *_tables(rows, phases, wall_s),
    '## Responses before and after',
    *_sample_blocks(before['samples'][:SAMPLES], after['samples'][:SAMPLES]),
    '## Config',
    knob_lists.table(config),
    # Collapsed; the blank lines between the blocks enable Markdown inside.
    f'<details>\n<summary>Fingerprint {fingerprint(values)}</summary>',
    markdown.fence(json.dumps(values, indent=2)),
    '</details>',
  ]
  files.write(workdir / 'report.md', '\n\n'.join(filter(None, blocks)) + '\n')
  wrong, right = 'rollout/length_wrong', 'rollout/length_right'
  ratios = [mean(x, wrong) / (mean(x, right) or math.nan) for x in fifths(rows)]
  facts = {
    'eval_before': results[0],
    'eval_after': results[1],
    **{name: spent[name] for name in ('wall_s', 'peak_rss_bytes', 'phases')},
    'steps': steps,
    'config_hash': fingerprint(values),
    'clip_moved_fraction': mean(rows, 'clip/moved'),
    'length_ratio': dict(zip(('first_fifth', 'last_fifth'), ratios, strict=True)),
    'responses': rows[-1].get('rollout/responses') if rows else None,
  }
  text = json.dumps(finite(facts), indent=2, allow_nan=False)
  files.write(workdir / 'report.json', text + '\n')


def fifths(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
  """Returns the first and last fifth of the training steps, at least one step each."""
  steps = [r for r in rows if any(name.startswith('rollout/') for name in r)]
  n = max(1, len(steps) // 5)
  return steps[:n], steps[-n:]
