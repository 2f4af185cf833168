"""Own reward functions: what they may return, and what happens if they misbehave."""

import asyncio
import json
import os
import pathlib
import textwrap

import pytest

from bapo_jax import custom_code
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.score import Sample, Scorer

HERE = pathlib.Path(__file__).parents[1]
MY = f'{HERE / "my_functions.py"}'
ROW = '{"answer": "42", "problem": "6*7"}'
GOOD = Sample(r'\boxed{42}', '42', '', '6*7', (1, 2, 3), ROW)
BAD = GOOD._replace(response='41', tokens=(1,))


def rights(verdicts):
  return [verdict.right for verdict in verdicts]


def scored(rule, *samples, **knobs):
  return Scorer(Verification.model_validate({'rule': rule} | knobs))(samples)


def test_a_function_sees_tokens_and_row_and_names_its_parts():
  good, bad = scored(f'{MY}:score', GOOD, BAD, custom={'per_token': 0.1})
  assert (good.right, bad.right) == (True, False)
  assert good.reward == pytest.approx(1 - 0.3) and bad.reward == pytest.approx(-0.1)
  assert bad.parts == {'right': 0.0, 'length': -0.1}  # their sum is the reward


def test_the_first_rule_decides_and_all_add_to_the_reward():
  rule = f'exact,{MY}:brief'
  good, bad = scored(rule, GOOD, BAD, weights=(2.0, -1.0))
  assert (good.right, bad.right) == (True, False)
  assert good.reward == pytest.approx(2 - 1 / 4) and bad.reward == pytest.approx(-1 / 2)
  assert good.answer == '42'  # for votes
  (other,) = scored(f'{MY}:brief,exact', GOOD, right_from=0.3)
  assert other.right is False and other.reward == pytest.approx(1.25)


@pytest.mark.parametrize('name', ['judge', 'longest_first', 'score', 'brief'])
def test_a_process_and_this_process_agree(verifier, name):
  samples = [GOOD, BAD, GOOD]
  here = scored(f'{MY}:{name}', *samples)
  assert verifier(f'{MY}:{name}').submit(samples).result() == here


def test_a_registered_function_runs_in_a_thread(verifier):
  calls = []

  def graded(sample):
    calls.append(sample)
    return 0.75

  made = verifier(custom_code.register(graded))
  (verdict,) = made.submit([GOOD]).result()
  assert verdict.right and verdict.reward == 0.75 and made._pool is None
  assert calls[0].row == {'answer': '42', 'problem': '6*7'}
  made.close()  # a closed verifier may be used again
  assert made.submit([GOOD]).one(0) == verdict and len(calls) == 2


@pytest.mark.parametrize(
  ('value', 'right', 'reward'),
  [
    ('0.4', False, 0.4),
    ('Verdict(True, "by hand", "7", 0.2)', True, 0.2),
    ('{"a": 0.5, "b": 0.25}', True, 0.75),
    ('Verdict(np.bool_(True), "by hand", None, np.float32(0.5))', True, 0.5),
    ('Verdict(None, "by hand", None, -1)', None, 0.0),
    ('{}', False, 0.0),
  ],
)
def test_what_a_function_may_return(tmp_path, value, right, reward):
  (verdict,) = scored(written(tmp_path, f'return {value}'), GOOD)
  assert verdict.right is right and verdict.earned == reward
  json.dumps(verdict)  # a process sends it


STEPS = "@bapo_jax.declare(steps='{}')\ndef score(sample):"


@pytest.mark.parametrize(
  ('unit', 'value', 'found'),
  [
    # The tokens of GOOD end after 3, 7 and 10 characters.
    ('characters', '{"a": 1, "steps": [(1, 0.5), (3, 1), (4, 2)]}', [1, 1, 2]),
    ('characters', '{"steps": [(7, 0.5), (8, 1), (10, 2)]}', [2, 3, 3]),
    (
      'tokens',
      'Verdict(True, "r", None, 1, None, [(1, 0), (3, np.float32(2))])',
      [1, 3],
    ),
    ('tokens', '{"a": 1, "steps": []}', []),
  ],
)
def test_a_step_ends_at_the_token_with_its_last_character(tmp_path, unit, value, found):
  sample = GOOD._replace(ends=(3, 7, 10))
  (verdict,) = scored(written(tmp_path, f'return {value}', STEPS.format(unit)), sample)
  assert [end for end, _ in verdict.steps or ()] == found and verdict.right is not None
  assert 'steps' not in verdict.parts
  json.dumps(verdict)


