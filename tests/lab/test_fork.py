"""Forks of a run: the same steps again, paired differences, refused requests."""

import re

import pytest
import runs
from pages import Page, cells

from bapo_jax.runtime import metrics
from bapo_jax.training import evaluate
from lab import fork

FIXED = 'clip.rule=fixed,clip.high=1.05,clip.low=0.95'


@pytest.fixture(scope='module')
def forked(whole_run, tmp_path_factory):
  """The directory of two forks of a recorded run, from its first step to its fourth."""
  to = tmp_path_factory.mktemp('forks')
  given = ['--step=1', '--steps=3', '--arms=run', f'--arms={FIXED}', f'--to={to}']
  with runs.one_device():
    assert fork.main([str(whole_run.workdir), *given]) == 0
    page = (to / 'fork.html').read_bytes()
    assert fork.main([str(whole_run.workdir), *given]) == 0  # trains nothing
  assert (to / 'fork.html').read_bytes() == page
  return to


def test_the_arm_of_the_run_repeats_its_steps_bit_for_bit(forked, whole_run):
  ours, theirs = (runs.last_run(x) for x in (forked / 'run/seed0', whole_run.workdir))
  assert ours.scalars == theirs.scalars and ours.rows == theirs.rows
  assert runs.same(ours.arrays, theirs.arrays)
  before, after = (
    evaluate.read_recorded(str(x), 4) for x in (forked / 'run/seed0', whole_run.workdir)
  )
  assert before == after


def test_another_rule_trains_on_the_same_prompts_and_noise(forked):
  other, one = (
    {row['step']: row for row in metrics.read(path)}
    for path in sorted(forked.glob('*/seed0'))
  )
  assert set(one) == set(other) == set(range(5))
  # The first step after the checkpoint samples the same responses.
  for name in ('rollout/accuracy', 'rollout/length', 'rollout/tokens'):
    assert one[2][name] == other[2][name]
  assert (one[2]['clip/high'], other[2]['clip/high']) == pytest.approx((1.2, 1.05))


def test_the_page_has_the_paired_differences(forked):
  text = (forked / 'fork.html').read_text()
  assert 'after step 1, where the runs begin to differ' in text
  assert 'paired over 16 held-out problems of one run each' in text
  # Over the 16 held-out problems, by hand from the recorded samples.
  base, other = (
    [s['correct'] for s in evaluate.read_recorded(str(path), 4)['samples']]
    for path in (forked / 'run/seed0', next(forked.glob('clip*/seed0')))
  )
  change = sum(b - a for a, b in zip(base, other, strict=True)) / 16
  shown = re.fullmatch(r'(.*) ± .* \(n=16\)', cells(text, 'eval/accuracy')[2])
  assert float(shown[1]) == pytest.approx(change, abs=0.005)
  # Means over the steps after the start: 2, 3 and 4.
  rows = metrics.read(forked / 'run/seed0')
  mean = sum(row['clip/fraction'] for row in rows if row['step'] > 1) / 3
  of_run, of_fixed = map(float, cells(text, 'clip/fraction')[:2])
  assert of_run == pytest.approx(mean, rel=1e-3) and of_fixed > of_run
  assert min(Page(text).values('Clip bounds')) == 2  # no update before the start


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    (['--step=9', '--arms=run', '--arms=clip.rule=fixed'], 'give one of [1, 2, 3, 4]'),
    (['--arms=run', '--arms=clip.rul=fixed'], 'no knob --config.clip.rul'),
    (['--arms=run', '--arms=optimizer.warmup=2'], 'cannot differ between forks'),
    (['--arms=run', '--arms=run'], '1 different arms'),
  ],
)
def test_a_wrong_request_is_one_sentence(given, message, whole_run, tmp_path):
  with pytest.raises(ValueError) as error:
    fork.main([str(whole_run.workdir), *given, f'--to={tmp_path}'])
  assert message in str(error.value) and not list(tmp_path.iterdir())


def test_a_fork_with_more_steps_or_other_rules_is_not_overwritten(forked, whole_run):
  given = [str(whole_run.workdir), '--step=1', f'--to={forked}', '--arms=run']
  with pytest.raises(ValueError, match='has 3 steps already; give --steps=3 or more'):
    fork.main([*given, f'--arms={FIXED}', '--steps=2'])
