"""Problems that come twice: in a data set, or in training and evaluation both."""

from bapo_jax.data import dedup
from bapo_jax.data.row import Row


def rows(*pairs):
  return [Row(problem, answer) for problem, answer in pairs]


def test_the_first_answer_counts_and_another_one_is_reported():
  found = rows(('1+1', '2'), ('1+2', '3'), ('1+1 ', '3'), ('1+1', '2'), (' 1+2', '3'))
  unique, message = dedup.deduplicate(found, 'x')
  assert unique == found[:2]
  assert message == (
    'x: 5 rows contain 2 different problems; 1 of them come with different answers, '
    "such as '1+1' with '2' and '3'"
  )
  assert dedup.deduplicate(unique, 'x') == (unique, '')
  assert dedup.deduplicate([], 'x') == ([], '')


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


def test_training_problems_that_are_held_out_too_are_found():
  around = 'Solve this.\n\n{}'
  texts = [around.format(f'What is {i}+1?') for i in (0, 1, 2, 3, 1)]
  training = rows(*((text, '') for text in texts))
  held_out = rows(*((f'What  is {i}+1?', str(i)) for i in (1, 3, 5)))
  both, message = dedup.overlap(training, held_out)
  assert both == {1, 3, 4}
  assert message == (
    "2 of 3 held-out problems are training problems too, such as 'What is 1+1?'"
  )
  assert dedup.overlap(training, held_out[2:]) == (set(), '')


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


def test_pictures_tell_problems_of_the_same_text_apart():
  # Unlike an instruction, a picture that all problems share is part of each problem.
  texts = [f'Solve this.\n{x}' for x in ('1', '1', '2')]
  files = b'a', b'b', b'a'
  seen = [Row(t, '3', pictures=(p,)) for t, p in zip(texts, files, strict=True)]
  assert dedup.deduplicate([*seen, seen[0]], 'x')[0] == seen
  assert dedup.overlap(seen, rows(('1', '3'), ('2', '3'))) == (set(), '')
  both, _ = dedup.overlap(seen, [Row('2', '3', pictures=(b'a',))])
  assert both == {2}
