"""Compares the seconds of one RL step with those of TRL's GRPOTrainer.

  python -m benchmarks.training.rl_step [--model=DIR] [--data=sums.jsonl] [--pairs=3]
      [--steps=3] [--peers=DIR] [--cases=embedded,SmolLM2-135M] [--workdir=DIR]
      [overrides]

The embedded default after its warm start, 64 prompts x 8 responses of at most 40 tokens
and 8 updates; and SmolLM2-135M-Instruct from --model on the problems of --data, in its
chat template: 8 x 8 x 20, 4 updates. Both sides have the same weights, prompts in the
same order, verifiers, temperature, learning rate, AdamW and GRPO loss (clipped at 0.8
and 1.2, mean over the tokens of a minibatch, no KL term), in float32 on every core.

Processes alternate and never overlap. Nothing else may run beside them: torch slows
down tenfold and more where its threads wait for each other. A process makes --steps
steps after one that is not counted, without evaluation or checkpoints; its figure is
their median, that of the last row of a table the median of --pairs processes. Of ours
the table also has the share of trained tokens that teach (advantage not 0), sampled
tokens/s of a step, teaching tokens/s of its updates, and the rate of the FLOPs that
these need beside the rate of a float32 product, both of the same process (`learner`).
TRL comes from --peers or this environment, see requirements/peers.txt. A model or peer
that is absent is a line with the reason. The last line is one JSON object.
"""

import argparse
import importlib.machinery
import json
import os
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks.training import our_step

PEERS = ('torch', 'trl', 'accelerate', 'datasets')


class Case(NamedTuple):
  """One model with the sizes of its step."""

  prompts: int
  group: int
  new: int
  updates: int
  lr: float
  chat: bool
  overrides: tuple[str, ...] = ()


CASES = {
  'embedded': Case(prompts=64, group=8, new=40, updates=8, lr=3e-4, chat=False),
  'SmolLM2-135M': Case(
    prompts=8,
    group=8,
    new=20,
    updates=4,
    lr=1e-6,
    chat=True,
    overrides=(
      'tokenizer.template=chat:{problem}',
      'prompts.max_prompt_tokens=40',  # the longest of the sums
      'rewards.rule=gsm8k',
      'sampler.max_num_seqs=64',
      'sampler.prefill_batch_size=64',
    ),
  ),
}
# GRPO in the settings that TRL has as well.
COMMON = (
  'batch.rule=fresh_only',
  'clip.rule=fixed',
  'optimizer.warmup=0',
  'optimizer.b2=0.999',
)
COLUMNS = (
  *('ours_s', 'sample_s', 'update_s', 'trl_s', 'trl_sample_s', 'trl_update_s'),
  *('ratio', 'teaching', 'sampled/s', 'teaching/s', 'learner'),
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
  """Parses the arguments.

  Raises:
    SystemExit: an argument is unknown.
  """
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='models/SmolLM2-135M-Instruct')
  parser.add_argument('--data', default='sums.jsonl')
  parser.add_argument('--pairs', type=int, default=3)
  parser.add_argument('--steps', type=int, default=3)
  parser.add_argument('--peers', default='', help='a directory of pip install --target')
  parser.add_argument('--cases', default=','.join(CASES))
  parser.add_argument('--workdir', default='runs/rl_step')
  args, args.overrides = parser.parse_known_args(argv)
  return args


def overrides(name: str, args: argparse.Namespace) -> list[str]:
  """Returns the arguments of bapo_jax.main for our run of a case."""
  case = CASES[name]
  values = [
    f'prompts.count={case.prompts}',
    f'sampler.group_size={case.group}',
    f'sampler.max_new_tokens={case.new}',
    f'learner.minibatches={case.updates}',
    f'optimizer.lr={case.lr}',
    f'steps={args.steps + our_step.SKIPPED}',
    *COMMON,
    *case.overrides,
  ]
  if name != 'embedded':
    values += [f'model.path={args.model}']
    values += [f'problems.{knob}={args.data}' for knob in ('source', 'test_source')]
  return [f'--config.{value}' for value in values]


def trl_command(name: str, args: argparse.Namespace) -> list[str]:
  """Returns the command of TRL's side."""
  case, model = CASES[name], args.model
  if name == 'embedded':
    model = os.path.join(args.workdir, name, 'model')
  sizes = ('prompts', 'group', 'new', 'updates', 'lr')
  return [
    *(sys.executable, '-m', 'benchmarks.training.trl_step'),
    *(f'--model={model}', f'--steps={args.steps}'),
    f'--problems={os.path.join(args.workdir, name, "problems.jsonl")}',
    f'--out={os.path.join(args.workdir, name, "trl")}',
    *(f'--{size}={getattr(case, size)}' for size in sizes),
    *(['--chat'] if case.chat else []),
  ]


