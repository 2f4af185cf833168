"""Samples and verifies all responses of a run.

1. prompts are submitted and decoded; slow verdicts are requested during decoding;
2. the oldest finished groups are read and verified;
3. they become `Groups`, with the rewards for the learner.

All responses of training, re-evaluation and evaluation come from `rollout`.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax import types
from bapo_jax.data import conversation
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.conversation import Between, messages, parts_of, tokens_of
from bapo_jax.data.prompts import Problems
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.rewards import PendingVerdicts, Verifier
from bapo_jax.rewards.score import Sample
from bapo_jax.rollout.decode import Rows
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.given import Given
from bapo_jax.rollout.knobs import RolloutConfig
from bapo_jax.rollout.partial_rollouts import OnFinished, PartialRollouts
from bapo_jax.rollout.turns import Turn
from bapo_jax.runtime import exchange
from bapo_jax.runtime.progress import PhaseTimer, log, progress_bar
from bapo_jax.types import Groups, LogpDiff, Prompts, Tree

COUNT = ' (count)'  # in Rollout.parts, the number of decided responses
EMPTY_SEAT = Verdict(False, 'an empty seat', None)  # no verifier runs


@dataclasses.dataclass(frozen=True)
class Verification:
  """Turns finished responses into groups with rewards."""

  problems: Problems
  tokenizer: Tokenizer
  verifier: Verifier
  timer: PhaseTimer  # has the phases 'sample' and 'verify'
  # (groups, formatted_B) -> groups with the rewards for the learner
  shape: Callable[[Groups, np.ndarray], Groups] = lambda groups, formatted_B: groups

  @functools.cached_property
  def between(self) -> Between:
    """The text between a turn and the next."""
    environment = self.verifier.environment
    if environment is None:
      return Between()
    return conversation.between(self.tokenizer, environment.k.custom.role)

  def samples(self, turns: Sequence[Turn]) -> list[Sample]:
    """Describes turns to a verifier or to an environment."""
    environment = self.verifier.environment
    if environment:
      parts = [
        parts_of(self.tokenizer, self.between, turn.tokens_T, turn.mask_T)
        for turn in turns
      ]
    else:
      texts = tokenizer_lib.decode_responses(
        self.tokenizer,
        [turn.tokens_T for turn in turns],
        [turn.mask_T for turn in turns],
      )
      parts = [[text] for text in texts]
    reads = self.verifier.custom or environment
    samples = []
    for turn, texts in zip(turns, parts, strict=True):
      ids = turn.tokens_T[turn.mask_T].tolist() if reads else []
      row = self.problems.rows[turn.problem]
      ends = ()
      if self.verifier.steps:
        earlier = sum(map(len, texts[:-1:2]))
        ends = tuple(end - earlier for end in tokenizer_lib.ends(self.tokenizer, ids))
      samples.append(
        Sample(
          response=texts[-1],
          answer=row.answer,
          rule=row.verifier,
          prompt=row.problem,
          tokens=tuple(ids),
          row=row.fields,
          messages=messages(row.problem, texts, self.between.role, row.history)
          if reads
          else (),
          ends=ends,
        )
      )
    return samples


class Rollout(NamedTuple):
  """Groups, and the texts and verdicts of their P * G responses, row by row."""

  groups: Groups
  texts: list[str]  # of the responses verified here; '' for other responses
  verdicts: list[Verdict]  # of the same responses; EMPTY_SEAT for other responses
  # Index of a response verified here -> its messages, for an environment.
  conversations: Mapping[int, Sequence[Mapping[str, str]]] = MappingProxyType({})
  own: np.ndarray | None = None  # indices of responses verified here; None: all
  undecided: int = 0  # undecided responses of all processes
  failed: int = 0  # turns that the environment failed to answer, in all processes
  logp_diff: LogpDiff | None = None  # sampler against learner; None: not scored again
  submits: bool = True  # False: only groups of earlier submissions
  # Named part of custom rewards -> its sum over the responses of all processes, and
  # COUNT -> the number of decided responses.
  parts: Mapping[str, float] = MappingProxyType({})


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
  k: RolloutConfig = RolloutConfig(),
  given: Sequence[Given | None] = (),
) -> Rollout:
  """Samples G responses to each of P prompts, and returns up to P verified groups.

  With a token budget (k.max_tokens_per_step) decoding stops when it is spent, and
  unfinished responses continue in the next step, with its weights (partial rollouts;
  Balanced PO, section 5). A group submitted k.max_off_policy_steps ago is due: it is
  completed beyond the budget. `collect_due` returns due groups beyond P in this step.

  Args:
    rollouts: has at least P free places; may have unfinished responses; mutated.
    prompts: P rows; a row with id -1 is an empty seat, for which nothing is sampled.
    key: with the uid of a response and the position, determines the noise.
    step: learner step at which the groups are completed.
    policy_version: learner step that made the weights `params`.
    first_uid: uid of the first response; later responses count up from it.
    k: budget and maximum age of responses. With k.cache='refresh' the cache of
      unfinished responses is recomputed first, by the new weights; with 'keep' they
      continue on the keys and values that older weights computed.
    given: see `PartialRollouts.submit`.

  Returns:
    The P oldest finished groups; the last are empty if fewer than P have finished.
  """
  P = len(prompts.id_P)
  if not P:
    return empty(rollouts.engine, verification.verifier.steps)
  with verification.timer('sample'):
    if k.cache == 'refresh' or rollouts.cache_lost:
      rollouts.refresh(params)
    uid_B = first_uid + np.arange(P * rollouts.engine.group_size)
    rollouts.submit(prompts, uid_B.astype(np.uint32), step, given=given)
    pending = PendingVerifications(verification, rollouts)
    environment = verification.verifier.environment
    conversations = Conversations(verification) if environment else None
    with _progress(rollouts, pending.request_early) as on_finished:
      rollouts.decode(
        params,
        key,
        policy_version=policy_version,
        max_tokens=k.max_tokens_per_step,
        due_W=rollouts.due(step - k.max_off_policy_steps),
        on_finished=on_finished,
        environment=conversations,
        read=verification.tokenizer.decode,
      )
    places = rollouts.finished()[:P]
  failed = conversations.failed() if conversations else 0
  return pending.record(places, P, step)._replace(failed=failed)


def collect_due(
  rollouts: PartialRollouts,
  seats: int,
  *,
  verification: Verification,
  step: int,
  max_off_policy_steps: int,
) -> Rollout:
  """Returns the finished groups that were submitted `max_off_policy_steps` ago or more.

  `rollout` completes all due groups, but returns at most as many as it submits. A step
  that submits fewer groups than an earlier step calls this function for the remaining
  groups, so that no group exceeds the maximum age. Decodes nothing.

  Args:
    rollouts: mutated: the places are freed.
    seats: P, the number of groups returned; the last are empty if fewer are due.
  """
  places = rollouts.finished()
  due_W = rollouts.due(step - max_off_policy_steps)
  pending = PendingVerifications(verification, rollouts)
  places = places[due_W[places]][:seats]
  return pending.record(places, seats, step)._replace(submits=False)


def empty(engine: RolloutEngine, steps: bool = False) -> Rollout:
  """Returns a rollout without groups; see `types.empty_groups`."""
  groups = types.empty_groups(
    0, engine.group_size, engine.length, steps, engine.spec.routes
  )
  return Rollout(groups, [], [])


@contextlib.contextmanager
def _progress(
  rollouts: PartialRollouts, on_finished: OnFinished
) -> Generator[OnFinished]:
  """Yields a function that advances a progress bar and calls `on_finished`."""
  with progress_bar(rollouts.unfinished, 'sampling', 'response') as bar:

    def advance(rows: list[int]) -> None:
      rate = rollouts.tokens / max(bar.format_dict['elapsed'], 1e-9)
      status = f'{rate:.0f} tokens/s, {rollouts.busy} slots busy'
      bar.set_postfix_str(status, refresh=False)
      bar.update(len(rows))
      on_finished(rows)

    yield advance


class Conversations:
  """Asks the environment of a run about turns, and returns its messages as tokens."""

  def __init__(self, verification: Verification):
    self._v = verification
    environment = verification.verifier.environment
    assert environment
    self._environment = environment
    self.max_turns = environment.k.max_turns
    # Row -> (its pending answers, its index in them).
    self._asked: dict[int, tuple[PendingVerdicts, int]] = {}
    self._failures: collections.Counter[str] = collections.Counter()
    self._turns = 0

  def ask(self, turns: Sequence[Turn]) -> None:
    """Asks about turns that have ended."""
    self._turns += len(turns)
    samples = [
      sample._replace(rule='', number=turn.number, tokens_left=turn.left - 1)
      for turn, sample in zip(turns, self._v.samples(turns), strict=True)
    ]
    pending = self._environment.submit(samples)
    self._asked |= {turn.row: (pending, i) for i, turn in enumerate(turns)}

  def answers(self, at_least: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yields (row, tokens of the message); no tokens end the response.

    Waits for `at_least` answers, and yields all that have arrived.
    """
    at_least = min(at_least, len(self._asked))
    while True:
      futures = {row: pending.future(i) for row, (pending, i) in self._asked.items()}
      late = {row: x for row, x in futures.items() if x and not x.done()}
      if len(futures) - len(late) >= at_least:
        break
      first = concurrent.futures.FIRST_COMPLETED
      concurrent.futures.wait(late.values(), return_when=first)
    arrived = [row for row in futures if row not in late]
    heard = {str(row): self._message(*self._asked.pop(row)) for row in arrived}
    for row, tokens in exchange.merged(heard).items():
      yield int(row), tokens

  def _message(self, pending: PendingVerdicts, i: int) -> list[int]:
    """Returns the tokens of a message; none if there is none, or it cannot be used."""
    turn = pending.samples[i]
    message = pending.one(i)
    try:
      if message.failure:
        raise ValueError(message.failure)
      if message.text is None:
        return []
      last = turn.tokens[-1]
      tokens = tokens_of(self._v.tokenizer, self._v.between, message.text, last)
      if len(tokens) > turn.tokens_left:
        raise ValueError(f'{len(tokens)} tokens, but {turn.tokens_left} may follow')
      return tokens
    except ValueError as error:
      self._failures[str(error)] += 1
      return []

  def failed(self) -> int:
    """Returns how many turns have no answer that can be used, in all processes."""
    failures = sum(self._failures.values())
    if failures and not self._environment.failed:  # said once
      self._environment.failed = True
      ((reason, _),) = self._failures.most_common(1)
      log(
        f'rollout.environment: {failures} of {self._turns} turns have no usable answer '
        f'({reason}), and their responses end there; rollout/environment_failed counts '
        'such turns'
      )
    return int(exchange.total([failures])[0])


