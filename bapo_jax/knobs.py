"""Describes every knob once: name, type, default, range, one sentence.

1. A section of the config is a frozen class whose fields are made by `knob`. The
   section of a rule, a `parts.Part`, is also the rule.
2. `validate` makes a section from plain values, or raises one sentence that names the
   knob, its value and its range.
3. `describe` gives the line of each knob in docs/reference/config.md.
"""

import difflib
import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic.fields import FieldInfo

from bapo_jax.runtime import files

# Of a custom function; `custom_code.load` refuses a file without a function's name.
PATH = r'(?:python:[A-Za-z_]\w*|.+\.py(?::[A-Za-z_]\w*)?)'
LARGEST = 2**31 - 1  # sizes and counts are int32 on the device

Range = tuple[float, float]
AnySection = TypeVar('AnySection', bound='Section')
Decided = TypeVar('Decided')
LocalPath = Annotated[str, pydantic.AfterValidator(files.local)]
FunctionPath = Annotated[str, pydantic.StringConstraints(pattern=f'^{PATH}$')]


def _unless_none(value: Any, handler: Any) -> Any:
  """Passes None on, past the check or the conversion of a value."""
  return None if value is None else handler(value)


_AUTO = pydantic.WrapValidator(_unless_none)
# The type of a knob that may be None until the program decides it, see autosetup/.
Auto = Annotated[Decided, _AUTO, pydantic.WrapSerializer(_unless_none)]


class Section(pydantic.BaseModel):
  """Base of all sections: frozen; refuses unknown names and values of another type."""

  model_config = pydantic.ConfigDict(
    frozen=True, extra='forbid', strict=True, protected_namespaces=()
  )

  @classmethod
  def described(cls) -> dict[str, FieldInfo]:
    """Returns name -> field; a subclass may describe its fields in more detail."""
    return cls.model_fields

  # Runs before the validators of a section, which may then rely on every range.
  @pydantic.model_validator(mode='after')
  def _ranges(self):
    for name, field in type(self).model_fields.items():
      value = getattr(self, name)
      limits = _limits(field)
      values = value if isinstance(value, tuple) else (value,)
      falls = limits.get('rising') and list(values) != sorted(values)
      if falls or not all(_inside(x, limits) for x in values):
        raise ValueError(f'{name}={shown(value)}: give {wanted(field)}')
    return self


def knob(
  default: Any,
  description: str,
  *,
  least: float | None = None,
  most: float | None = None,
  above: float | None = None,
  below: float | None = None,
  infinite: bool = False,
  rising: bool = False,
  needs: str | tuple[str, ...] = (),
) -> Any:
  """Makes a field of a section.

  Args:
    default: the default value, or the class of a nested section.
    description: one sentence with the unit, complete by itself in the table of
      docs/reference/config.md.
    least, most: inclusive limits of the value, or of each value of a tuple.
    above, below: exclusive limits.
    infinite: accepts infinity, which means no limit.
    rising: no value of a tuple is below its predecessor.
    needs: conditions without which the knob, or every knob of the section, has no
      effect, such as 'lora.rank > 0'; see training/needs.py.
  """
  extra: dict[str, Any] = {'needs': (needs,) if isinstance(needs, str) else needs}
  if isinstance(default, type) and issubclass(default, Section):
    return pydantic.Field(
      default_factory=default, description=description, json_schema_extra=extra
    )
  limits = {'least': least, 'most': most, 'above': above, 'below': below}
  extra |= {'infinite': infinite, 'rising': rising}
  extra |= {name: value for name, value in limits.items() if value is not None}
  return pydantic.Field(default, description=description, json_schema_extra=extra)


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


def describe(section: Section, name: str = '') -> Iterator[tuple[str, str, str, str]]:
  """Yields (knob, default, range, sentence) of every knob."""
  for path, field, value in fields(section, name):
    yield path, repr(value), expected(field), field.description or ''


def expected(field: FieldInfo) -> str:
  """Describes the accepted values: 'an integer from 1 to 2147483647'."""
  words = kind(field.annotation)
  limits = _limits(field)
  range_ = _range(limits, 'integer' in words)
  words += ' that do not fall' if limits.get('rising') else ''
  link = ', each' if words.startswith('a tuple') else ''
  link = link or (' of' if range_.startswith('at least') else '')
  text = f'{words}{link} {range_}' if range_ else words
  return f'{text}, or None' if is_auto(field) else text


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


def _range(limits: dict[str, Any], whole):
  """Describes the limits in words; '' without limits."""
  if whole and 'below' not in limits:
    limits = {'most': LARGEST} | limits
  ends = {'above': 'above', 'least': 'at least', 'below': 'below', 'most': 'at most'}
  code = 'd' if whole else 'g'
  number = {end: format(limits[end], code) for end in ends if end in limits}
  words = ' and '.join(f'{ends[end]} {n}' for end, n in number.items())
  if {'least', 'most'} <= number.keys():
    words = f'from {number["least"]} to {number["most"]}'
  return words + (' or inf' if words and limits.get('infinite') else '')


def kind(annotation: Any) -> str:
  """Describes the type of a knob in words."""
  origin = typing.get_origin(annotation)
  args = typing.get_args(annotation)
  if origin in (types.UnionType, typing.Union):  # a rule by name or by place
    return f'{kind(args[0])}, or path/to/file.py:function'
  if origin is typing.Literal:
    return 'one of ' + ', '.join(repr(arg) for arg in args)
  if origin is tuple:
    inner = args[0]
    count = '' if args[-1] is ... else f'{len(args)} '
    plural = {int: 'integers', float: 'numbers', str: 'strings', Any: 'values'}
    if inner in plural:
      return f'a tuple of {count}{plural[inner]}'
    values = 'tuples' if typing.get_origin(inner) is tuple else 'values'
    return f'a tuple of {count}{values}, each {kind(inner)}'
  if isinstance(annotation, type) and issubclass(annotation, Section):
    return f'a section with {", ".join(annotation.model_fields) or "no knobs"}'
  names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'True or False'}
  return names[annotation]


def is_auto(field: FieldInfo) -> bool:
  """Returns whether a knob may be None, so that the program decides it."""
  return _AUTO in field.metadata


def needed(field: FieldInfo) -> tuple[str, ...]:
  """Returns the conditions without which a knob or a section has no effect."""
  return _limits(field).get('needs', ())


def _limits(field: FieldInfo):
  extra = field.json_schema_extra
  return dict(extra) if isinstance(extra, dict) else {}


def _inside(value: Any, limits: dict[str, Any]):
  """Returns whether a number is in its range; True for everything else."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return True
  if value == math.inf:
    return bool(limits.get('infinite'))
  if isinstance(value, int) and abs(value) > LARGEST:
    return False
  return (
    math.isfinite(value)
    and limits.get('least', -math.inf) <= value <= limits.get('most', math.inf)
    and limits.get('above', -math.inf) < value < limits.get('below', math.inf)
  )


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
