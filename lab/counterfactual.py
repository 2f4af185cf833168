"""Applies other rules to the tokens of a recorded training step.

1. `read` loads the newest recorded step of a workdir, or a file that another trainer
   wrote (neutral_record.py): rows of tokens with their log-probabilities under the
   policy that sampled them and just before their update.
2. `apply` computes the bounds, and every token's weight in the gradient, under the
   advantage, clip and loss rules of any config; `staler` moves the policy further from
   the policy that sampled.
3. `summary` gives the numbers of a table row, `moved_by` lists the tokens that one rule
   moves and another cuts, and `searches` what a search of bounds finds in the rows of
   each update;
4. with the weights of the run, `cosines` compares the directions of the rules'
   gradients, and `entropy_changes` gives the change of entropy by a step of each rule;
5. For a page of papers/, `store_summaries` applies the rules of all arms to a recorded
   step of every run, and `recorded_table` renders the stored numbers.

All rows are treated as one minibatch, except by `searches`, although the step had
several, with ratios of different policies. Rows without an advantage have no ratios and
are left out.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from bapo_jax.algorithms import diagnostics, loss
from bapo_jax.algorithms.clip import Balanced, ClipRule, Recipe
from bapo_jax.learner import learner
from bapo_jax.models import logprobs, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.run import step_record
from bapo_jax.runtime import markdown
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import config as config_lib
from bapo_jax.training import inputs, policy
from bapo_jax.training.config import Config
from bapo_jax.training.evaluate import mean_and_error
from bapo_jax.types import CUTS, SOURCES, Bounds, Tree
from lab import experiments, neutral_record, rule_curves
from lab.experiments import Knobs

COLUMNS = {  # key of `summary` -> heading
  'low': 'lower bound',
  'high': 'upper bound',
  'share': 'share',
  'cut_positive': 'cut, A > 0',
  'cut_negative': 'cut, A < 0',
}
INSIDE = (0.9, 1.2)  # ratios that no bounds of the search cut (section 5)
STALER = (0, 1, 2, 4, 8)  # factors of the recorded log-ratios
ENDS = ('start', 'between', 'ends')  # the points where a search can stop


class Recorded(NamedTuple):
  """The computed rows of a recorded step; B rows of at most T response tokens."""

  config: Config  # of the run; the defaults for a file of another trainer
  step: int  # 0 for a file of another trainer
  reward_PG: np.ndarray  # f32, of every recorded group; nan: undecided
  row_B: np.ndarray  # int, index of each row into reward_PG, flattened
  source_B: np.ndarray  # int, index into SOURCES
  update_B: np.ndarray  # int, the update of the row's minibatch, from 1; 0: unknown
  behavior_logp_BT: np.ndarray  # f32, nats; 0 outside the loss mask
  logp_BT: np.ndarray  # f32, nats, under the policy before the row's update
  loss_mask_BT: np.ndarray  # bool
  # f32, the part of the advantages that is not of the reward of the response: of step
  # rewards and of a teacher. The rules of another config leave it as it is.
  extra_BT: np.ndarray
  pieces: list[list[str]]  # the tokens of each row as text
  # Tokens of prompt and response; None in old records, for problems with pictures, and
  # for files of other trainers.
  ids: list[tuple[list[int], list[int]]] | None


class Applied(NamedTuple):
  """The effect of a config's rules on recorded rows."""

  bounds: Bounds
  ratio_BT: np.ndarray  # f32, pi / mu of each token; 1 after the end of a row
  adv_BT: np.ndarray  # f32, times the weight of the source
  weight_BT: np.ndarray  # f32, weight in the gradient, scaled by row; 0 if cut
  cut_BT: np.ndarray  # u8, index into CUTS: why tokens with an advantage were cut
  start_BT: np.ndarray  # f32, the weights at the first bounds of a search


class Search(NamedTuple):
  """A search of bounds in the recorded rows of an update."""

  update: int  # from 1; 0: unknown
  rows: int
  tokens: int
  start_share: float  # of the gradient, tokens with A > 0, at the first bounds
  share: float  # at the last bounds
  low: float
  high: float
  stopped: str  # one of ENDS; '' for rules that do not search


class Token(NamedTuple):
  """A token in its context."""

  before: str  # the response up to the token
  text: str
  probability: float  # under the policy that sampled it
  ratio: float
  advantage: float


