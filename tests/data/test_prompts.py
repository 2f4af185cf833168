"""Problems become prompts with their pictures; repeats are dropped and logged."""

import numpy as np
import pytest
import recordings
from making import SEEING
from pictured import CHAT, ONE_LAYER, WORDS, png, reader

from bapo_jax.data import dedup, prompts, sources, tokenizer
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.prompt_rules import Shuffled
from bapo_jax.data.row import Row

N, WIDTH = 10, 4


@pytest.fixture
def problems():
  """Problem i is the row i+1, i+1, ... of length 1 + i % WIDTH."""
  length_N = 1 + np.arange(N, dtype=np.int32) % WIDTH
  inside_NT = np.arange(WIDTH) < length_N[:, None]
  tokens_NT = np.where(inside_NT, np.arange(1, N + 1)[:, None], 0).astype(np.int32)
  names = [str(i) for i in range(N)]
  ids = np.arange(N, dtype=np.int32)
  return prompts.Problems(ids, tokens_NT, length_N, [*map(Row, names, names)])


def test_prompts_by_id_are_these_problems_and_empty_seats(problems):
  found = prompts.prompts_by_id(problems, np.asarray([7, -1, 2, -1]))
  assert found.id_P.tolist() == [7, -1, 2, -1]
  assert found.length_P.tolist() == [4, 0, 3, 0]
  np.testing.assert_array_equal(found.tokens_PT[[0, 2]], problems.tokens_NT[[7, 2]])
  none = prompts.prompts_by_id(problems, np.zeros(0, np.int32))
  assert none.tokens_PT.shape == (0, WIDTH) and none.length_P.shape == (0,)


def test_the_fingerprint_changes_with_any_value(problems):
  first, *others = problems.rows
  changes = [  # of the first problem
    {},
    {'answer': '1'},
    {'verifier': 'math'},
    # A character that moves from one column to the next.
    {'problem': '00', 'answer': ''},
    {'system': 'a'},
    *({'pictures': (file,)} for file in (b'a', b'b')),
    *({'history': ((x, 'a'),)} for x in ('user', 'assistant')),
    *({'set': x} for x in ('aime24', 'aime25')),
    {'solutions': ('a',)},
  ]
  tables = [
    problems._replace(rows=[first._replace(**change), *others]) for change in changes
  ]
  tables.append(problems._replace(id_N=problems.id_N[::-1]))
  found = [*map(prompts.fingerprint, tables)]
  assert len(set(found)) == len(found) and len(found[0]) == 16
  # Recorded before problems had optional columns: empty ones change nothing.
  assert found[0] == '3d63149da817513a'


def test_the_fingerprint_of_prompts_is_that_of_their_tokens(problems):
  tokens_NT = problems.tokens_NT.copy()
  tokens_NT[3, 3] += 1  # the last token of a prompt
  padded_NT = np.pad(problems.tokens_NT, ((0, 0), (0, 2)), constant_values=9)
  padded_NT[4, 1:] = 7  # prompt 4 has one token
  changes = [
    {},
    {'tokens_NT': tokens_NT},
    {'length_N': problems.length_N[::-1]},
    {'tokens_NT': padded_NT, 'rows': problems.rows[::-1]},
  ]
  found = [problems._replace(**change) for change in changes]
  first, other, shorter, padded = map(prompts.prompt_fingerprint, found)
  assert len({first, other, shorter}) == 3 and first == padded


TOKENIZER = tokenizer.load(tokenizer.EMBEDDED, '{problem}\n')
TRAIN = [('1+1', 2), ('2+2', 4), ('1+1', 2), ('3+3', 6), ('10+100+1000', 1110)]
TEST = [('2+2', 4), ('5+5', 10), ('5+5', 11)]


