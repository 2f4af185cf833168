"""A run that can learn nothing says so once, also where it was resumed meanwhile."""

import re

import making
import pytest
from runs import last_run, tiny

from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.run import experiment, report
from bapo_jax.training import build


class NothingIsRight(making.OddVerifier):
  """Every response is wrong."""

  def verdict(self, text: str) -> Verdict:
    return Verdict(False, 'wrong', None)


@pytest.mark.slow
def test_ten_steps_without_anything_to_learn_are_reported_once(
  warm, one_device, capsys, monkeypatch
):
  monkeypatch.setattr(build, 'make_verifier', lambda config: NothingIsRight())
  knobs = {'evaluate.every': 50, 'checkpoint.every': 50}
  workdir, sentence = warm(), 'Nothing was learned in steps 1 to 10:'
  assert experiment.train(tiny(steps=7, **knobs), str(workdir)) == 0
  assert 'Nothing was learned' not in capsys.readouterr().out
  assert experiment.train(tiny(steps=12, **knobs), str(workdir)) == 0
  out = capsys.readouterr().out
  assert out.count(sentence) == out.count('Nothing was learned') == 1
  assert 'look at the verifier (rewards.rule)' in out
  assert 'Nothing was learned in steps 1 to 12:' in (workdir / 'report.md').read_text()
  run = last_run(workdir)
  assert run.scalars['idle_steps'] == 12
  assert run.rows[12]['learner/idle_steps'] == '12.0'
  # The bounds stay where a search starts: nothing was there to balance.
  assert {run.rows[i]['learner/grad_norm'] for i in range(1, 13)} == {'0.0'}


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