def test_the_steps_of_all_functions_have_their_weights(tmp_path):
  place = written(tmp_path, 'return {"steps": [(2, 3)]}', STEPS.format('tokens'))
  rule = f'exact,{place},{MY}:halves'
  sample = GOOD._replace(ends=(3, 7, 10))
  (verdict,) = scored(rule, sample, weights=(1.0, 2.0, -1.0))
  assert verdict.steps == [(2, 6.0), (2, -0.0), (3, -2.0)]


@pytest.mark.parametrize(
  ('unit', 'value', 'reason'),
  [
    (
      '',
      '{"steps": []}',
      "returned steps=[], which cannot be used: it declares steps=''",
    ),
    (
      'tokens',
      '0.5',
      "returned steps=None, which cannot be used: it declares steps='tokens'",
    ),
    ('tokens', '{"steps": [(4, 1)]}', 'cannot be used: a step ends at 4 of 3 tokens'),
    ('characters', '{"steps": [(0, 1)]}', 'a step ends at 0 of 10 characters'),
    ('tokens', '{"steps": [(1, math.nan)]}', 'cannot be used: not a finite number'),
    ('tokens', 'Verdict(None, "by hand", None)', 'by hand'),
  ],
)
def test_steps_that_do_not_fit_are_undecided(tmp_path, unit, value, reason):
  sample = GOOD._replace(ends=(3, 7, 10))
  head = STEPS.format(unit) if unit else 'def score(sample):'
  (verdict,) = scored(written(tmp_path, f'return {value}', head), sample)
  assert verdict.right is None and not verdict.steps and reason in verdict.reason


@pytest.mark.parametrize(
  ('body', 'reason'),
  [
    ('return None', 'returned None'),
    ('return "1.0"', "returned '1.0', not a finite number"),
    ('return 1e39', 'returned 1e+39, not a finite number'),  # inf in float32
    ('return Verdict(True, "r", None, 1, {"a": math.nan})', ', not a finite number'),
    ('return Verdict("yes", "r", None)', ', not a finite number'),
    ('raise SystemExit(3)', 'raises SystemExit: 3 (own.py, line 4)'),
    ('import json\njson.loads("?")', 'column 1 (char 0) (own.py, line 5)'),
  ],
)
def test_what_a_function_should_not_do_is_undecided(tmp_path, body, reason):
  place = written(tmp_path, body)
  (verdict,) = scored(place, GOOD)
  assert verdict.right is None and verdict.earned == 0.0
  assert verdict.reason.endswith(reason) and verdict.reason.startswith(place)


def written(folder, body, head='def score(sample):'):
  """The place of a reward function with this body."""
  path = folder / 'own.py'
  start = 'import math, bapo_jax, numpy as np\n'
  start += 'from bapo_jax.rewards.answers import Verdict\n'
  path.write_text(f'{start}{head}\n{textwrap.indent(body, "  ")}\n')
  return f'{path}:score'


def test_a_batched_function_that_returns_too_few_values_decides_none(tmp_path):
  head = '@bapo_jax.declare(batched=True)\ndef score(samples):'
  verdicts = scored(written(tmp_path, 'return [1.0]', head), GOOD, BAD)
  assert rights(verdicts) == [None, None]
  assert verdicts[0].reason.endswith('it returned 1 values for 2 samples')


ASYNC = """
import functools
import bapo_jax

@bapo_jax.declare(batched=True)
async def together(samples):
  return [float(len(samples))] * len(samples)

class Together:
  @bapo_jax.declare(batched=True)
  async def __call__(self, samples, *, scale: float = 1.0):
    return [scale * len(samples)] * len(samples)

class Alone:
  async def __call__(self, sample):
    return float(len(sample.tokens))

called, partial, alone = Together(), functools.partial(together), Alone()
"""


@pytest.mark.parametrize('name', ['together', 'called', 'partial', 'alone'])
def test_an_async_function_may_be_batched_or_an_object(verifier, tmp_path, name):
  path = tmp_path / 'own.py'
  path.write_text(ASYNC)
  made = verifier(f'{path}:{name}')
  batched = name != 'alone'
  assert made.starts_early(['exact']) != batched  # it waits for the whole batch
  verdicts = made.submit([GOOD, BAD, GOOD]).result()
  assert [v.reward for v in verdicts] == [3.0, 3.0 if batched else 1.0, 3.0]


