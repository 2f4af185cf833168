"""Every benchmark and every printed command runs, at its smallest size.

Commands are the lines of the fenced bash blocks of README, docs and papers. They keep
their flags; `small` adds flags that make the work tiny, a model and problems of a few
lines stand in for downloads, and every file goes to a temporary folder.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys

import foreign
import pytest
import recordings
import runs

from lab import sweep

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / 'README.md', *sorted(ROOT.glob('docs/**/*.md')))
PAGES += tuple(sorted(ROOT.glob('papers/*/README.md')))
LIMIT_S = 1200  # five times what the slowest takes on an idle machine

# Module -> the flags of its smallest size.
SMALLEST = {
  'algorithms.clip_search': '--repeat=1 --shapes=8x16',
  'first_contact': '--small --out=RUNS.json',
  'meshes': '--config=configs/aime.py --topology=h100:2',
  'models.experts': '--tokens 16 --width=16 --ffn=8 --rounds=1',
  'models.load_weights': '--gb=0.1',
  'rewards.verifiers': '--count=40 --characters=100 --workers=1',
  'rollout.quantized': '--model=MODEL --data=PROBLEMS --prompts=2',
  'rollout.sampler': '--batch=8 --waves=1 --alone',
  'rollout.turns': '--rounds=1 --slots=8',
  'seconds': '--config=configs/aime.py --topology=h100:1',
  'training.collectives': '--length=2 --times=1 --count TINY',
  'training.first_step': 'TINY',
  'training.learner': '--rows=8 --length=32 --rounds=1 --cases=1:1',
  'training.lora': '--model=MODEL --data=PROBLEMS --steps=1 --rank=2 --workdir=RUNS',
  'training.main_job': '--seeds=1 --workdir=RUNS TINY',
  'training.our_step': '--workdir=RUNS TINY',
  'training.overlap': '--rounds=2 TINY --config.steps=60',
  'training.processes': '--devices=2 --rounds=1 --steps=2 --workdir=RUNS TINY',
  'training.rl_step': '--model=MODEL --data=PROBLEMS --pairs=1 --steps=1 '
  '--cases=SmolLM2-135M --workdir=RUNS',
  'training.small_policy': '--seeds=0 --steps=1 TINY',
  'training.train_step': '--layers=1 --rows=2 --length=8 --steps=1 --vocab=64',
  'training.trl_step': '--model=MODEL --problems=PROBLEMS --out=RUNS --prompts=2 '
  '--group=2 --new=4 --updates=2 --steps=1 --lr=1e-6',
}
NEEDS = {
  'seconds': 'jax_cuda12_plugin',
  'training.train_step': 'torch',
  'training.trl_step': 'trl',
}
SKIPPED = {  # pattern -> reason
  r'pip install': 'installs packages',
  r'hf download': 'downloads a config',
  r'^nohup': 'is a command of README.md in the background',
  r'-m pytest': 'runs this test',
  r'--coordinator': 'waits for the process of another host; tests/run has several',
  r'lab\.outcomes': 'writes papers/results.csv, which tests/lab compares',
  r'--mode=plan': 'needs the files of a 7B model; tests/tools/test_plan.py plans',
  r'meshes .*path=models/': 'needs a config.json; tests/test_recipes.py has its knobs',
}
FINETUNE = {
  'steps': 1,
  'prompts.count': 4,
  'sampler.group_size': 2,
  'sampler.max_new_tokens': 8,
  'learner.minibatches': 2,
  'evaluate.every': 1,
  'mesh.data': 1,
}


def flags(knobs):
  return [f'--config.{name}={value}' for name, value in knobs.items()]


def commands():
  """The commands of all pages, without what installs the environment before them."""
  for page in PAGES:
    for block in re.findall(r'```bash\n(.*?)```', page.read_text(), re.S):
      for line in block.replace('\\\n', ' ').splitlines():
        command = ' '.join(f' {line}'.partition(' #')[0].split()).rpartition('&& ')[2]
        if command and 'my.py:' not in command:  # tests/test_library.py runs it
          yield command


def installed(package):
  return importlib.util.find_spec(package) is not None


@pytest.fixture(scope='module')
def stand_ins(tmp_path_factory):
  """A folder with a model, problems, and the workdir of a finished tiny run."""
  folder = tmp_path_factory.mktemp('commands')
  foreign.model(folder / 'model', 'qwen3', max_position_embeddings=512)
  recordings.jsonl(folder / 'problems.jsonl', foreign.problems(48))
  recordings.jsonl(folder / 'held_out.jsonl', foreign.problems(8, 48))
  execute([sys.executable, *main(folder / 'run')])
  return folder


def main(workdir):
  start = ['-m', 'bapo_jax.main', '--config=configs/aime.py', f'--workdir={workdir}']
  return start + runs.flags()


def execute(command, statuses=(0,)):
  """Runs a command at the top of the repository; returns its output."""
  done = subprocess.run(
    command,
    cwd=ROOT,
    env=os.environ
    | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1'}
    | {'PYTHON': sys.executable},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=LIMIT_S,
  )
  assert done.returncode in statuses, done.stdout[-4000:]
  return done.stdout


def smallest(module, folder, work):
  """The flags of a benchmark's smallest size."""
  names = {'MODEL': f'{folder}/model', 'PROBLEMS': f'{folder}/problems.jsonl'}
  text = SMALLEST[module].replace('RUNS', str(work))
  text = text.replace('TINY', ' '.join(runs.flags(**{'mesh.data': -1})))
  for name, path in names.items():
    text = text.replace(name, path)
  return text.split()


