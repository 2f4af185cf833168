"""The docs say what is the case: files, rules, knobs, metrics and links all exist."""

import contextlib
import inspect
import json
import pathlib
import pkgutil
import re

import pytest
from refusals import KNOBS, SECTIONS

from bapo_jax.data import sources
from bapo_jax.main import read_config
from bapo_jax.runtime.metrics import GLOSSARY
from bapo_jax.training import trainer
from bapo_jax.training.config import (
  PARTS,
  Config,
  merged,
  overrides,
  parse,
)
from docs.reference import write_algorithms, write_config

ROOT = pathlib.Path(__file__).parents[1]
DOCS = {
  str(path.relative_to(ROOT)): path.read_text()
  for path in (ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md')))
}
PARENTS = '|'.join(sorted({name.split('.')[0] for name in SECTIONS}))
OVERRIDE = re.compile(r'--config\.([\w.]+)(?:=("[^"]*"|[^\s`]+))?')


def code(text: str) -> list[str]:
  """Everything between single backticks, on one line."""
  return re.findall(r'`([^`\n]+)`', text)


def lines(text: str) -> list[str]:
  r"""The lines, where a line that ends in a \ goes on in the next."""
  return text.replace('\\\n', ' ').splitlines()


# Commands with a file of a user's own: test_library.py.
COMMANDS = sorted(
  line.strip()
  for line in {line for text in DOCS.values() for line in lines(text)}
  if '--config' in line and 'my.py:' not in line
)


@pytest.mark.parametrize('line', COMMANDS)
def test_every_override_is_a_knob_and_its_config_is_valid(line):
  for name, _ in OVERRIDE.findall(line):
    if '<' not in name:
      assert name.rstrip('.') in KNOBS | SECTIONS, name
  named = re.search(r'--config=(configs/\w+\.py(?::\w+)?)', line)
  texts = [(name, text.strip('"')) for name, text in OVERRIDE.findall(line)]
  flags = [f'--config.{name}={x}' for name, x in texts if x and not x.startswith('<')]
  read_config(str(ROOT / (named[1] if named else 'configs/aime.py')), flags)


def test_the_config_file_of_running_is_valid(tmp_path):
  page = DOCS['docs/guide/running.md']
  ((text, command),) = re.findall(
    r'```python\n# my.py\n([^`]*)```\n\n```bash\n([^`]*)```', page
  )
  (tmp_path / 'my.py').write_text(text)
  file = re.search(r'--config=(\S+)', command)[1]
  config = read_config(str(tmp_path / file), re.findall(r'--config\.\S+', command))
  assert (config.steps, config.seed, config.clip.high) == (400, 1, 1.28)
  assert read_config(str(tmp_path / 'my.py'), []).steps == 20


def test_the_function_of_problems_gives_a_run_its_problems(tmp_path):
  page = DOCS['docs/guide/data_and_rewards.md']
  (text,) = re.findall(r'```python\n(# my.py\n[^`]*def doubles[^`]*)```', page)
  (tmp_path / 'my.py').write_text(text)
  source = f'{tmp_path}/my.py:doubles'
  problems = {'source': source, 'test_source': source, 'custom': {'count': 9}}
  config = parse({'problems': problems})
  data = sources.read(config.problems)
  assert len(data.training) == len(data.held_out) == 9
  assert data.training != data.held_out
  assert sources.imitated(config.problems, data) == data.training


def test_every_knob_in_prose_is_a_knob():
  for name, text in DOCS.items():
    for words in code(text):
      found = re.fullmatch(rf'((?:{PARENTS})\.[a-z_.]+)(=.*)?', words)
      if found and not found[1].endswith(('.py', '.md', '.json', '.jsonl')):
        assert found[1] in KNOBS | SECTIONS, f'{name}: {words}'


def takes(words: str) -> bool:
  """Whether a knob takes a value, under one of the rules that have the knob."""
  part = words.partition('=')[0].rpartition('.')[0]
  rules = PARTS[part].names if part in PARTS else ()
  for flags in ([], *([f'--config.{part}.rule={rule}'] for rule in rules)):
    with contextlib.suppress(ValueError):
      given = overrides([*flags, f'--config.{words}'])
      Config.model_validate(merged({}, given))
      return True
  return False


def test_every_value_in_prose_is_one_that_its_knob_takes():
  checked = 0
  for page, text in DOCS.items():
    for words in code(text):
      found = re.fullmatch(r'([a-z_.]+)=([^\s()]+)', words)
      # `rollout.depth=k` is a formula; own functions are in test_library.py.
      if found and found[1] in KNOBS and len(found[2]) > 1 and 'my.py' not in words:
        assert takes(words), f'{page}: {words}'
        checked += 1
  assert checked > 30
  assert takes('clip.high=1.28') and not takes('clip.high=-1')


def exists(name: str) -> bool:
  """Whether a dotted name is a module of the repository, or is defined in one."""
  try:
    return pkgutil.resolve_name(name) is not None
  except (ImportError, AttributeError):
    return False


def test_every_module_and_file_in_prose_exists():
  folders = 'bapo_jax|benchmarks|configs|docs|lab|launch|notebooks|papers|tests'
  for page, text in DOCS.items():
    for words in code(text):
      for path in re.findall(rf'(?<![\w/.-])(?:{folders})/[\w./-]*\w', words):
        assert (ROOT / path).exists(), f'{page}: {path}'
      for name in re.findall(rf'(?<![\w/.-])(?:{folders})(?:\.[a-z_]\w*)+', words):
        known = name == 'bapo_jax.train' or name.endswith(('.md', '.py'))
        assert known or exists(name), f'{page}: {name}'
  assert not exists('lab.nothing') and not exists('lab.sweep.nothing')
  assert exists('lab.sweep.table') and exists('benchmarks.training.learner')


def test_a_linked_module_defines_the_name_beside_the_link():
  checked = 0
  for page, text in DOCS.items():
    for name, link in re.findall(r'`(\w+)` in \[[^\]]+\]\(([^)#]+\.py)\)', text):
      module = (ROOT / page).parent / link
      defined = rf'(?m)^(?:def |class )?{name}\b'
      assert re.search(defined, module.read_text()), f'{page}: {name} in {link}'
      checked += 1
  assert checked


def test_every_metric_in_prose_is_in_the_glossary():
  stages = '|'.join(sorted({metric.split('/')[0] for metric in GLOSSARY}))
  for name, text in DOCS.items():
    for words in code(text):
      if re.fullmatch(rf'({stages})/[a-z_]+', words):
        assert words in GLOSSARY, f'{name}: {words}'


def anchors(text: str) -> set[str]:
  """The fragments that GitHub gives to the headings of a page."""
  headings = re.findall(r'(?m)^#+ (.*)$', text)
  return {re.sub(r'[^\w\- ]', '', x).lower().replace(' ', '-') for x in headings}


FOLDERS = ('docs', 'log', 'papers', 'launch', 'benchmarks')
PAGES = [*ROOT.glob('*.md'), *(x for f in FOLDERS for x in (ROOT / f).rglob('*.md'))]


def broken(page: pathlib.Path, text: str) -> list[str]:
  """The links of a page that lead to no file, or to no heading of a page."""
  links = []
  for link in re.findall(r'\]\(([^)\s]+)\)', re.sub(r'`[^`\n]*`', '', text)):
    if '://' in link:
      continue
    path, _, fragment = link.partition('#')
    target = page.parent / path if path else page
    if not target.exists():
      links.append(link)
    elif target.suffix == '.md' and fragment:
      links += [link] if fragment not in anchors(target.read_text()) else []
  return links


def test_every_relative_link_resolves():
  for page in PAGES:
    assert not broken(page, page.read_text()), page
  for path in (ROOT / 'notebooks').glob('*.ipynb'):
    for cell in json.loads(path.read_text())['cells']:
      if cell['cell_type'] == 'markdown':
        assert not broken(path, ''.join(cell['source'])), path


def test_the_indices_name_every_page():
  for folder in ('docs', 'log'):
    index = ROOT / folder / 'README.md'
    named = re.findall(r'\]\(([\w/-]+\.md)\)', index.read_text())
    pages = {str(path.relative_to(index.parent)) for path in index.parent.rglob('*.md')}
    assert pages - {'README.md'} <= set(named), folder
  newest, *dates = [name for name in named if name.startswith('20')]
  assert dates == sorted(dates, reverse=True) and newest == dates[0]


def test_every_test_that_guards_a_decision_or_a_rule_exists():
  text = (ROOT / 'DECISIONS.md').read_text()
  named = set(re.findall(r'`(?:[\w/]*/)?(test_\w+)(?:\.py)?`', text))
  rules = [row for rows in write_algorithms.ROWS.values() for row in rows.values()]
  named |= {f'test_{name}' for row in rules for name in row.tests}
  files = [*(ROOT / 'tests').rglob('test_*.py')]
  defined = {path.stem for path in files}
  for path in files:
    defined |= set(re.findall(r'(?m)^def (test_\w+)', path.read_text()))
  assert len(named) > 100 and named <= defined, named - defined


def test_a_broken_link_is_found():
  text = '[a](gone.md) [b](DECISIONS.md) [c](README.md#gone) [d](README.md#compare)'
  assert broken(ROOT / 'README.md', text) == ['gone.md', 'README.md#gone']


def test_every_module_that_a_source_file_names_exists():
  package = ROOT / 'bapo_jax'
  parts = '|'.join(path.name for path in package.iterdir() if path.is_dir())
  module = rf'(?<![\w/])(?:{parts})/[a-z_0-9/]+\.py'
  folders = ('bapo_jax', 'configs', 'lab', 'benchmarks', 'papers')
  for path in (path for folder in folders for path in (ROOT / folder).rglob('*.py')):
    for named in re.findall(module, path.read_text()):
      assert (package / named).exists(), f'{path}: {named}'


def test_every_rule_is_named():
  named = set(code(DOCS['docs/reference/algorithms.md']))
  for part in PARTS.keys() - {'rewards.shaping'}:
    assert PARTS[part].names.keys() <= named, PARTS[part].names.keys() - named


def test_the_page_of_knobs_is_current():
  command = 'python -m docs.reference.write_config > docs/reference/config.md'
  assert DOCS['docs/reference/config.md'] == write_config.document(), command


# --- README.md: short, its loop is the code, its commands are those of CI ------------

README = DOCS['README.md']


def test_the_loop_is_the_loop():
  assert inspect.getsource(trainer.train_loop).rstrip() in README


def test_it_is_read_in_ten_minutes():
  beside_code = re.sub(r'```.*?```', '', README, flags=re.S)
  assert len(beside_code.split()) <= 900
  guide = {name: len(text.split()) for name, text in DOCS.items() if 'guide/' in name}
  assert max(guide.values()) <= 1800 and sum(guide.values()) <= 9000
