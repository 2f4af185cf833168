"""The loss explorer shows the numbers of the JAX rules, at any slider position."""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax import custom_code
from bapo_jax.algorithms import bound_search, loss
from bapo_jax.algorithms.advantage import AdvantageRule
from bapo_jax.learner.objective import Objective
from bapo_jax.methods import METHODS
from bapo_jax.training import refusals
from bapo_jax.training.config import Config
from lab import counterfactual, explorer, own_table, rule_curves

SETTINGS, POINTS = 16, 40  # per loss rule and per setting
RULES = {part: list(base.rules.names) for part, base in explorer.PARTS.items()}
DESCRIBED = explorer.knobs_of() | {
  'stale': {'value': 1.0, 'slider': (0.0, 4.0, 0.05)},
  'moved': {'value': 0.0, 'slider': (0.0, 1.0, 0.05)},
}
# What the page computes for settings, without drawing.
COMPUTE = """
(cases) => JSON.parse(cases, revive).map(({ knobs, points }) => {
  const k = { ...DEFAULTS, ...knobs };
  const applied = apply(DATA.batch, k);
  const { bounds, before, after, weights } = applied;
  const at = penalised(curveOf(k, applied), k);
  const { low, high, dual, index = 0, met = true } = bounds;
  const found = { low, high, dual, index, met, before: before.share, after: after.share,
    cut: weights.map((w) => Number(w === 0)), weights,
    points: points.map(([r, p, adv]) => at(r, p, adv)) };
  return JSON.stringify(found, (_, x) => (x === Infinity ? 'inf' : x));
})
"""
SLIDE = """
(name, value) => {
  const slider = document.querySelector(`[data-knob="${name}"] input[type=range]`);
  slider.value = value;
  slider.dispatchEvent(new Event('input', { bubbles: true }));
}
"""


@pytest.fixture(scope='module')
def drawn(browser):
  with browser.open(explorer.PAGE) as page:
    yield page


def computed(page, cases):
  """Returns what the page computes for cases, dicts of knobs and points."""
  text = json.dumps(json.dumps(explorer._finite(cases)))
  found = page.evaluate(f'({COMPUTE})({text})')
  return [json.loads(one, object_hook=_infinite) for one in found]


def _infinite(found):
  return {name: math.inf if x == 'inf' else x for name, x in found.items()}


def close(found, wanted, case, **tolerance):
  tolerance = {'rtol': 1e-6, 'atol': 1e-6} | tolerance
  for name in wanted:
    told = f'{name} of {case["knobs"]}'
    np.testing.assert_allclose(found[name], wanted[name], **tolerance, err_msg=told)


def rules_of(values):
  """Returns part -> rule with the knobs of the page's settings."""
  rules = {}
  for part, base in explorer.PARTS.items():
    rule = values.get(f'{part}.rule', base.rules.default)
    knobs = {'rule': rule}
    for name, value in values.items():
      prefix, _, knob = name.rpartition('.')
      if prefix in (part, f'{part}.{rule}'):
        knobs[knob] = tuple(value) if isinstance(value, list) else value
    rules[part] = base.rules.validate(knobs)
  return rules


def refused(values):
  config = Config().model_copy(update=rules_of(values))
  return next(refusals.of_config(config), '')


def drawn_position(rng, knob):
  """A random position of a slider, or a random choice."""
  if 'choices' in knob:
    return knob['choices'][rng.integers(len(knob['choices']))]
  if knob.get('infinite') and rng.random() < 0.3:
    return math.inf
  first, last, step = knob['slider']
  many = 2 if isinstance(knob['value'], tuple) else 1
  x = first + step * rng.integers(0, round((last - first) / step) + 1, many)
  if knob.get('rising'):
    x.sort()
  return x.tolist() if many == 2 else float(x[0])


