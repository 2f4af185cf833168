"""The figures of a notebook show what the files of the runs say."""

import json

import numpy as np
import pytest

from bapo_jax.runtime import glossary
from lab import plots, run_plots

LOGP = np.log([0.5, 0.25, 1.0]).tolist()


def response(correct, adv, ratio=(1.1, 0.7, 1.0), cut=(0, 1, 0), **values):
  found = dict(response='abc', correct=correct, reward=float(correct), advantage=adv)
  found |= dict(taught=True, tokens=3, truncated=False, version=[0, 0])
  found |= dict(pieces=['a', 'b', 'c'], sampler_logp=LOGP, learner_logp=LOGP)
  return found | dict(ratio=ratio and list(ratio), cut=cut and list(cut)) | values


def write(workdir, rows, groups=None, config=None):
  """A workdir with these metrics, groups of step 2 and config."""
  (workdir / 'groups').mkdir(parents=True)
  lines = [json.dumps({'step': n} | row) for n, row in enumerate(rows, 1)]
  (workdir / 'metrics.jsonl').write_text('\n'.join([*lines, '']))
  if config:
    (workdir / 'config.json').write_text(json.dumps(config))
  for update, responses in enumerate(groups or (), 1):
    group = dict(step=2, id=update, answer='', source='fresh', completed_step=1)
    group |= dict(
      prompt='p', prompt_tokens=1, update=update, low=0.8, high=1.0 + update
    )
    with open(workdir / 'groups' / '2.jsonl', 'a') as file:
      file.write(json.dumps(group | {'responses': responses}) + '\n')
  return workdir


@pytest.fixture
def two(tmp_path):
  up, down = response(True, 1.0), response(False, -0.5, (0.6, 1.3, 1.0), (1, 0, 2))
  even = response(False, 0.0, None, None, tokens=7)
  text = response(False, -1.0, None, None, pieces=None, sampler_logp=None, tokens=9)
  rows = [{'rollout/reward': 0.1, 'loss/entropy': 'nan'}, {'rollout/reward': 0.3}]
  full = write(
    tmp_path / 'full', rows, [[up, down], [even, text]], {'a': {'b': 1, 'c': [2]}}
  )
  bare = write(
    tmp_path / 'bare', [{'rollout/reward': 0.2}], (), {'a': {'b': 2, 'c': [2]}}
  )
  return [run_plots.read_run(full, 'first'), run_plots.read_run(bare)]


def test_a_run_is_read_without_model_or_config(two, tmp_path):
  full, bare = two
  assert (full.label, bare.label) == ('first', 'bare')
  assert [r['rollout/reward'] for r in full.rows] == [0.1, 0.3]
  assert [g.step for g in full.groups] == [2, 2] and bare.groups == []
  assert run_plots.differences(two) == {'a.b': [1, 2]}
  naked = run_plots.read_run(write(tmp_path / 'naked', [{'loss/kl': 0.0}]))
  assert run_plots.differences([full, naked]) == {'a.b': [1, None], 'a.c': [[2], None]}
  with pytest.raises(ValueError, match='no rows of metrics'):
    run_plots.read_run(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match=r'5\.jsonl cannot be read'):
    run_plots.read_run(tmp_path / 'full', step=5)


def test_tokens_are_those_that_an_update_computed(two):
  mu_N, ratio_N, cut_N = run_plots.tokens(two[0].groups, 1)
  np.testing.assert_allclose(mu_N, [0.5, 0.25, 1.0], rtol=1e-6)
  np.testing.assert_allclose(ratio_N, [1.1, 0.7, 1.0], rtol=1e-6)
  assert cut_N.tolist() == [False, True, False]
  mu_N, ratio_N, cut_N = run_plots.tokens(two[0].groups, -1)
  np.testing.assert_allclose(ratio_N, [0.6, 1.3, 1.0], rtol=1e-6)
  assert cut_N.tolist() == [1, 0, 2]
  assert [len(x) for x in run_plots.tokens(two[1].groups, 1)] == [0, 0, 0]


def points(ax):
  """Points of the scatters, by their number."""
  return [len(c.get_offsets()) for c in ax.collections if len(c.get_offsets())]


def test_figures_show_all_runs(two):
  figure = run_plots.overlay(two)
  assert len(figure.axes) == len(run_plots.PANELS)
  lines = [line for line in figure.axes[0].lines if len(line.get_ydata())]
  drawn = {line.get_color(): list(line.get_ydata()) for line in lines}
  assert drawn == {plots.BLUE: [0.1, 0.3], plots.ORANGE: [0.2]}
  ratios = run_plots.ratios(two)
  assert [ax.get_title(loc='left') for ax in ratios.axes] == ['first', 'bare']
  # Of each sign: tokens kept, clipped and masked; of the run without a record, none.
  assert [points(ax) for ax in ratios.axes] == [[2, 1, 1, 1, 1], []]
  levels = {line.get_ydata()[0] for line in ratios.axes[0].lines}
  assert levels == {0.8, 2.0, 3.0}
  lengths = run_plots.lengths(two)
  assert [points(ax) for ax in lengths.axes] == [[1, 3], []]
  for drawing in (figure, ratios, lengths):
    drawing.canvas.draw()


def test_panels_name_metrics_of_the_glossary():
  names = {name for _, _, names in run_plots.PANELS for name in names}
  assert names <= set(glossary.GLOSSARY)
