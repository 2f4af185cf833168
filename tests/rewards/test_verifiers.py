r"""Verdicts: what counts as an answer, and that no text stalls or fools a rule."""

import builtins
import functools
import itertools
import json
import logging
import pathlib
import resource
import time
import unittest.mock

import hypothesis
import oracles
import pytest
from hypothesis import strategies as st
from verifier_cases import BOMBS, CASES, FOUR, MATH
from verifier_hacks import HACKS
from verifier_honest import HONEST

from bapo_jax.rewards import answer_extraction, symbolic, verifiers
from bapo_jax.rewards.verifier_pool import VerifierPool

DEADLINE = 2.0
REAL = pathlib.Path(__file__).parents[3] / 'shared/data'


@pytest.fixture(scope='module')
def pool():
  with VerifierPool(2, deadline=DEADLINE) as made:
    yield made


def verify(pool, rule, answer, response):
  """As a run does it: in a worker process where the rule needs one."""
  if rule in verifiers.POOLED:
    return pool.submit([(rule, answer, response)])[0].result()
  return verifiers.verify(rule, answer, response)


def test_the_table_is_as_long_as_it_should_be():
  assert len(CASES) >= 150
  assert {rule for rule, *_ in CASES} == set(verifiers.RULES)


@pytest.mark.parametrize(
  ('rule', 'answer', 'response', 'right'),
  CASES,
  ids=[str(i) for i in range(len(CASES))],
)
def test_the_verdict_is_a_readers(pool, rule, answer, response, right):
  found = verify(pool, rule, answer, response)
  assert found.right is right, found
  assert found.reason


def test_the_tables_of_hacks_and_of_honest_answers_are_long():
  assert len(set(HACKS)) == len(HACKS) >= 150
  assert len(set(HACKS) | set(HONEST)) == len(HACKS) + len(HONEST) >= 400


@pytest.mark.parametrize(
  ('cases', 'right'), [(HACKS, False), (HONEST, True)], ids=['hacks', 'honest']
)
def test_no_hack_is_right_and_no_honest_answer_wrong(pool, cases, right):
  found = [verify(pool, *case[:3]) for case in cases]
  odd = [(c, v) for c, v in zip(cases, found, strict=True) if v.right is not right]
  assert not odd


def test_a_lenient_verdict_calculates_and_overlooks():
  calculated = [('56', r'\boxed{7\times 8}'), ('5050', r'\boxed{\sum_{k=1}^{100} k}')]
  with VerifierPool(1, strict=False) as lenient:
    futures = lenient.submit([('math', *case) for case in calculated])
    assert [future.result().right for future in futures] == [True, True]
  for case in calculated:
    assert verifiers.math(*case).right is False
  beside = ('gsm8k', '5', r'\boxed{5 million}')
  assert verifiers.verify(*beside, strict=False).right
  assert not verifiers.verify(*beside).right


@pytest.mark.parametrize(
  'answer', ['1e999', '\ud800', r'\frac{', '', r'\{', '9' * 5000]
)
@pytest.mark.parametrize('rule', sorted(verifiers.RULES))
def test_a_malformed_right_answer_crashes_nothing(pool, rule, answer):
  for response in (r'\boxed{5}', r'\boxed{\frac{1}{2}}', 'x', ''):
    verdict = verify(pool, rule, answer, response)
    assert not verdict.right or rule == 'exact'
  assert verify(pool, rule, answer, '\\boxed{\udc00}').right is not True


@pytest.mark.parametrize(
  ('rule', 'answer', 'response', 'right'),
  [
    ('math', '\ud800', r'\boxed{1}', None),
    ('math', '1', '\\boxed{\ud800}', False),
    ('gsm8k', '1', '\\boxed{\ud800}', False),
    ('math', r'\frac{', r'\boxed{1}', None),
  ],
)
def test_what_is_no_text_is_undecided_or_wrong(pool, rule, answer, response, right):
  assert verify(pool, rule, answer, response).right is right


def test_what_reaches_math_verify_is_the_box_that_was_read(monkeypatch):
  seen = []
  real = symbolic.equivalent
  monkeypatch.setattr(
    symbolic, 'equivalent', lambda *texts: seen.append(texts) or real(*texts)
  )
  # A second reader of boxes would stop at the brace of the half set, and find x.
  assert not verifiers.math('x', r'\boxed{\left\{x\right.}').right
  assert not verifiers.math('x', r'\boxed{\left\{x\right.}', strict=False).right
  assert verifiers.math('x+1', r'\boxed{1+x}').right
  assert seen == [('x', r'\left\{x\right.'), ('x+1', '1+x')]


@pytest.fixture(scope='module')
def lenient():
  with VerifierPool(1, strict=False, deadline=DEADLINE) as made:
    yield made


