"""Describes every knob once: name, type, default, range, one sentence.

1. A section of the config is a frozen class whose fields are made by `knob`. The
   section of a rule, a `parts.Part`, is also the rule.
2. `validate` makes a section from plain values, or raises one sentence that names the
   knob, its value and its range; docs/reference/config.md describes every range alike.
"""

import difflib
import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import annotated_types
import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from bapo_jax.runtime import files

# Of a custom function; `custom_code.load` refuses a file without a function's name.
PATH = r'(?:python:[A-Za-z_]\w*|.+\.py(?::[A-Za-z_]\w*)?)'
LARGEST = 2**31 - 1  # sizes and counts are int32 on the device

AnySection = TypeVar('AnySection', bound='Section')
Decided = TypeVar('Decided')
Number = TypeVar('Number')
LocalPath = Annotated[str, pydantic.AfterValidator(files.local)]
FunctionPath = Annotated[str, pydantic.StringConstraints(pattern=f'^{PATH}$')]
_RISING = annotated_types.Predicate(lambda ends: ends[0] <= ends[1])
Range = tuple[Number, Number]  # such as Range[Annotated[float, Interval(gt=0)]]
Rising = Annotated[Range[Number], _RISING]
# Limits by the names of annotated_types.
ENDS = {'gt': 'above', 'ge': 'at least', 'lt': 'below', 'le': 'at most'}


class _Auto:
  """Accepts None, past the check of a value."""

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    return core_schema.nullable_schema(handler(source))


_AUTO = _Auto()
# The type of a knob that may be None until the program decides it, see autosetup/.
Auto = Annotated[Decided, _AUTO]


class Section(pydantic.BaseModel):
  """Base of all sections: frozen; refuses unknown names and values of another type."""

  model_config = pydantic.ConfigDict(
    frozen=True, extra='forbid', strict=True, protected_namespaces=()
  )

  @classmethod
  def described(cls) -> dict[str, FieldInfo]:
    """Returns name -> field; a subclass may describe its fields in more detail."""
    return cls.model_fields


def knob(
  default: Any,
  description: str,
  *,
  least: float | None = None,
  most: float | None = None,
  above: float | None = None,
  below: float | None = None,
  infinite: bool = False,
  needs: str | tuple[str, ...] = (),
) -> Any:
  """Makes a field of a section.

  Args:
    default: the default value, or the class of a nested section.
    description: one sentence with the unit, complete by itself in the table of
      docs/reference/config.md.
    least, most: inclusive limits of a number; those of a tuple are in its type.
    above, below: exclusive limits.
    infinite: accepts infinity, which means no limit.
    needs: conditions without which the knob, or every knob of the section, has no
      effect, such as 'lora.rank > 0'; see training/needs.py.
  """
  extra: dict[str, Any] = {'needs': (needs,) if isinstance(needs, str) else needs}
  if isinstance(default, type) and issubclass(default, Section):
    return pydantic.Field(
      default_factory=default, description=description, json_schema_extra=extra
    )
  number = type(default)
  if number is int and most is None and below is None:
    most = LARGEST
  if number is float and infinite:
    most = math.inf  # which NaN is not
  return pydantic.Field(
    default,
    description=description,
    json_schema_extra=extra,
    ge=least,
    le=most,
    gt=above,
    lt=below,
    allow_inf_nan=infinite if number is float else None,
  )


def validate(
  section: type[AnySection], values: dict[str, Any], name: str = ''
) -> AnySection:
  """Returns the section with these values; knobs without a value have their defaults.

  `name` is the name of the section in errors; '' is the whole config.

  Raises:
    ValueError: one sentence with the knob, its value and its range.
  """
  try:
    return section.model_validate(values)
  except pydantic.ValidationError as error:
    raise ValueError(_sentence(section, values, error.errors()[0], name)) from None


