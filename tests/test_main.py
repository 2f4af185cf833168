"""What a user gets wrong is answered in one sentence, before anything compiles."""

import inspect
import json
import pathlib
import re
import sys
import warnings

import foreign
import processes
import pytest
import runs
from absl.testing import flagsaver
from refusals import refused

from bapo_jax import main
from bapo_jax.run import experiment
from bapo_jax.training.config import load, overrides

TINY = 'configs/aime.py'
GOOD = '--config=' + TINY
FINETUNE = ['--config=configs/finetune.py', '--config.model.path=models/nowhere']
FINETUNE += [f'--config.problems.{x}=none.jsonl' for x in ('source', 'test_source')]
CASES = [  # flags, what the sentence must say
  (['--config=configs/aime.py:8b'], "no variant '8b'"),
  (
    ['--config=nope.py:8b'],
    '], configs/finetune.py, configs/geometry.py[:tiny|:3b|:7b], configs/tools',
  ),
  (['check'], '--config is missing; give one of configs/aime.py[:tiny|:recipe|'),
  ([GOOD, '--learning_rate=1'], '--learning_rate; use optimizer.lr; knobs are written'),
  (
    [GOOD, '--steps=3'],
    'bapo train has no flag --steps; a knob is written --config.steps=',
  ),
  ([GOOD, 'steps=3'], 'a knob is written --config.steps='),
  ([GOOD, '--output_dir=x'], 'give --workdir=..., the folder of a run'),
  (['chekc', GOOD], "'chekc'; a mode comes first (train, check, eval,"),
  (['eval', GOOD], 'names no model; train there first'),
  ([GOOD, '--config.steps=many'], 'steps=many: give an integer from 1 to 2147483647'),
  ([GOOD, '--config.mesh.data=3'], 'does not fill'),
  ([GOOD, '--workdir=README.md/x'], 'cannot be used'),
  (['export'], 'has no run with a config.json; train there first'),
  ([GOOD, '--config.problems.source=x.jsonl'], "test_source='synthetic'"),
  ([GOOD, '--mode=exprt'], "invalid choice: 'exprt'"),
  (['eval', GOOD, '--processes=2'], 'bapo eval has no flag --processes'),
  ([GOOD, '--config.model.attention=splash'], 'splash needs a tpu'),
  (['--config=configs/finetune.py:x'], "no variant 'x'; give --config=configs/finetu"),
  (FINETUNE, '--config.model.path=models/nowhere (no config.json'),
  (FINETUNE, '--config.problems.source=none.jsonl'),
  ([GOOD, '--workdir=gs://bucket/run'], '--workdir=gs://bucket/run is not a path on'),
  (['export', '--to=s3://a/b'], '--to=s3://a/b is not a path on this machine'),
]


@pytest.mark.parametrize(
  ('flags', 'message'), CASES, ids=lambda v: v[:50] if type(v) is str else ''
)
def test_bad_input_is_one_sentence(flags, message, tmp_path):
  if not any(flag.startswith('--workdir') for flag in flags):
    flags = [*flags, f'--workdir={tmp_path}']
  assert message in refused(flags)
  assert not list(tmp_path.iterdir()), 'nothing is written before the input is sound'


def test_the_variants_listed_are_those_a_config_has():
  listed = re.findall(r'(configs/\w+\.py)(?:\[:(.*)\])?$', main.usage(), re.MULTILINE)
  assert {'configs/aime.py', 'configs/finetune.py'} <= dict(listed).keys()
  for file, variants in listed:
    for variant in filter(None, variants.split('|:')):
      assert load(f'{file}:{variant}')['steps'] > 0
    sentence = 'no variant ' if variants else 'it has none'
    with pytest.raises(ValueError, match=sentence) as error:
      load(f'{file}:nope')
    names = set(filter(None, variants.split('|:')))
    assert set(re.findall(r"'([\w]+)'", str(error.value))) - {'nope'} == names


