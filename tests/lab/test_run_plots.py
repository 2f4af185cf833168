"""The figures of a notebook show what the files of the runs say."""

import numpy as np
import pytest
import recordings

from bapo_jax.runtime import glossary
from lab import counterfactual, plots, rule_maps, run_plots
from lab.microscope_page import RULES
from lab.rule_maps import PROBABILITY, RATIO

LOGP = np.log([0.5, 0.25, 1.0]).tolist()


def response(correct, adv, ratio=(1.1, 0.7, 1.0), cut=(0, 1, 0), **values):
  logp = dict(pieces=[*'abc'], sampler_logp=LOGP, learner_logp=LOGP)
  values = logp | dict(ratio=ratio, cut=cut) | values
  return recordings.response('abc', correct, adv, **values)


@pytest.fixture
def two(tmp_path):
  up, down = response(True, 1.0), response(False, -0.5, (0.6, 1.3, 1.0), (1, 0, 2))
  even = response(False, 0.0, None, None, tokens=7)
  text = response(False, -1.0, None, None, pieces=None, sampler_logp=None, tokens=9)
  rows = [{'rollout/reward': 0.1, 'loss/entropy': np.nan}, {'rollout/reward': 0.3}]
  full = recordings.run(tmp_path / 'full', rows, {'a': {'b': 1, 'c': [2]}}, first=1)
  first = {'responses': [up, down], 'update': 1, 'high': 2.0}
  recordings.step(tmp_path / 'full', 2, first, {'responses': [even, text], 'high': 3.0})
  config = {'a': {'b': 2, 'c': [2]}}
  bare = recordings.run(tmp_path / 'bare', [{'rollout/reward': 0.2}], config, first=1)
  return [run_plots.read_run(full, 'first'), run_plots.read_run(bare)]


def test_a_run_is_read_without_model_or_config(two, tmp_path):
  full, bare = two
  assert (full.label, bare.label) == ('first', 'bare')
  assert [r['rollout/reward'] for r in full.rows] == [0.1, 0.3]
  assert [g.step for g in full.groups] == [2, 2] and bare.groups == []
  assert run_plots.differences(two) == {'a.b': [1, 2]}
  with pytest.raises(ValueError, match=r'nowhere'):
    run_plots.read_run(tmp_path / 'nowhere')


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


# ------------------------------------------- the map of a rule has its weights by hand


def at(name, sign, ratio, probability):
  """The weight of the grid's point nearest to these values."""
  i = np.abs(np.log(RATIO / ratio)).argmin()
  j = np.abs(np.log(PROBABILITY / probability)).argmin()
  return rule_maps.weights(RULES[name], sign)[i, j], RATIO[i], PROBABILITY[j]


@pytest.mark.parametrize(
  ('name', 'sign', 'ratio', 'probability', 'by_hand'),
  [
    ('GRPO', 1, 0.5, 0.01, lambda r, p: r),
    ('GRPO', 1, 1.5, 0.01, lambda r, p: 0),
    ('GRPO', -1, 0.5, 0.01, lambda r, p: 0),
    ('GRPO', -1, 5, 0.01, lambda r, p: -r),
    ('dual clip', -1, 5, 0.01, lambda r, p: 0),
    ('TIS', 1, 5, 0.01, lambda r, p: 2),
    ('REINFORCE', -1, 0.5, 0.01, lambda r, p: -1),
    ('DPPO-TV', 1, 3, 0.01, lambda r, p: r),  # p - q is .007
    ('DPPO-TV', 1, 3, 0.9, lambda r, p: 0),  # p - q is .6, above .2
    ('IcePop', 1, 7, 0.01, lambda r, p: 0),
  ],
)
def test_weights_by_hand(name, sign, ratio, probability, by_hand):
  found, r, p = at(name, sign, ratio, probability)
  assert found == pytest.approx(by_hand(r, p), rel=1e-4)


def test_a_ratio_that_no_token_has_is_empty():
  assert np.isnan(at('GRPO', 1, 0.2, 0.9)[0])  # mu would be 4.5


# ---------------------------------------------------------------- a recorded batch


