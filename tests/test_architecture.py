"""Checks the direction of imports, the length of functions, and the glossary.

Ruff checks docstrings and return annotations (pyproject.toml).
"""

import ast
import graphlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'bapo_jax'

# In flow order: a folder imports only itself and the folders above it.
FOLDERS = (
  '',
  'runtime',
  'algorithms',
  'models',
  'data',
  'rewards',
  'rollout',
  'learner',
  'training',
  'autosetup',
  'run',
  'tools',
)

# Rules of one slot know the records and their knobs, and no other slot.
SLOTS = {'replay_buffer', 'batch_rules', 'advantage', 'clip', 'loss'}
SLOTS = {f'algorithms.{name}' for name in SLOTS}

# The learner receives its rules; the config lists them, and the judge knows some.
RULES = {f'algorithms.{m}' for m in ('batch_rules', 'advantage', 'clip')}
MAY_NAME_RULES = {'training.schema', 'training.refusals'}

ONLY = {  # package -> the modules that may import it
  'transformers': {'data.tokenizer'},
  'tensorflow_datasets': {'data.hub'},
  'pyarrow': {'data.local_files'},
  'rich': {'tools.viewer'},
  'ml_collections': {'training.config'},
  'PIL': {'data.pictures'},
  'orbax': {'training.checkpoint'},
  'huggingface_hub': {'models.hf.directory', 'data.hub'},
  'math_verify': {'rewards.latex.symbolic'},
  'latex2sympy2_extended': {'rewards.latex.symbolic'},
}
# A bad knob is refused before any of these packages is imported.


def name_of(path):
  return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


MODULES = {name_of(p): p for p in PACKAGE.rglob('*.py') if p.name != '__init__.py'}


def folder_of(name):
  return name.split('.')[0] if '.' in name else ''


def imports(path):
  """(modules of the package, top-level packages outside) that a file imports."""
  inside, outside = set(), set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    else:
      continue
    for name in names:
      top, _, rest = name.partition('.')
      if top != 'bapo_jax':
        outside.add(top)
        continue
      found = [m for m in MODULES if rest == m or rest.startswith(m + '.')]
      assert found, f'{path.name} imports {name}, which is no module'
      inside.add(max(found, key=len))
  return inside, outside


def against_the_flow(name, needs):
  """The modules among `needs` in a folder below the folder of `name`."""
  place = FOLDERS.index(folder_of(name))
  return {other for other in needs if FOLDERS.index(folder_of(other)) > place}


def test_every_folder_has_a_place_in_the_flow():
  assert {folder_of(name) for name in MODULES} == set(FOLDERS)


@pytest.mark.parametrize('folder', [f for f in FOLDERS if f])
def test_imports_follow_the_flow(folder):
  for name in (m for m in MODULES if folder_of(m) == folder):
    needs, outside = imports(MODULES[name])
    late = against_the_flow(name, needs)
    assert not late, f'{name} imports {late}, which come after it'
    if name in SLOTS:
      assert not needs & SLOTS, f'{name} imports another slot: {needs & SLOTS}'
    if folder in ('learner', 'training') and name not in MAY_NAME_RULES:
      assert not needs & RULES, f'{name} imports {needs & RULES}; rules are passed in'
    for package, allowed in ONLY.items():
      assert package not in outside or name in allowed, f'{name} imports {package}'


def test_modules_import_each_other_in_one_direction():
  needs = {name: imports(path)[0] - {name} for name, path in MODULES.items()}
  graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def test_the_package_does_without_the_lab_and_its_figures():
  needs = {name: imports(path)[1] for name, path in MODULES.items()}
  assert not [
    name for name, outside in needs.items() if outside & {'lab', 'matplotlib'}
  ]


def test_an_import_against_the_flow_is_found(tmp_path):
  path = tmp_path / 'module.py'
  path.write_text('def f():\n  from bapo_jax.learner import learner\n')
  assert against_the_flow('algorithms.clip', imports(path)[0]) == {'learner.learner'}


def functions(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef):
      yield node


def splatted(function):
  """The local tuples that a function makes and then splats into a call."""
  nodes = list(ast.walk(function))
  assigned = [node for node in nodes if isinstance(node, ast.Assign)]
  tuples = [node for node in assigned if isinstance(node.value, ast.Tuple)]
  # A tuple with a starred element joins others of any length.
  tuples = [node for node in tuples if ast.Starred not in map(type, node.value.elts)]
  made = {ast.unparse(target) for node in tuples for target in node.targets}
  calls = [node for node in nodes if isinstance(node, ast.Call)]
  stars = [x for call in calls for x in call.args if isinstance(x, ast.Starred)]
  return made & {ast.unparse(star.value) for star in stars}


def test_no_local_tuple_is_made_to_be_splatted_into_a_call():
  paths = [*MODULES.values(), *(ROOT / 'lab').rglob('*.py')]
  found = {
    (path.name, name)
    for path in paths
    for function in functions(path)
    for name in splatted(function)
  }
  assert not found


def test_functions_stay_short():
  long = [
    f'{name}.{node.name}: {lines} lines'
    for name, path in MODULES.items()
    for node in functions(path)
    if (lines := node.end_lineno - node.lineno + 1) > 60
  ]
  assert not long, long


def test_arguments_of_public_functions_are_annotated():
  bare = [
    f'{name}.{node.name}: {arg.arg}'
    for name, path in MODULES.items()
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name[0] != '_'
    for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    if arg.annotation is None
  ]
  assert not bare, bare


REPORTING = (
  'algorithms.diagnostics',
  'algorithms.replay_buffer',
  'learner.learner',
  'training.step_metrics',
  'training.trainer',
  'run.experiment',
)


def test_what_a_step_reports_is_in_the_glossary():
  from bapo_jax.runtime.glossary import GLOSSARY, OF_UPDATES
  from bapo_jax.types import SOURCES

  text = '\n'.join(MODULES[name].read_text() for name in REPORTING)
  whole = set(re.findall(r"(?<!f)'([a-z]+/[a-z_]*[a-z])'", text))
  whole |= {f'batch/{source}' for source in SOURCES}
  whole |= {name for name, metric in OF_UPDATES.items() if metric.of in whole}
  # f'clip/fraction_{name}': by sign or by source.
  stems = tuple(re.findall(r"f'([a-z]+/[a-z_]+)\{", text))
  assert not whole - set(GLOSSARY)
  # eval/* and time/* are named after what evaluate returns and the timer's phases.
  meant = {n for n in GLOSSARY if not n.startswith(('eval/', 'time/'))}
  unreported = {n for n in meant - whole if not n.startswith(stems)}
  assert not unreported, 'defined and never reported'


def test_no_private_api_of_jax_or_orbax_is_imported():
  private = [
    f'{path.relative_to(ROOT)}:{n}'
    for folder in ('bapo_jax', 'lab', 'configs', 'benchmarks')
    for path in (ROOT / folder).rglob('*.py')
    for n, line in enumerate(path.read_text().splitlines(), 1)
    if re.search(r'\b(jax|orbax)\b\S*\._src\b', line)
  ]
  assert not private, private
