"""Whole runs, tiny: exact resume, the report, signals, kills, a full disk."""

import collections
import functools
import glob
import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import making
import numpy as np
import pictured
import processes
import pytest
import recordings
import runs
from chains import chains
from pages import Page
from runs import PARTIAL, command, last_run, same, tiny
from safetensors.numpy import load_file, save_file

from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.run import experiment, report, resume, step_record
from bapo_jax.runtime import jax_options, metrics
from bapo_jax.runtime import workdir as workdir_lib
from bapo_jax.tools import sweep
from bapo_jax.training import checkpoint, evaluate
from bapo_jax.training import config as config_lib
from lab import counterfactual


@pytest.fixture(params=['whole', 'partial', 'pictured', 'adapter'])
def recorded(request) -> runs.Recorded:
  """Returns each of the recorded runs."""
  return request.getfixturevalue(f'{request.param}_run')


def test_a_recorded_run_is_resumed_to_the_bit(recorded, tmp_path):
  # The actor of an odd step is older than its weights.
  last = recorded.config.steps
  workdir = runs.truncated(recorded, tmp_path / 'run', last - 3)
  assert runs.train(recorded.config, workdir, recorded.verifier) == 0
  assert_same_run(workdir, recorded.workdir, last)
  names = [f'groups/{step}.jsonl' for step in range(last - 2, last + 1)]
  for name in (*names, f'eval/{last}.json'):
    found, expected = (path / name for path in (workdir, recorded.workdir))
    assert found.exists() == expected.exists()
    assert not found.exists() or found.read_text() == expected.read_text(), name


def test_a_recorded_run_learned_and_reports(recorded):
  run = last_run(recorded.workdir)
  assert run.scalars['updates'] > 0
  assert max(float(row.get('learner/grad_norm', 0)) for row in run.rows.values()) > 0
  last = run.rows[recorded.config.steps]
  if recorded.config.batch.rule == 'adapted':
    assert float(last['buffer/hard']) + float(last['buffer/reusable']) > 0
  if recorded.config.rollout.max_off_policy_steps:
    # Some responses were unfinished, or no partial rollout was tested.
    host = {name: run.arrays[f'partial/host/{name}'] for name in ('done_B', 'id_W')}
    submitted_W = run.arrays['partial/host/submitted_W'] >= 0
    done_W = host['done_B'].reshape(len(submitted_W), -1).all(1)
    assert (submitted_W & ~done_W).any()
  report = json.loads((recorded.workdir / 'report.json').read_text())
  assert report['eval_before'].keys() >= {'accuracy', 'stderr', 'n'}
  assert sum(report['phases'].values()) <= report['wall_s']


@pytest.mark.nightly
@pytest.mark.parametrize('partial', [False, True], ids=['whole', 'partial'])
def test_no_step_after_the_second_compiles_a_program(
  tmp_path, monkeypatch, partial, compiled
):
  before, steps_of = [], experiment.train_loop  # programs compiled before each step

  def counted(t, s):
    before.append(len(compiled))
    for step_of in steps_of(t, s):
      yield step_of
      before.append(len(compiled))

  monkeypatch.setattr(experiment, 'train_loop', counted)
  knobs = {'steps': 4, 'evaluate.every': 99, 'batch.rule': 'adapted', 'mesh.data': 2}
  knobs |= {'buffer.reevaluate': 4} | (PARTIAL if partial else {})
  # With a mesh, unlike a run on one device.
  assert runs.train(tiny(**knobs), tmp_path / 'compiled', devices=2) == 0
  first, _, third, _, end = before
  assert first > 0
  # Rows are read by a program per device and power of two: exchange.rows_of.
  assert set(compiled[third:end]) <= {'jit(_take)'}