@pytest.mark.usefixtures('environment')
@pytest.mark.parametrize('mode', main.MODES)
def test_a_mode_comes_first_or_as_a_flag(mode):
  args = main.parse(['bapo', mode, GOOD, '--config.steps=3'])
  assert (args.mode, args.config, args.knobs) == (mode, TINY, ['--config.steps=3'])
  assert main.parse(['bapo', GOOD, f'--mode={mode}', '--config.steps=3']) == args


@pytest.mark.usefixtures('environment')
def test_a_mode_knows_only_its_flags(capsys):
  for mode in main.MODES:
    with pytest.raises(SystemExit) as done:
      main.parse(['bapo', mode, '--help'])
    text = capsys.readouterr().out
    assert done.value.code == 0 and f'bapo {mode} {main.MODES[mode]}'[:40] in text
    given = inspect.signature(main.command(mode)).parameters.values()
    optional = {x.name for x in given if x.default is not x.empty} - {'console'}
    assert {*re.findall(r'^  --(\w+)', text, re.MULTILINE)} == {'config', *optional}


def test_a_model_directory_as_workdir_is_refused_and_stays(tmp_path):
  model = foreign.model(tmp_path / 'model', 'qwen3')

  def files():
    paths = pathlib.Path(model).rglob('*')
    return {path: path.is_file() and path.read_bytes() for path in paths}

  before = files()
  for mode in ('train', 'report', 'export'):
    given = [GOOD] if mode == 'train' else []
    line = refused([mode, *given, f'--workdir={model}'])
    assert 'config.json is not the config of a run' in line or 'no checkpoint' in line
    assert files() == before


def test_a_flag_or_knob_that_is_given_twice_is_named_and_the_last_counts(capsys):
  knobs = ['--config.steps=3', '-config.steps=4', '--config.seed=1']
  args = main.parse(['bapo', GOOD, *knobs, GOOD, '--workdir=a', '--workdir', 'b'])
  assert args.workdir == 'b' and overrides(args.knobs)['steps'] == 4
  names = re.findall(r'--(\S+) is given twice; the last', capsys.readouterr().err)
  assert sorted(names) == ['config', 'config.steps', 'workdir']
  main.parse(['bapo', 'sweep', GOOD, '--set', 'steps=1', '--set', 'seed=3'])
  assert not capsys.readouterr().err


def test_the_home_directory_of_a_flag_is_expanded(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'own.py').write_text(DICT.format({'steps': 7}))
  args = main.parse(['bapo', '--config=~/own.py', '--workdir=~/runs'])
  assert args.workdir == f'{tmp_path}/runs' and main.config_of(args).steps == 7
  assert main.parse(['bapo', 'eval', '~/x', '--to=~/y']).workdir == f'{tmp_path}/x'


def test_a_folder_of_a_config_may_have_a_colon(tmp_path):
  path = tmp_path / 'a:b' / 'own.py'
  path.parent.mkdir()
  path.write_text(DICT.format({'steps': 7}))
  assert main.read_config(str(path), []).steps == 7
  assert main.read_config(f'{path}:grpo', []).batch.rule == 'fresh_only'


def test_a_stored_config_of_another_version_is_one_sentence_that_names_the_file(
  tmp_path,
):
  values = main.read_config(TINY, []).model_dump() | {'seed': -3}
  (tmp_path / 'config.json').write_text(json.dumps(values))
  assert 'of an older version' in refused(['eval', str(tmp_path)])
  (tmp_path / 'resolved.json').write_text('{"code": []}')
  line = refused(['eval', str(tmp_path)])
  assert f'{tmp_path}/config.json: seed=-3: give an integer' in line


def test_a_bug_of_a_library_is_no_sentence(monkeypatch):
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  monkeypatch.setattr(main, 'start', lambda args: json.loads('{'))
  with (
    flagsaver.flagsaver(),
    warnings.catch_warnings(),
    pytest.raises(json.JSONDecodeError),
  ):
    main.main(main.parse(['bapo', GOOD]))