def drawn_setting(rng, rule, bounds, mask):
  """Random positions of all sliders of rules that a run accepts together."""
  for _ in range(1000):
    values = {
      name: drawn_position(rng, knob)
      for name, knob in DESCRIBED.items()
      if name.startswith((f'loss.{rule}.', f'clip.{bounds}.', f'mask.{mask}.'))
      or name in ('stale', 'moved', 'loss.aggregate')
    }
    values |= {'loss.rule': rule, 'clip.rule': bounds, 'mask.rule': mask}
    if rng.random() < 0.5 and bounds == 'balanced':  # near the share of the batch
      values['clip.balanced.target'] = rng.integers(440, 480) / 1000
    try:
      if not refused(values):
        return values
    except ValueError:  # a range and its step do not fit
      continue
  raise AssertionError(f'no slider positions fit {rule}, {bounds} and {mask}')


def expected(values, points):
  """Returns the results of the JAX rules for the recorded batch and single tokens."""
  rules = rules_of(values)
  rule, bound, mask = (rules[part] for part in ('loss', 'clip', 'mask'))
  logp_BT, batch = (
    jax.tree.map(lambda x: x.astype(float) if x.dtype == jnp.float32 else x, tree)
    for tree in rule_curves.recorded(explorer.BATCH)
  )
  old_BT = batch.behavior_logp_BT
  logp_BT = jnp.where(
    batch.loss_mask_BT, old_BT + values['stale'] * (logp_BT - old_BT), 0
  )
  batch = batch._replace(prox_BT=old_BT + values['moved'] * (logp_BT - old_BT))
  scale_B = loss.row_scale(batch.loss_mask_BT, rule.aggregate, 64)
  weigh = loss.weigher(rule, logp_BT, batch, scale_B)
  find = loss.finder((rule, bound, mask), logp_BT, batch, scale_B)
  _, bounds = rule(logp_BT, batch, find)
  start = bounds._replace(low=bounds.start_low, high=bounds.start_high)
  mask_BT = np.asarray(batch.loss_mask_BT)
  before_BT, after_BT = np.asarray(weigh(start)), np.asarray(weigh(bounds))
  ratio, probability, adv = np.asarray(points).T
  tokens = rule_curves.single(ratio, probability, adv, values['moved'])
  keep_BT = mask(*tokens)
  if mask.rule == 'm2po':
    keep_BT = kept_beside(mask, (logp_BT, batch), tokens)
  alone = bounds._replace(keep_BT=keep_BT)
  by_token = bound.rule == 'dcpo'
  if by_token:
    alone = bound(alone.dual, tokens[1], None)._replace(keep_BT=alone.keep_BT)
  return {
    'low': 0.0 if by_token else float(bounds.low),
    'high': math.inf if by_token else float(bounds.high),
    'dual': float(bounds.dual),
    'index': int(bounds.search_steps),
    'met': bool(bounds.target_met),
    'before': share(before_BT, batch.adv_BT),
    'after': share(after_BT, batch.adv_BT),
    'cut': (after_BT[mask_BT] == 0).astype(int).tolist(),
    'weights': np.asarray(loss.weights(rule, logp_BT, batch, bounds))[mask_BT],
    'points': np.stack(rule_curves.curve(rule, *tokens, alone), 1),
  }


def added_row(recorded, logp, old, adv):
  """Returns a recorded batch with one more response, of one token."""
  logp_BT, batch = recorded
  row_T = jnp.arange(logp_BT.shape[1]) == 0
  more = batch._replace(
    tokens_BT=jnp.vstack([batch.tokens_BT, row_T.astype(int)]),
    loss_mask_BT=jnp.vstack([batch.loss_mask_BT, row_T]),
    behavior_logp_BT=jnp.vstack([batch.behavior_logp_BT, row_T * old]),
    prox_BT=jnp.vstack([batch.prox_BT, row_T * old]),
    adv_BT=jnp.vstack([batch.adv_BT, row_T * adv]),
    source_B=jnp.append(batch.source_B, 0),
    on_policy_BT=jnp.vstack([batch.on_policy_BT, row_T & False]),
  )
  return jnp.vstack([logp_BT, row_T * logp]), more


def kept_beside(mask, recorded, tokens):
  """Whether a mask keeps each token [N, 1] as one more row of a recorded batch."""
  logp_N1, alone = tokens

  def keep(logp, old, adv):
    return mask(*added_row(recorded, logp, old, adv))[-1, 0]

  return jax.vmap(keep)(
    logp_N1[:, 0], alone.behavior_logp_BT[:, 0], alone.adv_BT[:, 0]
  )[:, None]