def restore(section: type[AnySection], values: Any) -> AnySection:
  """Rebuilds a section from values of JSON, in which tuples have become lists.

  Raises:
    ValueError: one sentence with the knob, its value and its range.
  """

  def tuples(value: Any) -> Any:
    if isinstance(value, dict):
      return {key: tuples(x) for key, x in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value

  return validate(section, tuples(values))


def fields_of(section: Section, name: str = '') -> Iterator[tuple[str, FieldInfo, Any]]:
  """Yields (dotted name, field, value) of the knobs and sections of a section."""
  for key, field in type(section).described().items():
    yield f'{name}.{key}' if name else key, field, getattr(section, key)


def fields(section: Section, name: str = '') -> Iterator[tuple[str, FieldInfo, Any]]:
  """Yields (dotted name, field, value) of every knob, nested sections included."""
  for path, field, value in fields_of(section, name):
    if isinstance(value, Section):
      yield from fields(value, path)
    else:
      yield path, field, value


def expected(field: FieldInfo) -> str:
  """Describes the accepted values: 'an integer from 1 to 2147483647'."""
  words = kind(field.annotation)
  ends = limits(field)
  code = 'd' if 'integer' in words else 'g'
  number = {end: f'{x:{code}}' for end, x in ends.items() if x != math.inf}
  range_ = ' and '.join(f'{ENDS[end]} {text}' for end, text in number.items())
  if {'ge', 'le'} <= number.keys():
    range_ = f'from {number["ge"]} to {number["le"]}'
  if is_rising(field):
    words += ' that do not fall'
  if range_:
    of = range_.startswith('at least')
    link = ', each' if words.startswith('a tuple') else ' of' if of else ''
    words += f'{link} {range_}'
    words += ' or inf' if len(number) < len(ends) else ''
  return f'{words}, or None' if is_auto(field) else words


def wanted(field: FieldInfo) -> str:
  """Describes the accepted values and the meaning of a knob, for an error.

  The default of a tuple of numbers shows how a tuple is written on the command line.
  """
  text = f'{expected(field)} ({(field.description or "").rstrip(".")})'
  example = re.fullmatch(r'\((\d.*)\)', repr(field.default).replace(' ', ''))
  return f'{text}, such as {example[1]}' if example else text


def shown(value: Any) -> str:
  """Formats a value for an error: on one line, at most 60 characters."""
  try:
    return shorten(repr(value))
  except Exception:  # an integer of 5000 digits, a class without a repr
    return f'<{type(value).__name__}>'


def shorten(text: str) -> str:
  """Cuts a string of more than 60 characters to 57 characters and three dots."""
  return text if len(text) <= 60 else f'{text[:57]}...'


def limits(field: FieldInfo) -> dict[str, float]:
  """Returns the limits of a number, or of each number of a tuple: {'ge': 0}."""
  constraints = list(field.metadata)
  for element in typing.get_args(field.annotation)[:1]:
    constraints += getattr(element, '__metadata__', ())
  ends = [(end, getattr(x, end, None)) for end in ENDS for x in constraints]
  return {end: value for end, value in ends if value is not None}


def kind(annotation: Any) -> str:
  """Describes the type of a knob in words."""
  origin = typing.get_origin(annotation)
  args = typing.get_args(annotation)
  if origin is Annotated:
    return kind(args[0])
  if origin in (types.UnionType, typing.Union):  # a rule by name or by place
    return f'{kind(args[0])}, or path/to/file.py:function'
  if origin is typing.Literal:
    return 'one of ' + ', '.join(map(repr, args))
  if origin is tuple:
    count = '' if args[-1] is ... else f'{len(args)} '
    element = kind(args[0])
    plural = {'an integer': 'integers', 'a number': 'numbers', 'a string': 'strings'}
    return f'a tuple of {count}{plural.get(element, f"values, each {element}")}'
  if isinstance(annotation, type) and issubclass(annotation, Section):
    return f'a section with {", ".join(annotation.model_fields) or "no knobs"}'
  names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'True or False'}
  return names[annotation]


def is_auto(field: FieldInfo) -> bool:
  """Returns whether a knob may be None, so that the program decides it."""
  return _AUTO in field.metadata


def is_rising(field: FieldInfo) -> bool:
  """Returns whether no value of a tuple may be below its predecessor."""
  return _RISING in field.metadata


def needed(field: FieldInfo) -> tuple[str, ...]:
  """Returns the conditions without which a knob or a section has no effect."""
  extra: Any = field.json_schema_extra or {}
  return extra.get('needs', ())


def _sentence(section: type[Section], values: Any, error: Any, name):
  """Turns pydantic's first error into one sentence."""
  path = [name] if name else []
  field = None
  for key in map(str, error['loc']):  # down to a knob, not to an element of its tuple
    path.append(key)
    values = values.get(key)  # None: a default
    field = section.model_fields.get(key)
    inner = field and field.annotation
    if not isinstance(inner, type) or not issubclass(inner, Section):
      break
    section = inner
  dotted = '.'.join(path)
  if error['type'] == 'value_error':  # raised by a validator of a section
    # The section around `custom` names the knob, `custom` itself only its own.
    if error['loc'] and path[-1] == 'custom':
      dotted = '.'.join(path[:-1])
    joint = '=' if field and field.annotation is str else '.'  # a LocalPath
    sentence = f'{dotted}{joint}{error["ctx"]["error"]}'.lstrip('.')
    long = len(sentence) > 400  # a value in it may be
    return f'{sentence[:200]} ... {sentence[-150:]}' if long else sentence
  if field is None:
    near = difflib.get_close_matches(path[-1], section.model_fields, n=3, cutoff=0.0)
    has = f'the nearest in its section are {", ".join(near)}' if near else ''
    return f'{dotted} is not a knob; {has or "its section has no knobs"}'
  return f'{dotted}={shown(values)}: give {wanted(field)}'