@pytest.mark.nightly
@pytest.mark.parametrize('problems', [{}, pictured.DRAWN], ids=['text', 'pictures'])
def test_a_start_compiles_each_large_program_once_and_hardly_an_operation(
  tmp_path, compiled, capsys, problems
):
  jax.clear_caches()
  knobs = problems | {'steps': 2, 'evaluate.group_size': 4}  # that of training
  knobs |= {'learner.recompute_logprobs': 'on', 'batch.rule': 'fresh_only'}
  assert runs.train(tiny(**knobs), tmp_path / 'once') == 0
  count = collections.Counter(name[4:-1] for name in compiled)
  large = ('learn', 'copy', 'make', 'admit', 'run', 'harvest', 'recompute', 'embedded')
  ahead = sum(count[name] for name in large)  # and none of them once more
  assert f'Compiled {ahead} programs in' in capsys.readouterr().out
  # Evaluation differs from training in the number of rows alone.
  # With these pictures it has as many rows.
  rows = 1 if problems else 2
  assert (count['learn'], count['copy'], count['harvest']) == (1, 1, rows)
  assert count['embedded'] == bool(problems)
  if problems:  # pictures are read by a few more
    return
  # Operations outside jit are programs named after them; 91 before they were joined.
  operations = [name for name in count if hasattr(jax.lax, name) or name[0] == '_']
  names = {'_bits', '_finite', '_fold', '_mixed', '_part', '_seats', '_step_metrics'}
  assert len({*operations} - names - {'_take'}) <= 4, ' '.join(operations)
  assert count.total() <= 45


def test_a_run_is_refused_before_it_writes_results(tmp_path):
  """The weights are read in a start, after the workdir was claimed."""
  knobs = {'model.path': runs.source(tmp_path / 'model')}
  weights = tmp_path / 'model' / 'model.safetensors'
  tensors = load_file(weights)
  tensors['model.norm.weight'][0] = np.nan
  save_file(tensors, weights)
  with pytest.raises(ValueError, match='NaN'):
    runs.train(tiny(**knobs), tmp_path / 'runs' / 'nan')
  assert not workdir_lib.has_begun(str(tmp_path / 'runs' / 'nan'))


