r"""math-verify, behind one door: which of two expressions with variables are equal.

It receives the content of a box, never a text that it would search for one.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

NUMERAL = re.compile(r'[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]{1,3})?')


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


def _read(latex: str) -> tuple[Any, str]:
  """(sympy's object or None, the normalised text)."""
  from latex2sympy2_extended import latex2sympy, normalize_latex
  from math_verify.grader import should_treat_as_complex

  config = _math_verify().LatexExtractionConfig().normalization_config
  text = normalize_latex(latex, dataclasses.replace(config, boxed='none'))
  try:
    real = not should_treat_as_complex(text)
    parsed = latex2sympy(
      text, is_real=real, convert_degrees=False, normalization_config=None
    )
  except MemoryError:
    raise  # the worker process has to be replaced
  except Exception:  # whatever the grammar trips over
    parsed = None
  return parsed, text


def equivalent(answer: str, given: str) -> bool:
  """Whether two pieces of LaTeX mean the same; math-verify decides, or never returns.

  Only its LaTeX grammar is used: its reader of plain expressions is an eval. What the
  grammar does not read is compared by spelling. Timeouts of 0 set no alarm, which only
  a main thread could.
  """
  math_verify = _math_verify()
  (gold, gold_text), (found, found_text) = _read(answer), _read(given)
  if gold is None or found is None:
    return bool(gold_text.strip()) and gold_text.strip() == found_text.strip()
  return math_verify.verify(gold, found, timeout_seconds=0, raise_on_error=True)


VARIABLES = re.compile(
  r'\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|'
  r'phi|varphi|omega)(?![a-zA-Z])|(?<![a-zA-Z\\])[a-zA-Z]'
)
PARTS = re.compile(r'\\[a-zA-Z]+|[a-zA-Z]{2,}|[!|<>=≤≥≠±∈\u222a?\'"&;]')
HARMLESS = {r'\frac', r'\sqrt'}


def no_new_parts(answer: str, given: str) -> bool:
  """Whether `given` has no function, sign or variable that the answer lacks.

  So an integral, a sum sign or a determinant is not an answer, unless the right one
  has it, as often.
  """
  allowed = collections.Counter(PARTS.findall(answer))
  extra = collections.Counter(PARTS.findall(given)) - allowed
  if set(extra) - HARMLESS:
    return False
  return set(VARIABLES.findall(given)) <= set(VARIABLES.findall(answer))