class PendingVerifications:
  """Requests verdicts on finished responses, during decoding if verdicts are slow."""

  def __init__(self, verification: Verification, rollouts: PartialRollouts):
    self._verification = verification
    self._rollouts = rollouts
    rows = verification.problems.rows
    ids = rollouts.id_W[rollouts.submitted_W >= 0]
    self._early = verification.verifier.starts_early(
      {rows[i].verifier for i in ids if i >= 0}
    )
    # Output row -> (its pending verdicts, its index in them).
    self._requested: dict[int, tuple[PendingVerdicts, int]] = {}

  def request_early(self, rows: list[int]) -> None:
    """Submits rows that have just finished for verification, if verdicts are slow."""
    if self._early:
      self._request(rows)

  def _request(self, rows: list[int]) -> None:
    """Submits those finished rows that this process verifies."""
    if turns := self._rollouts.turns(rows):
      v = self._verification
      pending = v.verifier.submit(v.samples(turns))
      self._requested |= {turn.row: (pending, i) for i, turn in enumerate(turns)}

  def record(self, places: np.ndarray, seats: int, step: int) -> Rollout:
    """Reads, verifies, rewards and frees the groups with these indices."""
    v = self._verification
    rollouts = self._rollouts
    with v.timer('sample'):
      rows = jax.block_until_ready(rollouts.read(places, seats))
    with v.timer('verify'):
      verified = self._verified(rows, places, step)
    rollouts.free(places)
    return verified

  def _verified(self, rows: Rows, places: np.ndarray, step: int) -> Rollout:
    """Returns shaped groups with these indices and their verdicts, then empty seats.

    Each process waits for the verdicts on the responses on its devices; the verdicts
    are summed over processes.
    """
    P, G, _ = rows.tokens_BT.shape
    id_P = np.pad(self._rollouts.id_W[places], (0, P - len(places)), constant_values=-1)
    row_B = (places[:, None] * G + np.arange(G)).ravel()
    filled_B = np.repeat(id_P >= 0, G)[: len(row_B)]
    own = np.flatnonzero(filled_B & self._rollouts.own_B[row_B])
    self._request([row for row in row_B[own].tolist() if row not in self._requested])
    texts = [''] * (P * G)
    verdicts = [EMPTY_SEAT] * (P * G)
    conversations = {}
    told_4B = np.zeros((4, P * G), np.int32)
    for seat in own:
      pending, i = self._requested[int(row_B[seat])]
      texts[seat] = pending.samples[i].response
      conversations[int(seat)] = pending.samples[i].messages
      verdict = verdicts[seat] = pending.one(i)
      bits = np.float32(verdict.earned).view(np.int32)
      right = verdict.right
      told_4B[:, seat] = right is True, right is None, verdict.formatted, bits
    # One collective sums all: right, undecided and formatted responses, and the bits of
    # rewards. All are 0 for responses that another process verifies.
    right_B, undecided_B, formatted_B, bits_B = exchange.total(told_4B)
    reward_B = bits_B.view(np.float32)
    groups = _fold(rows, id_P, right_B > 0, undecided_B == 0, reward_B, step)
    if self._verification.verifier.steps:
      groups = groups._replace(**_steps(rows, verdicts))
    groups = self._verification.shape(groups, formatted_B > 0)
    parts = {}
    if self._verification.verifier.custom:  # in every process
      decided = sum(verdicts[seat].right is not None for seat in own)
      sums = collections.Counter({COUNT: decided})
      for seat in own:
        sums.update(verdicts[seat].parts or {})
      parts = exchange.summed(sums)
    undecided = int(undecided_B.sum())
    return Rollout(groups, texts, verdicts, conversations, own, undecided, parts=parts)


