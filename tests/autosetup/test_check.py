"""--mode=check finds what is wrong before the first hour is spent: ten mistakes."""

import collections
import shutil

import foreign
import numpy as np
import pytest

from bapo_jax import main
from bapo_jax.autosetup import check, check_rules, derive, facts
from bapo_jax.autosetup.check_rules import Sampled
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models import transformer
from bapo_jax.training.config import Config

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
  rows = training or foreign.problems(40), held_out or foreign.problems(8, 40)
  paths = [foreign.rows(tmp_path / f'{i}.jsonl', x) for i, x in enumerate(rows)]
  files = dict(zip(('problems.source', 'problems.test_source'), paths, strict=True))
  knobs = {'model.path': model} | files | overrides
  return [f'--config.{name}={value}' for name, value in knobs.items()]


def findings(tmp_path, model, training=None, held_out=None, free=PLENTY, **overrides):
  """name -> kind of what is found before anything is sampled."""
  given = flags(tmp_path, model, training, held_out, **overrides)
  r = derive.prepare(main.read_config(FINETUNE, given), str(tmp_path / 'work'))
  found = check_rules.of_config(r, facts.gather(r.config, r.model, r.mesh), free)
  assert all(len(each.text.split('; ')[-1]) > 10 for each in found), 'the way out'
  return {each.name: each.kind for each in found}


LONG = [{'problem': f'{"and " * 30}{i} + 1?', 'answer': str(i + 1)} for i in range(20)]
SUMS, TRAINING, SOME = (foreign.problems(*x) for x in ((30,), (40,), (8, 36)))
BOXED = {'rewards.rule': 'math', 'tokenizer.template': 'chat:{problem}'}
ASKING = BOXED | {'tokenizer.template': 'chat:{problem} Put it in \\boxed{}.'}
SHORT, KEEP = {'prompts.max_prompt_tokens': 30}, {'problems.overlap': 'keep'}
TEMPLATE, RATE = {'chat template': 'warning'}, {'learning rate': 'warning'}
CASES = [  # knobs, name -> kind of the findings, training and held-out rows
  ({}, {}),
  ({'tokenizer.template': '{problem}\n'}, TEMPLATE),
  ({'tokenizer.template': 'chat:<|user|>{problem}'}, TEMPLATE),  # written twice
  ({'rewards.rule': 'exact'}, {'verifier': 'warning'}),
  (BOXED, {'no box': 'warning'}, LATEX, LATEX[:1]),
  (ASKING, {}, LATEX, LATEX[:1]),
  ({'optimizer.lr': 1e-2}, RATE),  # the usual one of so small a model is 1e-4
  ({'optimizer.lr': 1e-6}, RATE),
  (SHORT, {'long prompts': 'warning'}, [*SUMS, *LONG]),
  (SHORT, {}, [*SUMS, *LONG[:2]]),
  (KEEP, {'overlap': 'warning'}, TRAINING, SOME),
  ({}, {}, TRAINING, SOME),  # dropped
  ({'free': 1000}, {'disk': 'mistake'}),
]


@pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(case[1]))
def test_a_mistake_in_the_config_is_found(case, tmp_path, chat_model, one_device):
  knobs, expected, *rows = case
  assert findings(tmp_path, chat_model, *rows, **knobs) == expected


def test_an_answer_that_its_verifier_cannot_read_is_refused(
  tmp_path, chat_model, one_device
):
  training, rule = [*LATEX, {'problem': 'p', 'answer': 'x'}], {'rewards.rule': 'gsm8k'}
  with pytest.raises(ValueError, match='gsm8k'):
    findings(tmp_path, chat_model, training, LATEX[:1], **rule)


def test_the_token_after_an_answer_does_not_end_it(tmp_path, one_device):
  model = foreign.model(tmp_path / 'm', 'qwen2')
  foreign.tokenizer('qwen2', end='<|system|>').save_pretrained(model)
  assert findings(tmp_path, model) == {'end token': 'warning'}


def test_a_base_model_has_a_plain_template(tmp_path, one_device):
  model = foreign.model(tmp_path / 'm', 'qwen2', chat=None)
  with pytest.raises(ValueError, match='chat template'):
    findings(tmp_path, model, **{'tokenizer.template': 'chat:{problem}'})
  assert findings(tmp_path, model) == {}


def test_checkpoints_beyond_the_disk(tmp_path, chat_model, one_device):
  config = main.read_config(FINETUNE, flags(tmp_path, chat_model))
  r = derive.prepare(config, str(tmp_path / 'work'))
  each = sum(r.budget.checkpoint.values())
  assert each == 12 * transformer.count(r.spec), 'weights and two moments'
  assert r.budget.disk == 3 * each
  assert findings(tmp_path, chat_model, free=2 * each) == {'disk': 'warning'}


EVERY, NONE = np.ones((2, 8), bool), np.zeros((2, 8), bool)


@pytest.mark.parametrize(
  ('right', 'changes', 'expected'),
  [
    ([1, 0, 8], {}, {}),  # one group is enough
    ([0, 0, 0], {}, {'nothing to learn': 'mistake'}),
    ([8, 8], {}, {'nothing to learn': 'mistake'}),
    ([0, 8], {}, {'nothing to learn': 'mistake'}),
    ([1, 2], {'truncated_PG': EVERY}, {'truncated': 'warning'}),
    ([1, 2], {'read_PG': NONE}, {'no answer': 'warning'}),
    ([1, 2], {'undecided': 3}, {'undecided': 'warning'}),
  ],
)
def test_findings_about_responses(right, changes, expected):
  right_PG = np.arange(8) < np.asarray(right)[:, None]
  nothing_PG = np.zeros(right_PG.shape, bool)
  sampled = Sampled(right_PG, nothing_PG, ~nothing_PG, 0)._replace(**changes)
  found = check_rules.of_responses(Config(), sampled)
  assert {each.name: each.kind for each in found} == expected


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
