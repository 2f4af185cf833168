r"""Rules that decide whether a response gives the right answer.

1. a reader (answer_extraction.py) finds the answer in a response;
2. a rule compares it with the right one: right, wrong or undecided, and why.

Text is parsed, never evaluated. Every rule but `math` takes time linear in the text,
whatever the text is; `math` may hang inside sympy and belongs in a process that can be
killed (verifier_worker.py). This module loads neither JAX nor NumPy.
"""

import ast
import collections
import json
import operator
from collections.abc import Callable
from fractions import Fraction

from bapo_jax.rewards.answer_extraction import box_or_line, hashes_or_box, tagged
from bapo_jax.rewards.math_rule import math
from bapo_jax.rewards.number_rules import aime, gsm8k
from bapo_jax.rewards.verdict import EQUAL, OTHER, Verdict, unusable

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


def countdown(answer: str, text: str, *, strict: bool = True) -> Verdict:
  """An expression that uses each number exactly once and gives the target.

  The right answer is JSON, {"numbers": [3, 5, 8], "target": 24}. The expression stands
  in the last box or else in the last <answer></answer>; `= 24` may follow it. A lenient
  verdict is the same.
  """
  del strict
  try:
    problem = json.loads(answer)
    numbers_given = collections.Counter(int(n) for n in problem['numbers'])
    target = int(problem['target'])
  except (ValueError, KeyError, TypeError, RecursionError):
    return unusable(answer, '{"numbers": [...], "target": ...}')
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


def exact(answer: str, text: str, *, strict: bool = True) -> Verdict:
  """The last box, else the `Answer:` line, else the whole response, is the answer.

  Character by character, but for blanks around it; the right answer is read likewise. A
  lenient verdict is the same.
  """
  del strict
  given, right = (
    (whole if found is None else found).strip()
    for whole, found in ((text, box_or_line(text)), (answer, box_or_line(answer)))
  )
  return Verdict(given == right, EQUAL if given == right else OTHER, given)


RULES: dict[str, Callable[..., Verdict]] = {
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


def verify(rule: str, answer: str, text: str, *, strict: bool = True) -> Verdict:
  """The verdict of a rule; of text that is no Unicode, undecided or wrong.

  Args:
    rule: a key of RULES.
    answer: the right answer, as the rule wants it.
    text: the response.
    strict: the answer must be calculated; a lenient verdict calculates (`math`) or
      overlooks what stands around a number (`gsm8k`).
  """
  for part, right in ((answer, None), (text, False)):
    try:
      part.encode()
    except UnicodeEncodeError:  # half a surrogate pair
      whose = 'the right answer' if right is None else 'the response'
      return Verdict(right, f'{whose} is no Unicode text', None)
  return RULES[rule](answer, text, strict=strict)
