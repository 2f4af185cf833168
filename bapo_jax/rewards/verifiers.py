r"""Rules that decide whether a response gives the right answer.

1. a reader (answer_extraction.py) finds the answer in a response;
2. a rule compares it with the right one: right, wrong or undecided, and why.

Text is parsed, never evaluated. Every rule but `math` takes time linear in the text,
whatever the text is; `math` may hang inside sympy and belongs in a process that can be
killed (verifier_worker.py). This module loads neither JAX nor NumPy.
"""

import ast
import collections
import functools
import json
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from bapo_jax.rewards.answer_extraction import (
  BOX,
  box_or_line,
  hashes_or_box,
  integer,
  numbers,
  tagged,
)


class Verdict(NamedTuple):
  """The verdict on one response."""

  right: bool | None  # None: undecided, which earns what wrong earns, and is counted
  reason: str  # in a few words
  answer: str | None  # the answer found, spelled as votes are counted; None: none


EQUAL, OTHER = 'equal', 'another answer'
DIGITS = 28  # that decimal holds exactly


def _unusable(answer: str, wanted: str) -> Verdict:
  """Undecided: the right answer itself is malformed."""
  return Verdict(None, f'the right answer {answer[:40]!r} is not {wanted}', None)


def aime(answer: str, text: str) -> Verdict:
  r"""The last \boxed{} (else the last `Answer:` line) is the right integer 0..999."""
  right = integer(answer)
  if right is None:
    return _unusable(answer, 'an integer 0..999')
  found = box_or_line(text)
  if found is None:
    return Verdict(False, 'no box and no answer line', None)
  given = integer(found)
  if given is None:
    return Verdict(False, 'not an integer 0..999', None)
  return Verdict(given == right, EQUAL if given == right else OTHER, str(given))


def gsm8k(answer: str, text: str) -> Verdict:
  """The number in the last box, else after ####, else the last number of all.

  A box or a #### that holds no number, or two, is wrong: nothing else is read.
  The right answer may be a whole solution that ends in ####.
  """
  right = numbers(answer.rpartition('####')[2])
  if len(right) != 1 or len(right[0]) > DIGITS:
    return _unusable(answer, 'one number')
  found = hashes_or_box(text)
  given = numbers(text)[-1:] if found is None else numbers(found)
  if len(given) != 1:
    return Verdict(False, 'no number' if not given else 'several numbers', None)
  if len(given[0]) > DIGITS:
    return Verdict(False, f'more than {DIGITS} digits', None)
  equal = Decimal(given[0]) == Decimal(right[0])
  spelled = f'{Decimal(given[0]).normalize():f}'
  return Verdict(equal, EQUAL if equal else OTHER, spelled)


OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
# \frac{a}{b} becomes ((a)/(b)); braces of anything else become a syntax error.
SPELLINGS = {
  r'\left': '',
  r'\right': '',
  r'\times': '*',
  r'\cdot': '*',
  r'\div': '/',
  '×': '*',  # noqa: RUF001
  '·': '*',
  '÷': '/',
  '−': '-',  # noqa: RUF001
  r'\dfrac{': '((',
  r'\tfrac{': '((',
  r'\frac{': '((',
  '}{': ')/(',
  '}': '))',
  '$': '',
}
LONGEST = 200  # characters of an expression; also bounds its depth and its numbers


def calculate(text: str) -> tuple[Fraction, collections.Counter[int]]:
  """(value, how often each number is used) of integers, + - * /, signs, parentheses.

  Raises:
    ValueError: the text is anything else, or longer than LONGEST.
    ZeroDivisionError: it divides by 0.
  """
  if len(text) > LONGEST or not set(text) <= set('0123456789+-*/() '):
    raise ValueError(text[:LONGEST])
  used: collections.Counter[int] = collections.Counter()

  def value(node: ast.expr) -> Fraction:
    match node:
      case ast.BinOp() if type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))
      case ast.UnaryOp(op=ast.USub()):
        return -value(node.operand)
      case ast.Constant(value=int(number)):
        used[number] += 1
        return Fraction(number)
    raise ValueError(type(node).__name__)

  try:
    tree = ast.parse(text.strip(), mode='eval')
  except (SyntaxError, MemoryError, RecursionError) as error:
    raise ValueError(text) from error
  return value(tree.body), used


