"""The report's numbers are those of the rows; it can be written from very little."""

import json

import pytest

from bapo_jax import metrics, report

SAMPLES = [
  {'problem': '2x+1=0 mod 5', 'answer': '2', 'response': 'x', 'correct': False}
]
RESULT = {'accuracy': 0.25, 'stderr': 0.02, 'n': 512}


def written(workdir, rows):
  with metrics.open_writers(workdir, -1, tensorboard=False) as put:
    for step, row in rows:
      put(step, row)
  report.write(
    workdir,
    title='a title',
    config_text='a = 1',
    config_hash='abc',
    eval_before=RESULT,
    eval_after=RESULT | {'accuracy': 0.75},
    samples_before=SAMPLES,
    samples_after=SAMPLES,
    phases={'sample': 60.0, 'update': 30.0},
    wall_s=100.0,
    peak_rss_bytes=2**30,
    steps=len(rows),
  )
  return json.loads((workdir / 'report.json').read_text())


def test_the_numbers_are_those_of_the_rows(tmp_path):
  # clip/moved: half of ten updates. Lengths wrong/right: 30/20 at first, 40/20 at last.
  rows = [
    (
      step,
      {
        'clip/moved': step % 2,
        'sample/length_right': 20,
        'sample/length_wrong': 30 if step <= 5 else 40,
      },
    )
    for step in range(1, 11)
  ]
  found = written(tmp_path, rows)
  assert found['clip_moved_fraction'] == pytest.approx(0.5)
  assert found['length_ratio'] == {
    'first_fifth': pytest.approx(1.5),
    'last_fifth': pytest.approx(2.0),
  }
  assert found['eval_before'] == RESULT
  assert found['phases']['sample'] == 60
  page = (tmp_path / 'report.md').read_text()
  assert '1.00 GiB' in page
  assert '2x+1=0 mod 5' in page
  assert 'a = 1' in page
  for name in ('curves.png', 'phases.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
    assert name in page


def test_one_row_without_an_evaluation_is_enough(tmp_path):
  assert written(tmp_path, [(1, {'loss/value': float('nan')})])['steps'] == 1