def test_other_problems_are_refused_on_resume_and_can_be_accepted(
  whole_run, tmp_path, capsys
):
  workdir = runs.truncated(whole_run, tmp_path / 'run', 2)
  rows = [{'problem': f'{n}+1', 'answer': n + 1} for n in range(8)]
  (tmp_path / 'own.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  with checkpoint.manager(str(workdir), 9) as checkpoints:
    found = checkpoint.read_meta(checkpoint.home(str(workdir)), 2)['problems']
    assert resume.same_problems(checkpoints, found, 'refuse')
    # Other problems, or the same problems with other prompts.
    for i, name in enumerate(('training', 'held-out', 'training prompts')):
      now = [*found[:i], 'other', *found[i + 1 :]]
      message = rf'{name}: {found[i]} then, other now.*=acc'
      with pytest.raises(ValueError, match=message):
        resume.same_problems(checkpoints, now, 'refuse')
  assert (last_run(workdir).arrays['buffer/hard/completed_step_P'] >= 0).any()
  knobs = runs.RECORDED['whole'] | {'problems.changed': 'accept', 'steps': 3}
  knobs |= {'problems.source': str(tmp_path / 'own.jsonl')}
  knobs |= {'problems.test_source': knobs['problems.source']}
  assert runs.train(tiny(**knobs), workdir) == 0
  assert 'the replay buffer starts empty' in capsys.readouterr().out
  run = last_run(workdir)
  parts = [run.arrays[f'buffer/{x}/completed_step_P'] for x in ('hard', 'reusable')]
  assert set(np.concatenate(parts).tolist()) <= {-1, 2}, 'no group of an earlier step'


def test_evaluations_of_other_settings_are_compared_nowhere(
  whole_run, tmp_path, capsys
):
  workdir = runs.truncated(whole_run, tmp_path / 'run', 2)
  meta = workdir / 'checkpoints' / '2' / 'meta' / 'metadata'
  assert json.loads(meta.read_text())['generator'] == jax_options.GENERATOR
  knobs = runs.RECORDED['whole'] | {'steps': 3, 'evaluate.sampling.temperature': 0.0}
  assert runs.train(tiny(**knobs), workdir) == 0
  last = evaluate.read_recorded(str(workdir), 3)['result']
  assert 'so the two are not compared' in capsys.readouterr().out
  # The steps 0 and 2 were sampled at temperature 1.
  rows = {row['step']: row for row in metrics.read(workdir)}
  assert [n for n, row in rows.items() if 'eval/accuracy' in row] == [3]
  assert rows[0][metrics.SETTINGS] == rows[2][metrics.SETTINGS]
  assert rows[0][metrics.SETTINGS] != rows[3][metrics.SETTINGS]
  text = (workdir / 'report.html').read_text()
  assert 'held-out accuracy before' not in text and 'wrong before' not in text
  assert sweep.accuracy(str(workdir), 0).endswith(f'-> {last["accuracy"]:.3f}')
  assert checkpoint.choose(str(workdir), 'best') == 3


def test_a_run_beyond_its_steps_is_finished(whole_run, tmp_path, capsys, monkeypatch):
  workdir = runs.copied(whole_run.workdir, tmp_path / 'run')
  (workdir / 'report.html').unlink()
  names = ('metrics.jsonl', 'config.json', 'resolved.json')
  stored, write = [(workdir / name).read_bytes() for name in names], report.write

  def interrupted(*args):
    signal.raise_signal(signal.SIGTERM)
    return write(*args)

  monkeypatch.setattr(report, 'write', interrupted)
  assert runs.train(whole_run.config.model_copy(update={'steps': 3}), workdir) == 0
  assert '4 steps are done, and steps=3' in capsys.readouterr().out
  # The config and the report are those of the steps that were done.
  assert [(workdir / name).read_bytes() for name in names] == stored
  assert '"steps": 4' in Page(workdir / 'report.html').data['config']


def assert_same_run(workdir: pathlib.Path, unbroken: pathlib.Path, step: int) -> None:
  """After `step` both hold the same state, and their metrics are those of one run."""
  found, whole = last_run(workdir), last_run(unbroken, step)
  assert found.scalars == whole.scalars and found.scalars['step'] == step
  assert same(found.arrays, whole.arrays)
  assert sorted(found.rows) == sorted(whole.rows) == list(range(step + 1))
  for number, row in whole.rows.items():
    # A part of a run ends with an evaluation.
    names = row.keys() & found.rows[number].keys()
    assert {k: row[k] for k in names} == {k: found.rows[number][k] for k in names}


KILLED = runs.RECORDED['partial']


def test_a_resumed_and_interrupted_run_is_the_unbroken_one(partial_run, tmp_path):
  broken = runs.truncated(partial_run, tmp_path / 'broken', 3)
  call = command(broken, **KILLED | {'checkpoint.every': 3, 'checkpoint.best': 0})
  process = subprocess.Popen(**call, stdout=subprocess.PIPE, text=True)
  processes.wait_until(lambda: newest(broken) > 3, [process])
  process.send_signal(signal.SIGINT)
  out = process.communicate()[0]
  assert process.returncode == 128 + signal.SIGINT
  assert 'Resuming after step 3.' in out and f'--workdir={broken}' in out
  assert_same_run(broken, partial_run.workdir, newest(broken))


@pytest.mark.parametrize(
  ('phase', 'saved'),
  [
    ('results ', 'no step is saved yet'),  # the first screen: the warm start follows
    ('Compiling', 'no step is saved yet'),
    ('Resuming after', 'step 3 is saved'),
  ],
)
def test_sigterm_outside_the_steps_says_what_is_saved(phase, saved, request, tmp_path):
  workdir, knobs = tmp_path / 'run', {'sft.clean': 10**6}  # a warm start of minutes
  if phase == 'Compiling':
    workdir, knobs = tmp_path / 'run', {}
  elif phase == 'Resuming after':
    run = request.getfixturevalue('partial_run')
    workdir, knobs = runs.truncated(run, workdir, 3), KILLED
  log = tmp_path / 'log'
  with open(log, 'w') as file:
    process = subprocess.Popen(**command(workdir, **knobs), stdout=file)
  processes.wait_until(lambda: phase in log.read_text(), [process])
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=600) == 128 + signal.SIGTERM
  last = log.read_text().splitlines()[-1]
  assert last == (
    f'Stopped: {saved}; run the same command with --workdir={workdir} to go on.'
  )


def test_a_second_signal_stops_at_once(tmp_path):
  # Two hundred epochs: seconds in which a step can be interrupted.
  workdir = tmp_path / 'run'
  call, log = command(workdir, **{'learner.epochs': 200}), tmp_path / 'log'
  with open(log, 'w') as file:
    process = subprocess.Popen(**call, stdout=file, stderr=subprocess.PIPE, text=True)
  processes.wait_until(lambda: workdir_lib.checkpoint_steps(str(workdir)), [process])
  process.send_signal(signal.SIGTERM)
  processes.wait_until(lambda: 'this step' in log.read_text(), [process])
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=600)
  assert process.returncode == 130  # 143 if the step was finished
  assert 'Traceback' not in error
  assert last_run(workdir).scalars['step'] in workdir_lib.checkpoint_steps(str(workdir))


