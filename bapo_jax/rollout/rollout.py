"""rollout = decode + verify: the only door by which a response enters the run.

1. prompts are submitted and decoded; verdicts that take long are requested meanwhile;
2. the oldest finished groups are read and verified;
3. they become `Groups`, with the rewards that the learner sees.

Training, re-evaluation and evaluation all come through here, so what is recorded cannot
differ between them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import types
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.prompts import Problems
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.rewards import rewards
from bapo_jax.rewards.rewards import PendingVerdicts, Verifier
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.rollout import knobs
from bapo_jax.rollout.decode import Rows
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import OnFinished, PartialRollouts
from bapo_jax.runtime import exchange
from bapo_jax.runtime.progress import PhaseTimer, progress_bar
from bapo_jax.types import Groups, LogpDiff, Prompts, Tree

_D = knobs.RolloutConfig()
EMPTY_SEAT = Verdict(False, 'an empty seat', None)  # whatever the rule makes of no text


@dataclasses.dataclass(frozen=True)
class Verification:
  """How finished responses become groups with rewards."""

  problems: Problems
  tokenizer: Tokenizer
  verifier: Verifier
  timer: PhaseTimer  # of phases 'sample' and 'verify'
  # (groups, texts of the responses) -> groups with the rewards that the learner sees
  shape: Callable[[Groups, Sequence[str]], Groups] = rewards.plain


class Rollout(NamedTuple):
  """Groups, and what was read in their responses: P * G of each, row by row."""

  groups: Groups
  texts: list[str]  # of the responses that this process verified; '' of the others
  verdicts: list[Verdict]  # likewise
  own: np.ndarray | None = None  # which of the P * G responses these are; None: all
  undecided: int = 0  # of all responses
  logp_diff: LogpDiff | None = None  # where the learner scored the responses again
  submits: bool = True  # prompts of its own; False: only groups of earlier ones


def rollout(
  rollouts: PartialRollouts,
  params: Tree,
  prompts: Prompts,
  key: Array,
  *,
  verification: Verification,
  step: int,
  policy_version: int,
  first_uid: int = 0,
  max_tokens_per_step: float = _D.max_tokens_per_step,
  max_off_policy_steps: int = _D.max_off_policy_steps,
  cache: str = _D.cache,
) -> Rollout:
  """G verified responses to each of P prompts, or to prompts of earlier steps.

  With a token budget per slot, `max_tokens_per_step`, decoding stops when it is spent
  (partial rollouts; Balanced PO, section 5): the oldest finished groups are returned,
  at most P, and the next step's weights continue the rest. A group that was submitted
  `max_off_policy_steps` ago is completed whatever the budget; where more than P are
  due, `collect_due` returns the rest, so that none becomes older.

  Args:
    rollouts: places for P groups at least, some still unfinished; changes in place.
    params: the weights that decode, made by learner step `policy_version`.
    prompts: rows with id -1 are empty seats: nothing is sampled for them.
    key: keys the noise, with the uid of a response; uids count from `first_uid`.
    step: the learner step at which the groups are completed.
    cache: 'refresh': unfinished responses get the cache of these weights first, and
      new tokens' recorded log-probabilities are these weights'; 'keep': they go on with
      the keys and values of the older weights.
  """
  P = len(prompts.id_P)
  if not P:
    return nothing(rollouts.engine)
  with verification.timer('sample'):
    if cache == 'refresh' or rollouts.cache_lost:
      rollouts.refresh(params)
    uid_B = first_uid + np.arange(P * rollouts.engine.group_size)
    rollouts.submit(prompts, uid_B.astype(np.uint32), step)
    pending = PendingVerifications(verification, rollouts)
    with _progress(rollouts, pending.request_early) as on_finished:
      rollouts.decode(
        params,
        key,
        policy_version=policy_version,
        max_tokens=max_tokens_per_step,
        due_W=rollouts.due(step - max_off_policy_steps),
        on_finished=on_finished,
      )
    places = rollouts.finished()[:P]
  return _recorded(rollouts, pending, places, P, verification, step)


def collect_due(
  rollouts: PartialRollouts,
  seats: int,
  *,
  verification: Verification,
  step: int,
  max_off_policy_steps: int,
) -> Rollout:
  """The finished groups that were submitted `max_off_policy_steps` ago or before.

  `rollout` completes all of them, yet returns only as many as it submits: a step that
  submits less than the one before asks here for the rest. Nothing is decoded.

  Args:
    seats: P, rows of the result, empty ones last.
    step: the learner step; other arguments as in `rollout`.
  """
  places = rollouts.finished()
  due_W = rollouts.due(step - max_off_policy_steps)
  pending = PendingVerifications(verification, rollouts)
  places = places[due_W[places]][:seats]
  found = _recorded(rollouts, pending, places, seats, verification, step)
  return found._replace(submits=False)


def _recorded(
  rollouts: PartialRollouts,
  pending: 'PendingVerifications',
  places: np.ndarray,
  seats: int,
  verification: Verification,
  step: int,
) -> Rollout:
  """The groups at these places, verified and with rewards; frees the places."""
  with verification.timer('sample'):
    rows = jax.block_until_ready(rollouts.read(places, seats))
  with verification.timer('verify'):
    verified = pending.record(rows, places, step)
  groups = verification.shape(verified.groups, verified.texts)
  rollouts.free(places)
  return verified._replace(groups=groups)


def nothing(engine: RolloutEngine) -> Rollout:
  """A rollout of no prompts."""
  return Rollout(types.empty_groups(0, engine.group_size, engine.length), [], [])


@contextlib.contextmanager
def _progress(
  rollouts: PartialRollouts, on_finished: OnFinished
) -> Generator[OnFinished]:
  """`on_finished`, with a progress bar that every call advances."""
  with progress_bar(rollouts.unfinished, 'sampling', 'response') as bar:

    def advance(rows: list[int]) -> None:
      rate = rollouts.tokens / max(bar.format_dict['elapsed'], 1e-9)
      status = f'{rate:.0f} tokens/s, {rollouts.busy} slots busy'
      bar.set_postfix_str(status, refresh=False)
      bar.update(len(rows))
      on_finished(rows)

    yield advance


class PendingVerifications:
  """Verdicts of a rollout; slow ones are requested while other responses are decoded.

  Args:
    verification: verifies each response by the rule of its problem.
    rollouts: after the prompts are submitted.
  """

  def __init__(self, verification: Verification, rollouts: PartialRollouts):
    verifier, problems = verification.verifier, verification.problems
    self._verifier, self._problems = verifier, problems
    self._tokenizer, self._rollouts = verification.tokenizer, rollouts
    self._rules = problems.verifier or [''] * len(problems.answer)
    ids = rollouts.id_W[rollouts.submitted_W >= 0]
    self._early = verifier.slow({self._rules[i] for i in ids if i >= 0})
    self._requested: dict[int, tuple[PendingVerdicts, int]] = {}  # row -> its verdict

  def request_early(self, rows: list[int]) -> None:
    """Submits rows that have just ended, where verdicts take long."""
    if self._early:
      self._request(rows)

  def _submit(self, ids: np.ndarray, texts: list[str]) -> PendingVerdicts:
    """Submits texts[i] as a response to problem ids[i]."""
    answers = [self._problems.answer[i] for i in ids]
    return self._verifier.submit(answers, texts, [self._rules[i] for i in ids])

  def _request(self, rows: list[int]) -> None:
    """Submits those of these finished rows that this process holds."""
    own = [row for row in rows if self._rollouts.own_B[row]]
    if not own:
      return
    texts = decode_rows(self._tokenizer, self._rollouts.rows, own)
    ids = self._rollouts.id_W[np.asarray(own, int) // self._rollouts.engine.group_size]
    pending = self._submit(ids, texts)
    self._requested |= {row: (pending, i) for i, row in enumerate(own)}

  def record(self, rows: Rows, places: np.ndarray, step: int) -> Rollout:
    """The rows of these places, then empty seats, with their verdicts; waits.

    A process verifies the responses on its own devices; the verdicts are summed.
    """
    P, G, _ = rows.tokens_BT.shape
    id_P = np.pad(self._rollouts.id_W[places], (0, P - len(places)), constant_values=-1)
    row_B = (places[:, None] * G + np.arange(G)).ravel()
    filled_B = np.repeat(id_P >= 0, G)[: len(row_B)]
    own = np.flatnonzero(filled_B & self._rollouts.own_B[row_B])
    self._request([row for row in row_B[own].tolist() if row not in self._requested])
    texts, verdicts = [''] * (P * G), [EMPTY_SEAT] * (P * G)
    for seat in own:
      pending, i = self._requested[int(row_B[seat])]
      texts[seat], verdicts[seat] = pending.texts[i], pending.one(i)
    counts = [[verdict.right is each for verdict in verdicts] for each in (True, None)]
    right_B, undecided_B = exchange.total(counts)
    assert right_B.max(initial=0) <= 1, 'a response is verified by one process'
    groups = _fold(rows, id_P, right_B > 0, step)
    return Rollout(groups, texts, verdicts, own, int(undecided_B.sum()))


@jax.jit
def _fold(rows: Rows, id_P: Array, correct_B: Array, step: Array) -> Groups:
  """Groups, their rewards the verdicts."""
  correct_PG = correct_B.reshape(rows.tokens_BT.shape[:2])
  return Groups(
    id_P=id_P,
    tokens_PGT=rows.tokens_BT,
    response_mask_PGT=rows.response_mask_BT,
    behavior_logp_PGT=rows.logp_BT,
    policy_version_PGT=rows.policy_version_BT,
    correct_PG=correct_PG,
    reward_PG=correct_PG.astype(jnp.float32),
    teaches_PG=jnp.ones_like(correct_PG),
    completed_step_P=jnp.where(id_P < 0, -1, step).astype(jnp.int32),
  )


def texts(tokenizer: Tokenizer, groups: Groups) -> list[list[str]]:
  """The responses as text, a list per group."""
  P, G, T = groups.tokens_PGT.shape
  flat = tokenizer_lib.decode_responses(
    tokenizer,
    *(
      np.asarray(x).reshape(P * G, T)
      for x in (groups.tokens_PGT, groups.response_mask_PGT)
    ),
  )
  return [flat[i * G : (i + 1) * G] for i in range(P)]


def decode_rows(tokenizer: Tokenizer, rows: Rows, own: list[int]) -> list[str]:
  """These responses as text; their rows are on devices of this process."""
  version_BT = exchange.rows_of(rows.policy_version_BT, own)
  tokens_BT = exchange.rows_of(rows.tokens_BT, own)
  return tokenizer_lib.decode_responses(tokenizer, tokens_BT, version_BT >= 0)