def _steps(rows: Rows, verdicts: Sequence[Verdict]) -> dict[str, Array]:
  """Returns the fields of Groups with rewards of steps; every process must call it."""
  mask_PGT = exchange.whole(rows.response_mask_BT)
  reward_PGT = np.zeros(mask_PGT.shape, np.float32)
  end_PGT = np.zeros_like(mask_PGT)
  own = {str(b): verdict.steps for b, verdict in enumerate(verdicts) if verdict.steps}
  for b, steps in exchange.merged(own).items():
    seat = divmod(int(b), mask_PGT.shape[1])
    columns = np.flatnonzero(mask_PGT[seat])
    for end, reward in steps:
      reward_PGT[seat][columns[end - 1]] += reward
      end_PGT[seat][columns[end - 1]] = True
  # The product gives both the layout of the tokens.
  fields = {'step_reward_PGT': reward_PGT, 'step_end_PGT': end_PGT}
  return {name: rows.response_mask_BT * x for name, x in fields.items()}


@jax.jit
def _fold(
  rows: Rows,
  id_P: Array,
  correct_B: Array,
  decided_B: Array,
  reward_B: Array,
  step: Array,
) -> Groups:
  """Makes groups of rows, verdicts and rewards; undecided responses do not teach."""
  correct_PG = correct_B.reshape(rows.tokens_BT.shape[:2])
  decided_PG = decided_B.reshape(correct_PG.shape)
  return Groups(
    id_P=id_P,
    tokens_PGT=rows.tokens_BT,
    response_mask_PGT=rows.response_mask_BT,
    behavior_logp_PGT=rows.logp_BT,
    policy_version_PGT=rows.policy_version_BT,
    correct_PG=correct_PG,
    decided_PG=decided_PG,
    reward_PG=reward_B.reshape(correct_PG.shape),
    teaches_PG=decided_PG,
    completed_step_P=jnp.where(id_P < 0, -1, step).astype(jnp.int32),
    routes_PGTX=rows.routes_BTX,
  )
