"""Pictures show what their problems ask for, and nothing else tells the answer."""

import collections
import io
import math

import numpy as np
import PIL.Image
import pytest

from examples import drawn

KINDS = sorted(drawn.KINDS.keys() - {'blank'})


def made(count=200, **knobs):
  return drawn.drawn('train', train=count, test=0, **knobs)


def numbers(row):
  """The quantities of a problem."""
  return row['solutions'].args[0]


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
  for row in made(80, kind=kind, shown=shown, sides=(56, 112)):
    found = READ[kind](dark_HW(row['images'][0]), shown)
    assert tuple(found) == numbers(row)


def test_the_answer_is_what_the_text_asks_for():
  rng = np.random.default_rng(0)
  terms = (4, 9, 7), (1, -3, 2)
  assert drawn.solve(*terms, rng, 0, 0) == r'4-7+9=6\boxed{6}'
  assert drawn.solve(*terms, rng, 0, 1) == r'4-7+9=6|4-7+9=6\boxed{6}'
  for row in made(100, shown=4, terms=3):
    asked = row['problem'].removeprefix('<image>').removesuffix(' mod 10')
    for i, n in enumerate(numbers(row), 1):
      asked = asked.replace(f'x{i}', str(n))
    answer = eval(asked) % 10
    assert answer == row['answer']
    assert row['solutions'](rng, 0, 0) == rf'{asked}={answer}\boxed{{{answer}}}'


def test_without_the_picture_every_answer_is_as_likely():
  problems = made(4000, kind='blank')  # quickly drawn; the kind changes no quantity
  by_text = collections.defaultdict(collections.Counter)
  for row in problems:
    by_text[row['problem']][row['answer']] += 1
  assert len(by_text) == 12  # six pairs, added or subtracted
  for counts in [*by_text.values(), sum(by_text.values(), collections.Counter())]:
    n = counts.total()
    assert set(counts) == set(range(10))
    # Five standard errors of a chance of 1/10.
    assert max(abs(c / n - 0.1) for c in counts.values()) < 5 * math.sqrt(0.09 / n)


def test_no_two_problems_have_the_same_quantities_and_text():
  problems = made(3000, kind='blank')
  assert len({(row['problem'], numbers(row)) for row in problems}) == 3000

  def shown(rows):
    return [(row['problem'], row['answer'], numbers(row)) for row in rows]

  assert shown(made(50)) == shown(made(80))[:50] != shown(made(50, seed=1))
  # The kind changes what is seen, and nothing else.
  mixed = made(50, kind='mixed')
  assert shown(mixed) == shown(made(50)) and mixed[0]['images'] != made(1)[0]['images']
  with pytest.raises(ValueError, match=r'about 200 different .* train \+ test = 300'):
    made(300, shown=2, terms=1)