def test_a_full_disk_ends_a_run_that_then_goes_on(partial_run, tmp_path):
  full = runs.truncated(partial_run, tmp_path / 'full', 1)
  knobs = KILLED | {'steps': 2}
  # No file above 20 KiB, which is less than a checkpoint needs.
  call = command(full, **knobs) | {'capture_output': True, 'text': True}
  limited = ['bash', '-c', 'ulimit -f 20; exec "$@"', 'bash', *call['args']]
  refused = subprocess.run(**call | {'args': limited})
  assert refused.returncode == 2, refused.stderr
  sentence = refused.stderr.strip().splitlines()[-1]
  assert f'{full}/checkpoints/2' in sentence and 'File too' in sentence
  assert 'Traceback' not in refused.stderr
  assert newest(full) == 1
  assert runs.train(tiny(**knobs), full) == 0
  assert_same_run(full, partial_run.workdir, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
  ('kills', 'more'), [(30, {}), (10, runs.TALK), (6, runs.ROUTED)], ids=str
)
def test_killed_often_a_run_ends_where_an_unbroken_one_does(tmp_path, kills, more):
  knobs, broken, whole = KILLED | more | {'steps': 120}, tmp_path / 'a', tmp_path / 'b'
  assert runs.train(tiny(**knobs), whole) == 0
  inside, rng = 0, random.Random(7)
  for kill in range(kills):
    saving = functools.partial(saves_after, broken, newest(broken))
    process = subprocess.Popen(**command(broken, **knobs), stdout=subprocess.DEVNULL)
    if kill % 3:  # a few milliseconds after the second save has begun, or the third
      processes.wait_until(saving, [process], 0.001)
      time.sleep(rng.uniform(0, 0.06))
    else:  # anywhere: loading, compiling, resuming, between two saves
      time.sleep(rng.uniform(0, 8))
    assert process.poll() is None, f'the run is over, kill {kill}'
    process.kill()
    process.wait()
    inside += bool(kill % 3 and half_written(broken))
  assert inside >= kills // 3, f'only {inside} kills fell into a save'
  assert runs.train(tiny(**knobs), broken) == 0
  assert_same_run(broken, whole, knobs['steps'])
  assert not half_written(broken)


def newest(workdir: pathlib.Path) -> int:
  """The step of the newest checkpoint; 0 without one."""
  return max(workdir_lib.checkpoint_steps(str(workdir)), default=0)


def saves_after(workdir: pathlib.Path, step: int) -> bool:
  """Returns whether a checkpoint after this step is whole and another one is not."""
  return newest(workdir) > step and bool(half_written(workdir))


def half_written(workdir: pathlib.Path) -> list[str]:
  """Directories of checkpoints that are not whole."""
  return glob.glob(f'{workdir}/checkpoints/*{checkpoint.INCOMPLETE}')


# ----------------- a run whose weights are lost stops, saved, with its own exit status


@pytest.fixture
def beyond(monkeypatch):
  """A function that returns the config with a value that no user can give."""

  def changed(config, section, knob, value):
    legal = {knob: getattr(getattr(config, section), knob)}
    parse = config_lib.parse

    def replaced(config):
      values = getattr(config, section).model_copy(update={knob: value})
      return config.model_copy(update={section: values})

    def parsed(values):
      return replaced(parse(values | {section: values[section] | legal}))

    monkeypatch.setattr(config_lib, 'parse', parsed)
    return replaced(config)

  return changed