@pytest.fixture
def load(tmp_path, capsys):
  """prompts.load of TRAIN and TEST with these knobs: problems, and the log's lines.

  A row is (problem, answer, seeds of its pictures).
  """

  def call(
    train=TRAIN, test=TEST, *, count=1, width=6, overlong='drop', vision=None, **knobs
  ):
    for knob, rows in (('source', train), ('test_source', test)):
      lines = []
      for problem, answer, *seeds in rows:
        for seed in seeds:
          (tmp_path / f'{seed}.png').write_bytes(png(56, 56, seed))
        names = [f'{seed}.png' for seed in seeds]
        lines.append({'problem': problem, 'answer': answer, 'images': names})
      knobs[knob] = recordings.jsonl(tmp_path / f'{knob}.jsonl', lines)
    own = Shuffled(count=count, max_prompt_tokens=width, overlong=overlong)
    own_problems = ProblemsConfig(**knobs)
    data = sources.read(own_problems)
    tables = prompts.load(TOKENIZER, own, own_problems, data, vision)
    return *tables, capsys.readouterr().out.splitlines()

  return call


def texts(problems):
  return [row.problem for row in problems.rows]


def test_rows_that_are_dropped_are_logged(load):
  training, held_out, lines = load()
  assert training.rows == [Row('1+1', '2'), Row('2+2', '4'), Row('3+3', '6')]
  assert held_out.rows == [Row('2+2', '4'), Row('5+5', '10')]
  for found in (training, held_out):
    assert found.id_N.tolist() == list(range(len(found.rows)))
    assert found.length_N.tolist() == [4] * len(found.rows)
    assert found.tokens_NT.shape == (len(found.rows), 6)
    assert found.tokens_NT.dtype == found.length_N.dtype == np.int32
  repeats, conflict, both, long = lines
  assert 'source.jsonl: 5 rows contain 4 different problems' in repeats
  assert "'5+5' with '10' and '11'" in conflict
  assert both.startswith('1 of 2 held-out') and both.endswith('problems.overlap=keep')
  assert '1 of 4 training prompts are longer, up to 12 tokens' in long


def test_every_choice_can_be_made_otherwise(load):
  training, held_out, lines = load(duplicates='keep', overlap='drop')
  assert texts(training) == ['1+1', '1+1', '3+3']
  assert texts(held_out)[1:] == ['5+5', '5+5']
  assert "'2+2'" in lines[2] and lines[2].endswith('dropped from the training problems')
  with pytest.raises(ValueError, match=r"prompt_tokens=6 is too small: .* '10.*has 12"):
    load(overlong='refuse')
  with pytest.raises(ValueError, match=r"prompt_tokens=6 is too small: .* '10.*has 12"):
    load(test=TRAIN)  # no held-out problem is dropped for its length
  assert texts(load(overlong='refuse', width=12)[0])[-1] == '10+100+1000'


def test_too_few_problems_are_refused_when_they_are_loaded(load):
  assert len(load(count=3)[0].rows) == 3
  with pytest.raises(ValueError, match=r'prompts\.count=4 .* only 3 problems'):
    load(count=4)
  with pytest.raises(ValueError, match=r'prompts\.count=1 .* only 0 problems'):
    load(train=TRAIN[-1:])


SAME = ('<image>1', '3')


def test_problems_with_pictures_are_loaded_as_texts_are(load):
  train = [(*SAME, 0), (*SAME, 1), (*SAME, 0), ('2', '4')]
  train += [('<image>' * 3, '5', 0, 1, 2)]
  test = [(*SAME, 1), ('5', '4')]
  knobs = {'vision': ONE_LAYER, 'overlap': 'drop'}
  training, held_out, _ = load(train, test, width=9, **knobs)
  pictured = Row('<image>1', '3', pictures=(png(56, 56, 0),))
  assert training.rows == [pictured, Row('2', '4')]
  assert training.grids == [((4, 4),), ()]
  # Four merged patches of a picture, then '1' and a newline.
  assert training.length_N.tolist() == [6, 2]
  assert training.tokens_NT[0].tolist() == [ONE_LAYER.image_token] * 4 + [7, 4, 0, 0, 0]
  assert [row.pictures for row in held_out.rows] == [(png(56, 56, 1),), ()]


V = SEEING.vision


def row(problem, *sizes, system=''):
  return Row(problem, '1', '', system, tuple(png(*size) for size in sizes))


def words(prompt):
  return [WORDS[i] for i in prompt.tokens]


