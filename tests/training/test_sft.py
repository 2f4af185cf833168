"""The supervised stage: which tokens weigh what, and that it learns."""

import jax
import making
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.data import prompts, tokenizer
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.made import synthetic
from bapo_jax.models import logprobs, transformer
from bapo_jax.training import sft
from bapo_jax.training.knobs import SftConfig

LENGTH = 66
SPEC = transformer.ModelSpec(
  vocab=len(tokenizer.CHARACTERS),
  width=16,
  layers=1,
  heads=2,
  kv_heads=1,
  head_width=8,
  ffn=32,
)


@pytest.fixture(scope='module')
def reader():
  return tokenizer.load('characters', '{problem}\n')


def made_problems(count):
  knobs = ProblemsConfig(family='trial', level=2, train=count, test=1)
  return synthetic.generate(knobs)[:count]


def rows(reader, length=LENGTH, count=40, slip=0.0, repeat=0.0):
  problems = made_problems(count)
  encoded = prompts.encode(reader, [problem.row for problem in problems])
  tokens, solve = (
    [prompt.tokens for prompt in encoded],
    synthetic.FAMILIES['trial'].solve,
  )
  made = sft.rows(reader, tokens, problems, solve, length, 0, slip, repeat)
  return problems, *made


def test_prompt_weighs_nothing_work_one_and_answer_four(reader):
  box, eos = tokenizer.CHARACTERS.index(r'\boxed{'), tokenizer.CHARACTERS.index('<eos>')
  for problem, tokens_T, weight_T in zip(*rows(reader), strict=True):
    row = [tokenizer.CHARACTERS[i] for i in tokens_T]
    prompt = len(problem.text) + 1
    assert ''.join(row[:prompt]) == problem.text + '\n'
    at, end = row.index(r'\boxed{'), row.index('<eos>')
    assert tokens_T[at] == box and tokens_T[end] == eos
    # The answer is the box, its number, the brace and the end: one digit modulo 7.
    padding = ['<pad>'] * (LENGTH - end - 1)
    assert row[at:] == [r'\boxed{', str(problem.answer), '}', '<eos>', *padding]
    expected = [0] * prompt + [1] * (at - prompt) + [4] * (end + 1 - at)
    np.testing.assert_array_equal(weight_T, expected + [0] * (LENGTH - end - 1))


@pytest.mark.parametrize('length', [4, 20, 40])
def test_rows_are_cut_at_their_length(reader, length):
  problems, whole_NT, weight_NT = rows(reader)
  _, tokens_NT, cut_NT = rows(reader, length)
  assert tokens_NT.shape == cut_NT.shape == (len(problems), length)
  np.testing.assert_array_equal(tokens_NT, whole_NT[:, :length])
  np.testing.assert_array_equal(cut_NT, weight_NT[:, :length])


def test_a_box_in_the_prompt_is_no_answer(reader):
  asked = reader._replace(template='{problem}=\\boxed{x}\n')
  for problem, tokens_T, weight_T in zip(*rows(asked, LENGTH + 4), strict=True):
    prompt = len(problem.text) + len('=#x}\n')
    assert tokenizer.CHARACTERS[tokens_T[prompt - 1]] == '\n'
    assert (weight_T[:prompt] == 0).all() and weight_T[prompt] == 1
    assert (weight_T == 4).sum() == 4


def test_a_few_steps_reduce_the_loss(reader, monkeypatch):
  # Its initial values take longer to compile than all the rest.
  monkeypatch.setattr(transformer, 'init', lambda spec, key: making.params(spec))
  _, tokens_NT, weight_NT = rows(reader)

  @jax.jit
  def nats(params):
    logp_NT = logprobs.sequence_stats(params, tokens_NT, SPEC, 1.0).logp_BT
    return -(logp_NT * weight_NT).sum() / weight_NT.sum()

  def fitted(clean, noisy):
    knobs = SftConfig(clean=clean, noisy=noisy, batch=8, lr=1e-2, slip=0.3, repeat=0.3)
    mesh = sharding.make(devices=jax.devices()[:1])
    given = made_problems(64), synthetic.FAMILIES['trial'].solve
    return sft.fit(reader, SPEC, mesh, LENGTH, *given, knobs, seed=0)

  assert nats(fitted(24, 4)) < nats(fitted(0, 0)) - 0.3