def read(path: str | os.PathLike[str]) -> Recorded:
  """Reads the newest recorded step of a workdir, or a file of neutral_record.py.

  Raises:
    ValueError: no step is recorded, no recorded row was computed, or a line of the file
      is wrong.
  """
  path = pathlib.Path(path)
  if path.is_file():
    step = 0
    groups = neutral_record.read(path)
    longest = max(len(r['ids']) for group in groups for r in group['responses'])
    changed = {'sampler.max_new_tokens': max(longest, 1)}
    config = config_lib.parse(config_lib.merged(Config().model_dump(), changed))
  else:
    config = config_lib.from_json(read_config(str(path)))
    step = step_record.newest(str(path))
    if step is None:
      raise ValueError(f'{path} has no recorded step; wait for its first checkpoint')
    groups = step_record.read(str(path), step)
  rows = rule_curves.computed(groups)
  if not rows:
    raise ValueError(f'{path}: no recorded response has an advantage')
  mask_BT, old_BT, logp_BT, source_B = rule_curves.arrays(rows)
  has_ids = all('prompt_ids' in g and not g.get('pictures') for g in groups)
  recorded = Recorded(
    config,
    step,
    np.asarray([[r['reward'] for r in g['responses']] for g in groups], np.float32),
    np.asarray([i for i, _, _ in rows]),
    source_B,
    np.asarray([r.get('update', g.get('update')) or 0 for _, g, r in rows]),
    old_BT,
    logp_BT,
    mask_BT,
    np.zeros(mask_BT.shape, np.float32),
    [response['pieces'] for _, _, response in rows],
    [(g['prompt_ids'], r['ids']) for _, g, r in rows] if has_ids else None,
  )
  by_token = {
    b: r['advantages'] for b, (*_, r) in enumerate(rows) if r.get('advantages')
  }
  if by_token:
    adv_BT = apply(recorded, config).adv_BT
    for b, adv_N in by_token.items():
      recorded.extra_BT[b, : len(adv_N)] = adv_N - adv_BT[b, : len(adv_N)]
  return recorded


def config_of(recorded: Recorded, knobs: Knobs) -> Config:
  """Returns the config of the run with some knobs changed.

  Raises:
    ValueError: a value of a knob is invalid.
  """
  return config_lib.parse(config_lib.merged(recorded.config.model_dump(), knobs))


def staler(recorded: Recorded, times: float) -> Recorded:
  """Returns the rows with every token's log-ratio multiplied.

  `times=0` gives the sampling policy, `times=1` the recorded policy.
  """
  moved_BT = recorded.logp_BT - recorded.behavior_logp_BT
  return recorded._replace(logp_BT=recorded.behavior_logp_BT + times * moved_BT)


def apply(recorded: Recorded, config: Config) -> Applied:
  """Returns bounds and weights under the rules of a config."""
  others: dict[str, Any] = dict.fromkeys(('config', 'step', 'pieces', 'ids'))
  arrays = recorded._replace(**others)
  undecided = bool(np.isnan(recorded.reward_PG).any())
  bounds, *weights = _apply(config, arrays, undecided)
  return Applied(bounds, *map(np.asarray, weights))


@functools.partial(jax.jit, static_argnames=('config', 'undecided'))
def _apply(config: Config, rows: Any, undecided: bool) -> tuple[Any, ...]:
  """Applies the rules to the arrays of a Recorded."""
  weight_S = jnp.asarray([getattr(config.batch.weights, x) for x in SOURCES])
  decided_PG = ~jnp.isnan(rows.reward_PG) if undecided else None
  reward_PG = jnp.nan_to_num(rows.reward_PG) if undecided else rows.reward_PG
  adv_PG = learner.compared(config.advantage, reward_PG, decided_PG)
  adv_B = adv_PG.reshape(-1)[rows.row_B]
  adv_B *= weight_S[rows.source_B]
  adv_BT = adv_B[:, None] + rows.extra_BT
  mask_BT = rows.loss_mask_BT
  old_BT = rows.behavior_logp_BT
  batch = rule_curves.batch_of(mask_BT, old_BT, old_BT, adv_BT, rows.source_B)
  scale_B = loss.row_scale(
    mask_BT, config.loss.aggregate, config.sampler.max_new_tokens
  )
  rules = config.loss, config.clip, config.mask
  _, bounds = config.loss(
    rows.logp_BT, batch, loss.finder(rules, rows.logp_BT, batch, scale_B)
  )
  start = bounds._replace(low=bounds.start_low, high=bounds.start_high)
  start_BT, weight_BT = (
    loss.weights(config.loss, rows.logp_BT, batch, b) * scale_B[:, None]
    for b in (start, bounds)
  )
  cut_BT = diagnostics.why_cut(weight_BT, batch, bounds)
  return bounds, loss.ratio(rows.logp_BT, batch), adv_BT, weight_BT, cut_BT, start_BT


