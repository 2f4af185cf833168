"""The sentences by which the config and the command line refuse a value."""

import contextlib
import io
import sys
import warnings
from collections.abc import Sequence

import pytest
from absl import logging
from absl.testing import flagsaver
from flax import traverse_util

from bapo_jax import main
from bapo_jax.knobs import fields
from bapo_jax.runtime import hosts
from bapo_jax.training.config import PARTS, Config, parse

# Every knob, those of rules that are not the default among them, and the sections.
KNOBS = {name for name, _, _ in fields(Config())} | {
  f'{part}.{knob}'
  for part, rules in PARTS.items()
  for kind in rules.names.values()
  for knob in kind.model_fields
}
SECTIONS = {name.rpartition('.')[0] for name in KNOBS} - {''}


def nested(dotted: dict) -> dict:
  """{'clip.rule': x} as {'clip': {'rule': x}}."""
  return traverse_util.unflatten_dict(dotted, sep='.')


def refusal(**dotted) -> str:
  """The sentence for these values, by dotted knob."""
  return sentence_of(parse, nested(dotted))


def sentence_of(function, *args, **kwargs) -> str:
  """Returns the one line of the ValueError that a call raises; pydantic's have more."""
  with pytest.raises(ValueError) as error:
    function(*args, **kwargs)
  assert '\n' not in str(error.value)
  return str(error.value)


def refused(flags: Sequence[str]) -> str:
  """Returns the one line on stderr by which `bapo_jax.main` refuses these flags."""
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
  assert done.value.code == 2, err.getvalue()
  (line,) = err.getvalue().strip().splitlines()
  assert line.startswith('bapo_jax: ') and not out.getvalue()
  return line
