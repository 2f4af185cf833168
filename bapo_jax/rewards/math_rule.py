r"""Implements the rule `math`: compares LaTeX answers by meaning.

1. both answers are brought to the normal spelling (latex/spelling.py) and parsed into
   lists, intervals and the like (latex/structures.py);
2. numbers and closed forms are compared by value (latex/trees.py);
3. expressions with variables are compared by math-verify (latex/symbolic.py).

A strict verdict requires an answer that is calculated as far as the right one;
docs/data_and_rewards.md lists what the rule accepts.
"""

from bapo_jax.rewards import answers
from bapo_jax.rewards.answers import Verdict
from bapo_jax.rewards.latex import spelling, structures, symbolic, trees
from bapo_jax.rewards.latex.structures import Answer

LONGEST_LATEX = 1000  # characters of an answer that is parsed


class Unreadable(ValueError):
  """Raised if the rule cannot parse the right answer."""


def math(answer: str, text: str, *, strict: bool = True) -> Verdict:
  r"""Verifies the last \boxed{} or else the last line `Answer: ...`.

  Call this only in a process that can be killed: math-verify may hang. An error inside
  math-verify leaves the response undecided. Votes are counted by spelling.

  Args:
    answer: the right answer, in LaTeX.
    text: the response.
    strict: requires an answer that is calculated as far as the right one. Otherwise
      math-verify alone decides; it evaluates, rounds and reads the last side of a
      chain of equations.
  """
  content = answers.box_or_line(text)
  if content is None:
    return Verdict(False, 'no box and no answer line', None)
  given = ' '.join(content.split())
  if not given:
    return Verdict(False, 'an empty box', None)
  if given == ' '.join(answer.split()):
    return Verdict(True, 'equal character by character', given)
  if len(content) > max(LONGEST_LATEX, 2 * len(answer)):
    return Verdict(False, f'more than {LONGEST_LATEX} characters', given)
  try:
    compare = _equal if strict else symbolic.equivalent
    equal = compare(answer, content)
  except MemoryError:
    raise  # the worker process must be replaced
  except Unreadable:
    return answers.unusable(answer, 'an expression')._replace(answer=given)
  except Exception as error:  # sympy raises many types
    return Verdict(None, f'math-verify failed: {type(error).__name__}', given)
  return answers.compared(equal, given)


def _equal(answer: str, given: str) -> bool:
  """Compares two LaTeX answers strictly; raises Unreadable for the right one."""
  gold_text, given_text = spelling.spell(answer), spelling.spell(given)
  for commas_group in (True, False):  # 1,000 is either a number or a list
    try:
      gold = structures.read(gold_text, commas_group)
    except ValueError as error:
      raise Unreadable(str(error)) from error
    try:
      parsed = structures.read(given_text, commas_group)
    except ValueError:
      return False
    if _same(gold, parsed):
      return True
    if ',' not in gold_text + given_text:
      return False
  return False


def _same(gold: Answer, given: Answer) -> bool:
  """Returns whether two answers have the same structure and equal parts."""
  if given.kind == 'equation':
    return _same_equation(gold, given)
  if gold.name and given.name and not _same_text(gold.name, given.name):
    return False
  # An inequality with two bounds is the interval between them.
  gold, given = (
    side._replace(kind='tuple') if side.kind == 'bounds' else side
    for side in (gold, given)
  )
  unordered = {'list', 'set'}
  if gold.kind in unordered and given.kind in unordered:
    return _same_unordered(_answers(gold), _answers(given))
  if gold.kind != given.kind or gold.brackets != given.brackets:
    return False
  match gold.kind:
    case 'expression':
      return _same_expression(str(gold.parts[0]), str(given.parts[0]))
    case 'union':
      return _same_unordered(_answers(gold), _answers(given))
    case 'equation':
      return False
  return len(gold.parts) == len(given.parts) and all(
    _same(a, b) for a, b in zip(_answers(gold), _answers(given), strict=True)
  )


