"""Defines the config of a run: typed, frozen, validated once.

1. A config file returns an ml_collections ConfigDict; `load` returns its values;
2. `overrides` parses arguments such as --config.clip.rule=fixed, and `merged` applies
   them. If an argument changes the rule of a part, the knobs start from their defaults;
3. `parse` validates the values. Knobs that are None are decided later (autosetup/).

`compose` does all three, and refuses a changed knob that has no effect.
"""

import ast
import difflib
import functools
import inspect
import os
import pathlib
import re
import typing
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import pydantic
from flax import traverse_util
from ml_collections import ConfigDict
from pydantic.fields import FieldInfo

from bapo_jax import custom_code, knobs
from bapo_jax.knobs import Section
from bapo_jax.methods import METHODS, Method
from bapo_jax.parts import part_of
from bapo_jax.training import foreign_names, needs, refusals
from bapo_jax.training.schema import CHOICES, PARTS, Config

OVERRIDE = re.compile(r'--?(no)?config\.([^=]*)(?:=(.*))?', re.DOTALL)
SOURCES = ('problems.source', 'problems.test_source')
NO_CONFIGS = (
  'no folder configs/ is here; run in the folder of the repository, or give a config '
  'file of your own, such as a copy of configs/aime.py'
)


def compose(
  config: str | Mapping[str, Any], changes: Mapping[str, Any] | Sequence[str] = ()
) -> Config:
  """Returns the validated config of a file, or of nested values, with changes applied.

  Args:
    config: path or path:variant of a config file, or the values of a config.
    changes: dotted name -> value, or arguments such as --config.steps=10.

  Raises:
    ValueError: the file or a knob is invalid, or a changed knob has no effect; the
      message is one sentence.
  """
  values = load(config) if isinstance(config, str) else config
  if not isinstance(changes, Mapping):
    changes = overrides(changes, values)
  parsed = parse(merged(values, changes))
  needs.refuse(changes, [parsed])
  return parsed


def from_json(values: dict[str, Any]) -> Config:
  """Restores the config from config.json, where tuples are lists.

  Raises ValueError, a sentence, if another version of the program wrote it.
  """
  return knobs.restore(Config, values)


def parse(values: dict[str, Any]) -> Config:
  """Returns the validated config with these values.

  A knob that is None is judged once it is decided. Raises ValueError if a knob is out
  of range or knobs do not fit together.
  """
  given = traverse_util.flatten_dict(values, sep='.')
  missing = {name for name, value in given.items() if value is None} - {*auto()}
  if len(missing) > 1:
    wanted = ', '.join(f'--config.{name}=...' for name in given if name in missing)
    raise ValueError(f'these knobs are None and must be set; give {wanted}')
  config = knobs.validate(Config, values)
  refusals.judge(refusals.of_config(config))
  return config


def defaults() -> ConfigDict:
  """Returns the knobs at their defaults, for the get_config of a config file.

  A part, such as `clip`, has only the knobs that all its rules share, so that a file
  can choose another rule with its knobs: config.clip.update(rule='fixed', high=1.28).
  """
  values = Config().model_dump()
  for name in PARTS:
    _drop_rule(values, name)
  values['problems']['custom'] = {}  # the knobs of problems.source, which may change
  return ConfigDict(values)


def auto() -> list[str]:
  """Returns the knobs that may be None, so that the program decides them."""
  return [name for name, field, _ in knobs.fields(Config()) if knobs.is_auto(field)]


def _drop_rule(values: dict[str, Any], part: str) -> None:
  """Removes from nested values the knobs of a part that not all its rules have."""
  section = functools.reduce(lambda x, key: x.get(key, {}), part.split('.'), values)
  for name in section.keys() - PARTS[part].base.model_fields.keys():
    del section[name]


