"""A fine-tuning with something wrong in it is refused, and nothing is written."""

import foreign
import pytest
from huggingface_hub import constants
from refusals import refused


@pytest.fixture
def refusal(tmp_path, monkeypatch):
  """Returns the sentence that refuses a sound fine-tuning with these overrides."""
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  knobs = {
    'model.path': foreign.model(tmp_path / 'model', 'qwen3'),
    'problems.source': foreign.rows(tmp_path / 'a.jsonl', foreign.problems(24)),
    'problems.test_source': foreign.rows(tmp_path / 'b.jsonl', foreign.problems(8, 24)),
  }

  def sentence(**overrides):
    given = [f'--config.{name}={value}' for name, value in (knobs | overrides).items()]
    workdir = tmp_path / 'work'
    line = refused(['--config=configs/finetune.py', f'--workdir={workdir}', *given])
    assert not workdir.exists()
    return line

  return sentence


def test_a_wrong_path_is_one_sentence(refusal):
  line = refusal(**{'model.path': 'models/nowhere'})
  assert '--config.model.path=models/nowhere (no config.json' in line
  line = refusal(**{'problems.source': 'nowhere.jsonl'})
  assert '--config.problems.source=nowhere.jsonl' in line


def test_a_broken_row_is_named_by_its_line(refusal, tmp_path):
  path = tmp_path / 'broken.jsonl'
  foreign.rows(path, foreign.problems(24))
  with open(path, 'a') as file:
    file.write('{"problem": "What is 1 + 1?", "answer"\n')
  assert f'{path}, line 25: not JSON' in refusal(**{'problems.source': path})


@pytest.mark.parametrize('knob', ['model.path', 'problems.source'])
def test_a_name_of_the_hub_without_a_network_is_one_sentence(knob, refusal):
  line = refusal(**{knob: 'hub:some-owner/not-here'})
  assert 'some-owner/not-here' in line
  assert 'fetch it' in line or 'download' in line