def searches(recorded: Recorded, config: Config) -> list[Search]:
  """Returns the search of bounds in the recorded rows of each update, in their order.

  The minibatch of an update had more rows if not all of its groups were recorded.
  """
  by_update = []
  for update in np.unique(recorded.update_B).tolist():
    rows = only(recorded, np.flatnonzero(recorded.update_B == update))
    applied = apply(rows, config)
    low = float(applied.bounds.low.mean())
    high = float(applied.bounds.high.mean())
    by_update.append(
      Search(
        update,
        rows=len(rows.row_B),
        tokens=int(rows.loss_mask_BT.sum()),
        start_share=_share(applied.start_BT),
        share=_share(applied.weight_BT),
        low=low,
        high=high,
        stopped=_stopped(config.clip, (low, high)),
      )
    )
  return by_update


def only(recorded: Recorded, index_N: np.ndarray) -> Recorded:
  """Returns some of the rows, without their text; rewards of groups stay whole."""
  of_rows = (name for name in Recorded._fields if name.endswith(('_B', '_BT')))
  kept = {name: getattr(recorded, name)[index_N] for name in of_rows}
  return recorded._replace(pieces=[], ids=None, **kept)


def _stopped(clip: ClipRule, bounds: tuple[float, float]) -> str:
  """Returns the point of ENDS where a search stopped; '' if the rule has no search."""
  if not isinstance(clip, Balanced | Recipe):
    return ''
  path = clip if isinstance(clip, Balanced) else clip.settings
  start, end = zip(path.low, path.high, strict=True)
  at_end = 'ends' if np.allclose(bounds, end) else 'between'
  return 'start' if np.allclose(bounds, start) else at_end


def _share(weight_BT: np.ndarray) -> float:
  """Returns the share of the positive weights; nan without weights."""
  size = np.abs(weight_BT).sum()
  return float(np.maximum(weight_BT, 0).sum() / size) if size else np.nan


def summary(recorded: Recorded, applied: Applied) -> dict[str, float]:
  """Returns bounds, positive share, shares cut by sign, norm, and share in INSIDE.

  `masked` is the share of all tokens that were cut by a mask.
  """
  mask_BT, weight_BT = recorded.loss_mask_BT, applied.weight_BT
  ratio = np.exp((recorded.logp_BT - recorded.behavior_logp_BT)[mask_BT])
  adv_BT = np.where(mask_BT, applied.adv_BT, 0)
  return {
    'low': float(applied.bounds.low.mean()),
    'high': float(applied.bounds.high.mean()),
    'share': _share(weight_BT),
    'cut_positive': float((applied.cut_BT[adv_BT > 0] > 0).mean()),
    'cut_negative': float((applied.cut_BT[adv_BT < 0] > 0).mean()),
    'masked': float((applied.cut_BT[mask_BT] == CUTS.index('masked')).mean()),
    'norm': float(np.sqrt((weight_BT**2).sum())),
    'inside': float(((ratio > INSIDE[0]) & (ratio < INSIDE[1])).mean()),
  }


def moved_by(recorded: Recorded, one: Applied, other: Applied) -> Iterator[Token]:
  """Yields the tokens that `one` moves and `other` cuts, by decreasing |log-ratio|."""
  freed_BT = (other.cut_BT > 0) & (one.weight_BT != 0)
  distance_BT = np.abs(recorded.logp_BT - recorded.behavior_logp_BT)
  for b, t in sorted(np.argwhere(freed_BT).tolist(), key=lambda bt: -distance_BT[*bt]):
    pieces = recorded.pieces[b]
    yield Token(
      ''.join(pieces[:t]),
      pieces[t],
      float(np.exp(recorded.behavior_logp_BT[b, t])),
      float(one.ratio_BT[b, t]),
      float(one.adv_BT[b, t]),
    )