def test_pictures_stand_where_the_template_puts_them():
  # 56 x 84 pixels are 2 x 3 merged patches of 28.
  rows = [
    row('<image>Find x', (56, 84)),
    row('Find <image> and <image>', (56, 56), (56, 84), system='x'),
    row('Find x'),
  ]
  found = prompts.encode(reader(), rows, V)
  pad = '<image_pad>'
  one, two, three = map(words, found)
  assert one == ['[user]', '<s>', *[pad] * 6, '<e>', 'Find', 'x', '[assistant]']
  assert two == [
    *('[system]', 'x', '[user]', 'Find', '<s>', *[pad] * 4, '<e>', 'and'),
    *('<s>', *[pad] * 6, '<e>', '[assistant]'),
  ]
  assert three == ['[user]', 'Find', 'x', '[assistant]']
  assert [prompt.grids for prompt in found] == [((4, 6),), ((4, 4), (4, 6)), ()]


@pytest.mark.parametrize(
  ('problem', 'chat', 'count'),
  [
    ('<image><image_pad>', CHAT, 2),
    ('Find', CHAT, 0),
    ('<image>Find', CHAT.replace('<image_pad>', ''), 0),
  ],
)
def test_another_number_of_picture_tokens_is_refused(problem, chat, count):
  with pytest.raises(ValueError, match=f'has {count} <image_pad> for 1 pictures'):
    prompts.encode(reader(chat=chat), [row(problem, (56, 56))], V)


# --------- problems that come twice: in a data set, or in training and evaluation both


def rows(*pairs):
  return [Row(problem, answer) for problem, answer in pairs]


def test_white_space_makes_no_other_problem_and_a_sign_does():
  def count(*problems):
    return len(dedup.deduplicate(rows(*((x, '') for x in problems)), 'x')[0])

  assert count('Let  x\n be 1.', 'Let x be 1.', 'Let x be\t1. ') == 1
  # é as one character, and as e with an accent.
  assert count('caf\u00e9', 'cafe\u0301') == 1
  assert count('x + 1', 'x - 1', 'x² = 1', 'x2 = 1', 'X + 1') == 5


def test_an_instruction_around_every_problem_is_no_part_of_it():
  bare = rows(*((f'What is {i}+1?', str(i + 1)) for i in range(5)))
  around = 'Solve this.\n\n{}\n\nPut the answer on its own line.'
  wrapped = [row._replace(problem=around.format(row.problem)) for row in bare]
  assert dedup.keys(wrapped) == dedup.keys(bare) == [row.problem for row in bare]
  # Of two texts, each is more than what they have in common.
  assert dedup.keys(rows(('a\nb', ''), ('a\nb\nb', ''))) == ['b', 'b b']
  assert dedup.keys(rows(('a\nb', ''), ('a\nb', ''))) == ['a b', 'a b']


def test_a_problem_that_is_held_out_verbatim_is_found_in_a_mixture():
  # 45 problems with an instruction and 45 without, or with another: the training
  # problems have no line in common, the nine held-out problems have the instruction.
  for other in ('{}', 'Think.\n{}'):
    asked = [f'Solve this.\nWhat is {i}+1?' for i in range(45)]
    others = [other.format(f'What is {i}-1?') for i in range(45)]
    training = rows(*((text, '') for text in [*asked, *others]))
    held_out = training[3:39:4]
    assert dedup.overlap(training, held_out)[0] == set(range(3, 39, 4))
    assert dedup.overlap(held_out, training)[0] == set(range(9))


def test_earlier_turns_tell_problems_of_the_same_text_apart():
  said = ('user', '1 +  1'), ('assistant', '2')
  others = said[:1], (*said, *said), (said[0], ('assistant', '3')), (('tool', '1+1'),)
  seen = [Row('Sure?', '3', history=x) for x in (said, *others, ())]
  again = Row('Sure?', '3', history=(('user', ' 1 + 1'), said[1]))
  assert dedup.deduplicate([*seen, again], 'x')[0] == seen
  assert dedup.overlap(seen, [again])[0] == {0}