def countdown(answer: str, text: str) -> Verdict:
  """An expression that uses each number exactly once and gives the target.

  The right answer is JSON, {"numbers": [3, 5, 8], "target": 24}. The expression stands
  in the last box or else in the last <answer></answer>; `= 24` may follow it.
  """
  try:
    problem = json.loads(answer)
    numbers_given = collections.Counter(int(n) for n in problem['numbers'])
    target = int(problem['target'])
  except (ValueError, KeyError, TypeError, RecursionError):
    return _unusable(answer, '{"numbers": [...], "target": ...}')
  found = tagged(text)
  if found is None:
    return Verdict(False, 'no box and no <answer>', None)
  if len(found) > 2 * LONGEST:
    return Verdict(False, f'more than {LONGEST} characters', None)
  for spelling, ours in SPELLINGS.items():
    found = found.replace(spelling, ours)
  found, equals, claimed = found.partition('=')
  given = ''.join(found.split())
  if equals and claimed.strip() != str(target):
    return Verdict(False, 'claims another number', given)
  try:
    value, used = calculate(found.strip())
  except ZeroDivisionError:
    return Verdict(False, 'divides by zero', given)
  except ValueError:
    return Verdict(False, 'not an expression of integers and + - * /', given)
  if used != numbers_given:
    return Verdict(False, 'not each number once', given)
  return Verdict(value == target, EQUAL if value == target else OTHER, given)


def exact(answer: str, text: str) -> Verdict:
  """The last box, else the `Answer:` line, else the whole response, is the answer.

  Character by character, but for blanks around it.
  """
  given = box_or_line(text)
  given = (text if given is None else given).strip()
  equal = given == answer.strip()
  return Verdict(equal, EQUAL if equal else OTHER, given)


WHOLE = re.compile(r'-?[0-9]{1,30}')
LATEX = 1000  # characters of an answer that the parser receives
NUMERAL = re.compile(r'[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?')


def _numeral(s: str, *_: Any, **__: Any):
  """A sympy number from a numeral; nothing else is parsed, and nothing evaluated."""
  import sympy

  if s.isascii() and s.isdigit():
    return sympy.Integer(int(s))
  if not NUMERAL.fullmatch(s):
    raise ValueError(f'{s[:40]!r} is no numeral')
  return sympy.Float(s)


@functools.cache
def _math_verify():
  """math-verify, its way to eval closed.

  Numerals reach sympy as text, and sympy passes text to Python's eval by way of
  parse_expr, whatever it is; `_numeral` replaces that.
  """
  import math_verify
  import sympy.physics.units  # noqa: F401 (names its units by parse_expr)
  from sympy.parsing import sympy_parser

  sympy_parser.parse_expr = _numeral
  return math_verify


def equivalent(answer: str, given: str) -> bool:
  """Whether two pieces of LaTeX mean the same; math-verify decides, or never returns.

  Only its LaTeX grammar is used: its reader of plain expressions is an eval. Timeouts
  of 0 set no alarm, which only a main thread could.
  """
  math_verify = _math_verify()
  grammar = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
  gold, found = (
    math_verify.parse(BOX + x + '}', grammar, parsing_timeout=0, raise_on_error=True)
    for x in (answer, given)
  )
  return math_verify.verify(gold, found, timeout_seconds=0, raise_on_error=True)


def math(answer: str, text: str) -> Verdict:
  r"""The last \boxed{} (else the last `Answer:` line) means what the answer means.

  To be called in a process that can be killed. An error inside math-verify leaves the
  response undecided. Votes are counted by spelling, blanks left out.
  """
  found = box_or_line(text)
  if found is None:
    return Verdict(False, 'no box and no answer line', None)
  given, gold = ''.join(found.split()), ''.join(answer.split())
  if not given:
    return Verdict(False, 'an empty box', None)
  if given == gold:
    return Verdict(True, 'equal to the letter', given)
  if WHOLE.fullmatch(given) and WHOLE.fullmatch(gold):  # most answers; no parser needed
    equal = int(given) == int(gold)
    return Verdict(equal, EQUAL if equal else OTHER, given)
  if len(found) > max(LATEX, 2 * len(answer)):
    return Verdict(False, f'more than {LATEX} characters', given)
  try:
    equal = equivalent(answer, found)
  except MemoryError:
    raise  # the worker process has to be replaced
  except Exception as error:  # whatever sympy trips over
    return Verdict(None, f'math-verify failed: {type(error).__name__}', given)
  return Verdict(equal, EQUAL if equal else OTHER, given)


RULES: dict[str, Callable[[str, str], Verdict]] = {
  'aime': aime,
  'math': math,
  'gsm8k': gsm8k,
  'countdown': countdown,
  'exact': exact,
}
POOLED = frozenset({'math'})  # rules that must run in a process that can be killed
# Where a rule wants its answer: an answer there earns the format bonus.
READERS: dict[str, Callable[[str], str | None]] = {
  'aime': box_or_line,
  'math': box_or_line,
  'gsm8k': hashes_or_box,
  'countdown': tagged,
  'exact': box_or_line,
}