def test_a_run_that_diverges_stops_saved_and_says_so(beyond, tmp_path, capsys):
  # An update or two overflow every later forward pass.
  knobs = {'steps': 9, 'optimizer.warmup': 0, 'learner.max_consecutive_skips': 3}
  knobs |= {'checkpoint.keep': 9, 'evaluate.every': 99}
  config, workdir = beyond(tiny(**knobs), 'optimizer', 'lr', 1e30), tmp_path / 'run'
  assert runs.train(config, workdir) == experiment.DIVERGED == 3
  run = last_run(workdir)
  step, skips = run.scalars['step'], run.scalars['consecutive_skips']
  out = capsys.readouterr().out
  assert 'learner.max_consecutive_skips=3' in out and 'Saved.' in out
  assert not (workdir / 'report.html').exists()
  # Two updates per step: it stops with the step in which the third was skipped.
  skipped = [int(float(run.rows[i]['learner/skipped'])) for i in range(1, step + 1)]
  assert 3 <= skips <= 4 and step < config.steps
  assert run.scalars['updates'] == 2 * step - sum(skipped)
  assert skipped[-2:] == [skips - 2, 2] and sum(skipped[:-2]) < 2
  # The saved weights are those before the skips: changed, and finite.
  before, last = (
    checkpoint.read_params(str(workdir), n)('embed') for n in (step - 1, step)
  )
  assert np.isfinite(last).all() and np.abs(last).max() > 1e20
  np.testing.assert_array_equal(last, before)


def test_a_run_whose_first_update_is_not_finite_says_so_at_once(
  beyond, tmp_path, capsys
):
  config = beyond(tiny(**{'steps': 9, 'evaluate.every': 50}), 'loss', 'kl', 1e39)
  workdir = tmp_path / 'run'
  assert config.learner.max_consecutive_skips > 2
  assert runs.train(config, workdir) == experiment.DIVERGED
  assert 'The first update of the run is not finite' in capsys.readouterr().out
  run = last_run(workdir)
  assert (run.scalars['step'], run.scalars['updates']) == (1, 0)
  assert run.scalars['consecutive_skips'] == 2


# ----------- a run that can learn nothing says so at its first step, and in its report


class NothingIsRight(making.OddVerifier):
  """Every response is wrong."""

  def verdict(self, text: str) -> Verdict:
    return Verdict(False, 'wrong', None)