def load(file: str) -> dict[str, Any]:
  """Returns the values that a config file sets, as nested dicts.

  `file` is a path or path:variant. The variant is passed to the file's get_config, or,
  if the file does not define it, looked up in methods.METHODS.

  Raises ValueError if the file cannot be read or executed.
  """
  stem, end, variant = file.partition('.py:')  # folders may have colons
  path = stem + end[:3]
  if not os.path.exists(path):
    problem = f'--config={file}: no such file' if file else '--config is missing'
    files = ', '.join(config_files())
    raise ValueError(f'{problem}; {f"give one of {files}" if files else NO_CONFIGS}')
  try:
    if not path.endswith('.py'):
      raise OSError(f'not a file that ends in .py: {path!r}')
    module = custom_code.run(path)
    if not hasattr(module, 'get_config'):
      raise ValueError('no function get_config; define one that returns a ConfigDict')
    is_method = _is_method(module, path, variant)
    config = module.get_config(*([] if is_method or not variant else [variant]))
    if not isinstance(config, ConfigDict):
      raise TypeError(f'get_config() returns {config!r:.60}, not a ConfigDict')
    values = config.to_dict()
    return _with_method(values, METHODS[variant]) if is_method else values
  except (ValueError, OSError) as error:
    raise ValueError(f'--config={file}: {error}') from None
  except (Exception, SystemExit) as error:  # a user's file may raise anything
    raise ValueError(f'--config={file}: {custom_code.described(error, path)}') from None


def config_files() -> list[str]:
  """Returns the files of configs/ with their variants: 'configs/a.py[:x|:y]'.

  Skips files that define no get_config or raise an error.
  """
  listed = []
  for path in sorted(pathlib.Path('configs').glob('*.py')):
    try:
      names = vars(custom_code.run(str(path)))
      variants = '|'.join(f':{name}' for name in names.get('VARIANTS', ()))
    except (Exception, SystemExit):  # a user's file may raise anything
      continue
    if 'get_config' in names:
      listed.append(f'{path}[{variants}]' if variants else str(path))
  return listed


def _is_method(module: ModuleType, path: str, variant: str) -> bool:
  """Returns whether a variant is a published method; a file's variant comes first.

  Raises ValueError if the file has no such variant and there is no such method.
  """
  names = list(getattr(module, 'VARIANTS', ()))
  takes_variant = bool(inspect.signature(module.get_config).parameters)
  if not variant or variant in names or (takes_variant and not names):
    return False
  if variant in METHODS:
    return True
  raise ValueError(
    f'no variant {variant!r}; give --config={path} alone, with a variant of this file '
    f'({names or "it has none"}), or with a method: {", ".join(METHODS)}'
  )


def _with_method(values: dict[str, Any], method: Method) -> dict[str, Any]:
  """Applies a method to the nested values of a config file.

  A rule that the method chooses starts from its defaults and gets the values of the
  method, even if the file chooses the same rule with other values.
  """
  for part in PARTS:
    if f'{part}.rule' in method.overrides:
      _drop_rule(values, part)
  title = f'{values.get("title", "run")}: {method.title}'
  return merged(values, {**method.overrides, 'title': title})


