"""Reads a config file and the knobs that the command line sets.

1. `load` runs the file and returns the values that it sets;
2. `overrides` reads arguments such as --config.steps=10;
3. `decided` removes the knobs that both leave None: the run derives them.
"""

import ast
import difflib
import importlib.util
import re
import typing
import warnings
from typing import Any

from ml_collections import ConfigDict

from bapo_jax import knobs
from bapo_jax.training.config import Config
from bapo_jax.training.knobs import DERIVABLE

OVERRIDE = re.compile(r'--?(no)?config\.([^=]*)(?:=(.*))?', re.DOTALL)
TRUTH = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
LONGEST = 10_000  # characters of a tuple


def load(file: str) -> dict[str, Any]:
  """Returns the values that a config file sets, as nested dicts.

  Args:
    file: its path; after a colon the variant, the argument of its get_config.

  Raises:
    ValueError: the file cannot be read, or raises.
  """
  path, *variant = file.split(':', 1)
  try:
    spec = importlib.util.spec_from_file_location('config', path)
    if spec is None or spec.loader is None:
      raise OSError(f'not a file that ends in .py: {path!r}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*variant)
    if not isinstance(config, ConfigDict):
      raise TypeError(f'get_config() returns {config!r:.60}, not a ConfigDict')
    return config.to_dict()
  except (ValueError, OSError) as error:
    raise ValueError(f'--config={file}: {error}') from None
  except (Exception, SystemExit) as error:  # somebody's file may raise anything
    raise ValueError(f'--config={file}: {type(error).__name__}: {error}') from None


def overrides(given: list[str]) -> dict[str, Any]:
  """Parses arguments such as --config.steps=10; the last value of a name counts.

  Raises:
    ValueError: an unknown knob, or a text that is not a value of its type.
  """
  known = {name: field for name, field, _ in knobs.fields(Config())}
  found = {}
  for arg in given:
    match = OVERRIDE.fullmatch(arg)
    assert match
    no, name, text = match.groups()
    if name not in known:
      near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
      raise ValueError(f'no knob --config.{name}; the nearest are {", ".join(near)}')
    kind = known[name].annotation
    if text is None and kind is bool:
      text = 'false' if no else 'true'
    try:
      found[name] = from_text(kind, text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
      wanted, text = knobs.expected(known[name]), text or ''
      text = knobs.shorten(text if text.isprintable() else repr(text))
      raise ValueError(f'{name}={text}: give {wanted}') from None
  return found


def decided(values: dict[str, Any]) -> dict[str, Any]:
  """Removes the values that are None; `derived` lists their names.

  Raises:
    ValueError: one of them is for the user to set.
  """
  found, names = _without_none(values)
  if missing := [name for name in names if name not in DERIVABLE]:
    wanted = ', '.join(f'--config.{name}=...' for name in missing)
    raise ValueError(f'the config file leaves this to you: give {wanted}')
  return found | {'derived': tuple(names)} if names else found


def _without_none(
  values: dict[str, Any], name: str = ''
) -> tuple[dict[str, Any], list[str]]:
  """Returns (values that are not None, dotted names of the others)."""
  found, names = {}, []
  for key, value in values.items():
    dotted = f'{name}.{key}' if name else key
    if isinstance(value, dict):
      found[key], inner = _without_none(value, dotted)
      names += inner
    elif value is None:
      names.append(dotted)
    else:
      found[key] = value
  return found, names


def from_text(kind: Any, text: str | None) -> Any:
  """Parses the value of a knob of this type; its range is not checked.

  Raises:
    ValueError, SyntaxError, RecursionError, MemoryError: the text is not such a value.
  """
  if text is None:
    raise ValueError('no value')
  if kind is bool:
    if text.lower() not in TRUTH:
      raise ValueError(text)
    return TRUTH[text.lower()]
  if kind in (int, float):
    return kind(text)
  if typing.get_origin(kind) is not tuple:
    return text
  if text.isidentifier():  # a string without its quotes
    return (text,)
  if len(text) > LONGEST:
    raise ValueError(f'{len(text)} characters')
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # Python warns of '1if'; the next line refuses it
    value = ast.literal_eval(text)
  inner, *rest = typing.get_args(kind)
  if isinstance(value, list):
    return tuple(value)
  single = rest == [...] and typing.get_origin(inner) is not tuple
  return (value,) if single and not isinstance(value, tuple) else value
