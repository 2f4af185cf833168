"""Describes a run in sentences, and writes its main results to report.json.

The page of a run shows the same sentences (run/page.py).
"""

import datetime
import math
import os
from collections.abc import Iterator, Sequence

from bapo_jax.run.series import mean, series
from bapo_jax.runtime import files
from bapo_jax.runtime.metrics import SETTINGS, Row
from bapo_jax.training import evaluate

IDLE = 10  # steps in a row without anything to learn that have a cause to look for


def settings_sentence(rows: Sequence[Row]) -> str:
  """Says when the settings of the evaluation changed; '' if they did not."""
  other = [x['step'] for x in rows if SETTINGS in x and 'eval/accuracy' not in x]
  if not other:
    return ''
  return (
    f'The settings of the evaluation changed after step {max(other)}: the evaluations '
    'up to there are not compared with the later ones, and left out here.'
  )


def change_sentence(
  before: files.Object, after: files.Object, what: str = 'Accuracy'
) -> str:
  """Compares the results of two evaluations, and their errors; then by named sets."""
  if not evaluate.comparable(before, after):
    return (
      f'{what} is {after["accuracy"]:.3f} ± {after["stderr"]:.3f} (one standard '
      f'error) on {after["n"]} held-out problems. The settings of the evaluation have '
      'changed since the accuracy before training, so the two are not compared.'
    )
  change = after['accuracy'] - before['accuracy']
  if math.isnan(change):
    return f'{what} is unknown: one of the two evaluations has no decided response.'
  clear = abs(change) > 2 * math.hypot(before['stderr'], after['stderr'])
  was, now = (f'{e["accuracy"]:.3f} ± {e["stderr"]:.3f}' for e in (before, after))
  n = ' and '.join(dict.fromkeys(str(e['n']) for e in (before, after)))
  sets = (
    f' {change_sentence(result, after["sets"][name], f"{what} on {name}")}'
    for name, result in before.get('sets', {}).items()
  )
  return (
    f'{what} went from {was} to {now} on {n} held-out problems (± is one standard '
    f'error): a change of {change:+.3f}, which is '
    f'{"more than" if clear else "within"} two standard errors of the difference'
    f'{"" if clear else ", so it may be chance"}.{"".join(sets)}'
  )


def rewards(
  before: files.Object, after: files.Object
) -> Iterator[tuple[str, str, str, str]]:
  """Yields the cells of a table that compares the rewards of two evaluations.

  Without custom reward functions there are no rows.
  """
  was, now = map(evaluate.rewards_of, (before, after))
  for name in (name for name in was if name in now):
    (old, old_error), (new, new_error) = was[name], now[name]
    change = f'{new - old:+.3f} ± {math.hypot(old_error, new_error):.3f}'
    yield name, f'{old:.3f} ± {old_error:.3f}', f'{new:.3f} ± {new_error:.3f}', change


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

  Describes the longest sequence of such steps, or with `latest` the sequence that ends
  at the last row. Suggests a cause if the sequence has at least IDLE steps or is the
  whole run.
  """
  steps, idle = series(rows, 'learner/idle_steps')
  count = int((idle > 0).sum())
  if not count:
    return ''
  at = -1 if latest else int(idle.argmax())
  last = int(steps[at])
  longest = int(idle[at])
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
  if not accuracy > 0:  # nan: all are undecided
    cause = (
      'No response is right: check the verifier (rewards.rule), the prompt template '
      '(tokenizer.template), the length limit (rollout/truncated) and some responses '
      'in eval/, or use easier problems.'
    )
  elif accuracy == 1:
    cause = 'Every response is right: the problems are too easy; use harder problems.'
  return f'{text} {cause}'


def write(
  workdir: str | os.PathLike[str],
  before: files.Object,
  after: files.Object,
  spent: files.Object,
  steps: int,
) -> str:
  """Writes report.json to a workdir.

  Args:
    before, after: results of the first and the last evaluation.
    spent: dict with wall_s, peak_rss_bytes and phases (name -> seconds).

  Returns:
    The sentences on the change of accuracy and the cost of the run.

  Raises:
    OSError: the file cannot be written.
  """
  facts = {'eval_before': before, 'eval_after': after, **spent, 'steps': steps}
  files.write_json(os.path.join(workdir, 'report.json'), facts)
  return (
    f'{change_sentence(before, after)} The run took {steps} steps, '
    f'{datetime.timedelta(seconds=round(spent["wall_s"]))} h of wall time and '
    f'{spent["peak_rss_bytes"] / 2**30:.2f} GiB of memory at its peak.'
  )
