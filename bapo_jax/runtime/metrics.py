"""What is measured: each number's meaning, where it is written, one line a step.

1. `GLOSSARY` defines every metric once; a name it lacks is refused;
2. `open_writers` appends rows to metrics.jsonl, to TensorBoard and, if asked, to W&B,
   after dropping the rows that a resumed run is about to write again;
3. `read` gives the rows back; `line` is the console's view of one.
"""

import difflib
import importlib
import json
import math
import os
import pathlib
import time
import uuid

from bapo_jax.runtime import files
from bapo_jax.types import SOURCES

# ruff: noqa: E501
GLOSSARY = {
  'rollout/reward': 'Mean reward of the fresh responses, as the learner sees it; [0, 1] unless shaped.',
  'rollout/accuracy': 'Share of the fresh responses that the verifier calls right, in [0, 1].',
  'rollout/length': 'Mean length of the fresh responses, tokens.',
  'rollout/length_right': 'Mean length of the right responses, tokens; nan where none is right.',
  'rollout/length_wrong': 'Mean length of the wrong responses, tokens; nan where none is wrong.',
  'rollout/truncated': 'Share of the fresh responses cut at the length limit, in [0, 1].',
  'rollout/undecided': 'Share of the responses, fresh and reevaluated, that the verifier could not decide: too slow, too large, or an error; they count as wrong; in [0, 1].',
  'rollout/seats': 'Share of the seats for fresh groups that finished groups fill, in [0, 1]; below 1 only while responses stay in flight.',
  'rollout/age': 'Mean age of the tokens of fresh responses, learner steps.',
  'rollout/age_max': 'Age of their oldest token, learner steps; at most rollout.max_off_policy_steps + rollout.weight_sync_interval - 1.',
  'rollout/responses': 'Responses sampled so far in the run, refills and those to reevaluated problems counted; not those of evaluations.',
  'rollout/rounds': 'Rounds of prompts asked in the step: 1, and the refills.',
  'rollout/tokens': "Response tokens of the step's fresh and reevaluated groups.",
  'rollout/tokens_per_s': 'Response tokens sampled per second of sampling.',
  'rollout/logp_diff': 'Mean |trainer logp - sampler logp| on the first minibatch, nats, >= 0; large means the two disagree about one policy.',
  'batch/filled': 'Share of the batch seats that are filled, in [0, 1].',
  'batch/fresh': 'Share of the batch seats filled with groups just sampled, in [0, 1].',
  'batch/reevaluated': 'Share of the batch seats filled with reevaluated problems, in [0, 1].',
  'batch/reused': 'Share of the batch seats filled from the good shelf, in [0, 1].',
  'batch/learnable': 'Share of the fresh groups with both right and wrong responses, in [0, 1].',
  'batch/age': "Mean learner steps since the batch's tokens were sampled, >= 0.",
  **{
    f'batch/age_{s}': f"Mean learner steps since the tokens of the batch's {s} groups were sampled; nan without any."
    for s in SOURCES
  },
  'buffer/hard': 'Rows held on the hard shelf.',
  'buffer/reusable': 'Rows held on the good shelf.',
  'buffer/hard_max_correct': 'Most right answers of a group whose problem is hard, in the band of the next step.',
  'buffer/reusable_min_correct': 'Fewest right answers of a good group, in the band of the next step.',
  'buffer/reusable_max_correct': 'Most right answers of a good group, in the band of the next step.',
  'buffer/entered': 'Problems that came onto the hard shelf in this step.',
  'buffer/promoted': 'Problems that left the hard shelf: reevaluated, and now solved sometimes.',
  'buffer/graduated': 'Problems that left the hard shelf: reevaluated, and now solved always.',
  'buffer/progressed': 'Problems that left the hard shelf: asked afresh, and no longer hard.',
  'buffer/evicted': 'Problems that left the hard shelf: no room, tried longest ago.',
  'advantage/positive': 'Share of the teaching tokens whose advantage is positive, in [0, 1].',
  'clip/low': "Ratio below which a negative token is no longer pushed down; mean over the step's updates.",
  'clip/high': "Ratio above which a positive token is no longer pushed up; mean over the step's updates.",
  'clip/search_steps': 'Mean steps the bound search took from its start, >= 0.',
  'clip/moved': 'Share of the updates in which the bound search moved, in [0, 1].',
  'clip/target_met': 'Share of the updates whose target share was met, in [0, 1].',
  'clip/share_start': "Positive tokens' share of the policy gradient at the starting bounds, before the search, in [0, 1].",
  'clip/share': "Positive tokens' share of the policy gradient at the bounds used, after the search, in [0, 1].",
  'clip/surrogate_share_start': "The public code's reading: positive tokens' share of the clipped surrogate at the starting bounds, in [0, 1].",
  'clip/surrogate_share': "The public code's reading: positive tokens' share of the clipped surrogate at the bounds used, in [0, 1].",
  'clip/fraction': 'Share of the teaching tokens whose gradient the clip sets to zero, in [0, 1].',
  'clip/fraction_positive': 'Share of the tokens with positive advantage whose gradient is zero, in [0, 1]; nan without any.',
  'clip/fraction_negative': 'Share of the tokens with negative advantage whose gradient is zero, in [0, 1]; nan without any.',
  'clip/fraction_fresh': 'Share of the tokens of fresh rows whose gradient the clip sets to zero, in [0, 1]; nan without any.',
  'clip/fraction_reevaluated': 'Share of the tokens of reevaluated rows whose gradient the clip sets to zero, in [0, 1]; nan without any.',
  'clip/fraction_reused': 'Share of the tokens of reused rows whose gradient the clip sets to zero, in [0, 1]; nan without any.',
  'clip/probability_positive': 'Mean probability, under the policy that wrote them, of the clipped tokens with positive advantage; nan without any.',
  'clip/probability_negative': 'Mean probability, under the policy that wrote them, of the clipped tokens with negative advantage; nan without any.',
  'loss/value': 'The loss that is minimised; its sign and size mean little by themselves.',
  'loss/ratio_mean': 'Mean probability ratio of the current to the behaviour policy; 1 where they agree.',
  'loss/ratio_max': 'Largest probability ratio of the current to the behaviour policy, > 0.',
  **{
    f'loss/ratio_mean_{s}': f'loss/ratio_mean over the {s} rows; nan without any.'
    for s in SOURCES
  },
  **{
    f'loss/ratio_max_{s}': f'loss/ratio_max over the {s} rows; nan without any.'
    for s in SOURCES
  },
  **{
    f'loss/tv_{s}': f'Estimated total variation between the policy and the one that wrote the {s} rows: half the mean of |r - 1| over tokens; nan without any.'
    for s in SOURCES
  },
  **{
    f'loss/gain_{s}': f'Unclipped surrogate, mean of r A over the tokens of {s} rows; nan without any.'
    for s in SOURCES
  },
  'loss/ratio_nan': 'Share of the teaching tokens whose probability ratio is not a number, in [0, 1]; above 0 is an error of the run.',
  'loss/ess': 'Effective sample size of the ratios as a share of the teaching tokens, (sum r)^2 / (n sum r^2), in [0, 1].',
  'loss/entropy': 'Mean entropy of the policy at the teaching tokens, nats per token, >= 0.',
  'loss/entropy_slope': 'Change of entropy that the Entropy-Clip Rule predicts per unit of step size, nats per token; its sign and relative size can be read beside loss/entropy_change.',
  'loss/entropy_change': 'Measured change of entropy from one update to the next, mean over the step, nats per token; nan with a single update.',
  'loss/kl': 'k3 estimate of the divergence of the behaviour from the current policy, mean of r - 1 - log r, nats per token, >= 0.',
  'loss/kl_plain': 'k1 estimate of the same divergence, mean of -log r, nats per token; noisier, may be negative.',
  'learner/grad_norm': 'Global norm of the gradient before it is clipped, >= 0.',
  'learner/updates': 'Optimiser updates done so far.',
  'learner/skipped': 'Updates of the step that were skipped since loss or gradient was not finite.',
  **{
    f'theory/gain_{s}': f'First term of Theorem 3.2 for {s} groups: the surrogate, mean over updates; nan without any.'
    for s in SOURCES
  },
  **{
    f'theory/moved_{s}': f'Second term of Theorem 3.2 for {s} groups, 2 K TV(pi, alpha): the policy against the one that wrote them; nan without any.'
    for s in SOURCES
  },
  **{
    f'theory/stale_{s}': f"Third term of Theorem 3.2 for {s} groups, 2 TV(pi_t, alpha), from the step's first update; nan without any."
    for s in SOURCES
  },
  'theory/bound': 'Lower bound of the gain by Theorem 3.2, summed over the sources in the batch: an estimate over tokens, to be compared with itself.',
  'eval/accuracy': 'Mean accuracy on the held-out problems, in [0, 1].',
  'eval/stderr': 'Standard error of eval/accuracy over the problems.',
  'eval/length': 'Mean length of the responses to the held-out problems, tokens.',
  'eval/truncated': 'Share of the held-out responses cut at the length limit, in [0, 1].',
  'eval/undecided': 'Share of the held-out responses that the verifier could not decide, in [0, 1]; they count as wrong.',
  'time/step': 'Wall time of the whole step, seconds.',
  'time/sample': 'Wall time of sampling, seconds.',
  'time/verify': 'Wall time of verifying the responses, seconds.',
  'time/batch': 'Wall time of choosing the batch, seconds.',
  'time/update': "Wall time of the learner's updates, seconds.",
  'time/log': 'Wall time of computing these metrics, seconds.',
  'time/insert': 'Wall time of filing groups on the buffer, seconds.',
  'time/eval': 'Wall time of evaluation, its sampling and scoring included, seconds.',
  'time/save': 'Wall time of writing checkpoints, seconds.',
  'time/other': 'Wall time of the step outside every other phase, seconds.',
}