def weights_of(workdir: str, recorded: Recorded) -> tuple[ModelSpec, Tree]:
  """Returns the model of a workdir and its weights after the recorded step.

  Raises:
    ValueError: the step has no checkpoint, or the checkpoint is damaged.
  """
  model = inputs.open_model(recorded.config)
  read = policy.reader(recorded.config, model, workdir, recorded.step)
  flat = {path: read(path) for path in transformer.describe(model.spec)}
  return model.spec, transformer.unflatten(flat)


def _functions_of(recorded: Recorded, spec: ModelSpec) -> tuple[Callable, Callable]:
  """Returns two functions of the weights of the model.

  One returns (logp_BT, mean entropy) of the recorded tokens; the other also takes
  weight_BT, and returns the gradient of sum(weight * logp).
  """
  if recorded.ids is None:
    raise ValueError('the record has pictures or no token ids; use a new text-only run')
  # Rows of prompt and response, and the column of each recorded token in them.
  rows = [[*prompt, *ids] for prompt, ids in recorded.ids]
  X = max(map(len, rows))
  tokens_BX = jnp.asarray([row + [0] * (X - len(row)) for row in rows], jnp.int32)
  mask_BT = jnp.asarray(recorded.loss_mask_BT)
  start_B1 = np.asarray([[len(prompt)] for prompt, _ in recorded.ids])
  column_BT = np.minimum(start_B1 + np.arange(mask_BT.shape[1]), X - 1)
  temperature = recorded.config.sampler.temperature

  def stats(params: Tree) -> tuple[Array, Array]:
    of_row = logprobs.sequence_stats(params, tokens_BX, spec, temperature)
    logp_BT, entropy_BT = (
      jnp.take_along_axis(x, column_BT, 1) for x in (of_row.logp_BT, of_row.entropy_BT)
    )
    return logp_BT, (entropy_BT * mask_BT).sum() / mask_BT.sum()

  def objective(params: Tree, weight_BT: Array) -> Array:
    return (weight_BT * stats(params)[0]).sum()

  return stats, jax.jit(jax.grad(objective))


def rescored(recorded: Recorded, model: tuple[ModelSpec, Tree]) -> Recorded:
  """Returns the rows with log-probabilities under the weights of a model.

  Raises:
    ValueError: the record has no token ids, or its problems have pictures.
  """
  spec, params = model
  stats, _ = _functions_of(recorded, spec)
  logp_BT, _ = jax.jit(stats)(params)
  mask_BT = recorded.loss_mask_BT
  return recorded._replace(logp_BT=np.where(mask_BT, np.asarray(logp_BT), 0))


def cosines(
  recorded: Recorded, applied: Mapping[str, Applied], model: tuple[ModelSpec, Tree]
) -> np.ndarray:
  """Returns the cosine between the gradients of each pair of rules, [N, N].

  The gradient is that of sum(weight * logp) with respect to the parameters, at the
  weights of the model. It is the gradient of the rule's objective if the rules were
  applied to `rescored` rows.

  Raises:
    ValueError: the record has no token ids, or its problems have pictures.
  """
  spec, params = model
  _, direction = _functions_of(recorded, spec)
  rows = [
    ravel_pytree(direction(params, rule.weight_BT))[0] for rule in applied.values()
  ]
  gradient_NW = np.asarray(jnp.stack(rows), np.float64)
  gradient_NW /= np.linalg.norm(gradient_NW, axis=1, keepdims=True)
  return gradient_NW @ gradient_NW.T


