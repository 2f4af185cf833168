"""One description per knob: name, type, default, range, one sentence.

1. a section of the config is a frozen class, its fields made by `knob`; it stands in
   the folder whose code uses it, in a knobs.py that imports neither JAX nor NumPy: a
   bad value is refused before either is loaded;
2. `validate` makes a section of plain values, or raises one sentence that names knob,
   value and range;
3. `describe` gives each knob's line of docs/config.md.
"""

import math
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import pydantic
from pydantic.fields import FieldInfo

LARGEST = 2**31 - 1  # sizes and counts are int32 on the device

AnySection = TypeVar('AnySection', bound='Section')


class Section(pydantic.BaseModel):
  """Base of all sections: frozen, no unknown names, no conversion between types."""

  model_config = pydantic.ConfigDict(
    frozen=True,
    extra='forbid',
    strict=True,
    allow_inf_nan=True,
    protected_namespaces=(),
  )

  @pydantic.model_validator(mode='after')
  def _in_range(self) -> 'Section':
    """The base's: runs before a section's own, which may rely on the ranges."""
    for name, field in type(self).model_fields.items():
      _check(name, field, getattr(self, name))
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
) -> Any:
  """A field of a section.

  Args:
    least, most: of the value, or of each value of a tuple; the ends are allowed.
    above, below: likewise, the ends are not allowed.
    infinite: infinity is allowed, and means: without a limit.
  """
  if isinstance(default, type) and issubclass(default, Section):
    return pydantic.Field(default_factory=default, description=description)
  limits = {'least': least, 'most': most, 'above': above, 'below': below}
  extra: dict[str, Any] = {k: v for k, v in limits.items() if v is not None}
  return pydantic.Field(
    default, description=description, json_schema_extra=extra | {'infinite': infinite}
  )


def validate(section: type[AnySection], values: dict, name: str = '') -> AnySection:
  """The section with these values.

  Args:
    name: the section's own, for errors; '' for the whole config.

  Raises:
    ValueError: one sentence with knob, value and range.
  """
  try:
    return section.model_validate(values)
  except pydantic.ValidationError as error:
    raise ValueError(_sentence(section, error.errors()[0], name, values)) from None


def fields(section: Section, name: str = '') -> Iterator[tuple[str, FieldInfo, Any]]:
  """(dotted name, description, value) of every knob, in order, sections opened."""
  for key, field in type(section).model_fields.items():
    value, path = getattr(section, key), f'{name}.{key}' if name else key
    if isinstance(value, Section):
      yield from fields(value, path)
    else:
      yield path, field, value


def _check(name: str, field: FieldInfo, value: Any) -> None:
  """Raises ValueError where a number is outside its range."""
  for one in value if isinstance(value, tuple) else (value,):
    if isinstance(one, bool) or not isinstance(one, int | float):
      continue
    if not _inside(one, _limits(field)):
      raise ValueError(f'{name}={shown(value)}: give {expected(field)}')


def _limits(field: FieldInfo) -> dict:
  extra = field.json_schema_extra
  return dict(extra) if isinstance(extra, dict) else {}


def _inside(value: float, limits: dict) -> bool:
  if isinstance(value, int):
    if abs(value) > LARGEST:
      return False
  elif math.isnan(value) or (math.isinf(value) and not limits.get('infinite')):
    return False
  return (
    value >= limits.get('least', -math.inf)
    and value <= limits.get('most', math.inf)
    and value > limits.get('above', -math.inf)
    and (value < limits.get('below', math.inf) or value == math.inf)
  )


def expected(field: FieldInfo) -> str:
  """What a knob may be, in words: 'an integer from 1 to 2147483647'."""
  limits, kind = _limits(field), _kind(field.annotation)
  whole = kind.startswith(('an integer', 'integers'))
  low = limits.get('least', limits.get('above'))
  high = limits.get('most', limits.get('below', LARGEST if whole else None))
  words = []
  if low is not None:
    words.append(f'above {low:g}' if 'above' in limits else f'from {low:g}')
  if high is not None:
    shown = f'{high}' if whole else f'{high:g}'
    words.append(f'below {shown}' if 'below' in limits else f'to {shown}')
  if limits.get('infinite'):
    words.append('or inf')
  return ' '.join([kind, *words]).removesuffix(',')


def _kind(annotation: Any) -> str:
  """The type in words."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Literal:
    return 'one of ' + ', '.join(repr(arg) for arg in args)
  if origin is tuple and args[-1] is ...:
    plural = {int: 'integers', float: 'numbers', str: 'strings'}
    inner = plural.get(args[0]) or f'tuples, each {_kind(args[0])}'
    if typing.get_origin(args[0]) is typing.Literal:
      inner = 'values, each ' + _kind(args[0])
    return f'{inner} in a tuple,' if args[0] in (int, float) else f'a tuple of {inner}'
  if origin is tuple:
    plural = {int: 'integers', float: 'numbers', str: 'strings'}
    return f'a tuple of {len(args)} {plural.get(args[0], "values")},'
  if isinstance(annotation, type) and issubclass(annotation, Section):
    return f'a section with {", ".join(annotation.model_fields)}'
  names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'True or False'}
  return names.get(annotation, str(annotation))


def shown(value: Any) -> str:
  """A value as an error shows it, on one line and not too long."""
  try:
    return shorten(repr(value))
  except Exception:  # an integer of 5000 digits, somebody's own class
    return f'<{type(value).__name__}>'


def shorten(text: str) -> str:
  """The text, or its first 57 characters and three dots."""
  return text if len(text) <= 60 else f'{text[:57]}...'


def _sentence(section: type[Section], error: Any, name: str, values: Any) -> str:
  """pydantic's first error as ours."""
  place = [name] if name else []
  place += [str(part) for part in error['loc']]
  if error['type'] == 'value_error':  # raised by a section's own check
    sentence = '.'.join([*place, str(error['ctx']['error'])])
    long = len(sentence) > 400  # a value in it may be
    return f'{sentence[:200]} ... {sentence[-150:]}' if long else sentence
  if error['type'] == 'extra_forbidden':
    return f'no knob {".".join(place)}'
  field, depth = _field(section, [str(part) for part in error['loc']])
  path = '.'.join(place[: depth + bool(name)])
  for key in error['loc'][:depth]:
    values = values[key]
  wanted = f'give {expected(field)}' if field else error['msg']
  return f'{path}={shown(values)}: {wanted}'


def _field(section: Any, place: list[str]) -> tuple[FieldInfo | None, int]:
  """The field at a path, or the one whose tuple element it names; and its depth."""
  field, depth = None, 0
  for key in place:
    if not isinstance(section, type) or not issubclass(section, Section):
      break
    if key not in section.model_fields:
      break
    field, depth = section.model_fields[key], depth + 1
    section = field.annotation
  return field, depth


def describe(section: Section, name: str = '') -> Iterator[tuple[str, str, str, str]]:
  """(knob, default, range, sentence) of every knob."""
  for path, field, value in fields(section, name):
    yield path, repr(value), expected(field), field.description or ''