def small(command, folder, work):
  """The command with its own flags, and with flags that make its work tiny."""
  words = shlex.split(command)
  if words[0] == '.venv/bin/bapo':  # tests/test_install.py installs it
    words = ['python', '-m', 'bapo_jax.main', f'--mode={words[1]}', *words[2:]]
  module = words[words.index('-m') + 1] if '-m' in words else words[0]
  own = words[words.index('-m') + 2 :] if '-m' in words else words[1:]
  if own and own[0].isalpha():  # a mode
    own = [f'--mode={own[0]}', *own[1:]]
  own = [word.replace('<directory>', f'{folder}/model') for word in own]
  own = [word.replace('<sums.jsonl>', f'{folder}/problems.jsonl') for word in own]
  # A laptop stands in for the devices of a mesh.
  devices = [word for word in words if word.startswith('XLA_FLAGS=')]
  if re.search(r'mesh\.(tensor|fsdp)', command):
    devices = ['XLA_FLAGS=--xla_force_host_platform_device_count=8']
  run = ['env', *devices, sys.executable, '-m', module]
  if module.startswith('benchmarks.'):
    return run + own + smallest(module.removeprefix('benchmarks.'), folder, work)
  if module == 'lab.claims':  # --check writes nothing
    return run + [word for word in own if '--runs' not in word] + ['--check']
  if module == 'lab.sweep' and 'papers/' in command:  # its runs take hours
    return [*run, *own, '--table']
  if module == 'lab.sweep':
    both = runs.flags('configs/countdown.py:both', steps=1, responses=64)
    return [*run, *own, f'--results={work}', f'--runs={work}/runs', *both]
  if module == 'launch/local.sh':
    tiny = [x for x in runs.flags(given=own) if 'mesh.data' not in x]
    return [module, *tiny, *own, f'--workdir={work}']
  assert module == 'bapo_jax.main'
  if '--mode=compare' in own:
    other = runs.copied(pathlib.Path(folder, 'run'), pathlib.Path(work, 'other'))
    paths = [f'{folder}/run', str(other)]
    return [*run, '--mode=compare', *paths, f'--to={work}/compare.html']
  if 'configs/finetune.py' in command:
    own = [re.sub(r'(model\.path)=.*', rf'\1={folder}/model', word) for word in own]
    for knob, name in (('source', 'problems'), ('test_source', 'held_out')):
      value = rf'\1={folder}/{name}.jsonl'
      own = [re.sub(rf'(problems\.{knob})=.*', value, word) for word in own]
    return [*run, *own, *flags(FINETUNE), f'--workdir={work}']
  # An evaluation needs a finished run; the command's own flags win over the tiny ones.
  workdir = f'{folder}/run' if '--mode=eval' in own else work
  file = next(x for x in own if x.startswith('--config=')).removeprefix('--config=')
  return [*run, *runs.flags(file, own), *own, f'--workdir={workdir}']


def test_every_benchmark_has_a_smallest_size_and_every_named_module_exists():
  programs = {
    '.'.join(path.relative_to(ROOT / 'benchmarks').with_suffix('').parts).removesuffix(
      '.__main__'
    )
    for path in ROOT.glob('benchmarks/**/*.py')
    if "__name__ == '__main__'" in path.read_text()
    and path.parent.name != 'on_gpu'  # test_on_gpu.py runs them together
  }
  assert programs == set(SMALLEST)
  named = {
    name for page in PAGES for name in re.findall(r'-m ([a-z_.]+)', page.read_text())
  }
  assert named and all(installed(name) for name in named)


@pytest.mark.nightly
@pytest.mark.parametrize('module', SMALLEST)
def test_a_benchmark_runs_and_ends_with_a_line_of_json(module, stand_ins, tmp_path):
  if module in NEEDS and not installed(NEEDS[module]):
    pytest.skip(f'{NEEDS[module]} is not installed')
  command = [sys.executable, '-m', f'benchmarks.{module}']
  output = execute([*command, *smallest(module, stand_ins, tmp_path / 'work')])
  last = output.strip().splitlines()[-1]
  assert last.startswith('{') and last.endswith('}'), output


@pytest.mark.nightly
@pytest.mark.parametrize('command', sorted(set(commands())), ids=str)
def test_a_printed_command_runs(command, stand_ins, tmp_path):
  for pattern, reason in SKIPPED.items():
    if re.search(pattern, command):
      pytest.skip(reason)
  if 'lab.sweep' in command:
    try:
      sweep.commit()
    except ValueError as error:
      pytest.skip(str(error))
  for module, package in NEEDS.items():
    if module in command and not installed(package):
      pytest.skip(f'{package} is not installed')
  # A check of a random model ends with 1: no response is right.
  statuses = (0, 1) if '--mode=check' in command else (0,)
  execute(small(command, stand_ins, tmp_path / 'work'), statuses)
