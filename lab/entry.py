r"""Enters a rule in the table of the bench: own rate, fresh seeds, one JSON file.

  python -m lab.entry mine --config.loss.rule=my.py:loss --config.clip.rule=unclipped
  python -m lab.entry --check mine.json
  python -m lab.entry --table papers/bench/entries

1. `tune` tries rates of protocol 5's ladder on its tuning seeds, in setting S1;
2. `test` trains the entry at its best rate, and GRPO at the rate of protocol 5, on the
   entry seeds: with the same problems, warm starts, prompts and noise;
3. `record` makes the file: the overrides, the text of custom functions, the commit, the
   versions, the processor, the evaluations of all runs, and the row of the table.

`--check` computes the row again from the evaluations. A row counts responses, not
seconds, so it does not depend on the machine; GRPO is trained beside the entry because
another processor rounds differently. Ctrl-C stops after a step; the same command
resumes. papers/bench/entries/README.md says what may be changed and what a row means.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.runtime import files, markdown
from bapo_jax.runtime.progress import log
from lab import experiments, sweep
from lab.evidence import relation
from lab.experiments import Experiment
from lab.outcomes import sign_flip, t_interval

PROTOCOL = 'papers/bench/rates.py'
SEEDS = tuple(range(900, 916))
BUDGET = 10_240  # sampled responses of a run
UPDATES = 16  # most updates per batch
GOAL = 0.7  # accuracy; a row has the responses until it
NEAR = 0.05  # rates whose accuracy is so close to the best are the stable range
ALLOWED = (
  'loss',
  'clip',
  'mask',
  'advantage',
  'batch',
  'buffer',
  'optimizer',
  'learner.minibatches',
  'learner.epochs',
)
PER_RUN = ('evaluations', 'diverged', 'config')  # fields of a result that a file has
COLUMNS = {  # field of a row -> heading
  'rate': 'own rate',
  'accuracy': 'accuracy, mean over 10,240 responses',
  'gain': 'less GRPO',
  'interval': '95 % interval',
  'p': 'p',
  'stable': 'stable range',
  'until': 'responses until .70',
}
BEGIN, END = '<!-- entries -->', '<!-- end of entries -->'
Runs = Mapping[str, Mapping[str, Any]]  # seed -> PER_RUN of its result


def accuracy(run: Mapping[str, Any]) -> float:
  """Returns the mean accuracy of a run over its BUDGET of responses.

  The accuracy is linear between evaluations, and 0 after a divergence.
  """
  _, accuracy_N, _, responses_N = np.asarray(run['evaluations'], float).T
  if run['diverged']:
    accuracy_N = np.append(accuracy_N, [0, 0])
    responses_N = np.append(responses_N, [responses_N[-1], BUDGET])
  return float(np.trapezoid(accuracy_N, responses_N) / responses_N[-1])


def until(run: Mapping[str, Any]) -> float:
  """Returns the responses at the first evaluation with accuracy GOAL; inf if none."""
  return next((row[3] for row in run['evaluations'] if row[1] >= GOAL), np.inf)


def stable_range(accuracy_of: Mapping[Any, float]) -> int:
  """Returns the number of rates whose accuracy is within NEAR of the best one."""
  best = max(accuracy_of.values())
  return sum(x >= best - NEAR for x in accuracy_of.values())


def mean_accuracy(runs: Runs) -> float:
  """Returns the mean over the seeds of the runs' accuracy."""
  return float(np.mean([accuracy(run) for run in runs.values()]))


