r"""The rule `math`: an answer in LaTeX is right where it is what the right one is.

1. both are brought to one spelling (spelling.py) and split (structures.py);
2. numbers and closed forms are compared exactly (closed_forms.py);
3. expressions with variables are compared by math-verify (symbolic.py).

A strict verdict wants an answer that is calculated as far as the right one is: what the
rule accepts stands in docs/data_and_rewards.md.
"""

from collections.abc import Callable, Sequence

from bapo_jax.rewards import closed_forms, latex_trees, structures, symbolic
from bapo_jax.rewards.answer_extraction import box_or_line
from bapo_jax.rewards.spelling import UNION, is_label, spell, split_unit
from bapo_jax.rewards.structures import Answer
from bapo_jax.rewards.verdict import EQUAL, OTHER, Verdict, unusable

LATEX = 1000  # characters of an answer that is parsed


class Unreadable(ValueError):
  """The right answer is none that this rule can read."""


def math(answer: str, text: str, *, strict: bool = True) -> Verdict:
  r"""The last \boxed{} (else the last `Answer:` line) is what the answer is.

  To be called in a process that can be killed. An error inside math-verify leaves the
  response undecided. Votes are counted by spelling.

  Args:
    strict: an answer is calculated as far as the right one; else math-verify decides
      alone, which calculates, rounds and reads the last side of a chain.
  """
  found = box_or_line(text)
  if found is None:
    return Verdict(False, 'no box and no answer line', None)
  given = ' '.join(found.split())
  if not given:
    return Verdict(False, 'an empty box', None)
  if given == ' '.join(answer.split()):
    return Verdict(True, 'equal to the letter', given)
  if len(found) > max(LATEX, 2 * len(answer)):
    return Verdict(False, f'more than {LATEX} characters', given)
  try:
    equal = decide(answer, found) if strict else symbolic.equivalent(answer, found)
  except MemoryError:
    raise  # the worker process has to be replaced
  except Unreadable:
    return unusable(answer, 'an expression')._replace(answer=given)
  except Exception as error:  # whatever sympy trips over
    return Verdict(None, f'math-verify failed: {type(error).__name__}', given)
  return Verdict(equal, EQUAL if equal else OTHER, given)


def decide(answer: str, given: str) -> bool:
  """The strict comparison of two pieces of LaTeX.

  Raises:
    Unreadable: the right answer has no structure.
  """
  gold_text, given_text = spell(answer), spell(given)
  for commas_group in (True, False):  # 1,000 may be a number or a list
    try:
      gold = structures.read(gold_text, commas_group)
    except ValueError as error:
      raise Unreadable(str(error)) from error
    try:
      found = structures.read(given_text, commas_group)
    except ValueError:
      return False
    if same(gold, found):
      return True
    if ',' not in gold_text + given_text:
      return False
  return False


def same(gold: Answer, given: Answer) -> bool:
  """Whether two answers have equal parts in the same structure."""
  if given.kind == 'equation':
    return _same_equation(gold, given)
  if gold.name and given.name and not _same_text(gold.name, given.name):
    return False
  gold, given = _interval(gold), _interval(given)
  unordered = {'list', 'set'}
  if gold.kind in unordered and given.kind in unordered:
    return _same_unordered(gold.parts, given.parts)
  if gold.kind != given.kind or gold.brackets != given.brackets:
    return False
  match gold.kind:
    case 'expression':
      return same_expression(str(gold.parts[0]), str(given.parts[0]))
    case 'union':
      return _same_unordered(gold.parts, given.parts)
    case 'equation':
      return False
  return _same_ordered(gold.parts, given.parts)


def _same_ordered(gold: Sequence, given: Sequence) -> bool:
  if len(gold) != len(given):
    return False
  return all(same(a, b) for a, b in zip(gold, given, strict=True))


def _same_unordered(gold: Sequence, given: Sequence) -> bool:
  """Whether every part has its partner, each one once."""
  left = list(given)
  if len(gold) != len(given):
    return False
  for part in gold:
    partner = next((i for i, other in enumerate(left) if same(part, other)), None)
    if partner is None:
      return False
    del left[partner]
  return True


