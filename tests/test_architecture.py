"""The house has rules, and they are checked: order of flow, size, words, glossary."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'bapo_jax'

# Folder by folder, in flow order: a folder imports only folders above it, a module only
# modules above it in its folder.
HOUSE = {
  '': ('knobs', 'types', 'sharding'),
  'runtime': (
    'statistics',
    'tables',
    'machine',
    'hub_names',
    'files',
    'picture_files',
    'json_files',
    'digests',
    'versions',
    'cluster',
    'watch',
    'hosts',
    'exchange',
    'progress',
    'signals',
    'workdir',
    'glossary',
    'markdown',
    'metrics',
  ),
  'models': (
    'knobs',
    'rope',
    'attention',
    'vision_spec',
    'transformer',
    'lora',
    'layers',
    'decoder',
    'packing',
    'logprob_tiles',
    'logprobs',
    'safetensors_io',
    'hf_config',
    'hf_vision',
    'hf_tensors',
    'hf_directory',
    'hf_weights',
    'peft_directory',
  ),
  'models.vision': ('grids', 'tower', 'sequence'),
  'data': (
    'knobs',
    'row',
    'chat_templates',
    'tokenizer',
    'synthetic',
    'countdown',
    'field_values',
    'pictures',
    'schemas',
    'local_files',
    'pictured_files',
    'pictured_prompts',
    'drawn',
    'gallery',
    'builder',
    'hub',
    'dedup',
    'sources',
    'prompts',
    'pictured_problems',
  ),
  'rewards': (
    'knobs',
    'answer_extraction',
    'verdict',
    'spelling',
    'latex_trees',
    'closed_forms',
    'structures',
    'symbolic',
    'math_rule',
    'number_rules',
    'verifiers',
    'gold',
    'verifier_worker',
    'verifier_pool',
    'rewards',
  ),
  'rollout': (
    'knobs',
    'sampling',
    'shapes',
    'decode',
    'engine',
    'partial_rollouts',
    'rollout',
  ),
  'algorithms': (
    'knobs',
    'batch_knobs',
    'replay_buffer',
    'batch_rules',
    'advantage',
    'bound_search',
    'clip',
    'loss',
    'diagnostics',
  ),
  'training': (
    'knobs',
    'optimizer',
    'pictured',
    'scoring',
    'accumulation',
    'objective',
    'learner',
    'sft',
    'evaluate',
    'memory',
    'config',
    'overrides',
    'remat',
    'rules',
    'step_metrics',
    'state',
    'trainer',
    'damage',
    'step_record',
    'checkpoint',
    'weights',
    'frozen',
    'resume',
    'policy',
    'setup',
    'facts',
    'derive_text',
    'derive_sizes',
    'derive',
    'check_rules',
    'check',
    'report_plots',
    'report',
    'welcome',
    'experiment',
  ),
  'tools.plan': (
    'environment',
    'roofline',
    'adapters',
    'programs',
    'hlo',
    'tables',
    'hosts',
    'search',
    'plan',
  ),
  'tools': (
    'config_docs',
    'export',
    'eval_checkpoint',
    'sweep',
    'sweep_grid',
    'sweep_runner',
    'claim_statistics',
    'claim_shown',
    'claim_verdicts',
    'claim_plots',
    'recorded_groups',
    'viewer',
    'run_plots',
    'counterfactual',
    'entropy_change',
    'claim_recorded',
    'claims',
  ),
}
FLOW = [
  f'{folder}.{module}' if folder else module
  for folder, modules in HOUSE.items()
  for module in modules
] + ['main']

# Siblings of the slots know the records, their knobs, and nothing of each other.
BLIND = {
  f'algorithms.{name}': {'types', 'algorithms.knobs', 'algorithms.batch_knobs'}
  for name in ('replay_buffer', 'batch_rules', 'advantage', 'clip', 'loss')
}
BLIND['algorithms.clip'] = BLIND['algorithms.clip'] | {'algorithms.bound_search'}

# The learner is handed its rules; one module looks their names up.
RULES = {f'algorithms.{m}' for m in ('batch_rules', 'advantage', 'clip')}
MAY_NAME_RULES = {'training.rules'}

ONLY = {  # package -> the modules that may import it
  'transformers': {'data.chat_templates', 'data.tokenizer'},
  'tensorflow_datasets': {'data.builder', 'data.hub'},
  'pyarrow': {'data.local_files'},
  'rich': {'tools.viewer'},
  'ml_collections': {'training.overrides'},
  'PIL': {'data.pictures'},
  'matplotlib': {'training.report_plots', 'tools.claim_plots', 'tools.run_plots'},
  'orbax': {'training.damage', 'training.checkpoint', 'training.weights'},
  'huggingface_hub': {'models.hf_directory', 'data.hub'},
  'math_verify': {'rewards.symbolic'},
  'latex2sympy2_extended': {'rewards.symbolic'},
}
# A bad knob is refused before any of these is loaded.
LIGHT = [m for m in FLOW if m.endswith('knobs')]
LIGHT += ['runtime.machine', 'training.memory', 'training.config']
HEAVY = {
  'jax',
  'numpy',
  'optax',
  'flax',
  'orbax',
  'transformers',
  'tensorflow_datasets',
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
      inside.add(max(found, key=len))
  return inside, outside


def broken_order(name, needs):
  """The modules among `needs` that do not stand before `name`."""
  return needs - set(FLOW[: FLOW.index(name)])


def test_every_module_has_its_room():
  assert set(MODULES) == set(FLOW)
  assert len(FLOW) == len(set(FLOW))


def test_the_design_lists_the_files_in_the_order_of_the_flow():
  text = (ROOT / 'docs' / 'design.md').read_text()
  listed = re.findall(r'^\| `bapo_jax/([^`]+)\.py` \|', text, re.M)
  assert [name.replace('/', '.') for name in listed] == FLOW


@pytest.mark.parametrize('name', FLOW)
def test_imports_follow_the_flow(name):
  needs, outside = imports(MODULES[name])
  late = broken_order(name, needs)
  assert not late, f'{name} imports {late}, which come after it'
  if name in BLIND:
    assert needs <= BLIND[name], f'{name} imports {needs}: siblings are blind'
  if name.startswith('training.') and name not in MAY_NAME_RULES:
    assert not needs & RULES, f'{name} imports {needs & RULES}; rules are handed to it'
  for package, allowed in ONLY.items():
    assert package not in outside or name in allowed, f'{name} imports {package}'


@pytest.mark.parametrize('name', LIGHT)
def test_knobs_are_checked_before_jax_is_loaded(name):
  needs, outside = imports(MODULES[name])
  assert not outside & HEAVY
  assert needs <= set(LIGHT)


@pytest.mark.parametrize(
  ('name', 'line', 'late'),
  [
    ('algorithms.clip', 'from bapo_jax.training import learner', 'training.learner'),
    (
      'runtime.workdir',
      'from bapo_jax.training import checkpoint',
      'training.checkpoint',
    ),
    ('rollout.decode', 'from bapo_jax.rollout import engine', 'rollout.engine'),
    ('models.rope', 'from bapo_jax.data.prompts import Problems', 'data.prompts'),
  ],
)
def test_an_import_against_the_flow_is_found(name, line, late, tmp_path):
  path = tmp_path / 'module.py'
  path.write_text(f'def f():\n  {line}\n')
  assert broken_order(name, imports(path)[0]) == {late}


@pytest.mark.parametrize('folder', [f for f in HOUSE if f])
def test_every_folder_says_what_flows_through_it(folder):
  path = PACKAGE.joinpath(*folder.split('.'), '__init__.py')
  tree = ast.parse(path.read_text())
  lines = (ast.get_docstring(tree) or '').splitlines()
  assert len(lines) >= 3, f'{path}: three lines: what flows in, out, and the order'
  assert len(tree.body) == 1, 'nothing but the docstring'


def functions(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef):
      yield node


def test_files_and_functions_stay_short():
  long = []
  for name, path in MODULES.items():
    lines = path.read_text().count('\n')
    if lines > 330:
      long.append(f'{name}: {lines} lines')
    for node in functions(path):
      if (lines := node.end_lineno - node.lineno + 1) > 60:
        long.append(f'{name}.{node.name}: {lines} lines')
  assert not long, long


def test_the_loop_stays_readable():
  loop = next(
    node for node in functions(MODULES['training.trainer']) if node.name == 'train_loop'
  )
  assert loop.end_lineno - loop.lineno + 1 <= 30


def public(path):
  """Top-level public functions and classes, and public methods of these classes."""
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != '_':
      yield node
    if isinstance(node, ast.ClassDef) and node.name[0] != '_':
      for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name[0] != '_':
          yield inner


def is_record(node):
  """A record explains itself field by field."""
  bases = {getattr(base, 'id', '') for base in getattr(node, 'bases', [])}
  return 'NamedTuple' in bases


def test_public_functions_have_docstrings():
  bare = [
    f'{name}.{node.name}'
    for name, path in MODULES.items()
    for node in public(path)
    if not ast.get_docstring(node) and not is_record(node)
  ]
  assert not bare, bare


def test_public_functions_are_annotated():
  bare = []
  for name, path in MODULES.items():
    for node in public(path):
      if not isinstance(node, ast.FunctionDef):
        continue
      args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
      unknown = [
        a.arg for a in args if a.annotation is None and a.arg not in ('self', 'cls')
      ]
      if unknown or node.returns is None:
        bare.append(f'{name}.{node.name}: {", ".join(unknown) or "return"}')
  assert not bare, bare


# The private vocabulary that the field's words replaced (docs/design.md).
GONE = re.compile(
  r'(?<![A-Za-z])('
  r'told|said|kept|speak|speaker|untold|shelf|shelves|shelve|shelved|Shelves|Flight|'
  r'flight|flying|recheck|rechecked|refills?|refilled|give_up|refresh_every|'
  r'actor_born|born|examine|Judge|judging|Marks|Band|SHELFLESS|RECHECKED|REFILLED|'
  r'LOOK|Pick|of_rows|max_age|mismatch'
  r')(?![A-Za-z])'
)


def words(path):
  """(line, word) of every identifier, argument, keyword, knob and metric of a file."""
  for node in ast.walk(ast.parse(path.read_text())):
    found = []
    match node:
      case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(name=name):
        found = [name]
      case ast.Attribute(attr=name):
        found = [name]
      case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
        found = [name]
      case ast.keyword(arg=str(name)):
        found = [name]
      case ast.Constant(value=str(text)):
        found = [text]
    for text in found:
      for match in GONE.finditer(text.replace('_', ' ')):
        yield getattr(node, 'lineno', 0), match[0]


SOURCES = sorted(
  p
  for folder in ('bapo_jax', 'configs', 'benchmarks', 'notebooks')
  for p in (ROOT / folder).rglob('*.py')
)


@pytest.mark.parametrize('path', SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_private_vocabulary_is_gone(path):
  assert not list(words(path))


REPORTING = [
  *(f'algorithms.{name}' for name in ('diagnostics', 'replay_buffer')),
  *(
    f'training.{name}' for name in ('learner', 'step_metrics', 'trainer', 'experiment')
  ),
]


def test_what_a_step_reports_is_in_the_glossary():
  from bapo_jax.algorithms import diagnostics
  from bapo_jax.runtime.glossary import GLOSSARY
  from bapo_jax.types import SOURCES

  text = '\n'.join(MODULES[name].read_text() for name in REPORTING)
  whole = set(re.findall(r"(?<!f)'([a-z]+/[a-z_]*[a-z])'", text))
  whole |= {f'batch/{source}' for source in SOURCES}
  # f'clip/fraction_{name}': by sign, by source or at the starting bounds.
  stems = tuple(re.findall(r"f'([a-z]+/[a-z_]+)\{", text))
  assert not whole - set(GLOSSARY) - set(diagnostics.OF_SOURCE)
  # eval/* and time/* are named after what evaluate returns and the timer's phases.
  meant = {n for n in GLOSSARY if not n.startswith(('eval/', 'time/'))}
  stems += tuple(diagnostics.OF_SOURCE)
  unreported = {n for n in meant - whole if not n.startswith(stems)}
  assert not unreported, 'defined and never reported'