def overrides(
  given: Sequence[str], values: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
  """Parses arguments such as --config.steps=10; the last value of a knob wins.

  Args:
    given: the arguments.
    values: nested values of the config file, which names rules and custom functions.

  Raises ValueError for an unknown knob, or a value that does not have the knob's type.
  """
  parsed = [match.groups() for arg in given if (match := OVERRIDE.fullmatch(arg))]
  # The rules first: they decide which other knobs exist.
  parsed.sort(key=lambda groups: groups[1] not in CHOICES)
  known = known_knobs(values)
  values_of: dict[str, Any] = {}
  choices = sum(name in CHOICES for _, name, _ in parsed)
  for number, (no, name, text) in enumerate(parsed):
    if number == choices:  # of all choices together: both sources may be new functions
      known = known_knobs(merged(values, values_of))
    if name not in known:
      advice = unknown(name, merged(values, values_of), known)
      raise ValueError(f'no knob --config.{knobs.shorten(name)}; {advice}')
    if text == 'None' and knobs.is_auto(known[name]):
      values_of[name] = None
      continue
    kind = known[name].annotation
    if text is None and kind is bool:
      text = 'false' if no else 'true'
    try:
      values_of[name] = _from_text(kind, text)
    except (ValueError, LookupError, SyntaxError, RecursionError, MemoryError):
      wanted = knobs.wanted(known[name])
      text = text or ''
      text = knobs.shorten(text if text.isprintable() else repr(text))
      raise ValueError(f'{name}={text}: give {wanted}') from None
  return values_of


def unknown(name: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> str:
  """Says what to use in place of an unknown knob, as the end of a sentence."""
  if foreign := foreign_names.translated(name, ()):
    return foreign
  for path, rules in PARTS.items():
    if name.startswith(f'{path}.'):
      rule, _, knob = name.removeprefix(f'{path}.').partition('.')
      if knob and rule in rules.names:  # as in older versions
        return f'use {path}.{knob} with {path}.rule={rule!r}'
      section = functools.reduce(lambda x, key: x.get(key, {}), path.split('.'), values)
      rule = section.get('rule', rules.default)
      return f'{path}.{rules.advice(rule, name.removeprefix(f"{path}."))}'
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
  return foreign_names.translated(name, known) or f'the nearest are {", ".join(near)}'


def known_knobs(
  values: Mapping[str, Any], section: type[Section] = Config, path: str = ''
) -> dict[str, FieldInfo]:
  """Returns dotted name -> field of every knob that exists with these values.

  The values need not be valid: only rules and custom functions are read.
  """
  known = {}
  for key, field in section.described().items():
    name = f'{path}{key}'
    inner = values.get(key)
    inner = inner if isinstance(inner, Mapping) else {}
    kind = field.annotation
    prefix = path
    try:
      if rules := part_of(field):
        prefix = f'{name}.'
        kind = rules.chosen(inner)
      elif key == 'custom' and issubclass(section, custom_code.CustomSection):
        kind = section.custom_type(values)
    except ValueError as error:
      raise ValueError(f'{prefix}{error}') from None
    if isinstance(kind, type) and issubclass(kind, Section):
      known |= known_knobs(inner, kind, f'{name}.')
    else:
      known[name] = field
  return known


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a copy of nested values with the values of dotted names replaced.

  If the rule of a part changes, only the knobs that all rules of the part have keep
  their values: the new rule starts from its defaults. If the function that returns the
  problems changes, the knobs that the new function lacks are dropped.

  Raises ValueError if a section is not a mapping.
  """
  values = dict(values)
  for name in sorted(changes, key=lambda name: name not in CHOICES):
    *sections, key = name.split('.')
    target = values
    for section in sections:
      inner = target.get(section, {})
      if not isinstance(inner, Mapping):
        raise ValueError(f'{section}={inner!r} is not a section; set its knobs instead')
      target[section] = dict(inner)
      target = target[section]
    part = '.'.join(sections)
    if part in PARTS and key == 'rule':
      restarted = PARTS[part].restarted(target, changes[name])
      target.clear()
      target.update(restarted)
    target[key] = changes[name]
  if changes.keys() & set(SOURCES):
    problems = values['problems']
    known = known_knobs({'problems': problems}).keys() | changes.keys()
    custom = problems.get('custom', {})
    problems['custom'] = {
      x: custom[x] for x in custom if f'problems.custom.{x}' in known
    }
  return values


def changed(config: Config) -> dict[str, tuple[Any, Any]]:
  """Returns the knobs that differ from their defaults: name -> (value, default).

  Omits the title and knobs that the program decides.
  """
  found = {}
  for name, field, value in knobs.fields(config):
    default = field.get_default(call_default_factory=True)
    if value not in (default, None) and name != 'title':
      found[name] = value, default
  return found


def _from_text(kind: Any, text: str | None) -> Any:
  """Parses a knob's value of the type `kind`, without checking its range."""
  if text is None:
    raise ValueError('no value')
  if kind in (bool, int, float):
    return pydantic.TypeAdapter(kind).validate_strings(text)
  if typing.get_origin(kind) is not tuple:
    return text
  if text.isidentifier():  # a string without its quotes
    return (text,)
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # Python only warns of '1if'; make it an error
    value = ast.literal_eval(text)
  if isinstance(value, list):
    return tuple(value)
  single = typing.get_args(kind)[-1] is ... and not isinstance(value, tuple)
  return (value,) if single else value
