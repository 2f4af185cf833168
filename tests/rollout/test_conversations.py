"""Responses of several turns, between which an environment answers."""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
import three_problems
from three_problems import ACTOR, ENGINE, PARAMS, SPEC, TOKENIZER, WIDTH, problems

from bapo_jax import custom_code, sharding
from bapo_jax.data import prompts, tokenizer
from bapo_jax.learner import scoring
from bapo_jax.models import decoder
from bapo_jax.models.transformer import LayerKind
from bapo_jax.rewards import environments, score
from bapo_jax.rewards.answers import Message
from bapo_jax.rewards.knobs import (
  CustomEnvironment,
  CustomReward,
  Environment,
  Verification,
)
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rewards.score import Sample
from bapo_jax.rollout import decode, rollout, shapes
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.rollout.turns import Turn
from bapo_jax.rollout.turns import stopped as stopped_at
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.types import Prompts, ended

NEW, GROUP, TURNS = 28, 8, 3
LONG = dataclasses.replace(
  ENGINE,
  max_new_tokens=NEW,
  group_size=GROUP,
  max_num_seqs=8,
  prefill_batch_size=4,
  tokens_per_dispatch=5,
)
# Windows shorter than a turn.
KINDS = (LayerKind(4, 'plain'), LayerKind())
WINDOWS = dataclasses.replace(
  LONG, spec=dataclasses.replace(SPEC, layers=2, kinds=KINDS, norms='sandwich')
)
KEY = jax.random.key(0)
IDS = [2, 0, 1, -1]
(EOS,) = TOKENIZER.eos


def echo(turn):
  """Answers with the number of the turn and the length of its text."""
  return f'{turn.number}={len(turn.response)}\n'


def slow(turn):
  """Answers like echo, later or sooner than the turns before."""
  time.sleep(0.01 * (len(turn.response) * 7 % 5))
  return echo(turn)


async def jittery(turn):
  """Answers like echo, in another order."""
  await asyncio.sleep(0.01 * (len(turn.response) * 3 % 7))
  return echo(turn)


@custom_code.declare(batched=True)
def together(turns):
  return [echo(turn) for turn in turns]


def verifier_of(
  environment, turns=TURNS, verify=Verification(rule='exact'), knobs=None, **limits
) -> Verifier:
  """Verifies the last turn; `environment` is a function, or path/to/file.py:name."""
  path = environment
  if callable(environment):
    path = custom_code.register(environment)
  custom = custom_code.section([path], CustomEnvironment)(**knobs or {})
  return Verifier(
    verify, Environment(rule=path, custom=custom, max_turns=turns, **limits)
  )


def sample(environment, *, engine=LONG, ids=IDS, step=5, **given) -> rollout.Rollout:
  """A rollout of these problems, by the weights of step 5; closes the verifier."""
  verifier = environment
  if not isinstance(environment, Verifier):
    verifier = verifier_of(environment)
  with contextlib.closing(verifier):
    return three_problems.sample(ids, verifier, engine=engine, step=step, **given)


def rows_of(sampled: rollout.Rollout):
  """Yields (prompt length, tokens_T, mask_T, logp_T) of each filled row."""
  g = jax.tree.map(np.asarray, sampled.groups)
  lengths = np.asarray(prompts.prompts_by_id(problems(), g.id_P).length_P)
  for p, r in np.ndindex(g.reward_PG.shape):
    if g.id_P[p] >= 0:
      row = g.tokens_PGT[p, r], g.response_mask_PGT[p, r], g.behavior_logp_PGT[p, r]
      yield p * GROUP + r, int(lengths[p]), *row


@functools.cache
def reference() -> rollout.Rollout:
  return sample(echo)


def assert_same(a: rollout.Rollout, b: rollout.Rollout):
  for name, x, y in zip(a.groups._fields, a.groups, b.groups, strict=True):
    np.testing.assert_array_equal(x, y, err_msg=name)


