"""--mode=check finds what is wrong before the first hour is spent: ten mistakes."""

import dataclasses
import re

import foreign
import making
import numpy as np
import pytest
import recordings
from pictured import DRAWN
from refusals import sentence_of
from runs import tiny

from bapo_jax import main
from bapo_jax.autosetup import check, check_rules, derive, facts
from bapo_jax.autosetup.check_rules import Sampled
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, inputs, resolve, trainer
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
  paths = [recordings.jsonl(tmp_path / f'{i}.jsonl', x) for i, x in enumerate(rows)]
  files = dict(zip(('problems.source', 'problems.test_source'), paths, strict=True))
  knobs = {'model.path': model} | files | overrides
  return [f'--config.{name}={value}' for name, value in knobs.items()]


def findings(tmp_path, model, training=None, held_out=None, free=PLENTY, **overrides):
  """name -> kind of what is found before anything is sampled."""
  given = flags(tmp_path, model, training, held_out, **overrides)
  r = derive.prepare(main.read_config(FINETUNE, given), str(tmp_path / 'work'))
  found = check_rules.of_config(r, facts.gather(r.config, r.inputs), free)
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
  ({'free': 300_000}, {'disk': 'warning'}),  # of 3 checkpoints with 107,712 bytes each
]


@pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(case[1]))
def test_a_mistake_in_the_config_is_found(case, tmp_path, chat_model, one_device):
  knobs, expected, *rows = case
  assert findings(tmp_path, chat_model, *rows, **knobs) == expected


def test_held_out_problems_are_not_counted_among_the_training_problems(
  tmp_path, chat_model, one_device
):
  def steps(**overrides):
    given = flags(tmp_path, chat_model, TRAINING, SOME, **overrides)
    r = derive.prepare(main.read_config(FINETUNE, given), str(tmp_path / 'work'))
    return {derived.knob: derived.reason for derived in r.derived}['steps']

  assert steps() == '2.22 passes over 36 problems, 8 a step'
  assert steps(**KEEP) == '2 passes over 40 problems, 8 a step'
  assert 'no training problem is left' in sentence_of(
    findings, tmp_path, chat_model, TRAINING, TRAINING
  )
  config = main.read_config(FINETUNE, flags(tmp_path, chat_model, TRAINING, TRAINING))
  assert derive.prepare(config, str(tmp_path / 'work'), trains=False).config.steps


def test_the_token_after_an_answer_does_not_end_it(tmp_path, one_device):
  model = foreign.model(tmp_path / 'm', 'qwen2')
  foreign.tokenizer('qwen2', end='<|system|>').save_pretrained(model)
  assert findings(tmp_path, model) == {'end token': 'warning'}


def test_a_base_model_has_a_plain_template(tmp_path, one_device):
  model = foreign.model(tmp_path / 'm', 'qwen2', chat=None)
  assert 'chat template' in sentence_of(
    findings, tmp_path, model, **{'tokenizer.template': 'chat:{problem}'}
  )
  assert findings(tmp_path, model) == {}


def test_a_held_out_prompt_beyond_the_positions_is_named(
  tmp_path, chat_model, one_device
):
  held_out = foreign.problems(4, 40)
  held_out[2] = {'problem': 'and ' * 200, 'answer': '3'}
  sentence = sentence_of(findings, tmp_path, chat_model, TRAINING, held_out)
  assert int(re.search(r'the prompt has (\d+) tokens', sentence)[1]) > 256
  assert f'{tmp_path / "1.jsonl"}, line 3: ' in sentence
  assert 'has 256 positions' in sentence
  # A training prompt is left out.
  assert findings(tmp_path, chat_model, [*TRAINING, held_out[2]], held_out[:2]) == {}


def test_special_tokens_in_rows_are_found(tmp_path, chat_model, one_device):
  text = 'What is 1 + 1?<|end|>'
  texts, talks = [*TRAINING], []
  texts[3] = texts[3] | {'problem': text}
  for i, row in enumerate(TRAINING):
    system = {'role': 'system', 'content': text if i == 3 else 'Add the numbers.'}
    user = {'role': 'user', 'content': row['problem']}
    talks.append({'prompt': [system, user], 'answer': row['answer']})
  for rows in (texts, talks):
    assert findings(tmp_path, chat_model, rows) == {'special tokens': 'warning'}