def _answers(answer: Answer) -> list[Answer]:
  return [part for part in answer.parts if isinstance(part, Answer)]


def _same_unordered(gold: list[Answer], given: list[Answer]) -> bool:
  """Returns whether the parts can be paired so that all pairs are equal."""
  if len(gold) != len(given):
    return False
  unpaired = list(given)
  for part in gold:
    partner = next((i for i, other in enumerate(unpaired) if _same(part, other)), None)
    if partner is None:
      return False
    del unpaired[partner]
  return True


def _same_equation(gold: Answer, given: Answer) -> bool:
  """Returns whether an equation states the right answer.

  If the right answer is an equation, math-verify compares the two. Otherwise every side
  must equal the right answer; a label may precede them (`x = 4/2 = 2`). So neither
  3 = 2 nor 1 + 1 = 2 states 2.
  """
  if gold.kind == 'equation':
    if len(gold.parts) != 2 or len(given.parts) != 2:
      return False
    return _same_symbols(
      *(' = '.join(str(side.parts[0]) for side in _answers(x)) for x in (gold, given))
    )
  sides = _answers(given)
  label = str(sides[0].parts[0])
  if spelling.is_label(label) and len(sides) > 2:
    if gold.name and not _same_text(gold.name, label):
      return False
    sides = sides[1:]
  return all(_same(gold, side) for side in sides)


def _same_text(gold: str, given: str) -> bool:
  return ''.join(gold.split()) == ''.join(given.split())


def _same_expression(gold: str, given: str) -> bool:
  """Returns whether two expressions without structure are equal."""
  gold_words, given_words = structures.words(gold), structures.words(given)
  if gold_words is not None and gold_words == given_words:
    return True
  gold, gold_unit = spelling.split_unit(gold)
  given, given_unit = spelling.split_unit(given)
  if gold_unit and given_unit and gold_unit != given_unit:
    return False
  if (gold_words and '\\text' in gold) or (given_words and '\\text' in given):
    return False
  gold_tree, given_tree = _tree(gold), _tree(given)
  # Outside the grammar are functions and words. A right answer inside the grammar is
  # never stated by such a response; one outside it may be stated by a tree, but not by
  # one with arithmetic left to do.
  if gold_tree is None:
    if given_tree and {'sum', 'product', 'power'} & set(trees.operations(given_tree)):
      return False
    return _same_symbols(gold, given)
  if given_tree is None or not trees.as_calculated(gold_tree, given_tree):
    return False
  variables = trees.symbols(gold_tree)
  if variables != trees.symbols(given_tree):
    return False
  if variables:
    return _same_symbols(gold, given)
  try:
    digits = 50 + 4 * (len(gold) + len(given))
    return trees.equal(gold_tree, given_tree, digits)
  except (ValueError, OverflowError):  # no finite value equals an undefined one
    return False


def _tree(text: str) -> trees.Tree | None:
  try:
    return trees.parse(text)
  except ValueError:
    return None


def _same_symbols(gold: str, given: str) -> bool:
  # Back to LaTeX: math-verify does not know the normal spelling.
  gold, given = (text.translate(LATEX_OF) for text in (gold, given))
  return symbolic.no_new_parts(gold, given) and symbolic.equivalent(gold, given)


LATEX_OF = str.maketrans(
  {
    '∞': r'\infty ',
    'π': r'\pi ',
    '≤': r'\le ',
    '≥': r'\ge ',
    '≠': r'\ne ',
    '*': r'\cdot ',
    '∈': r'\in ',
    spelling.UNION: r'\cup ',
    '±': r'\pm ',
    '°': r'^\circ ',
    '%': r'\%',
    spelling.THOUSANDS: '',
    spelling.SET_OPEN: r'\{',
    spelling.SET_CLOSE: r'\}',
    spelling.ROW: r'\\',
  }
)