def recorded(tmp_path):
  """Seven tokens: ratios 1, 1.5, 2.5 with A = 1, and 0.7, 0.4, 1, 1.8 with A = -1."""
  old, lines = np.log(0.3), []
  for reward, ratios in ((1.0, [1.0, 1.5, 2.5]), (0.0, [0.7, 0.4, 1.0, 1.8])):
    count = len(ratios)
    values = {'tokens': [0] * count, 'behavior_logp': [old] * count}
    values['logp'] = [float(old + np.log(r)) for r in ratios]
    lines.append({'group': 0, 'reward': reward} | values)
  return counterfactual.read(recordings.jsonl(tmp_path / 'batch.jsonl', lines))


def of(found, knobs):
  config = counterfactual.config_of(found, knobs)
  return config, counterfactual.apply(found, config)


def test_the_mass_of_the_cut_tokens_is_counted_by_sign(tmp_path):
  found = recorded(tmp_path)
  _, grpo = of(found, {'clip.rule': 'fixed'})
  tokens, mass = rule_maps.cut_mass(found, grpo, 1)
  assert (tokens, mass) == (pytest.approx(2 / 3), pytest.approx(4 / 5, abs=1e-4))
  tokens, mass = rule_maps.cut_mass(found, grpo, -1)
  assert (tokens, mass) == (pytest.approx(2 / 4), pytest.approx(1.1 / 3.9, abs=1e-4))


def test_the_region_is_where_a_token_of_that_sign_would_be_cut(tmp_path):
  found = recorded(tmp_path)
  p, r = 55, {'1.41': 35, '2': 40, '1/2': 20, '1/1.41': 25}  # p = .562
  assert rule_maps.PROBABILITY[p] == pytest.approx(0.562, abs=1e-3)
  assert rule_maps.RATIO[[*r.values()]] == pytest.approx([2**0.5, 2, 0.5, 0.5**0.5])

  def cut(knobs, sign, ratio, column=p):
    return bool(rule_maps.cut_regions(*of(found, knobs))[sign][r[ratio], column])

  grpo = {'clip.rule': 'fixed'}
  assert cut(grpo, 1, '2') and cut(grpo, 1, '1.41') and not cut(grpo, 1, '1/2')
  assert not cut(grpo, -1, '2')
  # p = .562 and q = 1.12 for r = 1/2: there is no such token.
  assert not cut(grpo, -1, '1/2') and cut(grpo, -1, '1/2', column=40)
  # The search of the batch ends at 1.55: P is 1 + 1.5 and N is 1 + .7 + 1.8 above .6.
  balanced = {'clip.rule': 'balanced', 'clip.target': 0.4}
  assert not cut(balanced, 1, '1.41') and cut(balanced, 1, '2')
  # Of p - q = .281 and .165 the first is above .2.
  dppo = {'clip.rule': 'unclipped', 'loss.rule': 'tis', 'mask.rule': 'dppo_tv'}
  assert cut(dppo, 1, '2') and not cut(dppo, 1, '1.41')
  # DCPO: a token with p = .1 is inside its bounds up to r (p - q) = .2, not with .562.
  dcpo = {'clip.rule': 'dcpo'}
  assert cut(dcpo, 1, '2') and not cut(dcpo, 1, '2', column=40)
  gspo = {'loss.rule': 'sequence', 'clip.rule': 'fixed', 'loss.aggregate': 'sequence'}
  assert rule_maps.cut_regions(*of(found, gspo)) == {}


def test_the_figure_has_a_panel_per_rule_and_its_shares(tmp_path):
  found = recorded(tmp_path)
  knobs = {'GRPO': {'clip.rule': 'fixed'}, 'free': {'clip.rule': 'unclipped'}}
  rules = {name: of(found, k) for name, k in knobs.items()}
  figure = rule_maps.draw_recorded(
    found, {n: x[1] for n, x in rules.items()}, {n: x[0] for n, x in rules.items()}
  )
  titles = [ax.get_title() for ax in figure.axes]
  assert titles[:2] == [
    'GRPO\ncut + 66.7% (80.0%),  - 50.0% (28.2%)',
    'free\ncut + 0.0% (0.0%),  - 0.0% (0.0%)',
  ]