@pytest.mark.parametrize(
  ('rule', 'answer', 'response'), [bomb for bomb in BOMBS if bomb[0] == 'math'][:16]
)
def test_a_lenient_verdict_survives_every_bomb(lenient, rule, answer, response):
  (future,) = lenient.submit([(rule, answer, response)])
  assert future.result().right is not True


LATEX_PIECES = [
  *r'0123456789.,+-*/^_(){}[]%!|=<>& xei',
  *[
    r'\frac',
    r'\sqrt',
    r'\pi',
    r'\pm',
    r'\cup',
    r'\infty',
    r'\left',
    r'\{',
    r'\}',
    r'\\',
    r'^\circ',
  ],
  *[r'\text{or}', r'\text{cm}', r'\begin{pmatrix}', r'\end{pmatrix}'],
  '\ud800',
]


@hypothesis.given(
  st.lists(st.sampled_from(LATEX_PIECES), max_size=12).map(''.join),
  st.sampled_from(['5', '-2', r'\frac{7}{2}', '0', '1000', r'50\%']),
)
def test_a_number_is_decided_without_math_verify(text, gold):
  found = verifiers.verify('math', gold, r'\boxed{' + text + '}')
  assert found.right in (True, False)
  with unittest.mock.patch.object(symbolic, 'equivalent', None):
    assert verifiers.verify('math', gold, r'\boxed{' + text + '}') == found


@pytest.mark.parametrize(
  ('rule', 'answer', 'response'), BOMBS, ids=[str(i) for i in range(len(BOMBS))]
)
def test_no_bomb_takes_longer_than_its_deadline(pool, rule, answer, response):
  began = time.process_time()  # a worker's is bounded by the pool, and by its tests
  assert verify(pool, rule, answer, response).right is not True
  assert time.process_time() - began < DEADLINE
  # The pool serves the next request.
  assert verify(pool, 'math', '1/2', r'\boxed{0.5}').right


def test_the_fast_rules_need_little_memory():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for rule, answer, response in BOMBS:
    if rule not in verifiers.POOLED:
      verifiers.RULES[rule](answer, response)
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown < 200 * 2**10  # KiB


@pytest.mark.parametrize('of', [r'\boxed{', '}', '{', '-', '1,', '\n', 'answer'])
@pytest.mark.parametrize('rule', sorted(set(verifiers.RULES) - {'math'}))
def test_fast_rules_take_linear_time(rule, of):
  # Eight times the text, eight times the time; anything quadratic takes 64 times.
  answer = FOUR if rule == 'countdown' else '7'

  def seconds(n):
    best = float('inf')
    for _ in range(3):
      began = time.process_time()
      verifiers.RULES[rule](answer, r'\boxed{' * 5 + of * n + '7' + '}' * n)
      best = min(best, time.process_time() - began)
    return best

  assert seconds(80_000) < 30 * seconds(10_000) + 0.02


@pytest.mark.parametrize(
  ('inside', 'expected'),
  [(r'\frac{1}{2}', r'\frac{1}{2}'), ('', ''), (r'1\boxed{2}', r'1\boxed{2}')],
)
def test_boxed_keeps_what_stands_inside(inside, expected):
  assert answer_extraction.boxed('therefore \\boxed{' + inside + '}, done') == expected
  assert answer_extraction.boxed('therefore, done') is None


@hypothesis.given(st.lists(st.sampled_from([r'\boxed{', '{', '}', '1', '\\', 'x'])))
def test_boxed_is_the_slow_one(parts):
  text = ''.join(parts)
  assert answer_extraction.boxed(text) == oracles.boxed(text)


@hypothesis.given(
  st.sampled_from(sorted(set(verifiers.RULES) - {'math'})),
  st.text() | st.text('0123456789+-*/()=.,{}\\$#% boxedanswer<>:\n', max_size=80),
)
def test_a_rule_always_has_a_verdict(rule, text):
  answer = FOUR if rule == 'countdown' else '7'
  for response in (text, r'\boxed{' + text + '}', f'<answer>{text}</answer>'):
    found = verifiers.RULES[rule](answer, response)
    assert found.right in (True, False)
    assert verifiers.RULES[rule](text, response).right in (True, False, None)


@hypothesis.given(
  st.recursive(
    st.integers(0, 99).map(str),
    lambda part: st.tuples(part, st.sampled_from('+-*'), part).map(
      lambda found: '({}{}{})'.format(*found)
    ),
    max_leaves=8,
  )
)
def test_calculate_agrees_with_python(expression):
  # Written by this test, so eval may read it; the module's own text never is.
  value, used = verifiers.calculate(expression)
  assert value == eval(expression)
  assert sum(used.values()) == sum(c in '+-*' for c in expression) + 1