def entropy_changes(
  recorded: Recorded,
  applied: Mapping[str, Applied],
  model: tuple[ModelSpec, Tree],
  step: float,
) -> dict[str, tuple[float, float]]:
  """Computes the change of entropy by one step of gradient ascent under each rule.

  The step follows the gradient of sum(weight * logp) of the recorded tokens, from the
  weights after the recorded step.

  Args:
    model: sizes and weights, from `weights_of`.
    step: length of the first rule's step relative to the length of the weights; the
      steps of the other rules keep their proportion to it.

  Returns:
    rule -> (change predicted by the derivative along the step, change measured by a
    second forward pass), of the mean entropy of the recorded tokens, nats.

  Raises:
    ValueError: the record has no token ids, or its problems have pictures.
  """
  spec, start = model
  stats, direction = _functions_of(recorded, spec)
  entropy = jax.jit(jax.value_and_grad(lambda params: stats(params)[1]))
  before, slope = entropy(start)
  gradients = {n: direction(start, rule.weight_BT) for n, rule in applied.items()}
  first = next(iter(gradients.values()))
  rate = step * float(optax.tree.norm(start) / optax.tree.norm(first))
  change = {}
  for name, gradient in gradients.items():
    moved = jax.tree.map(lambda x, g: x + rate * g, start, gradient)
    measured = float(entropy(moved)[0]) - float(before)
    predicted = rate * float(jnp.asarray(optax.tree.vdot(slope, gradient)))
    change[name] = predicted, measured
  return change


def summarise(workdir: str, arms: Mapping[str, Knobs], arm: str) -> dict[str, Any]:
  """Applies every arm's rules to the newest recorded step of a run.

  Args:
    arm: the arm of the run, a key of `arms`.

  Returns:
    the number of tokens, and the share inside all bounds of the search; a `summary` for
    each arm, and for each factor of the log-ratios under the rules of the run; and the
    number of recorded updates by the point where the search stopped (all 0 if the clip
    rule has no search).

  Raises:
    ValueError: no step is recorded.
  """
  recorded = read(workdir)
  groups = step_record.read(workdir, recorded.step)
  bounds = {g['update']: (g['low'], g['high']) for g in groups if g['update']}
  stopped = [_stopped(recorded.config.clip, pair) for pair in bounds.values()]

  def numbers(name: str, rows: Recorded) -> dict[str, float]:
    row = summary(rows, apply(rows, config_of(rows, arms[name])))
    return {key: float(f'{value:.5g}') for key, value in row.items()}

  return {
    'tokens': int(recorded.loss_mask_BT.sum()),
    'inside': numbers(arm, recorded)['inside'],
    'arms': {name: numbers(name, recorded) for name in arms},
    'staler': {str(times): numbers(arm, staler(recorded, times)) for times in STALER},
    'searches': {end: stopped.count(end) for end in ENDS},
  }


def recorded_table(stored: Sequence[Mapping[str, Any]]) -> str:
  """Returns tables of the stored runs, a row per arm and a row per staleness.

  Numbers are means and standard errors over runs.
  """
  mean, error = mean_and_error([run['inside'] for run in stored])
  tokens = sum(run['tokens'] for run in stored)
  low, high = INSIDE
  text = (
    f'{len(stored)} recorded steps, {tokens} tokens with an advantage: '
    f'{mean:.1%} ± {error:.1%} of them have a ratio between {low} and {high}.'
  )
  count = {end: sum(run['searches'][end] for run in stored) for end in ENDS}
  if total := sum(count.values()):
    text += (
      f' Of their {total} recorded updates {count["start"]} have the bounds of the '
      f'start, {count["ends"]} those of both ends, {count["between"]} others.'
    )
  arms = _means([run['arms'] for run in stored], 'rules of', COLUMNS)
  columns = COLUMNS | {'inside': 'inside'}
  staler = _means([run['staler'] for run in stored], 'log-ratios times', columns)
  return f'{text}\n\n{arms}\n\n{staler}'


def _means(
  runs: Sequence[Mapping[str, Any]], corner: str, columns: Mapping[str, str]
) -> str:
  rows = []
  for name in runs[0]:
    row = [name]
    for column in columns:
      mean, error = mean_and_error([run[name][column] for run in runs])
      row.append(f'{mean:.3f} ± {error:.3f}')
    rows.append(row)
  header = [corner, *columns.values()]
  return markdown.table(rows, header, 'l' + 'r' * len(columns))


def store_summaries(module: Any, folder: str, runs: str) -> None:
  """Stores summaries of the page's recorded runs that have a workdir in `runs`."""
  experiment, arm, others = module.RECORDED
  arms = {name: module.ARMS[name] for name in others}
  path = os.path.join(folder, 'results', 'recorded')
  for name, run in experiments.runs(module.get_experiment(experiment)).items():
    workdir = os.path.join(runs, experiment, name)
    if run.arm == arm and os.path.isdir(workdir):
      experiments.write(path, name, summarise(workdir, arms, arm))
  experiments.pack(path)