def check(names):
  """Raises ValueError for a name that the glossary does not define."""
  for name in names:
    if name not in GLOSSARY:
      near = difflib.get_close_matches(name, GLOSSARY, n=3, cutoff=0.0)
      raise ValueError(
        f'no metric named {name!r}; the nearest are {near}; '
        'a new one needs a sentence in metrics.GLOSSARY'
      )


def to_json(row: dict[str, float]) -> str:
  """One line; JSON has no nan or inf, so they are written as the strings float() reads."""
  values = {name: float(value) for name, value in row.items() if name != 'step'}
  values = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
  return json.dumps({'step': int(row['step']), **values}, allow_nan=False)


def from_json(text: str) -> dict[str, float]:
  """The row that `to_json` wrote."""
  row = json.loads(text)
  return {k: int(v) if k == 'step' else float(v) for k, v in row.items()}


def read(workdir) -> list[dict[str, float]]:
  """Rows of workdir/metrics.jsonl in the order written; [] where there is none.

  A last line torn by a kill is left out.

  Raises:
    ValueError: a line before the last is no row.
  """
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  if not path.exists():
    return []
  lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
  lines = lines[: max((i + 1 for i, text in enumerate(lines) if text), default=0)]
  rows = []
  for i, text in enumerate(lines):
    try:
      rows.append(from_json(text))
    except (ValueError, TypeError, AttributeError) as error:
      if i + 1 < len(lines):
        raise ValueError(
          f'{path}, line {i + 1} of {len(lines)} is no row of metrics: {text[:60]!r}; '
          'delete the line, or start in another workdir'
        ) from error
  return rows


