"""Parses the names of held-out sets: aime24=a.jsonl,aime25=b.jsonl,c.jsonl."""

import os
import re

from bapo_jax import custom_code
from bapo_jax.runtime import files
from bapo_jax.runtime.glossary import GLOSSARY

# The name is before the first =, which may also be in a path: runs/lr=1/a.jsonl.
NAMED = re.compile(r'([^/:=]*)=(.*)')
NAME = re.compile('[A-Za-z0-9_-]+')  # what every writer of metrics accepts


def parse(source: str) -> dict[str, str]:
  """Returns name -> source of each set, in order; {'': source} without names.

  A path that exists has no name, whatever its characters. A path without a name
  continues the set before it.

  Raises:
    ValueError: a name or its source cannot be used.
  """
  sets: dict[str, str] = {}
  name = ''
  for path in [source] if _exists(source) else source.split(','):
    named = None if _exists(path) else NAMED.fullmatch(path)
    if named:
      name, path = named.groups()
      if reason := _refusal(name, path, sets):
        raise ValueError(f'test_source={source}: {reason}')
      sets[name] = files.local(path, flag=f'test_source={name}=')
    else:
      sets[name] = f'{sets[name]},{path}' if name in sets else path
  return sets


def _exists(path):
  """Returns whether a path exists, or the file of a function's path."""
  return os.path.exists(re.sub(r':\w+$', '', path))


def _refusal(name, path, sets):
  """Returns why a set cannot have this name and path after these sets; '' if it can."""
  if '' in sets:
    return f'{sets[""]} precedes the first name, {name!r}; name every set, or none'
  if not NAME.fullmatch(name):
    return (
      f'{name!r} cannot name a set; use letters, digits, _ and -, as in aime24=file'
    )
  if name in sets or f'eval/{name}' in GLOSSARY:
    return f'the name {name} belongs to another set or metric already; choose another'
  if custom_code.is_path(path):
    return (
      f'{name} is a function, which cannot be a named set; write its rows to a file'
    )
  return '' if path else f'the set {name} is empty; write {name}=file.jsonl'
