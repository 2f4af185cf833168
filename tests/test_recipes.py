"""The page recipes.md is what the search finds, and compiled programs confirm it."""

import math
import operator
import pathlib
import re
from collections import defaultdict

import jax
import numpy as np
import pytest

from bapo_jax.methods import METHODS
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.tools.plan import devices, plan, programs
from bapo_jax.training import config as config_lib
from bapo_jax.training import resolve
from bapo_jax.training.config import PARTS, Config, merged, parse
from benchmarks import meshes
from docs.reference import write_algorithms, write_recipes
from docs.reference.write_algorithms import PAGE, ROWS

RECIPES = pathlib.Path(write_recipes.__file__).with_name('recipes.md').read_text()
WRITE = 'python -m docs.reference.write_recipes > docs/reference/recipes.md'
MODEL = 'Qwen2.5-7B'
PARAMETERS = {  # of the published weights
  'Qwen2.5-0.5B': 494_032_768,
  'Qwen2.5-1.5B': 1_543_714_304,
  'Qwen2.5-7B': 7_615_616_512,
  'Qwen2.5-14B': 14_770_033_664,
  'Qwen2.5-32B': 32_763_876_352,
  'gemma-3-270m': 268_098_176,
  'gemma-3-1b': 999_885_952,
  'OLMo-2-0425-1B': 1_484_916_736,
  'OLMo-2-1124-7B': 7_298_617_344,
  'SmolLM3-3B': 3_075_098_624,
}


@pytest.mark.parametrize('model', write_recipes.MODELS)
def test_the_models_have_the_size_of_the_published_ones(model):
  spec = hf_config.spec_of(write_recipes.options(model), 'bfloat16')
  assert transformer.count(spec) == PARAMETERS[model]


@pytest.mark.parametrize('topology', write_recipes.MACHINES)
def test_the_section_of_a_machine_is_current(topology):
  assert write_recipes.section(topology) in RECIPES, WRITE


def test_the_introduction_and_the_headings_are_current():
  headings = [f'## {name}' for name in write_recipes.MACHINES.values()]
  assert [line for line in RECIPES.splitlines() if line.startswith('## ')] == headings
  assert RECIPES.startswith(write_recipes.introduction()), WRITE


@pytest.mark.parametrize('lora', [False, True])
def test_the_excess_is_the_memory_that_is_missing(tmp_path, lora):
  # The 14B is too large for an update, too, but by less than for decoding.
  model = 'Qwen2.5-14B' if lora else 'Qwen2.5-1.5B'
  config, choice, excess = write_recipes.longest('rtx4090:1', model, lora)
  assert choice is None and excess > 0
  config = write_recipes.with_model(config, model, str(tmp_path))
  chip, found = meshes.count('rtx4090:1')
  spec = programs.device_spec(config, 'gpu')
  for memory, fits in ((-(2**20), False), (2**20, True)):
    memory += write_recipes.room(chip) + excess
    assert bool(meshes.search(config, spec, chip, found, memory)[0]) == fits


@pytest.fixture
def lowest_effort():
  """Compiles as --mode=plan does; with more effort, XLA takes memory that is free."""
  names = ('jax_exec_time_optimization_effort', 'jax_memory_fitting_effort')
  before = {name: getattr(jax.config, name) for name in names}
  for name in names:
    jax.config.update(name, -1.0)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def compiled(topology, where, config, model, path):
  """(chip, Row by program) of a config on an absent machine, with this model."""
  config = write_recipes.with_model(config, model, str(path))
  mesh, chip = resolve.make_mesh(config, topology(where)), devices.parse(where)[0]
  found = programs.programs_of(plan.planned(config, mesh, chip))
  return chip, {name: plan.compiled(program) for name, program in found.items()}


@pytest.mark.nightly
@pytest.mark.usefixtures('lowest_effort')
@pytest.mark.parametrize('where', ['h100:8', 'v5e:4x4', 'v6e:2x4'])
def test_a_row_fits_when_its_command_compiles(topology, tmp_path, where):
  config, choice, _ = write_recipes.longest(where, MODEL, lora=False)
  command = write_recipes.command(where, MODEL, lora=False)
  assert command in RECIPES.splitlines()
  changed = defaultdict(dict)
  flags = [flag for flag in command.split() if flag.startswith('--config.')]
  for knob, value in config_lib.overrides(flags).items():
    section, name = knob.split('.')
    changed[section][name] = value
  chip, rows = compiled(topology, where, config.with_values(**changed), MODEL, tmp_path)
  for name, row in rows.items():
    assert row.left(chip) >= 0, name
  # The error that training/budget.py states for an update.
  update, decoding = rows['train step'].total, rows['decode'].total
  assert choice.update_bytes == pytest.approx(update, rel=0.17)
  assert choice.decode_bytes == pytest.approx(decoding, rel=0.17)


# ------------ the tables of algorithms.md are what configs, tests and measurements say


CASES = {name: row for rows in ROWS.values() for name, row in rows.items()}
MEASURED = re.compile(r'\b\d+e[-+]\d+\b')


def test_the_tables_are_current():
  """Up to the measured differences, whose last bits depend on the processor."""
  text = PAGE.read_text()
  written = write_algorithms.document(text)
  command = 'python -m docs.reference.write_algorithms'
  assert MEASURED.sub('', written) == MEASURED.sub('', text), command


def test_stored_and_measured_differences_are_small():
  rows = write_algorithms.parity()
  lines = [write_algorithms.parity_row(*row)[:3] for row in rows]
  text = PAGE.read_text()
  for cells, (*_, value, gradient) in zip(lines, rows, strict=True):
    (line,) = [x for x in text.splitlines() if x.startswith(f'| {" | ".join(cells)} |')]
    stored = [float(x) for x in line.strip(' |').split(' | ')[3:]]
    assert max(*stored, value, gradient) < 1e-6
  # Something was compared: no two programs round alike.
  assert sum(gradient > 0 for *_, gradient in rows) > len(rows) / 2


def test_every_method_is_on_the_page():
  assert sorted(CASES) == sorted(METHODS)


@pytest.mark.parametrize('name', CASES)
def test_every_limit_of_a_rule_has_a_source(name):
  overrides = METHODS[name].overrides
  config = parse(merged(Config().model_dump(), overrides))
  for part in PARTS.keys() & {key.removesuffix('.rule') for key in overrides}:
    rule = operator.attrgetter(part)(config)
    for knob in type(rule).model_fields.keys() - PARTS[part].base.model_fields.keys():
      limits = np.atleast_1d(getattr(rule, knob)).tolist()
      limits = [x for x in limits if isinstance(x, int | float)]
      if limits and all(math.isfinite(x) for x in limits):
        assert f'{part}.{knob}' in CASES[name].values
