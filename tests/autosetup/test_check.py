"""--mode=check finds what is wrong before the first hour is spent: ten mistakes."""

import collections
import shutil

import foreign
import numpy as np
import pytest

from bapo_jax import main
from bapo_jax.autosetup import check, check_rules, derive
from bapo_jax.autosetup.check_rules import Sampled
from bapo_jax.data import tokenizer as tokenizer_lib

FINETUNE = 'configs/finetune.py'
PLENTY = 10**12  # bytes
LATEX = [
  {'problem': f'How much is {i} halves?', 'answer': f'\\frac{{{i}}}{{2}}'}
  for i in range(1, 40, 2)
]


@pytest.fixture(scope='module')
def chat_model(tmp_path_factory):
  return foreign.model(tmp_path_factory.mktemp('models') / 'chat', 'qwen2')


def flags(tmp_path, model, training=None, held_out=None, **overrides):
  """The command line of a fine-tuning, its files written."""
  files = {
    'problems.source': foreign.rows(
      tmp_path / 'a.jsonl', training or foreign.problems(40)
    ),
    'problems.test_source': foreign.rows(
      tmp_path / 'b.jsonl', held_out or foreign.problems(8, 40)
    ),
  }
  knobs = {'model.path': model} | files | overrides
  return [f'--config.{name}={value}' for name, value in knobs.items()]


def findings(tmp_path, model, training=None, held_out=None, free=PLENTY, **overrides):
  """name -> kind of what is found before anything is sampled."""
  given = flags(tmp_path, model, training, held_out, **overrides)
  r = derive.prepare(main.read_config(FINETUNE, given), str(tmp_path / 'work'))
  found = check_rules.of_config(r.config, check.known_of(r), free)
  assert all(len(each.way_out) > 10 for each in found)
  return {each.name: each.kind for each in found}


def test_a_sound_run_has_no_finding(tmp_path, chat_model, one_device):
  assert findings(tmp_path, chat_model) == {}


def test_1_a_chat_model_without_its_template(tmp_path, chat_model, one_device):
  plain = {'tokenizer.template': '{problem}\n'}
  assert findings(tmp_path, chat_model, **plain) == {'chat template': 'warning'}
  twice = {'tokenizer.template': 'chat:<|user|>{problem}'}
  assert findings(tmp_path, chat_model, **twice) == {'chat template': 'warning'}


def test_2_a_verifier_for_other_answers(tmp_path, chat_model, one_device):
  wrong = {'rewards.rule': 'exact'}
  assert findings(tmp_path, chat_model, **wrong) == {'verifier': 'warning'}
  with pytest.raises(ValueError, match='gsm8k'):
    findings(
      tmp_path,
      chat_model,
      [*LATEX, {'problem': 'p', 'answer': 'x'}],
      LATEX[:1],
      **{'rewards.rule': 'gsm8k'},
    )


def test_3_boxes_that_no_prompt_asks_for(tmp_path, chat_model, one_device):
  silent = {'rewards.rule': 'math', 'tokenizer.template': 'chat:{problem}'}
  assert findings(tmp_path, chat_model, LATEX, LATEX[:1] * 1, **silent) == {
    'no box': 'warning',
    'overlap': 'note',
  }
  asking = silent | {'tokenizer.template': 'chat:{problem} Put it in \\boxed{}.'}
  assert 'no box' not in findings(tmp_path, chat_model, LATEX, LATEX[:1], **asking)


@pytest.mark.parametrize('times', [100, 0.01])
def test_4_a_learning_rate_off_by_a_hundred(times, tmp_path, chat_model, one_device):
  rate = {'optimizer.lr': 1e-4 * times}  # of so small a model 1e-4
  assert findings(tmp_path, chat_model, **rate) == {'learning rate': 'warning'}


def test_5_a_third_of_the_prompts_is_too_long(tmp_path, chat_model, one_device):
  long = [
    {'problem': f'{"and " * 30}{i} + 1?', 'answer': str(i + 1)} for i in range(20)
  ]
  training = [*foreign.problems(30), *long]
  short = {'prompts.max_prompt_tokens': 30}
  assert findings(tmp_path, chat_model, training, **short) == {
    'long prompts': 'warning'
  }
  few = [*foreign.problems(30), *long[:2]]
  assert findings(tmp_path, chat_model, few, **short) == {'long prompts': 'note'}


def test_6_test_problems_in_training(tmp_path, chat_model, one_device):
  both = foreign.problems(40), foreign.problems(8, 36)
  keep = {'problems.overlap': 'keep'}
  assert findings(tmp_path, chat_model, *both, **keep) == {'overlap': 'warning'}
  assert findings(tmp_path, chat_model, *both) == {'overlap': 'note'}, 'dropped'
  assert findings(tmp_path, chat_model, both[0], both[0][:36]) == {
    'overlap': 'mistake'
  }, 'nothing is left'