def _same_text(gold: str, given: str) -> bool:
  return ''.join(gold.split()) == ''.join(given.split())


def _interval(answer: Answer) -> Answer:
  return answer._replace(kind='tuple') if answer.kind == 'bounds' else answer


def _same_equation(gold: Answer, given: Answer) -> bool:
  """A chain of right answers, after a label or not; or the equation that is asked for.

  3 = 2 is no way to say 2, nor is 1 + 1 = 2.
  """
  if gold.kind == 'equation':
    texts = [_equation(answer) for answer in (gold, given)]
    return None not in texts and _same_symbols(str(texts[0]), str(texts[1]))
  sides = list(given.parts)
  label = str(sides[0].parts[0]) if isinstance(sides[0], Answer) else ''
  if is_label(label) and len(sides) > 2:
    if gold.name and not _same_text(gold.name, label):
      return False
    sides = sides[1:]
  return all(isinstance(side, Answer) and same(gold, side) for side in sides)


def _equation(answer: Answer) -> str | None:
  """The LaTeX of an equation with two sides; None of a chain."""
  if len(answer.parts) != 2:
    return None
  sides = (side for side in answer.parts if isinstance(side, Answer))
  return ' = '.join(str(side.parts[0]) for side in sides)


def same_expression(gold: str, given: str) -> bool:
  """Whether two expressions, without structure, are the same."""
  gold_words, given_words = structures.words(gold), structures.words(given)
  if gold_words is not None and gold_words == given_words:
    return True
  (gold, gold_unit), (given, given_unit) = split_unit(gold), split_unit(given)
  if gold_unit and given_unit and gold_unit != given_unit:
    return False
  if (gold_words and '\\text' in gold) or (given_words and '\\text' in given):
    return False
  gold_tree, given_tree = _tree(gold), _tree(given)
  if gold_tree is None or given_tree is None:
    return _beyond(gold, given, gold_tree, given_tree)
  if not closed_forms.no_more_to_do(gold_tree, given_tree):
    return False
  variables = closed_forms.symbols(gold_tree)
  if variables != closed_forms.symbols(given_tree):
    return False
  if variables:
    return _same_symbols(gold, given)
  digits = 50 + 4 * (len(gold) + len(given))
  return _attempt(lambda: closed_forms.equal(gold_tree, given_tree, digits))


def _tree(text: str) -> latex_trees.Tree | None:
  try:
    return latex_trees.parse(text)
  except ValueError:
    return None


def _attempt(compare: Callable[[], bool]) -> bool:
  """A number whose divisor is 0 or whose exponent is out of bounds equals none."""
  try:
    return compare()
  except (ValueError, OverflowError):
    return False


LEFT_OVER = {'sum', 'product', 'power'}


def _beyond(
  gold: str,
  given: str,
  gold_tree: latex_trees.Tree | None,
  given_tree: latex_trees.Tree | None,
) -> bool:
  """Right answers with functions or words; a number is never one of the responses."""
  if gold_tree is not None:
    return False
  if given_tree is not None and LEFT_OVER & set(closed_forms.operations(given_tree)):
    return False
  return _same_symbols(gold, given)


def _same_symbols(gold: str, given: str) -> bool:
  gold, given = (_latex(text) for text in (gold, given))
  return symbolic.no_new_parts(gold, given) and symbolic.equivalent(gold, given)


LATEX_OF = {
  '∞': r'\infty ',
  'π': r'\pi ',
  '≤': r'\le ',
  '≥': r'\ge ',
  '≠': r'\ne ',
  '*': r'\cdot ',
  '∈': r'\in ',
  UNION: r'\cup ',
  '±': r'\pm ',
  '°': r'^\circ ',
  '%': r'\%',
  '\x1f': '',
  '\x02': r'\{',
  '\x03': r'\}',
  '\x04': r'\\',
}


def _latex(text: str) -> str:
  """LaTeX again, for a parser that knows no other spelling."""
  return text.translate(str.maketrans(LATEX_OF))
