"""Any value of any knob is refused in one sentence, quickly, or can be trained.

The trials are random and seeded: 60 in every run of the suite, 600 under `nightly`.
"""

import copy
import functools
import math
import operator
import random
import time

import jax
import jax.numpy as jnp
import pytest

from bapo_jax import knobs, sharding
from bapo_jax.data import sources
from bapo_jax.models import transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.training import budget, build, inputs, refusals, resolve
from bapo_jax.training.config import Config, overrides, parse

FIELDS = {name: (field, value) for name, field, value in knobs.fields(Config())}
SECTIONS = sorted({name.rpartition('.')[0] for name in FIELDS} - {''})
NUMBERS = (0, 1, -1, 7, 2**31 - 1, 2**31, 10**400, -(10**400))
NUMBERS += (-0.0, 0.5, 1.0, 1.5, 1e-300, 1e300, math.inf, -math.inf, math.nan)
NO_ROWS = sources.Data([], [])
LIMIT_S = 60  # thousands of times what a refusal takes
CELL = ('a', 'fresh_only', 'fixed')
OTHERS = (None, True, False, '', 'x', 'fresh', 'a\nb', 'é\ud800', 'y' * 10_000)
OTHERS += ((), (1,), (0.5, 0.9), (0.9, 0.5), (math.nan, 1.0), (1, 'x'), (10**400,))
OTHERS += (((),), ((1,),), (CELL,), ('a',) * 10_000)
OTHERS += ([], [0.5, 0.9], {}, {'x': 1}, b'x', 1j, object(), math)
TEXTS = ('', 'abc', '1.5', '-1', '0', '1', 'nan', 'inf', '-inf', '1e400', '9' * 400)
TEXTS += ('9' * 5000, 'None', 'maybe', '()', '(1,)', '(0.5,0.9)', '((1,2),(3,4))')
TEXTS += ('(' * 300, '[', '(1if,)', "('a\\d',)", '-' * 9000 + '1', 'x' * 2000, 'a\nb')
TEXTS += ('(1,)*10**9', '10**10**10', '{1: 2}', '3,', '\\')


def value(rng: random.Random, name: str):
  """Some value for a knob: at its limits, of its type, or anything."""
  field, default = FIELDS[name]
  edges = knobs.limits(field).values()
  near = [one for edge in edges for one in (edge, edge - 1, edge + 1, edge + 1e-9)]
  scaled = [default * n for n in (2, 1000)] if isinstance(default, int | float) else []
  choices = (near + scaled + [default], NUMBERS, OTHERS)
  return rng.choice(rng.choices(choices, weights=(4, 3, 2))[0])


def trial(rng: random.Random) -> dict:
  """The default's values, some of them replaced."""
  values = copy.deepcopy(Config().model_dump())
  for name in rng.sample(sorted(FIELDS), rng.randint(1, 3)):
    *sections, key = name.split('.')
    functools.reduce(dict.__getitem__, sections, values)[key] = value(rng, name)
  if rng.random() < 0.05:
    *sections, key = rng.choice(SECTIONS).split('.')
    functools.reduce(dict.__getitem__, sections, values)[key] = rng.choice(OTHERS)
  return values


def check_sentence(error: ValueError) -> None:
  """A sentence is one short line that begins with, or names, what is wrong."""
  text = str(error)
  assert type(error) in (ValueError, refusals.Refused)
  assert '\n' not in text and len(text) < 500, text
  assert any(name in text for name in (*FIELDS, *SECTIONS)), text
  assert not any(word in text for word in ('<class', 'typing.', 'pydantic')), text


def check_trainable(config: Config) -> None:
  """Model, decode slots and train step have shapes; nothing is allocated."""
  config = config.with_values(model={'attention': None})  # others need their device
  mesh = sharding.make(devices=jax.devices()[:1])
  model = inputs.open_model(config)
  sizes = budget.sizes_of(config, model.spec)
  counted = budget.count(sizes, model.spec, Schedule(), mesh)
  try:
    budget.check(counted, 2**34)
  except ValueError as error:
    return check_sentence(error)
  r = resolve.Resolved(config, model, NO_ROWS, mesh, Schedule(), counted)
  params = transformer.abstract(r.spec)
  opt = jax.eval_shape(build.optimizer(config).init, params)
  engine = build.make_engine(r)
  jax.eval_shape(engine.empty(config.places * config.sampler.group_size))
  step = build.make_train_step(config, r.spec)
  found = jax.eval_shape(step, params, opt, build.abstract_batch(config, mesh))
  shapes, expected = (jax.tree.map(jnp.shape, tree) for tree in (found[0], params))
  assert shapes == expected


def is_decided(config: Config) -> bool:
  """Whether no value was replaced by None, which a start derives from the model."""
  return not any(
    default is not None and operator.attrgetter(name)(config) is None
    for name, (_, default) in FIELDS.items()
  )


def run_trials(seed: int, trials: int, shaped: int) -> None:
  """Trials of values and of texts; the first `shaped` accepted ones are traced."""
  rng, accepted = random.Random(seed), 0
  for _ in range(trials):
    values, began = trial(rng), time.perf_counter()
    try:
      config = parse(values)
    except ValueError as error:
      check_sentence(error)
    else:
      accepted += 1
      if accepted <= shaped and not config.model.path and is_decided(config):
        check_trainable(config)
        began = time.perf_counter()
    assert time.perf_counter() - began < LIMIT_S, values
    given = f'--config.{rng.choice(sorted(FIELDS))}={rng.choice(TEXTS)}'
    try:
      overrides([given])
    except ValueError as error:
      check_sentence(error)
    assert time.perf_counter() - began < LIMIT_S, given
  assert accepted > trials // 20, 'most trials are refused: they test little'


def test_any_value_is_refused_in_one_sentence_or_can_be_trained():
  run_trials(seed=0, trials=60, shaped=3)


@pytest.mark.nightly
@pytest.mark.parametrize('seed', range(1, 5))
def test_any_value_of_many(seed):
  run_trials(seed, trials=150, shaped=10)
