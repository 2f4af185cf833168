"""Which prompts come when: a pure function of (seed, step)."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_jax.data import prompts, tokenizer
from bapo_jax.data.knobs import ProblemsConfig, PromptsConfig

N, WIDTH = 10, 4


@pytest.fixture
def problems():
  """Problem i is the row i+1, i+1, ... of length 1 + i % WIDTH."""
  return made()


def made():
  length_N = 1 + np.arange(N, dtype=np.int32) % WIDTH
  tokens_NT = np.where(
    np.arange(WIDTH) < length_N[:, None], np.arange(1, N + 1)[:, None], 0
  ).astype(np.int32)
  names = [str(i) for i in range(N)]
  return prompts.Problems(
    np.arange(N, dtype=np.int32), tokens_NT, length_N, names, names
  )


def ids_of(problems, steps, seed=0, count=3):
  return [prompts.next_prompts(problems, s, seed, count).id_P.tolist() for s in steps]


def epoch(problems, steps, seed=0, count=3):
  return [i for step in ids_of(problems, steps, seed, count) for i in step]


def test_prompts_are_a_function_of_step_and_seed(problems):
  forwards = ids_of(problems, range(8))
  backwards = ids_of(problems, reversed(range(8)))[::-1]
  assert forwards == backwards


def test_an_epoch_holds_each_problem_once(problems):
  # 10 problems by 5: steps 0 and 1 are one epoch, 2 and 3 the next, in another order.
  first, second = epoch(problems, [0, 1], count=5), epoch(problems, [2, 3], count=5)
  assert sorted(first) == sorted(second) == list(range(N))
  assert first != second


def test_no_problem_comes_twice_in_a_step_nor_an_epoch(problems):
  # 10 by 3 leaves one problem over, another one each epoch; it is skipped.
  skipped = set()
  for start in range(0, 60, 3):
    ids = epoch(problems, range(start, start + 3))
    assert len(set(ids)) == 9
    skipped |= set(range(N)) - set(ids)
  assert len(skipped) > 3


def test_another_seed_is_another_order(problems):
  orders = {tuple(epoch(problems, range(3), seed)) for seed in range(5)}
  assert len(orders) == 5


def test_a_prompt_is_its_problem(problems):
  for step in range(4):
    found = prompts.next_prompts(problems, step, 0, 3)
    np.testing.assert_array_equal(found.tokens_PT, problems.tokens_NT[found.id_P])
    np.testing.assert_array_equal(found.length_P, problems.length_N[found.id_P])


def test_all_problems_in_one_step(problems):
  assert sorted(ids_of(problems, [5], count=N)[0]) == list(range(N))


def test_too_many_prompts_names_both_numbers(problems):
  with pytest.raises(ValueError, match=r'prompts\.count=11 .* only 10 problems'):
    prompts.next_prompts(problems, 0, 0, 11)


def test_prompts_by_id_are_these_problems_and_empty_seats(problems):
  found = prompts.prompts_by_id(problems, np.asarray([7, -1, 2, -1]))
  assert found.id_P.tolist() == [7, -1, 2, -1]
  assert found.length_P.tolist() == [4, 0, 3, 0]
  np.testing.assert_array_equal(found.tokens_PT[[0, 2]], problems.tokens_NT[[7, 2]])
  none = prompts.prompts_by_id(problems, np.zeros(0, np.int32))
  assert none.tokens_PT.shape == (0, WIDTH) and none.length_P.shape == (0,)


@settings(max_examples=60, deadline=None)
@given(
  seed=st.integers(0, 9),
  start=st.integers(0, 30),
  processes=st.sampled_from([1, 2, 4]),
  count=st.sampled_from([4, 8]),
)
def test_processes_share_the_prompts_of_one_and_resume_anywhere(
  seed, start, processes, count
):
  problems = made()
  whole = [
    prompts.next_prompts(problems, step, seed, count) for step in range(start + 5)
  ]
  # Another run, begun at `start`, that never saw the steps before.
  for step in range(start, start + 5):
    parts = [
      prompts.next_prompts(problems, step, seed, count, process, processes)
      for process in range(processes)
    ]
    assert {len(part.id_P) for part in parts} == {count // processes}
    for field in whole[step]._fields:
      joined = np.concatenate([getattr(part, field) for part in parts])
      np.testing.assert_array_equal(joined, getattr(whole[step], field))


@pytest.mark.parametrize(('process', 'processes'), [(0, 4), (3, 3), (-1, 3)])
def test_prompts_that_do_not_divide_over_processes_are_refused(
  problems, process, processes
):
  message = (
    rf'prompts\.count=6 prompts do not divide over {processes} processes, of which '
  )
  with pytest.raises(ValueError, match=message):
    prompts.next_prompts(problems, 0, 0, 6, process, processes)


def test_the_fingerprint_changes_with_any_value(problems):
  N = len(problems.text)
  now = prompts.fingerprint(problems)
  assert len(now) == 16 and now == prompts.fingerprint(made())
  swapped = [*problems.text[:-2], problems.text[-1], problems.text[-2]]
  others = [
    problems._replace(id_N=problems.id_N[::-1]),
    problems._replace(text=swapped),
    problems._replace(answer=swapped),
    problems._replace(verifier=['math', *[''] * (N - 1)]),
    problems._replace(  # what moves from one column to the next
      text=['00', *problems.text[1:]], answer=['', *problems.answer[1:]]
    ),
    problems._replace(
      id_N=problems.id_N[1:], text=problems.text[1:], answer=problems.answer[1:]
    ),
  ]
  assert len({now, *map(prompts.fingerprint, others)}) == 7
  # No verifiers, and '' for each problem, both mean rewards.rule.
  assert now == prompts.fingerprint(problems._replace(verifier=[''] * N))


TOKENIZER = tokenizer.load('characters', '{problem}\n')
TRAIN = [('1+1', 2), ('2+2', 4), ('1+1', 2), ('3+3', 6), ('10+100+1000', 1110)]
TEST = [('2+2', 4), ('5+5', 10), ('5+5', 11)]


@pytest.fixture
def load(tmp_path, capsys):
  """prompts.load of TRAIN and TEST with these knobs: problems, and the log's lines."""

  def call(train=TRAIN, test=TEST, *, count=1, width=6, overlong='drop', **knobs):
    for knob, rows in (('source', train), ('test_source', test)):
      path = tmp_path / f'{knob}.jsonl'
      lines = (json.dumps({'problem': p, 'answer': a}) for p, a in rows)
      path.write_text('\n'.join(lines))
      knobs[knob] = str(path)
    own = PromptsConfig(count=count, max_prompt_tokens=width, overlong=overlong)
    found = prompts.load(TOKENIZER, str(tmp_path), own, ProblemsConfig(**knobs))
    return *found, capsys.readouterr().out.splitlines()

  return call