def test_steps_without_anything_to_learn_are_reported_at_once_and_not_at_each(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(report, 'IDLE', 2)
  knobs, workdir = {'evaluate.every': 50, 'checkpoint.every': 50}, tmp_path / 'run'
  first = 'Nothing was learned in step 1: no group had right and wrong'
  for steps, said in ((1, first), (3, 'Nothing was learned in steps 1 to 2:')):
    assert runs.train(tiny(steps=steps, **knobs), workdir, NothingIsRight) == 0
    out = capsys.readouterr().out
    assert said in out and out.count('Nothing was learned') == 1
    text = (workdir / 'report.html').read_text()
    assert f'nothing was learned in {steps} of {steps} steps.' in text
  run = last_run(workdir)
  assert run.scalars['idle_steps'] == 3
  assert {run.rows[i]['learner/grad_norm'] for i in range(1, 4)} == {'0.0'}


def rows(idle, accuracy):
  return [
    {'step': i, 'learner/idle_steps': n, 'rollout/accuracy': accuracy}
    for i, n in enumerate(idle, 1)
  ]


@pytest.mark.parametrize(
  ('idle', 'accuracy', 'words'),
  [
    ([*range(1, 11)], 0.0, 'steps 1 to 10: .* 10 of 10 steps.* verifier .* template'),
    ([1, 0, *range(1, 13), 0, 1], 1.0, 'steps 3 to 14: .* 14 of 16 .* too easy'),
    ([0, 1, 0, 1, 2, 0], 0.0, r'steps 4 to 5: .* 3 of 6 steps\.$'),
  ],
)
def test_the_sentence_names_the_steps_and_where_to_look(idle, accuracy, words):
  assert re.search(words, report.idle_sentence(rows(idle, accuracy)))


# ------------------------- whole runs, tiny, with a user's own functions in every slot


HERE = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def my(tmp_path_factory):
  """A user's file, in a folder of its own."""
  path = tmp_path_factory.mktemp('mine') / 'my.py'
  shutil.copy(HERE / 'my_functions.py', path)
  return path


def knobs(my):
  """Own functions in every slot, with knobs."""
  return {
    'rewards.rule': f'{my}:score,{my}:brief',
    'rewards.weights': (1.0, 0.5),
    'rewards.custom.per_token': 0.01,
    'loss.rule': f'{my}:sapo',
    'loss.tau': 1.5,
    'clip.rule': f'{my}:dppo_tv',
    'clip.low': 0.002,
    'clip.high': 0.002,
    'advantage.rule': f'{my}:signs',
    'batch.rule': f'{my}:all_fresh',
    'rewards.shaping.rule': f'{my}:half_for_truncated',
  }


VALUES = {'accuracy': 'correct', 'reward': 'reward'}  # metric -> of a sample


@pytest.fixture(scope='module')
def whole(my, tmp_path_factory):
  """The workdir of a run to the end, with two named sets of held-out problems."""
  workdir = tmp_path_factory.mktemp('own') / 'whole'
  held_out = [chains('test'), chains('test', seed=1)]
  files = [
    recordings.jsonl(workdir.with_name(name), [row | {'solutions': None} for row in x])
    for name, x in zip(('a.jsonl', 'b.jsonl'), held_out, strict=True)
  ]
  sets = {'problems.test_source': 'a={},b={}'.format(*files)}
  assert runs.train(tiny(**knobs(my) | sets), workdir) == 0
  return workdir


def test_every_own_function_has_an_effect(whole):
  rows = [row for row in metrics.read(str(whole)) if row['step']]
  assert all('reward/score' in row and 'reward/length' in row for row in rows)
  assert max(row['reward/brief'] for row in rows) > 0
  assert max(row['clip/masked'] for row in rows) > 0
  # Half of the reward of a truncated response is gone.
  sums = [row['reward/score'] + 0.5 * row['reward/brief'] for row in rows]
  pairs = zip(rows, sums, strict=True)
  assert any(abs(row['rollout/reward'] - x) > 1e-6 for row, x in pairs)


def test_an_evaluation_reports_graded_rewards_and_named_sets(whole):
  samples = json.loads((whole / 'eval' / '4.json').read_text())['samples']
  first, *_, last = metrics.read(str(whole))
  page = Page(whole / 'report.html')
  text = ' '.join(page.data['sentences'])
  for name, title in {'': 'held-out problems', 'a/': 'a', 'b/': 'b'}.items():
    mine = [sample for sample in samples if name in ('', f'{sample["set"]}/')]
    parts = {f'reward/{x}': [s['parts'][x] for s in mine] for x in mine[0]['parts']}
    values = {x: [s[y] for s in mine] for x, y in VALUES.items()} | parts
    found = {x: last[f'eval/{name}{x}'] for x in values}
    assert found == pytest.approx({x: np.mean(y) for x, y in values.items()})
    assert len(mine) >= 16 and found['reward'] != found['accuracy']
    assert last[f'eval/{name}reward_stderr'] > 0
    # The page has a chart with errors, and a sentence; a sweep has the outcome.
    accuracy = f'eval/{name}accuracy'
    assert f'Accuracy on {title}' in page.titles()
    errors = page.values(page.data['errors'][accuracy])
    assert errors[4] == pytest.approx(last[f'eval/{name}stderr'], rel=1e-5)
    before, after = (f'{row[accuracy]:.3f}' for row in (first, last))
    of_set = f' on {title}' if name else ''
    assert f'Accuracy{of_set} went from {before} ± ' in text
    assert f'{name}accuracy {before} -> {after}' in sweep.accuracy(str(whole), 0)


def test_the_lab_applies_own_rules_to_a_recorded_step(whole, my):
  found = counterfactual.read(str(whole))
  own = counterfactual.apply(found, found.config)
  plain = {'clip.rule': 'unclipped'}
  without = counterfactual.apply(found, counterfactual.config_of(found, plain))
  masked = np.asarray(~own.bounds.keep_BT) & found.loss_mask_BT
  assert masked.any() and (own.cut_BT[masked & (own.adv_BT != 0)] == 2).all()
  # The run recorded the same reason; the lab has one mask for all updates of the step.
  groups = step_record.read(str(whole), found.step)
  cuts = [cut for g in groups for r in g['responses'] for cut in r['cut'] or ()]
  assert set(cuts) == {0, 2}
  kept = ~masked & found.loss_mask_BT
  np.testing.assert_array_equal(own.weight_BT[kept], without.weight_BT[kept])


def test_a_reward_that_fails_at_once_is_refused_before_compiling(my, tmp_path):
  my.with_name('late.py').write_text('def score(sample): return sample.row["none"]')
  place = f'{my.with_name("late.py")}:score'
  with pytest.raises(
    ValueError, match=r"fails on a trial.*KeyError: 'none' \(late\.py, line 1\)"
  ):
    runs.train(tiny(**{'rewards.rule': place}), tmp_path / 'late')