def test_a_function_that_hangs_is_killed_and_the_next_is_scored(verifier, tmp_path):
  body = 'import time\nif sample.response == "41": time.sleep(60)\nreturn 1.0'
  made = verifier(written(tmp_path, body), timeout=1.0, workers=1)
  # The grace is for functions that stop by themselves.
  verdicts = made.submit([GOOD, BAD, GOOD]).result()
  assert rights(verdicts) == [True, None, True]
  assert verdicts[1].reason == 'took over rewards.timeout=1 s'


def test_an_async_function_that_waits_too_long_does_not_stop_the_others(tmp_path):
  body = 'import asyncio\nawait asyncio.sleep(30 * (sample.response == "41"))\nreturn 1'
  place = written(tmp_path, body, 'async def score(sample):')
  verdicts = scored(place, GOOD, BAD, GOOD, timeout=0.2, parallel=2)
  assert rights(verdicts) == [True, None, True]
  assert verdicts[1].reason == f'{place}: took over rewards.timeout=0.2 s'


def test_a_timeout_of_the_function_itself_is_its_own(tmp_path):
  body = 'raise TimeoutError("the judge is busy")'
  (verdict,) = scored(written(tmp_path, body, 'async def score(sample):'), GOOD)
  assert verdict.reason.endswith(':score: the judge is busy')


# The lock belongs to the event loop in which a call waits for it first.
LOCK = 'import asyncio\nlock = asyncio.Lock()\nasync def score(sample):'
WAITS = 'async with lock: await asyncio.sleep(60 * (sample.response == "41"))\nreturn 1'


def test_what_a_module_holds_serves_every_request_of_a_worker(verifier, tmp_path):
  place = written(tmp_path, WAITS, LOCK)
  made = verifier(place, workers=1)
  for _ in range(3):
    assert rights(made.submit([GOOD] * 4).result()) == [True] * 4

  async def cell():  # of a notebook, whose event loop is running
    return scored(place, GOOD) + made.submit([GOOD]).result()

  assert rights(asyncio.run(cell())) == [True, True]


def test_what_a_module_holds_survives_a_timeout_and_a_verifier(verifier):
  lock = asyncio.Lock()

  async def judge(sample):
    async with lock:
      await asyncio.sleep(60 * (sample.response == '41'))
    return 1.0

  for _ in range(2):
    made = verifier(custom_code.register(judge), timeout=0.3)
    verdicts = made.submit([GOOD, GOOD]).result()
    assert rights(verdicts) == [True, True]
    verdicts = made.submit([BAD]).result() + made.submit([GOOD, GOOD]).result()
    assert rights(verdicts) == [None, True, True]


@pytest.mark.parametrize('kind', ['def', 'async def'])
def test_nothing_is_called_with_nothing_nor_in_the_training_process(
  verifier, tmp_path, kind
):
  head = f'import os\n@bapo_jax.declare(batched=True)\n{kind} score(samples):'
  body = (
    f'with open({str(tmp_path / "calls")!r}, "a") as file:\n'
    '  print(os.getpid(), len(samples), file=file)\nreturn [1.0] * len(samples)'
  )
  made = verifier(written(tmp_path, body, head))
  for samples in ([GOOD, BAD], [], [GOOD]):
    assert len(made.submit(samples).result()) == len(samples)
  lines = (tmp_path / 'calls').read_text().split('\n')[:-1]
  assert sorted(line.split()[1] for line in lines) == ['1', '2']
  assert str(os.getpid()) not in [line.split()[0] for line in lines]


def test_at_most_so_many_calls_of_an_async_function_run_at_once(tmp_path):
  head = 'import asyncio\nlive, most = 0, 0\nasync def score(sample):'
  body = (
    'global live, most\nlive += 1\nmost = max(live, most)\nawait asyncio.sleep(0.01)\n'
    'live -= 1\nreturn float(most)'
  )
  verdicts = scored(written(tmp_path, body, head), *[GOOD] * 7, parallel=3)
  assert max(v.reward for v in verdicts) == 3.0


def test_eight_gigabytes_are_refused_and_the_run_goes_on(verifier, tmp_path):
  body = 'if sample.response == "41": bytearray(8 << 30)\nreturn 1.0'
  verdicts = verifier(written(tmp_path, body)).submit([GOOD, BAD, GOOD]).result()
  assert rights(verdicts) == [True, None, True]
  assert verdicts[1].reason in ('took over 2048 MiB', '2 workers died of it')