def row(entry: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the row of an entry, computed from the evaluations of its runs.

  Raises:
    ValueError: the entry and GRPO have different seeds.
  """
  own: Runs = entry['test']['entry']
  grpo: Runs = entry['test']['grpo']
  if own.keys() != grpo.keys():
    raise ValueError('the entry and GRPO have different seeds; train all of both')
  gain_S = np.asarray([accuracy(own[s]) - accuracy(grpo[s]) for s in own])
  tried = {rate: mean_accuracy(runs) for rate, runs in entry['tuning'].items()}
  best = max(sorted(tried, key=float), key=lambda rate: tried[rate])
  reached = [until(run) for run in own.values()]
  return {
    'rate': float(best),
    'accuracy': round(mean_accuracy(own), 4),
    'gain': round(float(gain_S.mean()), 4),
    'interval': [round(x, 4) for x in t_interval(gain_S)],
    'p': round(sign_flip(gain_S), 5),
    'stable': stable_range(tried),
    # The first accuracy of the median seed, since a run may never reach the goal.
    'until': float(np.median(reached)) if np.isfinite(np.median(reached)) else None,
  }


def check(path: str) -> list[str]:
  """Returns what is wrong with an entry's file, a sentence each; [] if nothing is."""
  entry = files.read_object(path, 'give a file that lab.entry wrote')
  problems = []
  try:
    computed = row(entry)
    protocol = experiments.run_file(PROTOCOL)
    tried = {float(x): mean_accuracy(y) for x, y in entry['tuning'].items()}
    if set(entry['test']['entry']) != set(map(str, SEEDS)):
      problems.append(f'the test seeds are not {SEEDS[0]} to {SEEDS[-1]}')
    for rate, runs in entry['tuning'].items():
      if set(runs) != set(map(str, protocol.TUNING)):
        problems.append(f'rate {rate} has other tuning seeds than {protocol.TUNING}')
    if (following := protocol.to_add(tried)) is not None:
      problems.append(f'the best rate is at an edge, and {following:g} was not tried')
  except (KeyError, TypeError, IndexError) as error:
    return [f'a field is missing or has another form ({error!r})']
  stored = entry.get('row', {})
  for name, value in computed.items():
    if stored.get(name) != value:
      problems.append(f'{name} is {value} by the evaluations, not {stored.get(name)}')
  return problems


def refuse(knobs: Mapping[str, Any]) -> None:
  """Raises a ValueError for an override that an entry may not have."""
  for name in knobs:
    allowed = any(name == x or name.startswith(f'{x}.') for x in ALLOWED)
    if name == 'optimizer.lr':
      raise ValueError(f'{name}: the ladder tries the rates; leave it out')
    if not allowed:
      raise ValueError(
        f'{name}: the track fixes this knob; an entry may set {", ".join(ALLOWED)}'
      )


def track(knobs: Mapping[str, Any]) -> Experiment:
  """Returns all runs that an entry may need: GRPO, and the entry at every rate.

  Raises:
    ValueError: an override is not allowed, or the protocol has no rate of GRPO yet.
  """
  refuse(knobs)
  protocol = experiments.run_file(PROTOCOL)
  if 'grpo' not in protocol.OWN['s1']:
    raise ValueError(
      f'{PROTOCOL} has no own rate of GRPO in S1 yet; its stage 1 chooses it'
    )
  arms = {arm_of(rate): {**knobs, 'optimizer.lr': rate} for rate in protocol.LADDER}
  arms['grpo'] = protocol.ARMS['grpo'] | {'optimizer.lr': protocol.OWN['s1']['grpo']}
  values = protocol.SETTINGS['s1']() | {'responses': BUDGET}
  return Experiment(values, arms, (*protocol.TUNING, *SEEDS), of_run=protocol.of_run)


def arm_of(rate: float) -> str:
  """Returns the name of the entry's arm at a rate."""
  return f'entry_lr{rate:g}'


class Entry(NamedTuple):
  """An entry whose runs are trained by `train`, and read by `stored`."""

  made: Experiment
  command: list[str]
  folder: str  # of workdirs and results
  workers: int

  @property
  def results(self) -> str:
    """The folder of the runs' results."""
    return f'{self.folder}/results/runs'

  def train(self, arms: Iterable[str], seeds: tuple[int, ...]) -> None:
    """Trains the runs of arms and seeds that are not done.

    Exits with the status of `sweep.train_all` if a run fails or a signal arrives.
    """
    some = {arm: self.made.arms[arm] for arm in arms}
    specs = experiments.runs(self.made._replace(arms=some, seeds=seeds))
    for name, spec in specs.items():
      if spec.config.updates_per_step > UPDATES:
        raise ValueError(
          f'run {name} has {spec.config.updates_per_step} updates per batch, and an '
          f'entry at most {UPDATES}; lower learner.epochs or learner.minibatches'
        )
    if status := sweep.train_all(
      self.command, specs, self.folder, self.results, self.workers
    ):
      sys.exit(status)

  def stored(self, arm: str, seeds: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Returns seed -> PER_RUN of the finished runs of an arm."""
    results = experiments.read_runs(self.results)
    named = {str(seed): experiments.run_name(arm, {}, seed) for seed in seeds}
    return {
      seed: {field: results[name][field] for field in PER_RUN}
      for seed, name in named.items()
      if name in results
    }


def tune(entry: Entry) -> dict[float, Runs]:
  """Tries rates until the best one is inside; returns rate -> runs."""
  protocol = experiments.run_file(PROTOCOL)
  rates = [*protocol.FIRST]
  while True:
    entry.train(map(arm_of, rates), protocol.TUNING)
    runs: dict[float, Runs] = {
      rate: entry.stored(arm_of(rate), protocol.TUNING) for rate in rates
    }
    following = protocol.to_add({x: mean_accuracy(y) for x, y in runs.items()})
    if following is None:
      return runs
    rates.append(following)


def run(name: str, knobs: Mapping[str, Any], entry: Entry) -> dict[str, Any]:
  """Trains all runs of an entry; returns the content of its file."""
  tuning = tune(entry)
  protocol = experiments.run_file(PROTOCOL)
  own = arm_of(protocol.best({x: mean_accuracy(y) for x, y in tuning.items()}))
  entry.train([own, 'grpo'], SEEDS)
  some = next(iter(experiments.read_runs(entry.results).values()))
  content: dict[str, Any] = {
    'name': name,
    'overrides': dict(knobs),
    'sources': some['sources'] if knobs else {},
    'commit': some['commit'],
    'versions': some['versions'],
    'processor': some['processor'],
    'tuning': {f'{rate:g}': runs for rate, runs in sorted(tuning.items())},
    'test': {'entry': entry.stored(own, SEEDS), 'grpo': entry.stored('grpo', SEEDS)},
  }
  return content | {'row': row(content)}


def table(entries: Iterable[Mapping[str, Any]]) -> str:
  """Returns the rows of entries as a Markdown table, the largest gain first."""
  lines = []
  for entry in sorted(entries, key=lambda x: -x['row']['gain']):
    x = entry['row']
    low, high = x['interval']
    lines.append(
      (
        entry['name'],
        f'{x["rate"]:g}',
        f'{x["accuracy"]:.3f}',
        f'{x["gain"]:+.3f}',
        f'{low:+.3f} to {high:+.3f}',
        relation(x['p']).removeprefix('= '),
        f'{x["stable"]} of {len(entry["tuning"])} tried',
        'never' if x['until'] is None else f'{x["until"]:,.0f}',
      )
    )
  return markdown.table(lines, ('method', *COLUMNS.values()), 'lrrrrrrr')


def write_table(folder: pathlib.Path) -> None:
  """Replaces the table in a folder's README.md by one of all its entries.

  Raises:
    ValueError: an entry does not pass its check.
  """
  paths = sorted(folder.glob('*.json'))
  for path in paths:
    if problems := check(str(path)):
      raise ValueError(f'{path}: {"; ".join(problems)}')
  page = folder / 'README.md'
  text = page.read_text(encoding='utf-8')
  before, _, rest = text.partition(BEGIN)
  _, _, after = rest.partition(END)
  lines = table(files.read_object(str(path)) for path in paths)
  files.write(page, f'{before}{BEGIN}\n\n{lines}\n\n{END}{after}')


def check_all(paths: Sequence[str]) -> int:
  """Prints what is wrong with entries' files; returns 1 if anything is, else 0."""
  wrong = 0
  for path in paths:
    problems = check(path)
    print(f'{path}: {"; ".join(problems) or "every figure follows from its runs"}')
    wrong |= bool(problems)
  return int(wrong)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs an entry, checks files or writes the table; returns an exit status.

  Raises:
    ValueError: a knob is not allowed, or a custom file in the repository is not
      committed.
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('name', nargs='?', default='', help='name of the entry')
  parser.add_argument('--to', default='', help='file to write; empty: <name>.json')
  parser.add_argument('--check', nargs='+', default=[], help='files to check')
  parser.add_argument('--table', default='', help='folder whose README.md gets a table')
  args, knobs = sweep.parse(parser, argv, 'runs/entries')
  if args.check:
    return check_all(args.check)
  if args.table:
    write_table(pathlib.Path(args.table))
    return 0
  if not args.name:
    raise ValueError('give the entry a name: python -m lab.entry mine --config....')
  made = track(knobs)
  entry = Entry(
    made,
    [sys.executable, '-m', 'lab.entry', *argv],
    f'{args.runs}/{args.name}',
    args.workers,
  )
  if args.only:
    arm = args.only.rpartition('-seed')[0]
    specs = experiments.runs(made._replace(arms={arm: made.arms[arm]}))
    return sweep.train(specs[args.only], args.only, entry.folder, entry.results)
  content = run(args.name, knobs, entry)
  to = args.to or f'{args.name}.json'
  files.write_json(to, content)
  log(f'{table([content])}\nThe entry: {to}')
  return 0


if __name__ == '__main__':
  experiments.command(main)
