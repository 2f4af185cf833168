r"""Is this answer right? Rules that read a response and compare it with what is known.

1. a reader (answers.py) finds the answer in a response;
2. a rule compares it with the right one and says right, wrong or undecided, and why.

Text is parsed, never evaluated. Every rule but `math` takes time linear in the text
whatever stands in it; `math` may hang inside sympy and belongs into a process that can
be killed (pool.py). This module loads neither JAX nor NumPy.
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
from typing import NamedTuple

from bapo_jax.rewards.answer_extraction import (
  BOX,
  box_or_line,
  hashes_or_box,
  integer,
  numbers,
  tagged,
)


class Verdict(NamedTuple):
  """Of one response."""

  right: bool | None  # None: undecided, which earns what wrong earns and is counted
  reason: str  # in a few words
  answer: str | None  # the answer found, spelled as votes are counted; None: none found


EQUAL, OTHER = 'equal', 'another answer'
DIGITS = 28  # what decimal keeps exactly


def _gold(answer: str, wanted: str) -> Verdict:
  return Verdict(None, f'the right answer {answer[:40]!r} is not {wanted}', None)


def aime(answer: str, text: str) -> Verdict:
  r"""The last \boxed{} (else the last `Answer:` line) is the right integer 0..999."""
  right = integer(answer)
  if right is None:
    return _gold(answer, 'an integer 0..999')
  found = box_or_line(text)
  if found is None:
    return Verdict(False, 'no box and no answer line', None)
  given = integer(found)
  if given is None:
    return Verdict(False, 'not an integer 0..999', None)
  return Verdict(given == right, EQUAL if given == right else OTHER, str(given))


def gsm8k(answer: str, text: str) -> Verdict:
  """The number in the last box, else after ####, else the last number of all.

  A box or a #### that holds no number, or two, is wrong: nothing else is looked at.
  The right answer may be a whole solution that ends in ####.
  """
  right = numbers(answer.rpartition('####')[2])
  if len(right) != 1 or len(right[0]) > DIGITS:
    return _gold(answer, 'one number')
  found = hashes_or_box(text)
  given = numbers(text)[-1:] if found is None else numbers(found)
  if len(given) != 1:
    return Verdict(False, 'no number' if not given else 'several numbers', None)
  if len(given[0]) > DIGITS:
    return Verdict(False, f'more than {DIGITS} digits', None)
  equal = Decimal(given[0]) == Decimal(right[0])
  spelled = f'{Decimal(given[0]).normalize():f}'
  return Verdict(equal, EQUAL if equal else OTHER, spelled)


OPERATIONS = {
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


def calculate(text: str) -> tuple[Fraction, collections.Counter]:
  """(value, the numbers used) of integers, + - * /, signs and parentheses.

  Raises:
    ValueError: the text is anything else, or longer than LONGEST.
    ZeroDivisionError: it divides by 0.
  """
  if len(text) > LONGEST or not set(text) <= set('0123456789+-*/() '):
    raise ValueError(text[:LONGEST])
  used = collections.Counter()

  def value(node) -> Fraction:
    match node:
      case ast.BinOp() if type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))
      case ast.UnaryOp(op=ast.USub()):
        return -value(node.operand)
      case ast.Constant(value=int()):
        used[node.value] += 1
        return Fraction(node.value)
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
    asked = json.loads(answer)
    given = collections.Counter(int(n) for n in asked['numbers'])
    target = int(asked['target'])
  except (ValueError, KeyError, TypeError, RecursionError):
    return _gold(answer, '{"numbers": [...], "target": ...}')
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
  if used != given:
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
LATEX = 1000  # characters of an answer that is handed to the parser


NUMERAL = re.compile(r'[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?')


def _numeral(text: str, **_):
  """A sympy number from a numeral; nothing else is parsed, and nothing evaluated."""
  import sympy

  if text.isascii() and text.isdigit():
    return sympy.Integer(int(text))
  if not NUMERAL.fullmatch(text):
    raise ValueError(f'{text[:40]!r} is no numeral')
  return sympy.Float(text)


@functools.cache
def _math_verify():
  """math-verify, its way to eval closed.

  Numerals reach sympy as text, and sympy hands text to Python's eval by way of
  parse_expr, whatever it is; here it meets `_numeral`.
  """
  import math_verify
  import sympy.physics.units  # noqa: F401 (names its units by parse_expr)
  from sympy.parsing import sympy_parser

  sympy_parser.parse_expr = _numeral
  return math_verify


def equivalent(answer: str, given: str) -> bool:
  """Do two pieces of LaTeX mean the same? math-verify decides; it may take for ever.

  Only its LaTeX grammar is used: its reader of plain expressions is an eval.
  """
  math_verify = _math_verify()
  grammar = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
  gold, found = (
    math_verify.parse(BOX + x + '}', grammar, parsing_timeout=None, raise_on_error=True)
    for x in (answer, given)
  )
  return math_verify.verify(gold, found, timeout_seconds=None, raise_on_error=True)


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
    raise  # the process that judges has to be replaced
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
POOLED = frozenset({'math'})  # what must run in a process that can be killed
READERS = {  # where each rule wants its answer: what a bonus for the format is paid for
  'aime': box_or_line,
  'math': box_or_line,
  'gsm8k': hashes_or_box,
  'countdown': tagged,
  'exact': box_or_line,
}
