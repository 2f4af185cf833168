"""Writes the problems of S3: sums and differences of two numbers from 2 to 29.

  .venv/bin/python papers/bench/sums.py

128 of 896 distinct problems are held out.
"""

import json
import pathlib
import random

HELD_OUT, TRAINING = 128, 768
FOLDER = pathlib.Path(__file__).parent


def rows() -> list[dict[str, str]]:
  """Returns the problems, held-out ones first."""
  draw, answers = random.Random(0), {}
  while len(answers) < HELD_OUT + TRAINING:
    a, b, plus = draw.randint(2, 29), draw.randint(2, 29), draw.random() < 0.5
    a, b = (a, b) if plus else (max(a, b), min(a, b))
    answers[f'What is {a} {"+" if plus else "-"} {b}?'] = a + b if plus else a - b
  return [{'problem': text, 'answer': str(n)} for text, n in answers.items()]


def lines(some: list[dict[str, str]]) -> str:
  """Returns one JSON object per line."""
  return ''.join(f'{json.dumps(row)}\n' for row in some)


if __name__ == '__main__':
  (FOLDER / 'sums_test.jsonl').write_text(lines(rows()[:HELD_OUT]))
  (FOLDER / 'sums_train.jsonl').write_text(lines(rows()[HELD_OUT:]))