def test_7_the_token_after_an_answer_does_not_end_it(tmp_path, one_device):
  model = foreign.model(tmp_path / 'm', 'qwen2')
  backend = foreign.tokenizer('qwen2', end='<|system|>')
  backend.save_pretrained(model)
  assert findings(tmp_path, model) == {'end token': 'warning'}


def sampled(correct, **changes):
  """Responses of this many right ones of 8 in each group, all of them well formed."""
  right_PG = np.arange(8) < np.asarray(correct)[:, None]
  nothing_PG = np.zeros(right_PG.shape, bool)
  return Sampled(right_PG, nothing_PG, ~nothing_PG, 0)._replace(**changes)


def of(correct, **changes):
  config = main.read_config(
    FINETUNE,
    [f'--config.{k}=x.jsonl' for k in ('problems.source', 'problems.test_source')]
    + ['--config.model.path=m'],
  )
  found = check_rules.of_responses(config, sampled(correct, **changes))
  return {each.name: each.kind for each in found}


def test_8_no_group_to_learn_from():
  assert of([1, 0, 8]) == {}, 'one group is enough'
  assert of([0, 0, 0]) == of([8, 8]) == of([0, 8]) == {'nothing to learn': 'mistake'}


def test_responses_that_are_cut_unread_or_undecided():
  every, none = np.ones((2, 8), bool), np.zeros((2, 8), bool)
  assert of([1, 2], truncated_PG=every) == {'truncated': 'warning'}
  assert of([1, 2], read_PG=none) == {'no answer': 'warning'}
  assert of([1, 2], undecided=3) == {'undecided': 'warning'}


def test_9_checkpoints_beyond_the_disk(tmp_path, chat_model, one_device):
  assert findings(tmp_path, chat_model, free=1000) == {'disk': 'mistake'}
  config = main.read_config(FINETUNE, flags(tmp_path, chat_model))
  r = derive.prepare(config, str(tmp_path / 'work'))
  known = check.known_of(r)
  each = sum(r.budget.checkpoint.values())
  assert each == 12 * known.parameters, 'weights and two moments'
  assert r.budget.disk == 3 * each
  assert findings(tmp_path, chat_model, free=2 * each) == {'disk': 'warning'}


def test_10_a_base_model_is_given_a_chat_prompt(tmp_path, one_device):
  model = foreign.model(tmp_path / 'm', 'qwen2', chat=None)
  with pytest.raises(ValueError, match='chat template'):
    findings(tmp_path, model, **{'tokenizer.template': 'chat:{problem}'})
  assert findings(tmp_path, model) == {}, 'without it a plain one is taken'


@pytest.mark.nightly
def test_the_check_of_a_model_that_knows_nothing(
  tmp_path, chat_model, one_device, capsys, monkeypatch
):
  """Random weights: no response is right, which is a mistake; nothing is written."""
  work = tmp_path / 'work'
  # Sums of a single digit are guessed, by one response in sixty.
  large = [row | {'answer': f'{i}23457'} for i, row in enumerate(foreign.problems(48))]
  short = {'sampler.max_new_tokens': 8}
  given = flags(tmp_path, chat_model, large[:40], large[40:], **short)
  config = main.read_config(FINETUNE, given)
  usage = collections.namedtuple('usage', 'total used free')
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage(9, 9, PLENTY))
  assert check.check(config, str(work)) == 1
  text = capsys.readouterr().out
  assert not work.exists()
  assert '  | <|user|>What is 0 + 0?<|end|><|assistant|>' in text
  assert 'answers    48 of 48 are right by their own verifier' in text
  assert 'accuracy   0.000' in text and 'learnable  0 of 8' in text
  assert 'MISTAKE (nothing to learn): all 64 responses are wrong' in text
  assert 'a step     about' in text and 'memory     at most' in text


def test_a_check_needs_a_model(one_device):
  with pytest.raises(ValueError, match=r'--config\.model\.path'):
    check.check(main.read_config('configs/aime.py', []), 'nowhere')


def test_an_exchange_ends_as_the_template_says():
  backend = foreign.tokenizer('llama')
  tokenizer = tokenizer_lib.Tokenizer(backend, (backend.eos_token_id,), '{problem}')
  assert tokenizer_lib.turn_end(tokenizer) == ('<|end|>', True)
  assert tokenizer_lib.turn_end(tokenizer._replace(eos=(0,))) == ('<|end|>', False)
  backend.chat_template = None
  assert tokenizer_lib.turn_end(tokenizer) is None