def _need(package: str, knob: str):
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ValueError(
      f'{knob}=True needs the package {package}, which cannot be imported ({error}); '
      f'pip install {package}, or set {knob}=False'
    ) from error


def _jsonl(workdir: pathlib.Path, step: int):
  path = workdir / 'metrics.jsonl'
  kept = [row for row in read(workdir) if row['step'] <= step]
  new = workdir / 'metrics.jsonl.tmp'
  with files.naming(path):
    with open(new, 'w', encoding='utf-8') as file:
      file.writelines(to_json(row) + '\n' for row in kept)
      file.flush()
      os.fsync(file.fileno())
    os.replace(new, path)  # a kill at any moment leaves the old rows or the new ones
    # Unbuffered: what a full disk refuses is not tried again when the file is closed.
    file = open(path, 'ab', buffering=0)  # noqa: SIM115 (open as long as the run)

  def write(step, row):
    left = (to_json({'step': step, **row}) + '\n').encode()
    with files.naming(path):
      while left:  # an almost full disk takes a part; the rest then says why
        left = left[file.write(left) :]

  return write, file.close


def _tensorboard(workdir: pathlib.Path, step: int, config):
  # Not its SummaryWriter: that writes in a thread, which a full disk ends, and the next
  # row would wait for it for ever.
  summary = _need('tensorboardX.summary', 'metrics.tensorboard')
  proto = importlib.import_module('tensorboardX.proto.event_pb2')
  lib = importlib.import_module('tensorboardX.event_file_writer')
  path = workdir / 'tensorboard'
  with files.naming(path):
    path.mkdir(exist_ok=True)
    board = lib.EventsWriter(str(path / 'events'))

  def tell(step, **what):
    board.write_event(proto.Event(step=step, wall_time=time.time(), **what))

  def write(step, row):
    with files.naming(path):
      for name, value in row.items():
        tell(step, summary=summary.scalar(name, value))
      board.flush()

  # TensorBoard hides what earlier event files hold at this step and after.
  start = proto.SessionLog(status=proto.SessionLog.START)
  tell(step + 1, session_log=start)
  if config is not None:
    tell(max(step, 0), summary=summary.text('config', f'```\n{config}\n```'))
  return write, board.close


