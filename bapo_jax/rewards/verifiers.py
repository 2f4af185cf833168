r"""Defines the rules that decide whether a response gives the right answer.

`verify` extracts the answer from a response by the rule's reader (answers.py), once.
The rule compares it with the right answer: right, wrong or undecided, with a reason.

Text is parsed, never evaluated. Every rule but `math` takes time linear in the length
of the text, for any text; `math` may hang inside sympy and must run in a process that
can be killed (verifier_worker.py). This module loads neither JAX nor NumPy.
"""

import ast
import collections
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from bapo_jax.rewards import answers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.latex.spelling import SET_CLOSE, SET_OPEN, spell
from bapo_jax.rewards.math_rule import math
from bapo_jax.rewards.number_rules import aime, gsm8k

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
FRACTION = re.compile(r'\\frac *\{([^{}]*)\} *\{([^{}]*)\}')
CROSS = re.compile(r'(?<=[0-9) ])[xX•](?=[0-9( ])')  # 3 x 5
BRACKETS = str.maketrans(
  {'[': '(', '{': '(', SET_OPEN: '(', ']': ')', '}': ')', SET_CLOSE: ')'}
)
LONGEST = 200  # characters of an expression; also bounds its depth and numbers


def calculate(text: str) -> tuple[Fraction, collections.Counter[int]]:
  """Returns the value of an expression, and how often it uses each number.

  The expression has integers, + - * /, minus signs and parentheses.

  Raises:
    ValueError: the text is not such an expression, or is longer than LONGEST.
    ZeroDivisionError: the expression divides by 0.
  """
  if len(text) > LONGEST or not set(text) <= set('0123456789+-*/() '):
    raise ValueError(text[:LONGEST])
  used: collections.Counter[int] = collections.Counter()

  def value(node: ast.expr):
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


def countdown(answer: str, content: str | None, text: str) -> Verdict:
  """Verifies an expression that uses each number exactly once and equals the target.

  The expression is in the last box or else in the last <answer></answer>; `= 24` may
  follow it, or `24 =` precede it. `answer` is the problem as JSON,
  {"numbers": [3, 5, 8], "target": 24}.
  """
  del text
  try:
    problem = json.loads(answer)
    numbers = collections.Counter(problem['numbers'])
    target = problem['target']
    if any(type(n) is not int for n in (*numbers, target)):
      raise TypeError
  except (ValueError, KeyError, TypeError, RecursionError):
    return answers.unusable(answer, '{"numbers": [3, 5, 8], "target": 24}')
  if content is None:
    return Verdict(False, 'no box and no <answer>', None)
  if len(content) > 2 * LONGEST:
    return Verdict(False, f'more than {LONGEST} characters', None)
  # LaTeX becomes plain signs: 3\,\times\,\frac{8}{2} is 3*((8)/(2)).
  content = spell(answers.without_markdown(content))
  while FRACTION.search(content):
    content = FRACTION.sub(r'((\1)/(\2))', content)
  content = CROSS.sub('*', content.translate(BRACKETS))
  expression, equals, claimed = content.partition('=')
  if equals and expression.strip() == str(target):
    expression, claimed = claimed, expression
  spelled = ''.join(expression.split())
  if equals and claimed.strip() != str(target):
    return Verdict(False, 'claims another number', spelled)
  try:
    value, used = calculate(expression.strip())
  except ZeroDivisionError:
    return Verdict(False, 'divides by zero', spelled)
  except ValueError:
    return Verdict(False, 'not an expression of integers and + - * /', spelled)
  if used != numbers:
    return Verdict(False, 'not each number once', spelled)
  return answers.compared(value == target, spelled)


def exact(answer: str, content: str | None, text: str) -> Verdict:
  """Verifies that a response has the same characters as the right answer.

  Reads both from the last box, else the answer line, else the whole text, stripped.
  """
  response = (text if content is None else content).strip()
  part = answers.box_or_line(answer)
  right = (answer if part is None else part).strip()
  return answers.compared(response == right, response)


# Called with the right answer, the answer that the reader has found, and the response.
RULES: dict[str, Callable[..., Verdict]] = {
  rule.__name__: rule for rule in (aime, math, gsm8k, countdown, exact)
}
POOLED = frozenset({'math'})  # rules for processes that can be killed
LENIENT = ('math', 'gsm8k')  # rules that also have a lenient mode
# Readers of the rules; an answer that they find earns the format bonus.
READERS: dict[str, Callable[[str], str | None]] = {
  **dict.fromkeys(RULES, answers.box_or_line),
  'gsm8k': answers.hashes_or_box,
  'countdown': answers.tagged,
}


def verify(rule: str, answer: str, text: str, *, strict: bool = True) -> Verdict:
  """Verifies a response by a rule.

  `strict` requires a calculated answer; otherwise `math` evaluates the answer, and
  `gsm8k` ignores the text around a number.
  """
  options = {'strict': strict} if rule in LENIENT else {}
  content = READERS[rule](text)
  verdict = RULES[rule](answer, content, text, **options)
  return verdict._replace(formatted=content is not None)