def test_rows_that_are_left_out_are_logged(load):
  training, held_out, lines = load()
  assert training.text == ['1+1', '2+2', '3+3']
  assert training.answer == ['2', '4', '6'] and training.verifier == [''] * 3
  assert held_out.text == ['2+2', '5+5'] and held_out.answer == ['4', '10']
  for found in (training, held_out):
    assert found.id_N.tolist() == list(range(len(found.text)))
    assert found.length_N.tolist() == [4] * len(found.text)
    assert found.tokens_NT.shape == (len(found.text), 6)
  repeats, conflict, both, long = lines
  assert repeats.endswith(
    'source.jsonl: 5 rows hold 4 different problems; the first of each counts'
  )
  assert "as '5+5' with '10' and '11'; the first of each counts" in conflict
  assert both == (
    "1 of 2 held-out problems are training problems too, as '2+2'; "
    'problems.overlap=keep'
  )
  assert long == (
    'prompts.max_prompt_tokens=6: 1 of 4 training prompts are longer, up to 12 tokens, '
    'and left out'
  )


def test_every_choice_can_be_made_otherwise(load):
  training, held_out, lines = load(duplicates='keep', overlap='drop')
  assert training.text == ['1+1', '1+1', '3+3'] and held_out.text[1:] == ['5+5', '5+5']
  assert lines[0].endswith('problems.duplicates=keep')
  assert lines[2].endswith("as '2+2'; they are not trained on")
  with pytest.raises(ValueError, match=r"prompt_tokens=6 is too small: .* '10.*has 12"):
    load(overlong='refuse')
  assert load(overlong='refuse', width=12)[0].text[-1] == '10+100+1000'


def test_no_held_out_problem_is_dropped_for_its_length(load):
  with pytest.raises(ValueError, match=r"prompt_tokens=6 is too small: .* '10.*has 12"):
    load(test=TRAIN)


def test_too_few_problems_are_refused_when_they_are_loaded(load):
  assert len(load(count=3)[0].text) == 3
  with pytest.raises(ValueError, match=r'prompts\.count=4 .* only 3 problems'):
    load(count=4)
  with pytest.raises(ValueError, match=r'prompts\.count=1 .* only 0 problems'):
    load(train=TRAIN[-1:])


def test_nothing_is_logged_where_nothing_is_left_out(load):
  assert load(train=TRAIN[:1], test=TEST[:1])[2] == []


def test_system_messages_are_loaded_and_become_prompts(tmp_path, capsys):
  backend = tokenizer.characters()
  backend.chat_template = '{% for m in messages %}{{ m.content }}={% endfor %}'
  chat = tokenizer.Tokenizer(backend, (1,), 'chat:{problem}')
  user = {'role': 'user', 'content': '1+1'}
  rows = [
    {'prompt': [{'role': 'system', 'content': 'mod 7'}, user], 'solution': '2'},
    {'prompt': [user | {'content': '1+2'}], 'solution': '3'},
  ]
  path = str(tmp_path / 'set.jsonl')
  (tmp_path / 'set.jsonl').write_text('\n'.join(map(json.dumps, rows)))

  def load(width):
    own = PromptsConfig(max_prompt_tokens=width)
    problems = ProblemsConfig(source=path, test_source=path)
    return prompts.load_held_out(chat, str(tmp_path), own, problems)

  found = load(20)
  assert found.text == ['1+1', '1+2'] and found.system == ['mod 7', '']
  assert tokenizer.decode_prompts(chat, found.tokens_NT, found.length_N) == [
    'mod 7=1+1=',
    '1+2=',
  ]
  assert capsys.readouterr().out == ''
  # mod 7=1+1= is m o d, a space, 7 = 1 + 1 =, one token each.
  assert found.length_N.tolist() == [10, 4]
  with pytest.raises(ValueError, match=r'=9 is too small: the prompt .* has 10 tokens'):
    load(9)


def test_a_system_message_changes_the_fingerprint_and_no_other_does(problems):
  first = prompts.fingerprint(problems)
  assert first == prompts.fingerprint(problems._replace(system=[''] * N))
  others = [
    prompts.fingerprint(problems._replace(system=['a'] * i + [''] * (N - i)))
    for i in (1, 2)
  ]
  assert len({first, *others}) == 3