def test_a_mode_without_a_config_reads_that_of_the_run(tmp_path):
  config = main.read_config(TINY, ['--config.steps=7', '--config.clip.rule=fixed'])
  (tmp_path / 'config.json').write_text(json.dumps(config.model_dump()))
  args = main.parse(['bapo', 'eval', str(tmp_path), '--config.seed=5'])
  assert main.config_of(args) == config.model_copy(update={'seed': 5})
  assert 'config.json' in refused(['eval', f'{tmp_path}/other'])


def test_only_a_usage_that_was_not_asked_for_is_an_error(capsys):
  for args, status in (([], 2), (['--help'], 0), (['help'], 0), (['-h'], 0)):
    with pytest.raises(SystemExit) as done:
      main.parse(['bapo', *args])
    shown = capsys.readouterr()
    assert done.value.code == status
    assert (shown.err if status else shown.out).startswith('Usage: bapo')


def test_nothing_imports_jax_before_its_environment_is_set():
  code = 'import sys; from bapo_jax import main; assert "jax" not in sys.modules; '
  code += 'main.parse(["bapo", "plan"]); import jax; '
  code += 'assert jax.config.jax_traceback_filtering == "off"'
  processes.call(sys.executable, '-c', code)


FILES = [  # a config file, what the sentence must say
  ("\n\nraise KeyError('boom')", "KeyError: 'boom' (own.py, line 3)"),
  ('def get_config(:', 'SyntaxError: invalid syntax'),
  ('get_config = lambda: None', 'get_config() returns None, not a ConfigDict'),
  ("raise ValueError('two\\nlines')", 'two lines'),
]
DICT = 'from ml_collections import ConfigDict\nget_config = lambda: ConfigDict({})\n'


@pytest.mark.parametrize(('text', 'message'), FILES)
def test_a_config_file_that_raises_is_one_sentence(text, message, tmp_path):
  (tmp_path / 'own.py').write_text(text)
  with pytest.raises(ValueError) as error:
    load(str(tmp_path / 'own.py'))
  assert message in ' '.join(str(error.value).split())
  assert str(error.value).startswith(f'--config={tmp_path}/own.py: ')


@pytest.mark.parametrize(
  ('given', 'value'),
  [
    ('--config.steps=None', None),
    ('--config.title=a=b', 'a=b'),
    ('--noconfig.metrics.wandb', False),
    ('--config.evaluate.k=(1, 8)', (1, 8)),
    ('--config.evaluate.k=8', (8,)),
    ("--config.clip.sources=('fresh','reused')", ('fresh', 'reused')),
  ],
)
def test_an_override_is_read_by_the_type_of_its_knob(given, value):
  name = given.split('config.')[1].split('=')[0]
  assert overrides([given]) == {name: value}


@pytest.fixture
def environment(monkeypatch):
  """Restores the variables that a plan sets."""
  for name in main.PLANNING:
    monkeypatch.setenv(name, '')


@pytest.mark.usefixtures('environment')
def test_a_plan_sets_its_environment_before_an_own_file_runs(tmp_path):
  names = ', '.join(map(repr, main.PLANNING))
  (tmp_path / 'my.py').write_text(
    f'import os\nraise SystemExit([os.environ.get(x) for x in [{names}]])'
  )
  flags = [GOOD, f'--config.loss.rule={tmp_path}/my.py:f', '--mode=plan']
  assert str([*main.PLANNING.values()]) in refused(flags)


def test_a_function_of_the_same_path_in_another_folder_is_said(
  tmp_path, monkeypatch, capsys
):
  def enter(name, reward):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'my.py').write_text(f'def score(sample): return {reward}')
    monkeypatch.chdir(tmp_path / name)

  enter('ran', 1.0)
  experiment.claim(str(tmp_path / 'run'), runs.tiny(**{'rewards.rule': 'my.py:score'}))
  args = main.parse(['bapo', 'eval', str(tmp_path / 'run')])
  main.config_of(args)
  assert not capsys.readouterr().err
  enter('other', 0.5)
  main.config_of(args)
  assert 'rewards.rule is now my.py' in capsys.readouterr().err
