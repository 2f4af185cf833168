"""A run that can learn nothing says so at its first step, and in its report."""

import re

import making
import pytest
import runs
from runs import last_run, tiny

from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.run import report


class NothingIsRight(making.OddVerifier):
  """Every response is wrong."""

  def verdict(self, text: str) -> Verdict:
    return Verdict(False, 'wrong', None)


def test_steps_without_anything_to_learn_are_reported_at_once_and_not_at_each(
  warm, capsys, monkeypatch
):
  monkeypatch.setattr(report, 'IDLE', 2)
  knobs, workdir = {'evaluate.every': 50, 'checkpoint.every': 50}, warm()
  assert runs.train(tiny(steps=1, **knobs), workdir, NothingIsRight) == 0
  out = capsys.readouterr().out
  assert out.count('Nothing was learned in step 1: no group had right and wrong') == 1
  assert out.count('Nothing was learned') == 1
  text = (workdir / 'report.html').read_text()
  assert 'nothing was learned in 1 of 1 steps. No response is right' in text
  assert runs.train(tiny(steps=3, **knobs), workdir, NothingIsRight) == 0
  out = capsys.readouterr().out
  assert out.count('Nothing was learned in steps 1 to 2:') == 1
  assert out.count('Nothing was learned') == 1
  assert 'check the verifier (rewards.rule)' in out
  text = (workdir / 'report.html').read_text()
  assert 'Nothing was learned in steps 1 to 3:' in text
  assert 'nothing was learned in 3 of 3 steps.' in text
  run = last_run(workdir)
  assert run.scalars['idle_steps'] == 3
  assert run.rows[3]['learner/idle_steps'] == '3.0'
  assert {run.rows[i]['learner/grad_norm'] for i in range(1, 4)} == {'0.0'}


def rows(idle, accuracy):
  return [
    {'step': i, 'learner/idle_steps': n, 'rollout/accuracy': accuracy}
    for i, n in enumerate(idle, 1)
  ]


@pytest.mark.parametrize(
  ('idle', 'accuracy', 'words'),
  [
    ([*range(1, 11)], 0.0, 'steps 1 to 10: .* 10 of 10 steps.* verifier .* template'),
    ([1, 0, *range(1, 13), 0, 1], 1.0, 'steps 3 to 14: .* 14 of 16 .* too easy'),
    ([*range(1, 11)], 0.5, 'always solved or never'),
    ([1, 2], 0.0, 'steps 1 to 2: .* 2 of 2 steps. No response is right'),
    ([0, 1, 0, 1, 2, 0], 0.0, r'steps 4 to 5: .* 3 of 6 steps\.$'),
    ([0, 0], 0.0, '^$'),
  ],
)
def test_the_sentence_names_the_steps_and_where_to_look(idle, accuracy, words):
  assert re.search(words, report.idle_sentence(rows(idle, accuracy)))