def by_hand(uid, prompt, answer, stop=()):
  """Samples one response turn by turn: every turn is a response to a longer prompt.

  The noise is of (uid, position), so a turn needs no environment and no other row.
  """
  row = list(prompt)
  logp = [0.0] * len(row)
  mask = [False] * len(row)
  for turn in range(1, TURNS + 1):
    longest = len(prompt) + NEW - len(row)
    engine = dataclasses.replace(
      LONG, max_prompt_tokens=len(row), max_new_tokens=longest, group_size=1
    )
    rollouts = PartialRollouts(engine, 1)
    given = np.asarray([row], np.int32)
    ask = Prompts(np.asarray([0]), given, np.asarray([len(row)], np.int32))
    rollouts.submit(ask, np.asarray([uid]))
    rollouts.decode(decoder.actor(PARAMS, SPEC), KEY)
    found = jax.tree.map(lambda x: np.asarray(x)[0], rollouts.rows)
    n = int((found.policy_version_BT >= 0).sum())
    part = found.tokens_BT[len(row) :][:n].tolist()
    # As an oracle, the text is read again after each token.
    cuts = [k for k in range(1, n + 1) if any(x in text_of(part[:k]) for x in stop)]
    n = min([n, *cuts])
    part = part[:n]
    logp += found.logp_BT[len(row) :][:n].tolist()
    row += part
    mask += [True] * n
    text = text_of(part)
    left = len(prompt) + NEW - len(row)
    if (not cuts and part[-1] != EOS) or turn == TURNS or left < 2:
      break
    message = answer(turn, text)
    (ids,) = tokenizer.encode(TOKENIZER, [message])
    if len(ids) >= left:
      break
    row += ids
    logp += [0.0] * len(ids)
    mask += [False] * len(ids)
  return row, mask, logp, text


def text_of(ids):
  return ''.join(making.CHARACTERS[i] for i in ids if i != EOS)


def assert_sampled_by_hand(sampled, stop=()):
  turns = []
  for b, length, tokens_T, mask_T, logp_T in rows_of(sampled):
    row, mask, logp, text = by_hand(
      b, tokens_T[:length], lambda turn, text: f'{turn}={len(text)}\n', stop
    )
    np.testing.assert_array_equal(tokens_T[: len(row)], row)
    assert not tokens_T[len(row) :].any() and not logp_T[len(row) :].any()
    np.testing.assert_array_equal(np.flatnonzero(mask_T), np.flatnonzero(mask))
    np.testing.assert_allclose(logp_T[: len(row)], logp, atol=1e-5)
    assert sampled.texts[b] == text  # what the verifier reads is the last turn
    turns.append(1 + (np.diff(np.flatnonzero(mask_T)) > 1).sum())
  assert set(turns) == {1, 2, 3}  # or nothing was tested


def test_every_turn_is_sampled_as_if_what_was_said_were_its_prompt():
  assert_sampled_by_hand(reference())
  g = reference().groups
  np.testing.assert_array_equal(
    g.policy_version_PGT, np.where(g.response_mask_PGT, 5, -1)
  )


@pytest.mark.parametrize('environment', [slow, jittery, together])
def test_nothing_depends_on_when_an_answer_comes(environment):
  assert_same(sample(environment), reference())


def assert_same_text(found: rollout.Rollout, expected: rollout.Rollout):
  """The same tokens, and log-probabilities up to rounding."""
  for name, wanted in expected.groups._asdict().items():
    if wanted is None:  # without process rewards
      continue
    mine = np.asarray(getattr(found.groups, name))[: len(IDS)]
    tolerance = 1e-5 if name == 'behavior_logp_PGT' else 0
    np.testing.assert_allclose(mine, wanted, atol=tolerance, err_msg=name)


def assert_time_leaves_every_bit(engine):
  found = sample(slow, engine=engine)
  assert_same_text(found, reference())
  assert_same(sample(echo, engine=engine), found)


@pytest.mark.parametrize(
  'knobs',
  [{'max_num_seqs': 5, 'prefill_batch_size': 2}, {'cache_segments': 4}],
  ids=str,
)
def test_slots_and_segments_leave_the_text_and_time_leaves_every_bit(knobs):
  engine = dataclasses.replace(LONG, **knobs)
  assert_time_leaves_every_bit(engine)


