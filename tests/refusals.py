"""The sentences by which the config and the command line refuse a value."""

import contextlib
import io
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import pydantic
import pytest
from absl import logging
from absl.testing import flagsaver

from bapo_jax import main
from bapo_jax.runtime import hosts
from bapo_jax.training.config import parse


def nested(dotted: dict) -> dict:
  """{'clip.rule': x} as {'clip': {'rule': x}}."""
  values = {}
  for path, value in dotted.items():
    *sections, name = path.split('.')
    section = values
    for key in sections:
      section = section.setdefault(key, {})
    section[name] = value
  return values


def refusal(**dotted) -> str:
  """The sentence for these values, by dotted knob."""
  with pytest.raises(ValueError) as error:
    parse(nested(dotted))
  assert not isinstance(error.value, pydantic.ValidationError)
  assert '\n' not in str(error.value)
  return str(error.value)


class Ended(NamedTuple):
  """A command that has ended."""

  status: int
  stdout: str
  stderr: str


def command(flags: Sequence[str]) -> Ended:
  """Runs `python -m bapo_jax.main` with these flags inside this process."""
  out, err, verbosity = io.StringIO(), io.StringIO(), logging.get_verbosity()
  with (
    flagsaver.flagsaver(),
    warnings.catch_warnings(),
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    pytest.raises(SystemExit) as done,
  ):
    patch.setattr(sys, 'unraisablehook', sys.unraisablehook)
    patch.setattr(hosts, 'initialise', lambda *_: None)  # must come before other JAX
    main.main(main.parse(['bapo_jax', *flags]))
  logging.set_verbosity(verbosity)
  return Ended(done.value.code, out.getvalue(), err.getvalue())


def refused(flags: Sequence[str]) -> str:
  """Returns the one line on stderr by which the command line refuses these flags."""
  ended = command(flags)
  assert ended.status == 2, ended
  (line,) = ended.stderr.strip().splitlines()
  assert line.startswith('bapo_jax: ') and not ended.stdout
  return line