def _wandb(workdir: pathlib.Path, config):
  lib = _need('wandb', 'metrics.wandb')
  name = workdir / 'wandb_id.txt'  # a resumed run goes on in the same curve
  if not name.exists():
    name.write_text(uuid.uuid4().hex)
  run = lib.init(
    project='bapo_jax',
    name=workdir.resolve().name,
    id=name.read_text(),
    dir=str(workdir),
    config=config,
    resume='allow',
  )
  # W&B ignores steps it has already seen: after a resume metrics.jsonl is the truth
  return lambda step, row: run.log(row, step=step), run.finish


class Writers:
  """`write(step, metrics)` to every sink, and `close()`; also a context manager."""

  def __init__(self, sinks):
    self._sinks = sinks

  def __call__(self, step: int, metrics: dict[str, float]):
    check(metrics)
    row = {name: float(value) for name, value in metrics.items()}
    for write, _ in self._sinks:
      write(int(step), row)

  def close(self):
    for _, close in self._sinks:
      close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


def open_writers(
  workdir, step: int, *, tensorboard: bool = True, wandb: bool = False, config=None
) -> Writers:
  """Writers into `workdir`; only one process of a run may hold them.

  Args:
    workdir: made if it does not exist.
    step: the step resumed from; rows after it are dropped. -1 for a fresh start, which
      drops them all.
    tensorboard: event files in workdir/tensorboard.
    wandb: Weights & Biases too.
    config: shown beside the curves; a dict if wandb is to read it.
  """
  workdir = pathlib.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  sinks = []
  if wandb:  # first, for what is missing shall be said before rows are dropped
    sinks.append(_wandb(workdir, config))
  if tensorboard:
    sinks.append(_tensorboard(workdir, step, config))
  return Writers([_jsonl(workdir, step), *sinks])


COLUMNS = (  # label, metric, format
  ('acc', 'rollout/accuracy', '5.3f'),
  ('len', 'rollout/length', '6.0f'),
  ('kl', 'loss/kl', '7.4f'),
  ('entropy', 'loss/entropy', '6.3f'),
  ('share', 'clip/share', '5.3f'),
  ('bounds', 'clip/low', '5.3f'),
  ('..', 'clip/high', '5.3f'),
  ('clipped', 'clip/fraction', '6.4f'),
  ('grad', 'learner/grad_norm', '8.3g'),
  ('tok/s', 'rollout/tokens_per_s', '6.0f'),
  ('sec', 'time/step', '6.1f'),
)


def legend() -> str:
  """What the columns of `line` are, for the console."""
  named = [f'{label}: {name}' for label, name, _ in COLUMNS if label != '..']
  return f'columns ({", ".join(named)}); all metrics: metrics.GLOSSARY'


def line(step: int, steps: int, metrics: dict[str, float]) -> str:
  """The console's line for a step; columns stand under each other, '-' is missing."""
  cells = [f'{step:>{len(str(steps))}}/{steps}']
  for label, name, form in COLUMNS:
    width = int(form.split('.')[0])
    text = format(float(metrics[name]), form) if name in metrics else '-'
    cells.append(f'{label} {text:>{width}}')
  return '  '.join(cells).replace('  .. ', ' .. ')