def share(weight_BT, adv_BT):
  """The share of the tokens with A > 0 in the sum of |weight|; 0 without weights."""
  size_BT = np.abs(np.asarray(weight_BT))
  return size_BT[np.asarray(adv_BT) > 0].sum() / max(size_BT.sum(), 1e-30)


@pytest.mark.parametrize('rule', RULES['loss'])
def test_the_page_computes_what_the_rules_compute(drawn, rule):
  rng = np.random.default_rng(sorted(RULES['loss']).index(rule))
  fitting = [
    x for x in RULES['clip'] if not refused({'loss.rule': rule, 'clip.rule': x})
  ]
  cases = []
  for i in range(SETTINGS):
    ratio_N = np.exp2(rng.uniform(-3, 3, POINTS))
    sign_N = rng.choice([-1.0, 1.0], POINTS)
    points = np.stack([ratio_N, rng.uniform(0.01, 1, POINTS), sign_N], 1)
    bounds, mask = fitting[i % len(fitting)], RULES['mask'][i % len(RULES['mask'])]
    setting = drawn_setting(rng, rule, bounds, mask)
    cases.append({'knobs': setting, 'points': points.tolist()})
  for case, found in zip(cases, computed(drawn, cases), strict=True):
    with jax.enable_x64(True):
      close(found, expected(case['knobs'], case['points']), case)


@pytest.mark.parametrize('resolution', ['step', 'continuous'])
def test_every_kind_of_search_finds_the_bounds_of_a_run(drawn, resolution):
  logp_BT, batch = rule_curves.recorded(explorer.BATCH)
  ratio_BT = loss.ratio(logp_BT, batch)
  # A point on either leg of the path, for the order that moves the upper bound first.
  points = {'upper': [(0.6, 1.43), (0.77, 3.0)], 'lower': [(0.77, 1.2), (0.9, 1.43)]}
  cases = []
  for contribution, weight in making.KINDS:
    for order, leg in itertools.product(points, range(2)):
      values = dict(contribution=contribution, weight=weight, order=order)
      k = bound_search.Share(**values)
      target = float(bound_search.share(ratio_BT, batch, *points[order][leg], k)) - 1e-5
      values |= {'resolution': resolution, 'low_step': 0.005, 'target': target}
      setting = {f'clip.balanced.{name}': value for name, value in values.items()}
      cases.append({'knobs': setting | {'stale': 1.0, 'moved': 0.0}, 'points': []})
  found = computed(drawn, cases)
  for case, values in zip(cases, found, strict=True):
    with jax.enable_x64(True):
      wanted = expected(case['knobs'], np.ones((1, 3)))
    names = ('low', 'high', 'index', 'met', 'after')
    close(values, {name: wanted[name] for name in names}, case)
  assert len({values['index'] for values in found}) >= 5


def objective_of_row(objective, logp_T, row):
  """Returns the objective of a run for a batch of one row."""
  logp_BT, batch = logp_T[None], jax.tree.map(lambda x: x[None], row)
  find = objective.search(logp_BT, batch, jnp.ones(1))
  return -objective.loss(logp_BT, batch, jnp.ones(1), find)[0]


def test_the_penalty_is_that_of_a_run(drawn):
  rng = np.random.default_rng(11)
  cases = []
  for direction in explorer.knobs_of()['loss.kl_direction']['choices']:
    knobs = {'clip.rule': 'fixed', 'mask.rule': 'icepop', 'mask.icepop.high': 2.0}
    knobs |= {'loss.kl': float(rng.uniform(0.1, 3)), 'loss.kl_direction': direction}
    # Cut, masked and other tokens.
    ratio_N = np.exp2(np.linspace(-3, 3, POINTS))
    sign_N = np.resize([1.0, -1.0, -1.0], POINTS)
    points = np.stack([ratio_N, rng.uniform(0.01, 1, POINTS), sign_N], 1)
    cases.append({'knobs': knobs, 'points': points.tolist()})
  for case, found in zip(cases, computed(drawn, cases), strict=True):
    rules = rules_of(case['knobs'])
    objective = Objective(
      rules['clip'],
      rules['loss'],
      spec=None,
      temperature=1.0,
      mask_rule=rules['mask'],
    )
    gain = functools.partial(objective_of_row, objective)
    with jax.enable_x64(True):
      tokens = rule_curves.single(*np.asarray(case['points']).T)
      gain_N, weight_N1 = jax.vmap(jax.value_and_grad(gain))(*tokens)
    close(found, {'points': np.stack([gain_N, weight_N1[:, 0]], 1)}, case)
  # By hand: at r = 2, KL(mu || pi) is 1 - log 2, and its slope is 1.
  at_2 = drawn.evaluate('PENALTIES.behavior_policy(Math.log(2))')
  np.testing.assert_allclose(at_2, [math.log(2) - 1, -1])


