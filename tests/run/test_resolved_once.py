"""A start, a check and a plan open each file of rows and of a model in one place."""

import collections
import os
import pathlib
import sys

import foreign
import pytest
import recordings

from bapo_jax import main
from bapo_jax.autosetup import check, derive
from bapo_jax.run import experiment
from benchmarks import meshes

PACKAGE = pathlib.Path(main.__file__).parent
OPENED: list[tuple[str, str]] = []  # (path, module of the package that opens it)
HOOK = {'folder': ''}


def hook(event, args):
  """Records who opens a file for reading below HOOK['folder']."""
  if (
    event != 'open' or not HOOK['folder'] or not isinstance(args[0], str | os.PathLike)
  ):
    return
  path = os.path.realpath(os.fspath(args[0]))
  if not path.startswith(HOOK['folder']) or 'w' in (args[1] or 'r'):
    return
  frame = sys._getframe()
  while frame and not frame.f_code.co_filename.startswith(str(PACKAGE)):
    frame = frame.f_back
  if frame:
    name = pathlib.Path(frame.f_code.co_filename).relative_to(PACKAGE)
    OPENED.append((path, str(name)))


@pytest.fixture(scope='module', autouse=True)
def audited():
  """Audit hooks stay for the life of the process; without a folder this one rests."""
  sys.addaudithook(hook)
  yield
  HOOK['folder'] = ''


def readers(folder, call):
  """name -> the modules that open a file during a call, once per time."""
  OPENED.clear()
  HOOK['folder'] = os.path.realpath(folder)
  try:
    call()
  finally:
    HOOK['folder'] = ''
  modules = collections.defaultdict(list)
  for path, module in OPENED:
    modules[pathlib.Path(path).name].append(module)
  return modules


SIZES = {
  'steps': 1,
  'prompts.count': 4,
  'learner.minibatches': 1,
  'sampler.max_new_tokens': 8,
  'sampler.max_num_seqs': 8,
  'metrics.tensorboard': False,
  'mesh.data': 1,
}


def test_each_file_is_opened_by_one_place(tmp_path, one_device):
  files = tmp_path / 'files'
  files.mkdir()
  model = foreign.model(files / 'model', 'qwen2')
  rows = [foreign.problems(40), foreign.problems(8, 40)]
  paths = [recordings.jsonl(files / f'{i}.jsonl', x) for i, x in enumerate(rows)]
  names = ('model.path', 'problems.source', 'problems.test_source')
  knobs = SIZES | dict(zip(names, (model, *paths), strict=True))
  given = [f'--config.{name}={value}' for name, value in knobs.items()]
  config = main.read_config('configs/finetune.py', given)
  workdir = str(tmp_path / 'run')
  decided = derive.decide(config, workdir)
  calls = {
    'check': lambda: check.check(config, ''),
    'train': lambda: experiment.train(config, workdir),
    'plan': lambda: meshes.run(decided, 'h100:2'),
  }
  for mode, call in calls.items():
    opened = readers(files, call)
    assert opened, mode
    assert {name: x for name, x in opened.items() if len(set(x)) > 1} == {}, mode
    if mode != 'plan':  # which reads the sizes of the model alone
      assert {'config.json', 'tokenizer.json'} <= opened.keys()
      assert len(opened['0.jsonl']) == len(opened['1.jsonl']) == 1