def test_text_is_never_evaluated(monkeypatch):
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  symbolic.equivalent('1', '0.5')  # loads sympy, which evals while it loads
  evaluated = []

  def spy(real, source, *scopes):
    evaluated.append(source if isinstance(source, str) else '')  # '': a module's code
    return real(source, *scopes)

  for name in ('eval', 'exec'):
    real = getattr(builtins, name)
    monkeypatch.setattr(builtins, name, functools.partial(spy, real))
  attacks = [
    r'\boxed{print(1)}',
    r'\boxed{(lambda: 1)()}',
    r'\boxed{7+1}',
    r'\boxed{97.5}',
  ]
  cases = [*((a, r) for a, r, _ in MATH), *(('2', r) for r in attacks)]
  for answer, response in cases:
    verifiers.math(answer, response)
    for rule, right in (('aime', '2'), ('gsm8k', '2'), ('countdown', FOUR)):
      verifiers.RULES[rule](right, response)
  # What is left is sympy's own, templates for the arithmetic of polynomials.
  sources = [source for source in evaluated if source]
  assert all('def monomial_' in source for source in sources)


def test_an_error_of_the_library_leaves_it_undecided(monkeypatch):
  def fail(answer, given):
    raise TypeError('a matrix is not a number')

  monkeypatch.setattr(symbolic, 'equivalent', fail)
  found = verifiers.math('x+y', r'\boxed{y+x}')
  assert found == (None, 'math-verify failed: TypeError', 'y+x')
  # What is the same to the letter needs no library.
  assert verifiers.math('x', r'\boxed{ x }').right


def test_integers_need_no_library(monkeypatch):
  pairs = [('7', '007'), ('7', '-7'), ('-12', '- 12'), ('0', '-0'), ('41', '42')]
  expected = [symbolic.equivalent(a, b) for a, b in pairs]
  assert expected == [True, False, True, True, False]
  monkeypatch.setattr(symbolic, 'equivalent', None)
  found = [verifiers.math(a, f'\\boxed{{{b}}}').right for a, b in pairs]
  assert found == expected


def test_equal_answers_are_spelled_alike():
  def found(rule, answer, text):
    return verifiers.RULES[rule](answer, text).answer

  assert found('aime', '7', r'\boxed{007}') == found('aime', '7', 'Answer: 7') == '7'
  assert found('gsm8k', '7', r'\boxed{1,000.0}') == '1000'
  assert found('gsm8k', '7', '#### $0.50') == '0.5'
  assert found('countdown', FOUR, r'<answer> 8 * 3*2/2 = 24</answer>') == '8*3*2/2'
  assert found('aime', '7', 'seven') is None


def rows(name):
  """The answers in a real file; skips where there is none."""
  path = REAL / name
  if not path.exists():
    pytest.skip(f'no {path.name} beside the checkout')
  return [json.loads(line)['answer'] for line in path.read_text().splitlines()]


def shifted(answers):
  """(answer, the next problem's) where the two differ."""
  pairs = itertools.pairwise([*answers, answers[0]])
  return [(a, b) for a, b in pairs if a != b]


@pytest.mark.parametrize(
  ('rule', 'name', 'count'),
  [('aime', 'aime24.jsonl', 30), ('gsm8k', 'gsm8k_test_300.jsonl', 300)],
)
def test_real_integer_answers(rule, name, count):
  answers = rows(name)
  bare = [answer.rpartition('####')[2].strip() for answer in answers]
  assert len(answers) == count
  decide = verifiers.RULES[rule]
  for answer, own in zip(answers, bare, strict=True):
    assert decide(answer, f'So it is \\boxed{{{own}}}.').right
  if rule == 'gsm8k':
    assert all(decide(answer, answer).right for answer in answers)
  others = shifted(bare)
  assert len(others) > 0.9 * count
  for answer, other in others:
    assert decide(answer, f'\\boxed{{{other}}}').right is False


def test_real_latex_answers(pool):
  answers = rows('math500_200.jsonl')
  boxes = [f'So it is \\boxed{{{answer}}}.' for answer in answers]
  requests = [('math', *pair) for pair in zip(answers, boxes, strict=True)]
  assert all(future.result().right for future in pool.submit(requests))
  # And math-verify itself, that equal spelling spares: for 98 % of the 200 at least.
  assert sum(symbolic.equivalent(answer, answer) for answer in answers) >= 196
  others = shifted(answers)
  assert len(others) > 190
  requests = [('math', answer, f'\\boxed{{{other}}}') for answer, other in others]
  found = [future.result() for future in pool.submit(requests)]
  right = [o for o, v in zip(others, found, strict=True) if v.right is not False]
  assert right == [('5', 'x=5')]  # neighbours in the file, and they do mean the same
