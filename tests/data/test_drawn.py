"""Pictures show what their problems ask for, and nothing else tells the answer."""

import collections
import io
import math

import numpy as np
import PIL.Image
import pytest

from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made import drawn
from bapo_jax.data.made.problem import Problem
from bapo_jax.data.row import Row

KINDS = sorted(drawn.KINDS.keys() - {'blank'})


def made(count=200, seed=0, **knobs):
  problems = ProblemsConfig(seed=seed, train=count - 1, test=1, drawn=knobs)
  return drawn.generate(problems)


def picture(problem):
  return problem.row.pictures[0]


def dark_HW(data):
  """Where a picture is darker than its background and its grid."""
  return np.asarray(PIL.Image.open(io.BytesIO(data))).max(2) < 200


def read_bars(dark, shown):
  side = len(dark)
  bars_HW = dark[: side - 3, 4:]
  thirds = np.array_split(bars_HW[:, : (side - 4) // shown * shown], shown, 1)
  return [round(each.any(1).sum() / ((side - 6) // 10)) for each in thirds]


def read_dots(dark, shown):
  wide = len(dark) // shown
  size = min((wide - 2) // 2, len(dark) // 5) - 2
  return [dark[:, i * wide : (i + 1) * wide].sum() / size**2 for i in range(shown)]


def read_lengths(dark, shown):
  high, unit = len(dark) // shown, (len(dark) - 2) // 10
  spans = [np.flatnonzero(dark[i * high : (i + 1) * high].any(0)) for i in range(shown)]
  return [(span[-1] - span[0] - 1) / unit for span in spans]


def read_dials(dark, shown):
  across = math.ceil(math.sqrt(shown))
  cell = len(dark) // across
  row, column = np.indices((cell, cell)) - cell / 2
  tenths = []
  for i in range(shown):
    top, left = i // across * cell, i % across * cell
    inside = np.hypot(row, column) < cell / 2 - 5
    hand = dark[top : top + cell, left : left + cell] & inside
    angle = math.atan2(column[hand].sum(), -row[hand].sum())
    tenths.append(round(10 * angle / (2 * math.pi)) % 10)
  return tenths


READ = {'bars': read_bars, 'dots': read_dots}
READ |= {'lengths': read_lengths, 'dials': read_dials}


@pytest.mark.parametrize('shown', [2, 3, 4])
@pytest.mark.parametrize('kind', KINDS)
def test_a_picture_shows_its_quantities(kind, shown):
  for problem in made(80, kind=kind, shown=shown, sides=(56, 112)):
    found = READ[kind](dark_HW(picture(problem)), shown)
    assert tuple(found) == problem.numbers


PROBLEM = Problem(Row('<image>x1-x3+x2 mod 10', '6'), 6, (4, 9, 7), (1, -3, 2))


def test_the_answer_is_what_the_text_asks_for():
  problem, rng = PROBLEM, np.random.default_rng(0)
  assert drawn.solve(problem, rng, 0, 0) == r'4-7+9=6\boxed{6}'
  assert drawn.solve(problem, rng, 0, 1) == r'4-7+9=6|4-7+9=6\boxed{6}'
  for problem in made(100, shown=4, terms=3):
    asked = problem.text.removeprefix('<image>').removesuffix(' mod 10')
    for i, n in enumerate(problem.numbers, 1):
      asked = asked.replace(f'x{i}', str(n))
    answer = eval(asked) % 10
    assert answer == problem.answer
    assert drawn.solve(problem, rng, 0, 0) == rf'{asked}={answer}\boxed{{{answer}}}'


def test_without_the_picture_every_answer_is_as_likely():
  problems = made(4000, kind='blank')  # quickly drawn; the kind changes no quantity
  by_text = collections.defaultdict(collections.Counter)
  for problem in problems:
    by_text[problem.text][problem.answer] += 1
  assert len(by_text) == 12  # six pairs, added or subtracted
  for counts in [*by_text.values(), sum(by_text.values(), collections.Counter())]:
    n = counts.total()
    assert set(counts) == set(range(10))
    # Five standard errors of a chance of 1/10.
    assert max(abs(c / n - 0.1) for c in counts.values()) < 5 * math.sqrt(0.09 / n)


def test_no_two_problems_have_the_same_quantities_and_text():
  problems = made(3000, kind='blank')
  assert len({(p.text, p.numbers) for p in problems}) == 3000
  assert made(50) == made(50) == made(80)[:50]
  assert made(50, seed=1) != made(50)
  # The kind changes what is seen, and nothing else.
  for problem, other in zip(made(50, kind='mixed'), made(50), strict=True):
    same = problem.row._replace(pictures=other.row.pictures)
    assert problem._replace(row=same) == other
  with pytest.raises(ValueError, match=r'about 200 different .* train \+ test = 300'):
    made(300, shown=2, terms=1)
