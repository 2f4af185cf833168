"""--mode=eval, whole: what training measured is measured again, from files alone."""

import json
import shutil

import numpy as np
import pytest
from runs import copied, source, tiny
from runs import one_device as on_one_device

from bapo_jax.run import experiment
from bapo_jax.runtime import metrics
from bapo_jax.tools import eval_checkpoint

GROUP = 3


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(workdir, knobs) of a run of two steps."""
  workdir = tmp_path_factory.mktemp('run')
  knobs = {'steps': 2, 'evaluate.group_size': GROUP, 'evaluate.k': (1, GROUP)}
  with on_one_device():
    assert experiment.train(tiny(**knobs), str(workdir)) == 0
  return workdir, knobs


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_as_training_did(trained, one_device, capsys):
  workdir, knobs = trained
  assert eval_checkpoint.eval_checkpoint(tiny(**knobs), str(workdir), '') == 0
  (file,) = (workdir / 'eval').glob('2-*.jsonl')
  found = rows(file)
  before = json.loads((workdir / 'eval' / '2.json').read_text())
  assert len(found) == 16 * GROUP
  for now, then in zip(found, before['samples'], strict=True):
    settings = now.pop('settings')
    # The embedded chat template adds the line's end.
    assert now.pop('prompt') == now['problem'] + '\n'
    assert now == then  # the same function, the same weights, the same noise
  assert settings['model'] == f'{workdir}/checkpoints/2'
  assert settings['seed'] == 0
  assert settings['sampler']['temperature'] == 1.0
  assert found[0].keys() >= {
    'id',
    'uid',
    'extracted',
    'verdict',
    'reason',
    'logp',
    'tokens',
  }
  output = capsys.readouterr().out
  assert file.with_suffix('.md').read_text() in output
  assert f'avg@{GROUP}' in output and f'maj@{GROUP}' in output
  accuracy = np.mean([row['correct'] for row in found])
  assert accuracy == pytest.approx(before['result']['accuracy'])
  assert f'{accuracy:.4f}' in output
  undecided = [row.get('rollout/undecided') for row in metrics.read(workdir)]
  assert undecided.count(0) == 2  # of both steps
  # Nothing of the run has changed.
  assert experiment.train(tiny(**knobs), str(workdir)) == 0


@pytest.mark.slow
def test_other_settings_and_problems_go_into_another_file(
  trained, one_device, tmp_path, capsys
):
  workdir, knobs = trained
  config = tiny(**knobs, **{'sampler.temperature': 0.5})
  eval_checkpoint.eval_checkpoint(config, str(workdir), '')
  assert len(list((workdir / 'eval').glob('2-*.md'))) == 2
  given = [{'problem': f'{n}+1 mod 10', 'answer': str(n + 1)} for n in (3, 4)]
  (tmp_path / 'set.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in given))
  config = tiny(**knobs, **{'problems.test_source': str(tmp_path / 'set.jsonl')})
  capsys.readouterr()
  eval_checkpoint.eval_checkpoint(config, str(workdir), str(tmp_path / 'out'))
  found = rows(tmp_path / 'out.jsonl')
  assert [row['problem'] for row in found] == ['3+1 mod 10'] * 3 + ['4+1 mod 10'] * 3
  assert [row['answer'] for row in found] == ['4'] * 3 + ['5'] * 3
  # One set is asked: it is not also that of training.
  assert 'training problems too' not in capsys.readouterr().out


@pytest.mark.slow
def test_a_published_model_is_evaluated_without_a_run(one_device, tmp_path):
  path = source(tmp_path / 'model')
  knobs = {'model.path': path, 'tokenizer.path': path, 'evaluate.group_size': 2}
  config = tiny(**knobs, **{'rewards.rule': 'math'})
  assert eval_checkpoint.eval_checkpoint(config, str(tmp_path / 'run'), '') == 0
  (file,) = (tmp_path / 'run' / 'eval').glob('model-*.jsonl')
  assert {row['settings']['model'] for row in rows(file)} == {path}


def test_without_weights_it_says_what_to_do(tmp_path):
  with pytest.raises(ValueError, match='--workdir='):
    eval_checkpoint.eval_checkpoint(tiny(), str(tmp_path), '')


@pytest.mark.slow
@pytest.mark.parametrize('to', ['', 'file/out'])
def test_files_that_cannot_be_written_are_refused_before_the_evaluation(
  to, trained, one_device, tmp_path, monkeypatch
):
  workdir, knobs = trained
  run = copied(workdir, tmp_path / 'run')
  shutil.rmtree(run / 'eval')
  # No directory can be made there, also for root, to whom all modes are open.
  (run / 'eval').write_text('')
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr(experiment, 'evaluation', None)
  knob = f'--eval_to={tmp_path}/{to}' if to else f'--workdir={run}'
  with pytest.raises(ValueError, match=knob):
    eval_checkpoint.eval_checkpoint(
      tiny(**knobs), str(run), str(tmp_path / to) if to else ''
    )


@pytest.mark.slow
def test_the_checkpoint_of_another_model_is_refused(trained):
  workdir, knobs = trained
  with pytest.raises(ValueError, match=r'model\.width=16'):
    eval_checkpoint.eval_checkpoint(
      tiny(**knobs, **{'model.width': 8}), str(workdir), ''
    )
