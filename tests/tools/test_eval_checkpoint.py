"""--mode=eval, whole: what training measured is measured again, from files alone."""

import json

import numpy as np
import pytest
import recordings
from runs import copied, source, tiny

from bapo_jax.run import experiment
from bapo_jax.tools.eval_checkpoint import eval_checkpoint


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluation_is_that_of_training(whole_run, one_device, tmp_path, capsys):
  run = copied(whole_run.workdir, tmp_path / 'run')
  assert eval_checkpoint(whole_run.config, str(run), '') == 0
  (file,) = (run / 'eval').glob('4-*.jsonl')
  found, before = rows(file), json.loads((run / 'eval' / '4.json').read_text())
  assert len(found) == 16
  for now, then in zip(found, before['samples'], strict=True):
    settings = now.pop('settings')
    # The embedded chat template adds the line's end.
    assert now.pop('prompt') == now['problem'] + '\n'
    assert now == then  # the same function, the same weights, the same noise
  assert settings['model'] == f'{run}/checkpoints/4'
  assert (settings['seed'], settings['sampler']['temperature']) == (0, 1.0)
  wanted = {'id', 'uid', 'extracted', 'verdict', 'reason', 'logp', 'tokens'}
  assert found[0].keys() >= wanted
  output = capsys.readouterr().out
  assert file.with_suffix('.md').read_text() in output
  accuracy = np.mean([row['correct'] for row in found])
  assert accuracy == pytest.approx(before['result']['accuracy'])
  assert f'{accuracy:.4f}' in output


def test_other_settings_and_problems(whole_run, one_device, tmp_path, capsys):
  for n in (3, 4):
    row = {'problem': f'{n}+1 mod 10', 'answer': str(n + 1)}
    recordings.jsonl(tmp_path / f'{n}.jsonl', [row])
  config = whole_run.config.with_values(
    problems={'test_source': f'three={tmp_path}/3.jsonl,4th={tmp_path}/4.jsonl'},
    sampler={'temperature': 0.5},
    evaluate={'group_size': 3, 'k': (1, 3)},
  )
  eval_checkpoint(config, str(whole_run.workdir), str(tmp_path / 'out'), '2')
  found = rows(tmp_path / 'out.jsonl')
  assert [row['problem'] for row in found] == ['3+1 mod 10'] * 3 + ['4+1 mod 10'] * 3
  assert [row['answer'] for row in found] == ['4'] * 3 + ['5'] * 3
  assert found[0]['settings']['model'].endswith('checkpoints/2')
  output = capsys.readouterr().out
  assert [row['set'] for row in found] == ['three'] * 3 + ['4th'] * 3
  assert output.count('avg@3') == output.count('maj@3') == 3  # of all, and of each set
  assert '\nthree: 1 problems x 3 responses\n' in output
  # Only one set of problems is read: no warning that it is that of training too.
  assert 'training problems too' not in output


def test_a_published_model_is_evaluated_without_a_run(one_device, tmp_path):
  path = source(tmp_path / 'model')
  config = tiny(**{'model.path': path, 'tokenizer.path': path, 'rewards.rule': 'math'})
  assert eval_checkpoint(config, str(tmp_path / 'run'), '') == 0
  assert eval_checkpoint(config, str(tmp_path / 'run'), '') == 0  # its own files
  (file,) = (tmp_path / 'run' / 'eval').glob('model-*.jsonl')
  assert {row['settings']['model'] for row in rows(file)} == {path}


@pytest.mark.parametrize('ending', ['md', 'jsonl'])
def test_files_of_others_are_refused_before_the_evaluation(
  ending, whole_run, one_device, tmp_path, monkeypatch
):
  mine = tmp_path / f'train.{ending}'
  mine.write_text('{"problem": "1 + 1", "settings": 3}\n')
  monkeypatch.setattr(experiment, 'evaluation', None)
  with pytest.raises(
    ValueError, match=rf'train\.{ending} exists, and this program did'
  ):
    eval_checkpoint(whole_run.config, str(whole_run.workdir), str(tmp_path / 'train'))
  assert [x.read_text() for x in tmp_path.iterdir()] == [
    '{"problem": "1 + 1", "settings": 3}\n'
  ]


@pytest.mark.parametrize('to', ['', 'file/out'])
def test_files_that_cannot_be_written_are_refused_before_the_evaluation(
  to, whole_run, one_device, tmp_path, monkeypatch
):
  run = tmp_path / 'run'
  run.mkdir()
  for name in ('config.json', 'resolved.json', 'checkpoints'):
    (run / name).symlink_to(whole_run.workdir / name)
  # No directory can be made there, also for root, to whom all modes are open.
  (run / 'eval').write_text('')
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr(experiment, 'evaluation', None)
  to = str(tmp_path / to) if to else ''
  knob = f'--to={to}' if to else f'--workdir={run}'
  with pytest.raises(ValueError, match=knob):
    eval_checkpoint(whole_run.config, str(run), to)
