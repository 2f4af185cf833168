"""The house has rules, and they are checked: order of flow, lint, size, glossary."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'bapo_jax'
# A module imports only modules that stand before it.
FLOW = (
  'types',
  'progress',
  'files',
  'mesh',
  'frequency',
  'attention',
  'model',
  'logprob',
  'tensors',
  'config_json',
  'weights',
  'text',
  'problems.families',
  'problems.clean',
  'problems.builder',
  'problems.synthetic',
  'problems.countdown',
  'problems.layouts',
  'problems.math_file',
  'problems.remote',
  'problems.sources',
  'prompts',
  'columns',
  'sampler',
  'flight',
  'answers',
  'verifiers',
  'pool',
  'rewards',
  'rollout',
  'buffer',
  'batch',
  'advantage',
  'search',
  'clip',
  'loss',
  'diagnostics',
  'learner',
  'warmstart',
  'evaluate',
  'metrics',
  'report',
  'checkpoint',
  'train',
  'validate',
  'binding',
  'setup',
  'workspace',
  'roofline',
  'programs',
  'collectives',
  'plan',
  'experiment',
  'export',
  'grid',
  'examine',
  'recorded',
  'show',
  'main',
)
BLIND = {'batch', 'buffer', 'advantage', 'clip', 'loss'}  # siblings of the slots
ONLY = {  # package -> the modules that may import it
  'transformers': {'text'},
  'tensorflow_datasets': {
    'problems.builder',
    'problems.synthetic',
    'problems.countdown',
    'problems.math_file',
    'problems.remote',
  },
  'pyarrow': {'problems.math_file'},
  'rich': {'show'},
  'ml_collections': {'main'},
  'matplotlib': {'report'},
  'orbax': {'checkpoint'},
  'huggingface_hub': {'weights', 'problems.remote'},
  'math_verify': {'verifiers'},
}


def name_of(path):
  return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


MODULES = {name_of(p): p for p in PACKAGE.rglob('*.py') if p.name != '__init__.py'}


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
      inside |= set(found)
  return inside, outside


def test_every_module_has_its_place():
  assert set(MODULES) == set(FLOW)
  assert len(FLOW) == len(set(FLOW))


@pytest.mark.parametrize('name', FLOW)
def test_imports_follow_the_flow(name):
  needs, outside = imports(MODULES[name])
  late = needs - set(FLOW[: FLOW.index(name)])
  assert not late, f'{name}.py imports {late}, which come after it'
  if name in BLIND:
    own = {'types', 'search'} if name == 'clip' else {'types'}
    assert needs <= own, f'{name}.py imports {needs}: siblings are blind'
  for package, allowed in ONLY.items():
    assert package not in outside or name in allowed, f'{name}.py imports {package}'


def test_a_misplaced_import_is_found(tmp_path):
  path = tmp_path / 'clip.py'
  path.write_text('def f():\n  from bapo_jax import learner\n')
  assert imports(path)[0] == {'learner'}


@pytest.mark.parametrize('command', ['check', 'format --check'])
def test_ruff(command):
  run = subprocess.run(
    [sys.executable, '-m', 'ruff', *command.split(), '.'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0, run.stdout + run.stderr


def test_files_and_functions_stay_short():
  long = []
  for name, path in MODULES.items():
    text = path.read_text()
    if text.count('\n') > 330:
      long.append(f'{name}: {text.count(chr(10))} lines')
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef):
        lines = node.end_lineno - node.lineno + 1
        if lines > 80:
          long.append(f'{name}.{node.name}: {lines} lines')
  assert not long, long


def test_public_functions_have_docstrings():
  bare = [
    f'{name}.{node.name}'
    for name, path in MODULES.items()
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    if not node.name.startswith('_') and not ast.get_docstring(node)
  ]
  # A record explains itself field by field.
  records = {'Slots', 'Rows', 'Problems', 'Problem', 'Text', 'Prompts', 'Groups'}
  records |= {'Band', 'Shelves', 'Batch', 'Bounds'}
  assert not [b for b in bare if b.split('.')[-1] not in records]


def test_what_a_step_reports_is_in_the_glossary():
  from test_diagnostics import diagnose, golden

  from bapo_jax.runtime import metrics
  from bapo_jax.types import SOURCES

  found = set(diagnose(*golden()))
  for name in ('learner', 'train', 'experiment', 'buffer'):
    text = MODULES[name].read_text()
    found |= set(re.findall(r"'((?:[a-z]+)/(?:[a-z_]+))'", text))
    for stem in re.findall(r"f'([a-z]+/[a-z_]*)\{source\}'", text):
      found |= {stem + source for source in SOURCES}
  assert not found - set(metrics.GLOSSARY)
  # eval/* and time/* are named after what evaluate returns and the clock's phases.
  meant = {n for n in metrics.GLOSSARY if not n.startswith(('eval/', 'time/'))}
  assert not meant - found, 'defined and never reported'