def test_advantages_are_those_of_a_run(drawn):
  rules = AdvantageRule.rules.names
  assert drawn.evaluate('Object.keys(ADVANTAGES)') == list(rules)
  for right in range(9):
    rewards = [1.0] * right + [0.0] * (8 - right)
    for name, kind in rules.items():
      found = drawn.evaluate(f'ADVANTAGES.{name}({rewards})')
      wanted = kind()(jnp.asarray([rewards]))[0]
      np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_refused_pair_is_named_and_offers_pairs_that_fit(drawn):
  names = ['loss.rule', 'clip.rule', 'loss.aggregate']
  names += ['clip.balanced.contribution', 'clip.balanced.weight']
  shown = "[byId('refusal').querySelector('p').textContent, byId('refusal').hidden]"
  sentences = explorer.refusals()
  for key in list(sentences)[:: len(sentences) // 12]:
    values = dict(zip(names, key.split('|'), strict=True))
    start = f'(set({{ ...DEFAULTS, ...{json.dumps(values)} }}), 0)'
    drawn.evaluate(start)
    assert drawn.evaluate(shown) == [refused(values), False]
    # Each button changes one knob, to rules that a run accepts.
    offers = drawn.evaluate('offers()')
    assert any('clip.rule' in offer for offer in offers)
    for i, offer in enumerate(offers):
      drawn.evaluate(start)
      drawn.evaluate(f"byId('refusal').querySelectorAll('button')[{i}].click()")
      chosen = drawn.evaluate(f'{json.dumps(names)}.map((x) => knobs[x])')
      assert chosen == [(values | offer)[name] for name in names]
      assert drawn.evaluate(shown)[1] and not refused(values | offer)
  # A range and a step that do not fit.
  narrow = {'clip.balanced.low': (0.6, 0.62), 'clip.balanced.low_step': 0.05}
  with pytest.raises(ValueError, match=r'low_step=0\.05 must be') as error:
    rules_of(narrow)
  drawn.evaluate(f'(set({{ ...DEFAULTS, ...{json.dumps(narrow)} }}), 0)')
  assert drawn.evaluate(shown) == [f'clip.{error.value}', False]
  assert {'clip.balanced.resolution': 'continuous'} in drawn.evaluate('offers()')


def test_sliders_hover_and_address(browser):
  with browser.open(explorer.PAGE, fragment='clip.rule=fixed') as page:
    assert page.evaluate("byId('method').value") == 'PPO, GRPO'
    page.evaluate(f"({SLIDE})('clip.fixed.high', 1.28)")
    assert page.evaluate("byId('method').value") == 'DAPO (clip-higher)'
    page.evaluate(f"({SLIDE})('stale', 2)")
    address = '#clip.rule=fixed&clip.fixed.high=1.28&stale=2'
    assert page.evaluate('location.hash') == address
    # The names of a run's knobs have no rule in them.
    command = '--config.loss.rule=clipped --config.clip.rule=fixed '
    command += '--config.clip.high=1.28'
    spans = "[...byId('command').children].map((x) => x.textContent).join(' ')"
    assert page.evaluate(spans) == command
    # The last position of a slider that may be infinite.
    page.evaluate(f"({SLIDE})('clip.fixed.high', 1e9)")
    assert 'clip.fixed.high=inf' in page.evaluate('location.hash')
    page.evaluate(f"({SLIDE})('clip.fixed.high', 1.28)")
    # Over the middle of the axis the ratio is 1; at the right end it is 4.
    hover = """(share) => {
      const svg = byId('weight').querySelector('svg');
      const box = svg.getBoundingClientRect();
      const x = svg.frame.left + share * (svg.frame.right - svg.frame.left);
      svg.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + x }));
      return byId('readout').innerText.replace(/\\s+/g, ' ');
    }"""
    assert 'weight 1, gain 1' in page.evaluate(f'({hover})(0.5)')
    at_4 = page.evaluate(f'({hover})(1)')
    assert 'r = 4' in at_4 and 'weight 0, gain 1.28' in at_4
    assert 'weight -4, gain -4' in at_4
    # A loss rule that no run accepts beside these bounds brings other bounds along.
    page.evaluate("(set({ 'loss.rule': 'tis' }), 0)")
    assert page.evaluate("knobs['clip.rule']") == 'unclipped'
    address = page.evaluate('location.hash.slice(1)')
    assert page.errors == page.requests == []
  with browser.open(explorer.PAGE, width=390, touch=True, fragment=address) as page:
    assert page.evaluate("[knobs['loss.rule'], knobs.stale]") == ['tis', 2]
    assert page.evaluate('document.documentElement.scrollWidth') == 390


@pytest.mark.parametrize('width', [1280, 390])
def test_the_page_opens_with_a_search_that_moves(browser, width):
  drawn = "[...byId('penalty').querySelectorAll('svg')].some((x) => x.clientWidth)"
  with browser.open(explorer.PAGE, width=width, touch=width < 500) as page:
    bounds = page.evaluate('current.applied.bounds')
    assert bounds['met'] and bounds['low'] > 0.6 and bounds['high'] > 1.2
    # The command has the target, which is not the default of a run.
    assert '--config.clip.target=0.47' in page.evaluate("byId('command').innerText")
    assert '0.42' in page.evaluate("byId('target-note').innerText")
    # A method is named as a command names it.
    options = page.evaluate("[...byId('method').options].map((x) => x.text)")
    named = dict(option.rsplit(' :', 1) for option in options)
    assert named.pop('Balanced PO') == 'balanced' and len(named) > 20
    assert all(METHODS[name].title == title for title, name in named.items())
    # Only the picture of a penalty that has a cost is drawn.
    assert not page.evaluate(drawn)
    page.evaluate(f"({SLIDE})('loss.kl', 0.5)")
    assert page.evaluate(drawn)
    assert page.evaluate('document.documentElement.scrollWidth') == width


OWN = '''
"""A rule in a file."""

import jax
import jax.numpy as jnp

from bapo_jax.algorithms import clip, loss


def soft(logp_BT, batch, find, *, tau=0.5, floor=0.0, steps=3):
  """Computes a soft gate: </script><script>document.title = 'hacked'</script>."""
  r_BT = loss.ratio(logp_BT, batch)
  gain_BT = jax.nn.sigmoid(tau * (r_BT - 1)) + floor * r_BT * logp_BT
  return jnp.where(batch.loss_mask_BT, gain_BT * batch.adv_BT, 0), find(r_BT)


def leaky(logp_BT, batch, find, *, slope=0.125):
  """Computes the clipped surrogate with a slope beyond the bounds."""
  clipped_BT, bounds = loss.Clipped()(logp_BT, batch, find)
  r_BT = loss.ratio(logp_BT, batch)
  leak_BT = slope * r_BT * batch.adv_BT
  return jnp.where(batch.loss_mask_BT, clipped_BT + leak_BT, 0), bounds


def goal(ratio_BT, batch, weigh, *, target=0.45):
  """Searches both bounds for a share of the gradient."""
  return clip.Balanced(target=target)(ratio_BT, batch, weigh)


def mask(ratio_BT, batch, weigh, *, far=0.2):
  """Masks tokens that moved far, compared with the batch."""
  moved_BT = jnp.abs(ratio_BT - 1) * jnp.exp(batch.behavior_logp_BT)
  mean = jnp.where(batch.loss_mask_BT, moved_BT, 0).sum() / batch.loss_mask_BT.sum()
  keep_BT = moved_BT <= far + mean
  return clip.Unclipped()(ratio_BT, batch, weigh)._replace(keep_BT=keep_BT)


def by_token(ratio_BT, batch, weigh):
  """Gives rare tokens more room."""
  high_BT = 1.2 + 0.5 * (1 - jnp.exp(batch.behavior_logp_BT))
  return clip.Fixed()(ratio_BT, batch, weigh)._replace(high=high_BT)
'''


@pytest.fixture
def own(tmp_path):
  """Writes the page of a rule: name -> (page, place)."""
  path = tmp_path / 'my.py'
  path.write_text(OWN)

  def write(name):
    page = tmp_path / 'my.html'
    page.write_text(explorer.page(f'{path}:{name}'))
    return page, f'{path}:{name}'

  return write


def drawn_points(rng, count):
  """Random points of the table's grid: (ratio, probability, advantage)."""
  ratio = rng.choice(own_table.RATIOS, count)
  p = rng.choice(own_table.PROBABILITIES, count)
  return np.stack([ratio, p, np.resize([1, -1], count)], 1)


def drawn_cases(rng, axes, count, points):
  cases = []
  for _ in range(count):
    values = {name: x[rng.integers(len(x))] for name, x in axes.items()}
    cases.append({'knobs': values, 'points': drawn_points(rng, points).tolist()})
  assert any(case['knobs'] != cases[0]['knobs'] for case in cases)
  return cases


def short(values):
  return {name.rpartition('.')[2]: value for name, value in values.items()}


@pytest.mark.parametrize('name', ['soft', 'leaky'])
def test_a_rule_of_yours_is_its_table(browser, own, name):
  path, place = own(name)
  rule = custom_code.load(place)
  recorded = rule_curves.recorded(explorer.BATCH)
  mask_BT = np.asarray(recorded[1].loss_mask_BT)
  with browser.open(path) as page:
    assert page.evaluate('document.title') == 'Loss explorer'
    axes = {axis['name']: axis['values'] for axis in page.evaluate('DATA.own.axes')}
    names = list(short(axes))
    assert names == {'soft': ['tau', 'floor'], 'leaky': ['slope', 'low', 'high']}[name]
    cases = drawn_cases(np.random.default_rng(7), axes, 4, 20)
    for case, found in zip(cases, computed(page, cases), strict=True):
      values = short(case['knobs'])
      ends = [values.pop(name) for name in ('low', 'high') if name in values]
      bounds = rule_curves.constant(*ends)
      bound = functools.partial(rule, **values)
      tokens = rule_curves.single(*np.float32(case['points']).T)
      weight_BT = np.asarray(loss.weights(bound, *recorded, bounds))
      wanted = {
        'points': np.stack(rule_curves.curve(bound, *tokens, bounds), 1),
        'weights': weight_BT[mask_BT],
        'after': share(weight_BT, recorded[1].adv_BT),
      }
      close(found, wanted, case)
    assert rule.function.__doc__ in page.evaluate("byId('about').innerText")
    # A run has the knob without its rule.
    knob, values = next(iter(axes.items()))
    page.evaluate(f"(set({{ '{knob}': {values[-1]} }}), 0)")
    assert f'--config.loss.{names[0]}=' in page.evaluate("byId('command').textContent")
    assert page.errors == page.requests == []


def applied(rule, stale, points):
  """The results of a clip rule beside `clipped`: recorded tokens, and one row more."""
  logp_BT, batch = rule_curves.recorded(explorer.BATCH)
  mask_BT, old_BT = batch.loss_mask_BT, batch.behavior_logp_BT
  recorded = jnp.where(mask_BT, old_BT + stale * (logp_BT - old_BT), 0), batch

  def weighed(logp_BT, batch):
    scale_B = loss.row_scale(batch.loss_mask_BT, 'token', 1)
    weigh = loss.weigher(loss.Clipped(), logp_BT, batch, scale_B)
    bounds = rule(loss.ratio(logp_BT, batch), batch, weigh)
    gain_BT, _ = loss.gain(loss.Clipped(), logp_BT, batch, lambda _: bounds)
    return bounds, gain_BT, np.asarray(weigh(bounds))

  bounds, _, weight_BT = weighed(*recorded)
  found = []
  for ratio, p, adv in points:
    more = added_row(recorded, np.log(p), np.log(p) - np.log(ratio), adv)
    _, gain_BT, added_BT = weighed(*more)
    found.append((gain_BT[-1, 0], added_BT[-1, 0]))
  return bounds, weight_BT[np.asarray(mask_BT)], np.asarray(found).reshape(-1, 2)


@pytest.mark.parametrize('name', ['goal', 'mask', 'by_token'])
def test_a_clip_rule_of_yours_is_its_table(browser, own, monkeypatch, name):
  monkeypatch.setattr(own_table, 'MOST_COMBINATIONS', 3)
  monkeypatch.setattr(own_table, 'STALE', own_table.STALE[::4])
  path, place = own(name)
  rule = custom_code.load(place)
  with browser.open(path) as page:
    axes = {axis['name']: axis['values'] for axis in page.evaluate('DATA.own.axes')}
    knob = {'goal': ['target'], 'mask': ['far'], 'by_token': []}[name]
    assert list(axes) == [*(f'clip.own.{x}' for x in knob), 'stale']
    points = 0 if name == 'goal' else 4
    cases = drawn_cases(np.random.default_rng(3), axes, 3, points)
    seen = set()
    for case, found in zip(cases, computed(page, cases), strict=True):
      values = short(case['knobs'])
      stale = values.pop('stale')
      bounds, weight_N, points = applied(
        functools.partial(rule, **values), stale, case['points']
      )
      if name == 'goal':
        wanted = float(bounds.low), float(bounds.high), int(bounds.search_steps)
        assert (found['low'], found['high'], found['index']) == wanted
      found['points'] = np.reshape(found['points'], (-1, 2))
      close(found, {'weights': weight_N, 'points': points}, case, rtol=1e-5)
      seen.add(sum(found['cut']))
    assert len(seen) > 1
    page.evaluate("(set({ 'loss.rule': 'sequence', 'clip.rule': 'own' }), 0)")
    assert page.evaluate("byId('command').textContent").startswith(
      f'--config.loss.rule=clipped--config.clip.rule={place}'
    )
    assert page.errors == page.requests == []


def test_a_rule_of_ours_can_be_shown_as_its_table():
  data = own_table.table('loss.sapo', explorer.BATCH)
  assert [axis['name'] for axis in data['axes']] == [
    'loss.own.positive',
    'loss.own.negative',
  ]


def test_a_recorded_step_is_read_as_elsewhere():
  workdir = explorer.ROOT / 'notebooks' / '5_run'
  logp_BT, batch = rule_curves.recorded(workdir / 'groups' / '20.jsonl')
  other = counterfactual.read(str(workdir))
  np.testing.assert_array_equal(logp_BT, other.logp_BT)
  np.testing.assert_array_equal(batch.behavior_logp_BT, other.behavior_logp_BT)
  np.testing.assert_array_equal(batch.loss_mask_BT, other.loss_mask_BT)
  config = counterfactual.config_of(other, {})
  adv_BT = np.where(other.loss_mask_BT, counterfactual.apply(other, config).adv_BT, 0)
  # Advantages are recorded with four decimals.
  np.testing.assert_allclose(batch.adv_BT, adv_BT, rtol=0, atol=5.1e-5)


def test_every_rule_and_every_method_is_on_the_page(drawn):
  described = explorer.knobs_of()
  for part, names in RULES.items():
    assert drawn.evaluate(f"KNOBS['{part}.rule'].choices") == names
    for rule in names:
      formula = drawn.evaluate(
        f"!!byId('formula-texts').content.getElementById('formula-{part}-{rule}')"
      )
      assert formula or rule == 'none'
      for knob in explorer.PARTS[part].rules.names[rule].model_fields:
        keys = {f'{part}.{knob}', f'{part}.{rule}.{knob}'}
        assert keys & (described.keys() | explorer.LEFT_OUT)
  titles = drawn.evaluate('Object.keys(METHODS)')
  assert {'Balanced PO', 'DAPO (clip-higher)', 'SAPO', 'IcePop'} <= set(titles)
  for title, settings in explorer.methods().items():
    assert title in titles and not refused(settings)


def test_the_page_of_the_docs_is_up_to_date():
  text = explorer.PAGE.read_text()
  assert text == explorer.page(), 'run python -m lab.explorer'
  assert len(text.encode()) < 500_000
