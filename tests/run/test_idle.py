"""A run that can learn nothing says so once, also where it was resumed meanwhile."""

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


def test_steps_without_anything_to_learn_are_reported_once(warm, capsys, monkeypatch):
  monkeypatch.setattr(report, 'IDLE', 2)
  knobs, workdir = {'evaluate.every': 50, 'checkpoint.every': 50}, warm()
  assert runs.train(tiny(steps=1, **knobs), workdir, NothingIsRight) == 0
  assert 'Nothing was learned' not in capsys.readouterr().out
  assert runs.train(tiny(steps=3, **knobs), workdir, NothingIsRight) == 0
  out = capsys.readouterr().out
  assert out.count('Nothing was learned in steps 1 to 2:') == 1
  assert out.count('Nothing was learned') == 1
  assert 'look at the verifier (rewards.rule)' in out
  assert 'Nothing was learned in steps 1 to 3:' in (workdir / 'report.md').read_text()
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
    ([*range(1, 11)], 0.0, 'steps 1 to 10: .* verifier .* template'),
    ([1, 0, *range(1, 13), 0, 1], 1.0, 'steps 3 to 14: .* too easy'),
    ([*range(1, 11)], 0.5, 'always solved or never'),
    ([*range(1, 10), 0, *range(1, 10)], 0.0, None),
    ([], 0.0, None),
  ],
)
def test_the_sentence_names_the_steps_and_where_to_look(idle, accuracy, words):
  found = report.idle_sentence(rows(idle, accuracy))
  assert found == '' if words is None else re.search(words, found)