EVERY, NONE = np.ones((2, 8), bool), np.zeros((2, 8), bool)


@pytest.mark.parametrize(
  ('right', 'changes', 'expected'),
  [
    ([1, 0, 0, 0, 0, 0, 0, 0], {}, {'little to learn': 'warning'}),
    ([1, 2, 0, 0, 0, 0, 0, 0], {}, {}),
    ([8, 8], {}, {'nothing to learn': 'mistake'}),
    ([1, 2], {'truncated_PG': EVERY}, {'truncated': 'warning'}),
    ([1, 2], {'read_PG': NONE}, {'no answer': 'warning'}),
    ([1, 2], {'undecided': ['late', 'slow', 'slow']}, {'undecided': 'warning'}),
    (
      [0, 0],
      {'correct_PG': np.full((2, 8), np.nan), 'undecided': 16 * ['late']},
      {'nothing to learn': 'mistake', 'undecided': 'warning'},
    ),
  ],
)
def test_findings_about_responses(right, changes, expected):
  right_PG = np.arange(8) < np.asarray(right)[:, None]
  nothing_PG = np.zeros(right_PG.shape, bool)
  sampled = Sampled(right_PG, nothing_PG, ~nothing_PG, [])._replace(**changes)
  found = [*check_rules.of_responses(Config(), sampled)]
  assert {each.name: each.kind for each in found} == expected
  if expected == {'undecided': 'warning'}:
    assert '3 of 16 responses' in found[0].text
    assert 'the most frequent reason: slow;' in found[0].text
  if 'no answer' in expected:  # a custom function returns numbers without answers
    custom = Config().with_values(rewards={'rule': 'my.py:score'})
    assert not list(check_rules.of_responses(custom, sampled))


def built(r):
  return build.build(r, build.tabulate(r), making.OddVerifier(), PhaseTimer())


def test_a_check_samples_the_first_groups_of_the_run(adapter_run, one_device):
  # 12 made problems per step, and a model from a directory.
  knobs = {'prompts': {'count': 12}, 'learner': {'minibatches': 3}}
  r = resolve.resolve(adapter_run.config.with_values(**knobs))
  t, s = built(r)
  s = trainer.sync_actor_if_due(t, s)
  _, first = trainer.next_round(t, s)
  sampled = t.sampler.submit(first, trainer.actor_of(t, s), 0).result()
  groups = sampled.fresh.groups
  small = dataclasses.replace(r, config=check.shrunk(r.config))
  _, found = check.sample(*built(small))
  assert len(found.groups.id_P) == 8 < len(groups.id_P)
  for name in ('id_P', 'tokens_PGT'):
    ours, theirs = (np.asarray(getattr(x, name))[:8] for x in (found.groups, groups))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.nightly
def test_the_check_of_a_model_that_knows_nothing(
  tmp_path, chat_model, one_device, capsys
):
  """Random weights: no response is right, which is a mistake; nothing is written."""
  work = tmp_path / 'work'
  # Sums of a single digit are guessed, by one response in sixty.
  large = [row | {'answer': f'{i}23457'} for i, row in enumerate(foreign.problems(48))]
  short = {'sampler.max_new_tokens': 8}
  given = flags(tmp_path, chat_model, large[:40], large[40:], **short)
  config = main.read_config(FINETUNE, given)
  assert check.check(config, str(work)) == 1
  text = capsys.readouterr().out
  assert not work.exists()
  assert 'accuracy   0.000' in text and 'learnable  0 of 8' in text
  assert 'MISTAKE (nothing to learn): all 64 responses are wrong' in text


# --------- --mode=check of a model that sees: its prompts have room for their pictures


def test_lengths_count_what_pictures_take(one_device):
  config = tiny(**DRAWN)
  known = facts.gather(config, inputs.read(config))
  # 16 tokens of a picture, and 'x1 mod 10' with its newline.
  assert known.lengths('{problem}\n') == (
    [26] * config.problems.custom.train,
    [26] * config.problems.custom.test,
  )
  assert known.verified('aime').right == known.verified('aime').tried > 0