def our_command(name: str, args: argparse.Namespace) -> list[str]:
  """Returns the command of our side, which writes the inputs of TRL's."""
  return [
    *(sys.executable, '-m', 'benchmarks.training.our_step'),
    f'--workdir={os.path.join(args.workdir, name)}',
    *overrides(name, args),
    *args.overrides,
  ]


def lacking(name: str, args: argparse.Namespace) -> str:
  """Returns why a case cannot be run, or ''."""
  if name == 'embedded':
    return ''
  for knob, path in (('model', args.model), ('data', args.data)):
    if not os.path.exists(path):
      return f'--{knob}={path} does not exist'
  return ''


def peers_lacking(peers: str) -> str:
  """Returns why TRL cannot be run, or ''."""
  if peers and not os.path.isdir(peers):
    return f'--peers={peers} does not exist'
  path = [peers, *sys.path] if peers else sys.path
  found = importlib.machinery.PathFinder.find_spec
  if absent := [package for package in PEERS if not found(package, path)]:
    return f'not installed: {", ".join(absent)} (requirements/peers.txt)'
  return ''


def run(command: list[str], peers: str = '') -> dict[str, Any]:
  """Runs a process to its end and returns its JSON line.

  Raises:
    subprocess.CalledProcessError: the process failed.
  """
  env = os.environ | {'HF_HUB_OFFLINE': '1'}
  if peers:
    path = [os.path.abspath(peers), env.get('PYTHONPATH', '')]
    env['PYTHONPATH'] = os.pathsep.join(filter(None, path))
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env)
  return json.loads(done.stdout.splitlines()[-1])


def pair(
  name: str, args: argparse.Namespace, ours_first: bool, with_trl: bool
) -> dict[str, float | None]:
  """Returns COLUMNS of one process of ours and one of TRL's."""

  def own() -> dict[str, Any]:
    return run(our_command(name, args))

  def peer() -> dict[str, Any]:
    return run(trl_command(name, args), args.peers) if with_trl else {}

  if ours_first:
    a, b = own(), peer()
  else:
    b, a = peer(), own()
  if a['compiles']:
    print(f'{name}: {a["compiles"]} programs were compiled in steps that are counted')
  figures = [a['step_s'], a['sample_s'], a['update_s']]
  figures += [b.get(key) for key in ('step_s', 'sample_s', 'update_s')]
  figures += [b['step_s'] / a['step_s'] if b else None]
  figures += [a[k] for k in ('teaching', 'sampled_tps', 'teaching_tps', 'learner')]
  return dict(zip(COLUMNS, figures, strict=True))


def medians(rows: list[dict[str, Any]]) -> dict[str, float | None]:
  """Returns the median of each column; `ratio` is the ratio of the medians."""
  row: dict[str, Any] = {
    k: None if rows[0][k] is None else statistics.median(r[k] for r in rows)
    for k in COLUMNS
  }
  return row | {'ratio': row['trl_s'] / row['ours_s'] if row['trl_s'] else None}


def line(label: str, row: dict[str, Any]) -> str:
  """Formats a row of the table."""
  cells = ('-' if row[k] is None else f'{row[k]:.3g}' for k in COLUMNS)
  return f'{label:22}' + ''.join(f'{cell:>13}' for cell in cells)


def main() -> None:
  """Prints the table and the JSON line."""
  args = parse()
  if no_peer := peers_lacking(args.peers):
    print(f'TRL is left out: {no_peer}')
  print(' ' * 22 + ''.join(f'{k:>13}' for k in COLUMNS))
  result = {}
  for name in args.cases.split(','):
    if reason := lacking(name, args):
      print(f'{name} is left out: {reason}')
      continue
    rows = []
    for i in range(args.pairs):
      # Our first run writes the inputs of TRL's.
      rows.append(pair(name, args, ours_first=i % 2 == 0, with_trl=not no_peer))
      print(line(f'{name} {i + 1}', rows[-1]), flush=True)
    result[name] = {k: v and round(v, 4) for k, v in medians(rows).items()}
    print(line(f'{name} median', result[name]), flush=True)
  print(json.dumps(result))


if __name__ == '__main__':
  main()
