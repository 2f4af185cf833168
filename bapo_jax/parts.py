"""Makes the parts of the training loop replaceable: a rule is a section to be called.

1. A `Part` is the base class of the rules of one part of the loop, such as all clip
   rules. The fields of a rule are its knobs, and its `__call__` is the formula. A rule
   also declares what it reads, and refuses configs with which it cannot work.
2. `OneOf` lists the rules of a part. The config names one of them, or the path of a
   custom function, path/to/file.py:function, whose keyword-only arguments are knobs.
3. Every other knob belongs to the chosen rule: a knob of another rule is refused.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from bapo_jax import custom_code, knobs, methods
from bapo_jax.knobs import FunctionPath, Section, shorten, shown


class Part(Section):
  """The base class of all rules of one part of the loop, such as all clip rules."""

  # The arguments with which a rule is called and the values that it returns, for the
  # trial of a custom function; `refusals.example` has a value for each name.
  arguments: ClassVar[tuple[str, ...]] = ()
  returns: ClassVar[tuple[str, ...]] = ()
  traced: ClassVar[bool] = True  # is called in a compiled program
  # All rules of the part, as `OneOf` lists them.
  rules: ClassVar['OneOf']

  rule: str

  @classmethod
  def described(cls) -> dict[str, FieldInfo]:
    """Returns name -> field, where the field `rule` lists the rules of the part."""
    return {**cls.model_fields, 'rule': cls.rules.field}

  @property
  def identity(self) -> bool:
    """Whether the rule changes nothing."""
    return False

  def refuses(self, config) -> Iterator[str]:
    """Yields a sentence, with the way out, for each reason why a config cannot work."""
    yield from ()

  def fault(self, result, example) -> str:
    """Says what is wrong with the result of a trial, whose types are right; or ''."""
    return ''

  @property
  def custom(self) -> bool:
    """Whether the rule is a user's function."""
    return custom_code.is_path(self.rule)


class Custom(Part):
  """A rule that calls a user's function."""

  function: ClassVar[custom_code.UserFunction]

  def __call__(self, *arguments: Any, **named: Any) -> Any:
    return self.function.bound(self)(*arguments, **named)


class OneOf:
  """The rules of a part, for `Annotated[Base, OneOf(Default, ...)]`."""

  def __init__(self, meaning: str, *rules: type[Part]):
    """Lists rules that have the same direct base class; the first is the default."""
    self.names = {rule.model_fields['rule'].default: rule for rule in rules}
    self.default = next(iter(self.names))
    base = rules[0].__base__
    assert base is not None and issubclass(base, Part)
    self.base = base
    literal: Any = Literal
    self.field = FieldInfo(
      annotation=literal[tuple(self.names)] | FunctionPath,
      default=self.default,
      description=meaning,
    )
    base.rules = self

  def at_defaults(self) -> dict[str, Any]:
    """Returns name -> every rule of the part, with its knobs at their defaults."""
    return {name: rule(rule=name) for name, rule in self.names.items()}

  def type_of(self, rule: Any) -> type[Part]:
    """Returns the class of a rule, by its name or by the path of a custom function.

    Raises:
      ValueError: no such rule, or a function that cannot be used.
    """
    if isinstance(rule, str) and custom_code.is_path(rule):
      try:
        return custom_code.section([rule], self.base, Custom)
      except ValueError as error:
        raise ValueError(f'rule={error}') from None
    if not isinstance(rule, str) or rule not in self.names:
      advice = f'{methods.advice(rule, self.names)}give {knobs.expected(self.field)}'
      raise ValueError(f'rule={shown(rule)}: {advice}')
    return self.names[rule]

  def chosen(self, values: Mapping[str, Any]) -> type[Part]:
    """Returns the class of the rule that values['rule'] names, or of the default."""
    return self.type_of(values.get('rule', self.default))

  def restarted(self, values: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """Switches a part to another rule, whose knobs start from their defaults.

    The knobs that all rules of the part have keep their values.
    """
    if rule == values.get('rule', self.default):
      return dict(values)
    shared = self.base.model_fields.keys() & values.keys()
    return {name: values[name] for name in values if name in shared} | {'rule': rule}

  def validate(self, values: Any) -> Part:
    """Returns the rule with these values; errors name knobs relative to the part."""
    if isinstance(values, self.base):
      return values
    if not isinstance(values, Mapping):
      raise ValueError(
        f'rule={shown(values)} is not a section; give a rule with its knobs'
      )
    kind = self.chosen(values)
    for name in values:
      if name not in kind.model_fields:
        rule = values.get('rule', self.default)
        raise ValueError(f'{shorten(name)} is not a knob; {self.advice(rule, name)}')
    return knobs.validate(kind, dict(values))

  def advice(self, rule: str, name: str) -> str:
    """Says which knobs a rule has, and which rules have the knob `name`."""
    has = [x for x in self.type_of(rule).model_fields if x != 'rule']
    text = f'rule={rule!r} has {", ".join(has) or "no knobs"}'
    if others := [x for x, kind in self.names.items() if name in kind.model_fields]:
      return f'{text}; {name} is a knob of rule={" or ".join(map(repr, others))}'
    near = difflib.get_close_matches(name, ['rule', *has], n=1)
    return f'{text}; did you mean {near[0]}?' if near else text

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    return core_schema.no_info_plain_validator_function(
      self.validate,
      serialization=core_schema.plain_serializer_function_ser_schema(
        pydantic.BaseModel.model_dump
      ),
    )


def part_of(field: FieldInfo) -> OneOf | None:
  """Returns the rules of a field of a section; None if the field is not a part."""
  return next((x for x in field.metadata if isinstance(x, OneOf)), None)


def parts(section: Section, name: str = '') -> Iterator[tuple[str, OneOf]]:
  """Yields (dotted name, rules) of each part in a section."""
  for path, _, value in knobs.fields_of(section, name):
    if isinstance(value, Part):
      yield path, value.rules
    elif isinstance(value, Section):
      yield from parts(value, path)