def test_a_row_is_recomputed_at_its_own_width(monkeypatch):
  widths = []

  class Watched(type(LONG)):
    def resume(self, params, slots, rows, id_A, entering, message_AT, *, columns):
      widths.append(columns)
      position_A = entering.position_A
      assert (position_A <= columns).all()
      taken = position_A[entering.slot_A < len(slots.row_S)]
      assert (taken > columns // 2).all() or columns == 8
      return super().resume(
        params, slots, rows, id_A, entering, message_AT, columns=columns
      )

  monkeypatch.setattr(shapes, 'SHORTEST', 8)
  engine = Watched(**vars(LONG))
  assert_time_leaves_every_bit(engine)
  assert len(set(widths)) > 1


def on_eight_devices(engine) -> rollout.Rollout:
  mesh = sharding.make(8, 1, 1)
  placed = jax.device_put(PARAMS, sharding.shardings(PARAMS, mesh, 'decode'))
  actor = decode.sync_actor(placed, SPEC, mesh)
  engine = dataclasses.replace(engine, mesh=mesh)
  return sample(echo, engine=engine, actor=actor, ids=[*IDS, -1, -1, -1, -1])


def test_eight_devices_sample_the_same_text():
  assert_same_text(on_eight_devices(LONG), reference())
  assert_same_text(on_eight_devices(STOPPED), stopped())


# --- partial rollouts -----------------------------------------------------------------


def stepped(environment, steps=5, save_at=None, engine=LONG):
  """Groups of steps with a budget of twelve tokens, under weights that change."""
  rollouts = PartialRollouts(engine, 4 * 8)
  groups = []
  for step in range(steps):
    params = making.drifted(making.params(engine.spec), step)
    if step == save_at:
      state = jax.tree.map(np.array, rollouts.state())
      waits = set(rollouts.queue.answered)
      before = rollouts
      rollouts = PartialRollouts(engine, 4 * 8)
      rollouts.restore(jax.tree.map(jnp.asarray, state))
      assert rollouts.queue.asked == waits
      if engine.stop:  # a string may have begun
        busy = before.row_S >= 0
        assert (before.turn_S[busy] > WIDTH).any() or save_at < 2
        for name in ('turn_S', 'searched_S'):
          pair = (getattr(x, name)[busy] for x in (before, rollouts))
          np.testing.assert_array_equal(*pair)
      assert waits or not engine.done_check_lag  # or nothing is tested
    made = environment() if environment.__name__ == '<lambda>' else environment
    sampled = sample(
      made,
      actor=decoder.actor(params, engine.spec),
      engine=engine,
      rollouts=rollouts,
      step=step,
      first_uid=step * 4 * GROUP,
      max_tokens_per_step=12.0,
      max_off_policy_steps=7,
    )
    groups.append(jax.tree.map(np.asarray, sampled.groups))
  return groups, rollouts


def assert_weights_change(groups):
  """A turn is under newer weights than the turn before, or nothing is tested."""
  versions = np.concatenate([g.policy_version_PGT for g in groups])
  spread = [set(row[row >= 0].tolist()) for row in versions.reshape(-1, WIDTH + NEW)]
  assert max(map(len, spread)) > 1


def test_with_a_budget_the_weights_of_a_turn_do_not_depend_on_time():
  groups, rollouts = stepped(echo, 8)
  for environment in (slow, jittery):
    jax.tree.map(np.testing.assert_array_equal, groups, stepped(environment, 8)[0])
  assert_weights_change(groups)
  assert rollouts.turns_B.max() > 1


@pytest.mark.parametrize(
  ('save_at', 'lag', 'engine'),
  [(2, 1, LONG), (3, 1, LONG), (1, 0, LONG), (4, 0, LONG), (4, 1, WINDOWS)],
)
def test_a_restart_between_turns_goes_on_to_the_same_text(save_at, lag, engine):
  # With a lag, turns that the last dispatch has ended are answered and have no slot.
  engine = dataclasses.replace(engine, done_check_lag=lag)
  wanted, _ = stepped(echo, 6, engine=engine)
  found, _ = stepped(echo, 6, save_at, engine)
  jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_an_interrupted_call_asks_again():
  class Interrupted(Exception):
    pass

  def raises(rows):
    raise Interrupted

  engine = dataclasses.replace(LONG, max_num_seqs=4)
  rollouts = PartialRollouts(engine, len(IDS))
  verification = rollout.Verification(
    problems(), TOKENIZER, verifier_of(echo), PhaseTimer()
  )
  asked = prompts.prompts_by_id(problems(), IDS)
  rollouts.submit(asked, np.arange(len(IDS) * GROUP))
  actor = decoder.actor(PARAMS, SPEC)

  def go(on_finished):
    talks = rollout.Conversations(verification)
    rollouts.decode(
      actor, KEY, policy_version=5, on_finished=on_finished, environment=talks
    )

  interruptions = 0
  while rollouts.unfinished:
    try:
      go(raises)
    except Interrupted:
      interruptions += 1
  assert interruptions > 1
  rows = rollouts.read(np.arange(len(IDS)), len(IDS))
  np.testing.assert_array_equal(rows.tokens_BT, reference().groups.tokens_PGT)
  verification.verifier.close()


# --- stop strings ---------------------------------------------------------------------

STOP = ('4', '66', '78', 'oxed')  # a token, two tokens, a part of one
STOPPED = dataclasses.replace(LONG, stop=STOP)


@functools.cache
def stopped() -> rollout.Rollout:
  return sample(echo, engine=STOPPED)


@pytest.mark.parametrize('searched', [0, 1, 2, 5])
def test_the_token_that_completes_a_stop_string_is_found(searched):
  # Bytes, of which one token may be a part of a character, as in a byte-level BPE.
  pieces = ['é'.encode()[:1], 'é'.encode()[1:], b'b</', b'sea', b'rch>\n', b'</search>']

  def read(rows):
    return [b''.join(pieces[i] for i in row).decode(errors='replace') for row in rows]

  def find(tokens, *stop):
    return stopped_at(read, stop, [(tokens, searched)])[0]

  ids = [*[3] * searched, 0, 1, 2, 3, 4, 5]
  assert find(ids, '</search>') == find(ids, 'x', 'h>') == searched + 5
  assert find(ids, 'é') == searched + 2
  assert find(ids, 'b<', '</search>') == searched + 3
  assert find(ids, 'nowhere') == find(ids[: searched + 4], '</search>') == 0


def test_a_turn_ends_with_the_token_that_completes_a_stop_string():
  assert_sampled_by_hand(stopped(), STOP)
  for end in ('4', '66', '\\boxed{'):  # or nothing was tested
    assert any(text.endswith(end) for text in stopped().texts)


def test_up_to_a_stop_string_every_bit_is_that_of_a_run_without():
  found, whole = (sample(verifier_of(echo, 1), engine=x) for x in (STOPPED, LONG))
  pairs = zip(rows_of(found), rows_of(whole), strict=True)
  shorter = 0
  for (_, _, tokens_T, mask_T, logp_T), (_, length, *other) in pairs:
    end = length + mask_T.sum()
    assert mask_T[length:end].all()
    np.testing.assert_array_equal(tokens_T[:end], other[0][:end])
    np.testing.assert_array_equal(logp_T[:end], other[2][:end])
    shorter += mask_T.sum() < other[1].sum()
  assert shorter > 10
  # A response that a stop string ended is not truncated.
  g = jax.tree.map(np.asarray, found.groups)
  is_end_PGT = g.tokens_PGT == EOS
  is_ended = ended(g.response_mask_PGT, is_end_PGT, STOPPED.max_new_tokens).ravel()
  only_end_tokens = ended(g.response_mask_PGT, is_end_PGT).ravel()
  for b, _, tokens_T, mask_T, _ in rows_of(found):
    assert is_ended[b] == (mask_T.sum() < NEW or tokens_T[mask_T][-1] == EOS)
  assert is_ended.sum() - only_end_tokens.sum() > 10
  assert not is_ended[-GROUP:].any()  # empty seats


@pytest.mark.parametrize(
  'knobs',
  [
    {'tokens_per_dispatch': 1},
    {'tokens_per_dispatch': 28},
    {'max_num_seqs': 5, 'prefill_batch_size': 2, 'tokens_per_dispatch': 3},
    {'cache_segments': 4},
  ],
  ids=str,
)
def test_stop_strings_depend_neither_on_dispatches_nor_on_slots(knobs):
  found = sample(slow, engine=dataclasses.replace(STOPPED, **knobs))
  assert_same_text(found, stopped())


@pytest.mark.parametrize('save_at', [1, 2, 4])
def test_a_restart_finds_a_stop_string_that_had_begun(save_at):
  wanted, _ = stepped(echo, 6, engine=STOPPED)
  found, _ = stepped(echo, 6, save_at, STOPPED)
  jax.tree.map(np.testing.assert_array_equal, wanted, found)
  assert_weights_change(wanted)


def test_only_runs_with_stop_strings_have_programs_for_them():
  names = [
    {call.function.__name__ for call in engine.programs(ACTOR, places=2)}
    for engine in (LONG, STOPPED)
  ]
  assert names[1] - names[0] == {'recent'}


# --- the learner ----------------------------------------------------------------------


@pytest.mark.parametrize('engine', [LONG, WINDOWS])
def test_the_learner_gives_sampled_tokens_their_log_probabilities(engine):
  spec = engine.spec
  groups, _ = stepped(echo, 8, engine=engine)
  score = jax.jit(
    functools.partial(scoring.score, rows=8, spec=spec, temperature=LONG.temperature)
  )
  compared = 0
  for step in range(8):
    params = making.drifted(making.params(spec), step)
    for each in groups:
      logp_PGT = score(params, each)
      of_step = each.policy_version_PGT == step
      diff = np.abs(np.asarray(logp_PGT) - each.behavior_logp_PGT)[of_step]
      compared += of_step.sum()
      assert diff.max(initial=0) < 2e-5
  assert compared == sum(each.response_mask_PGT.sum() for each in groups) > 300


# --- environments that fail -----------------------------------------------------------

FAILING = """
import time


def misbehave(turn, *, how: str = '', at: int = 1):
  if turn.number < at:
    return f'{turn.number}=\\n'
  if how == 'raises':
    raise KeyError('nothing')
  if how == 'exits':
    raise SystemExit(3)
  if how == 'hangs':
    time.sleep(600)
  return {
    'megabyte': '7' * 2**20,
    'bytes': b'7',
    'number': 7,
    'empty': '',
    'unknown': 'seven',
    'special': '<eos>7',
  }[how]
"""
REASONS = {
  'raises': "KeyError: 'nothing'",
  'exits': 'SystemExit: 3',
  'hangs': 'took over',
  'megabyte': ' tokens, but',
  'bytes': "returned b'7', neither a message nor None",
  'number': 'returned 7, neither',
  'empty': "returned '', neither",
  'unknown': "no token for 's'",
  'special': "no token for '<'",
}


@pytest.mark.parametrize('at', [1, 2])
@pytest.mark.parametrize('how', REASONS)
def test_a_failing_environment_ends_responses_not_the_run(how, at, tmp_path, capsys):
  if (how, at) == ('hangs', 2):
    pytest.skip('takes seconds per row, and is the same path')
  path = tmp_path / 'failing.py'
  path.write_text(FAILING)
  limits = {'timeout': 0.2, 'deadline': 0.2, 'workers': 2}
  knobs = {'how': how, 'at': at}
  verifier = verifier_of(f'{path}:misbehave', knobs=knobs, **limits)
  is_slow = how in ('hangs', 'megabyte')
  engine = dataclasses.replace(LONG, group_size=4 if is_slow else 8)
  ids = [0] if is_slow else IDS
  sampled = sample(verifier, engine=engine, ids=ids)
  g = jax.tree.map(np.asarray, sampled.groups)
  begun = (g.response_mask_PGT[..., 1:] & ~g.response_mask_PGT[..., :-1]).sum(2)
  filled = g.id_P >= 0
  assert begun[filled].max() == at and begun[filled].min() == 1
  assert sampled.failed > 0
  said = capsys.readouterr().out
  assert said.count('rollout.environment: ') == 1 and REASONS[how] in said
  assert (g.completed_step_P[filled] == 5).all()


# --- environments with a state --------------------------------------------------------

GAME = """
import os


class Game:
  def __init__(self, *, dies: str = '', says: str = '', mark: str = '=', log: str = ''):
    self.dies, self.says, self.mark = dies, says, mark
    if log:
      with open(log, 'a') as file:
        file.write('.')

  def start(self, row):
    assert row['answer']
    self.heard = []
    return self.says or None

  def step(self, turn):
    self.heard.append(turn.response)
    assert len(self.heard) == turn.number
    assert self.heard == [x['content'] for x in turn.messages[1::2]]
    if self.dies and turn.number == 2 and not os.path.exists(self.dies):
      open(self.dies, 'w').close()
      os._exit(1)
    return f'{len(self.heard)}{self.mark}{len(turn.response)}\\n'


class Short:
  def start(self, row):
    return None
"""


def game(tmp_path, name='Game', **knobs):
  path = tmp_path / 'game.py'
  path.write_text(GAME)
  return verifier_of(f'{path}:{name}', knobs=knobs, workers=2)


def test_an_object_has_heard_all_turns_of_its_response(tmp_path):
  assert_same(sample(game(tmp_path)), reference())
  other = sample(game(tmp_path, mark='+'))
  assert (other.groups.tokens_PGT != reference().groups.tokens_PGT).any()


def test_the_turns_of_a_response_go_to_one_worker(tmp_path):
  path = tmp_path / 'made'
  sampled = sample(game(tmp_path, log=str(path)))
  rows = [(tokens_T, mask_T) for _, _, tokens_T, mask_T, _ in rows_of(sampled)]
  asked = sum(EOS in tokens_T[mask_T][: NEW - 2] for tokens_T, mask_T in rows)
  assert len(path.read_text()) == asked > 10


def test_a_new_worker_replays_the_turns(tmp_path):
  path = tmp_path / 'died'
  assert_same(sample(game(tmp_path, dies=str(path))), reference())
  assert path.exists()


def test_a_restart_replays_the_turns(tmp_path):
  # Every step has new processes.
  wanted, _ = stepped(echo, 6)
  found, _ = stepped(lambda: game(tmp_path), 6, save_at=2)
  jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_a_class_that_is_no_environment_is_refused(tmp_path, capsys):
  with pytest.raises(ValueError, match=r'without a method step; define start and step'):
    game(tmp_path, 'Short')
  sampled = sample(game(tmp_path, says='Hello'))
  assert sampled.failed and "start returned 'Hello'" in capsys.readouterr().out


def test_turns_are_answered_without_replays_and_objects_are_closed():
  made, closed, homes = [], [], set()

  class Counted:
    def start(self, row):
      made.append(self)

    def step(self, turn):
      return f'{turn.number}' if turn.number < 3 else None

    def close(self):
      closed.append(self)

  games = environments.Games(Counted)
  said = [{'role': 'user', 'content': '1+1'}]
  for number in (1, 2, 3):
    said = [*said, {'role': 'assistant', 'content': 'x'}]
    turn = Sample('x', row={'a': 1}, messages=said, number=number)
    homes.add(score.home(turn))
    again = games(turn)
    assert again == (None if number == 3 else str(number)) and len(made) == 1
    said = [*said, {'role': 'user', 'content': str(number)}]
  assert closed == made and len(homes) == 1


def test_none_ends_a_response_and_is_no_failure():
  def ends(turn):
    return None

  sampled = sample(ends)
  assert sampled.failed == 0
  assert_same(sampled, sample(verifier_of(echo, turns=1)))


def test_the_environment_reads_what_was_said():
  heard = []

  def listen(turn):
    heard.append(turn)
    return f'{turn.number}=\n'

  sampled = sample(listen)
  assert {turn.number for turn in heard} == {1, 2}
  longest = max(heard, key=lambda turn: (turn.number, len(turn.response)))
  roles = [x['role'] for x in longest.messages]
  assert roles == ['user', 'assistant', 'user', 'assistant']
  texts = [x['content'] for x in longest.messages]
  assert texts[0] == longest.prompt and texts[2] == '1=\n'
  assert texts[3] == longest.response
  assert 0 < longest.tokens_left < NEW
  # The verifier sees the last turn, and the record every turn.
  for b, said in sampled.conversations.items():
    assert said[-1]['content'] == sampled.texts[b]
    assert len(said) % 2 == 0


def test_what_was_said_begins_with_the_earlier_turns_of_the_prompt():
  history = ('user', '1+1'), ('assistant', '2')
  earlier = problems()
  rows = [row._replace(history=history) for row in earlier.rows]
  earlier = earlier._replace(rows=rows)
  verifier = verifier_of(echo)
  v = rollout.Verification(earlier, TOKENIZER, verifier, PhaseTimer())
  tokens_T = earlier.tokens_NT[0]
  ended = Turn(0, 0, 1, 9, tokens_T, np.arange(len(tokens_T)) == len(tokens_T) - 1)
  (said,) = v.samples([ended])
  (plain,) = dataclasses.replace(v, problems=problems()).samples([ended])
  assert said.messages[2:] == plain.messages and len(plain.messages) == 2
  assert [tuple(x.values()) for x in said.messages[:2]] == [*history]
  verifier.close()


@custom_code.declare(steps='characters')
def ends_of_text(sample):
  n = len(sample.response)
  return {'right': 1.0, 'steps': [(1, 0.5), (n, 2.0)] if n else []}


def test_steps_end_at_their_tokens_of_the_last_turn():
  rule = custom_code.register(ends_of_text)
  custom = custom_code.section([rule], CustomReward)()
  sampled = sample(verifier_of(echo, verify=Verification(rule=rule, custom=custom)))
  g = jax.tree.map(np.asarray, sampled.groups)
  turns = set()
  for p, r in np.argwhere(g.response_mask_PGT.any(2)):
    mask_T = g.response_mask_PGT[p, r]
    starts = np.flatnonzero(np.diff(mask_T, prepend=False) & mask_T)
    turns.add(len(starts))
    in_last_T = mask_T & (np.arange(len(mask_T)) >= starts[-1])
    text = np.flatnonzero(in_last_T & (g.tokens_PGT[p, r] != EOS))
    reward_T = np.zeros(len(mask_T))
    np.add.at(reward_T, [*text[:1], *text[-1:]], [0.5, 2.0][: 2 * len(text)])
    np.testing.assert_array_equal(g.step_end_PGT[p, r], reward_T > 0)
    np.testing.assert_array_equal(g.step_reward_PGT[p, r], reward_T)
  assert turns == {1, 2, 3}
  np.testing.assert_array_equal(g.tokens_PGT, reference().groups.tokens_PGT)


def test_the_environments_of_the_guide_answer(tmp_path):
  page = (pathlib.Path(__file__).parents[2] / 'docs/guide/conversations.md').read_text()
  blocks = re.findall(r'```python\n(# my.py\n[^`]*)```', page)
  for i, block in enumerate(blocks):
    (tmp_path / f'my{i}.py').write_text(block)

  def answered(path, *texts, **knobs):
    custom = custom_code.section([path], CustomEnvironment)(**knobs)
    caller = score.make(Environment(rule=path, custom=custom, max_turns=3))
    messages = caller([Sample(text, answer='17', number=1) for text in texts])
    return custom.role, [message.text for message in messages]

  near = 'I say 3.', 'or 20 then', 'It is 17.', 'no'
  told = 'user', ['too small', 'too large', None, None]
  assert answered(f'{tmp_path}/my0.py:nearer', *near, hints=2) == told
  calls = [
    f'<tool_call>{x}</tool_call>' for x in ('{"item": "tea"}', '{"item": 7}', '{')
  ]
  role, messages = answered(f'{tmp_path}/my1.py:shop', *calls, 'done')
  assert (role, messages[0], messages[-1]) == ('tool', '2', None)
  assert all(error.startswith('error: ') for error in messages[1:-1])


@pytest.mark.parametrize(
  ('rule', 'response', 'message'),
  [
    ('calculator', '12 + 3\n(2+3)*4=', '20\n'),
    ('calculator', '7/2=', '7/2\n'),
    ('calculator', '7/0=', None),
    ('calculator', '7' * 10**6 + '=', None),
    ('feedback', r'\boxed{3*4+5}', '=17\n'),
    ('feedback', r'\boxed{(5+3)*4-8}', '=24\n'),
    ('feedback', r'\boxed{5+}', None),
  ],
)
def test_built_in_environments(rule, response, message):
  caller = score.make(Environment(rule=rule, max_turns=3))
  answer = '{"numbers": [3, 4, 5], "target": 27}'
  assert caller([Sample(response, answer)]) == [Message(message)]
  right = Sample(r'\boxed{(5+4)*3}', answer)
  assert rule != 'feedback' or caller([right]) == [Message(None)]


def exactly(turn):
  """Leaves room for one more token."""
  return '7' * turn.tokens_left


def one_more(turn):
  return '7' * (turn.tokens_left + 1)


def test_a_message_that_leaves_a_token_fits_and_a_longer_one_is_left_out():
  g = jax.tree.map(np.asarray, sample(exactly).groups)
  answered = 0
  for _, length, tokens_T, mask_T, _ in rows_of(sample(exactly)):
    sampled_T = np.flatnonzero(mask_T)
    if sampled_T[-1] - length + 1 < NEW:  # its first turn ended too late for a message
      assert mask_T[sampled_T[0] : sampled_T[-1] + 1].all()
      continue
    assert sampled_T[-1] == length + NEW - 1
    if not mask_T[length : length + NEW].all():
      answered += 1
      assert sampled_T[-1] - sampled_T[-2] > 1  # one token after the message
      assert tokens_T[sampled_T[-2]] == EOS
  assert answered > 3 and g.tokens_PGT.shape[2] == WIDTH + NEW
  longer = sample(one_more)
  assert_same(longer, sample(verifier_of(echo, turns=1)))
  assert longer.failed >= answered
