"""From a problems.source to its rows: problem, answer, and the verifier they ask for.

  synthetic, countdown       made from the seed; splits `train` and `test`
  a.jsonl, a.jsonl,b.parquet files, read in this order
  hub:owner/name:split       files of a data set on the hub
  tfds:name:split            a data set of tensorflow-datasets

The builders are imported when asked for: tensorflow-datasets takes a second.
"""

import functools
import os
from collections.abc import Callable

from bapo_jax.data import dedup, families
from bapo_jax.runtime.progress import log

# The split of a name that gives none, by its knob.
SPLITS = {'source': 'train', 'test_source': 'test'}


def check(knob: str, source: str, problems: dict) -> list[str]:
  """What there is not of a source on this machine, as words; names are not looked up.

  Made problems are made, files are read, all of them: what is wrong is then known.

  Args:
    knob: source or test_source; problems: the config's section of that name.

  Raises:
    ValueError: they cannot be made or read.
  """
  p, count = problems, problems['train'] + problems['test']
  if source == 'synthetic':
    families.generate(p['family'], p['level'], p['seed'], count)
  elif source == 'countdown':
    from bapo_jax.data import countdown

    countdown.generate(p['seed'], count, **p['countdown'])
  elif _named(source):
    _parts(knob, source)
  else:
    paths = source.split(',')
    if lost := [path for path in paths if not os.path.isfile(path)]:
      return [f'--config.problems.{knob}={path}' for path in lost]
    from bapo_jax.data import local_files

    for path in paths:
      local_files.read(path)
  return []


def worked(problems: dict) -> tuple[list[families.Problem], Callable]:
  """What the warm start imitates: the training problems, and who works them out.

  They are those of problems.source='countdown', and for any other source those of
  problems.family. The second is (problem, rng, slip, repeat) -> solution.

  Raises:
    ValueError: they cannot be made, or the embedded policy cannot read them.
  """
  p, train = problems, problems['train']
  count = train + p['test']
  if p['source'] != 'countdown':
    found = families.generate(p['family'], p['level'], p['seed'], count)
    return found[:train], families.SOLVERS[p['family']]
  from bapo_jax.data import countdown

  kinds = p['countdown']
  found = countdown.generate(p['seed'], count, **kinds)[:train]
  solve = functools.partial(countdown.solve, largest=kinds['target'])
  return countdown.embedded(found, kinds['wording']), solve


def find(knob: str, source: str) -> None:
  """Downloads what a name stands for, unless it is here already.

  Raises:
    ValueError: it is not here and cannot be downloaded.
  """
  if _named(source):
    _remote(knob, source)


def rows(knob: str, data_dir: str, problems: dict) -> list[dict]:
  """The rows of a source, each problem once unless problems.duplicates='keep'.

  What is made or read is kept in `data_dir`; repeats are told.
  """
  source = problems[knob]
  made = source in ('synthetic', 'countdown')
  found = _made(knob, data_dir, problems) if made else _read(knob, source)
  kept, told = dedup.distinct(found, f'problems.{knob}={source}')
  if drop := problems['duplicates'] == 'drop':
    found = kept
  if told:
    log(told + ('; the first of each counts' if drop else '; problems.duplicates=keep'))
  if made:
    return found
  from bapo_jax.data import local_files

  return local_files.keep(data_dir, source, found)


def _made(knob: str, data_dir: str, problems: dict) -> list[dict]:
  from bapo_jax.data import builder, countdown, synthetic

  made = {name: problems[name] for name in ('seed', 'train', 'test')}
  if problems[knob] == 'synthetic':
    own = {name: problems[name] for name in ('family', 'level')}
    prepared = synthetic.prepare(data_dir, **own, **made)
  else:
    prepared = countdown.prepare(data_dir, **made, **problems['countdown'])
  return builder.rows(prepared, SPLITS[knob])


def _read(knob: str, source: str) -> list[dict]:
  from bapo_jax.data import local_files

  paths = source.split(',')
  if _named(source):
    found = _remote(knob, source)
    if not isinstance(found, tuple):
      return found
    paths = found
  return [row for path in paths for row in local_files.read(path)]


def _named(source: str) -> bool:
  return source.startswith(('hub:', 'tfds:'))


def _parts(knob: str, source: str) -> tuple[str, str, str]:
  where, _, rest = source.partition(':')
  name, _, split = rest.partition(':')
  if not name or (where == 'hub') != ('/' in name):
    raise ValueError(
      f'problems.{knob}={source}: write hub:owner/name:split or tfds:name:split'
    )
  return where, name, split or SPLITS[knob]


def _remote(knob: str, source: str):
  """Rows, or the paths of files that hold them."""
  from bapo_jax.data import hub

  where, name, split = _parts(knob, source)
  get = hub.hub if where == 'hub' else hub.library
  return get(name, split, f'problems.{knob}')
