"""report.html: the numbers of the run's files, whatever texts a model writes."""

import json
import math
import re

import numpy as np
import pytest
import recordings
from pages import Page, cells
from recordings import response

from bapo_jax.run import charts, report, series
from bapo_jax.run.page import MAIN, OPTIONAL, PANELS, write
from bapo_jax.runtime import metrics
from bapo_jax.training.config import parse

EVIL = (
  '</pre></script><script>document.title = "stolen"</script><img src=x onerror=f()>'
)
EVIL += '\x00\x1b[31m\u202e\ud800 &lt; "\' http://example.org'


def workdir(path, rows, groups=(), title='A run', **samples):
  """Writes a run: metrics from step 1, recorded groups of step 2, evaluations."""
  values = {'title': title, 'steps': 9, 'clip': {'rule': 'balanced'}}
  first, last = (
    {'eval/accuracy': x, 'eval/stderr': y} for x, y in ((0.25, 0.03), (0.5, 0.04))
  )
  recordings.run(path, [first, *rows, last], parse(values).model_dump())
  for step, when in ((0, 'before'), (len(rows) + 1, 'after')):
    if when in samples:
      accuracy, stderr = (0.25, 0.03) if when == 'before' else (0.5, 0.04)
      result = dict(accuracy=accuracy, stderr=stderr, n=200)
      (path / 'eval').mkdir(exist_ok=True)
      text = json.dumps({'result': result, 'samples': samples[when]})
      (path / 'eval' / f'{step}.json').write_text(text)
  if groups:
    recordings.step(path, 2, *({'responses': group} for group in groups))
  return path


def made(path) -> Page:
  written = write(path)
  with open(written, encoding='utf-8') as file:
    return Page(file.read())


def test_the_numbers_are_those_of_the_metrics(tmp_path):
  rng = np.random.default_rng(0)
  rows = [
    {'rollout/reward': rng.normal(), 'learner/grad_norm': 3e5 * 9.0**-n}
    for n in range(1, 60)
  ]
  rows[7]['rollout/reward'] = math.nan
  page = made(workdir(tmp_path, rows))
  written = metrics.read(str(tmp_path))
  for name, chart in (
    ('rollout/reward', 'Reward'),
    ('learner/grad_norm', 'Gradient norm'),
    ('eval/accuracy', 'Accuracy on held-out problems'),
  ):
    exact = {x['step']: x[name] for x in written if not math.isnan(x.get(name, NAN))}
    shown = page.values(chart)
    assert shown.keys() == exact.keys()
    found = [shown[step][0] for step in exact]
    np.testing.assert_allclose(found, list(exact.values()), rtol=5e-6)  # six digits
  first, last, _ = cells(page.text, 'rollout/reward')
  # A fifth of 59 steps is 11; the undefined value is left out.
  values = [row['rollout/reward'] for row in rows]
  assert first == f'{np.mean(values[:7] + values[8:11]):.4g}'
  assert last == f'{np.mean(values[-11:]):.4g}'
  assert cells(page.text, 'steps')[:2] == ['9', '80']


def test_the_page_has_the_wall_time_of_the_run(tmp_path):
  run = workdir(tmp_path, [{'time/step': 600.0}, {'time/step': 900.0}])
  assert '0:25:00' in made(run).texts['b']  # so far: no report is written
  result = dict(accuracy=0.5, stderr=0.1, n=9)
  phases = {'verify': 372.34, 'sample': 3000.0}
  spent = {'wall_s': 3723.4, 'peak_rss_bytes': 3 * 2**29, 'phases': phases}
  report.write(run, result, result, spent, 3)
  shown = made(run)
  assert {'1:02:03', '1.50 GiB'} <= {*shown.texts['b']}
  # Phases, the longest first, then what they leave of 3723.4 s.
  table = shown.text.partition('Where the time went')[2].partition('</table>')[0]
  assert re.findall(r'<td class="[lr]">([^<]*)</td>', table) == [
    *('sample', '3000.0', '80.6'),
    *('verify', '372.3', '10.0'),
    *('other', '351.1', '9.4'),
  ]


def test_what_no_user_set_is_not_listed_as_set(tmp_path):
  problems = {'source': 'a.jsonl', 'test_source': 'b.jsonl'}
  config = parse({'model': {'path': 'm'}, 'problems': problems, 'steps': None})
  run = workdir(tmp_path, [{}])
  (run / 'config.json').write_text(json.dumps(config.model_dump()))
  ran = {'config': config.model_dump() | {'steps': 9}, 'decided': {'steps': 9}}
  (run / 'resolved.json').write_text(json.dumps(ran))
  text = made(run).text
  assert '<code>model.path</code>' in text
  assert '<code>tokenizer.path</code>' not in text
  value, *_, meaning = cells(text, 'steps')
  assert value == '9' and meaning.startswith('Derived. ')


def test_a_default_is_that_of_the_rule(tmp_path):
  clip = {'rule': 'fixed', 'high': 1.28}
  text = made(recordings.run(tmp_path, [{}], parse({'clip': clip}).model_dump())).text
  assert cells(text, 'clip.high')[:2] == ['1.28', '1.2']
  assert cells(text, 'clip.rule')[:2] == ['fixed', 'balanced']
  for name in ('clip.low', 'clip.target'):
    assert f'<code>{name}</code>' not in text


def test_mixed_groups_come_first_and_the_verifier_is_explained(tmp_path):
  right, wrong = response('yes', True), response('no', False)
  cut = dict(pieces=['a', 'b<', 'c'], ratio=[1.0, 2.5, None], cut=[2, 1, 0])
  groups = [[right, right], [right, wrong | {'taught': False}]]
  by_token = {'advantages': [2.0, 2.0, -1.0]}
  groups.append([right, right, response('ab<c', False, **cut | by_token)])
  sample = dict(problem='1+2?', answer='3', response='so 3', correct=True)
  sample |= dict(extracted='3', verdict='right', reason='')
  lost = sample | dict(correct=False, verdict='wrong', extracted='12', reason='not 3')
  page = made(workdir(tmp_path, [{}, {}], groups, before=[lost], after=[sample]))
  heads = [text for text in page.texts['summary'] if text.startswith('Problem')]
  # Problem 1 has both verdicts, but only its right response was part of the loss.
  heads = [head.removeprefix('Problem ') for head in heads]
  assert heads == ['2: 2 of 3 right', '1: 1 of 2 right', '0: 2 of 2 right']
  assert page.texts['mark'] == ['a', 'b<']
  for title in ('ratio 1, masked, advantage +2.00', 'ratio 2.5, clipped', 'advantage'):
    assert f'title="{title}' in page.text
  assert page.text.count('mean advantage ') == 1
  text = re.sub('<[^>]*>', '', page.text)
  assert 'Before: wrong; the verifier read 12 (not 3)' in text
  assert 'Of 1 responses: 1 wrong before, right after; 0 right before' in text
  assert 'from 0.250 ± 0.030 to 0.500 ± 0.040 on 200 held-out problems' in text


def hostile(path):
  sample = dict(problem=EVIL, answer=EVIL, response=EVIL, correct=False)
  sample |= dict(extracted=EVIL, verdict='wrong', reason=EVIL)
  pieces = dict(pieces=[EVIL, EVIL], ratio=[1.0, 2.0], cut=[0, 1])
  groups = [[response(EVIL, True), response(EVIL, False, **pieces)]]
  rows = [{'rollout/reward': 0.5 + 0.1 * n, 'time/step': 1.0} for n in range(30)]
  run = workdir(path, rows, groups, EVIL, before=[sample], after=[sample])
  return run, made(run)


def test_texts_take_no_effect_and_nothing_is_fetched(tmp_path):
  _, page = hostile(tmp_path)
  tags = [tag for tag, _ in page.tags]
  assert tags.count('script') == 1 and 'img' not in tags
  assert not [c for c in page.text if not c.isprintable() and c != '\n']
  addresses = [a for a in page.addresses() if not a.startswith('http://example.org')]
  assert addresses == []


def test_a_browser_shows_it_wide_and_on_a_phone(browser, tmp_path):
  run, _ = hostile(tmp_path)
  for width, columns in ((1280, 3), (390, 1)):
    with browser.open(run / 'report.html', width, touch=width < 600) as page:
      assert page.errors == page.requests == []
      assert page.evaluate('document.documentElement.scrollWidth') == width
      tops = page.evaluate(
        "[...document.querySelectorAll('figure')].map(f => f.offsetTop)"
      )
      assert tops.count(tops[0]) == columns
      # The pointer over step 4 of the first chart: 0.5 + 0.1 * 3.
      said = page.evaluate(
        """(() => {
          const figure = document.querySelector('figure');
          const strip = [...figure.querySelectorAll('.hit')][3];
          const options = {bubbles: true, pointerType: 'mouse'};
          strip.dispatchEvent(new PointerEvent('pointermove', options));
          return figure.querySelector('output').textContent;
        })()"""
      )
      assert said == 'step 4: fresh responses 0.8'


def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path):
  names = [name for panel in PANELS for name in panel.labels]
  rows = [dict.fromkeys(names, n % 7) for n in range(3000)]
  rows[1234]['rollout/reward'] = 50.0
  page = made(workdir(tmp_path, rows))
  assert len(page.text) < 2_000_000
  step_N, value_N = charts.thinned(
    (np.arange(3000.0), np.array([row['rollout/reward'] for row in rows]))
  )
  assert len(step_N) <= 2 * charts.STRIPS and step_N[value_N.argmax()] == 1234


@pytest.mark.parametrize('panel', OPTIONAL, ids=lambda panel: panel.title)
def test_what_few_runs_record_is_drawn_where_it_is_recorded(tmp_path, panel):
  without = made(workdir(tmp_path / 'without', [{'time/step': 2.0}]))
  assert f'<b>{panel.title}</b>' not in without.text
  recorded = {name: (n + 1) / 4 for n, name in enumerate(panel.labels)}
  page = made(workdir(tmp_path / 'with', [recorded]))
  assert page.values(panel.title)[1.0] == [*recorded.values()]


def test_every_panel_draws_metrics_of_the_glossary():
  panels = *PANELS, *OPTIONAL
  names = {name for panel in panels for name in panel.labels}
  assert names | set(MAIN.split()) <= set(metrics.GLOSSARY)


# ------- the results of a run as sentences and JSON: the numbers by hand, gaps as gaps


NAN = math.nan
BEFORE = dict(accuracy=0.25, stderr=0.03, n=200)
AFTER = dict(accuracy=0.5, stderr=0.04, n=200)


def test_evaluations_are_compared_only_if_their_settings_are_equal():
  unknown, one, two = (AFTER | x for x in ({}, {'settings': 1.0}, {'settings': 2.0}))
  for before, after in ((BEFORE, unknown), (BEFORE, two), (one, one)):
    assert 'Accuracy went from' in report.change_sentence(before, after)
  sentence = report.change_sentence(BEFORE | {'settings': 1.0}, two)
  assert '0.500 ± 0.040' in sentence and 'not compared' in sentence


def test_graded_rewards_are_compared_with_their_errors():
  def result(reward, fit):
    parts = {'fit': {'mean': fit, 'stderr': 0.04}, 'a|b': {'mean': 1, 'stderr': 0}}
    return {'reward': reward, 'reward_stderr': 0.03, 'parts': parts}

  # The error of a difference: sqrt(.03^2 + .03^2), sqrt(.04^2 + .04^2).
  assert list(report.rewards(result(0.5, 0.5), result(0.25, 0.75))) == [
    ('reward', '0.500 ± 0.030', '0.250 ± 0.030', '-0.250 ± 0.042'),
    ('reward/fit', '0.500 ± 0.040', '0.750 ± 0.040', '+0.250 ± 0.057'),
    ('reward/a|b', '1.000 ± 0.000', '1.000 ± 0.000', '+0.000 ± 0.000'),
  ]
  assert not list(report.rewards(dict(accuracy=0.5), result(0.5, 0.5)))


@pytest.mark.parametrize(
  'rows',
  [
    [],
    [{'rollout/reward': 0.5}],
    [{'eval/accuracy': 0.5}],  # no standard error, no training step
    [{'loss/entropy': NAN, 'eval/accuracy': NAN, 'eval/stderr': NAN}] * 2,
    [{'learner/grad_norm': g, 'clip/share': math.inf} for g in (1.0, 0.0, 1000.0)],
  ],
)
def test_gaps_are_shown_as_gaps(tmp_path, rows):
  recordings.run(tmp_path, rows, parse({}).model_dump(), first=1)
  text = made(tmp_path).text
  assert text.count('not recorded') >= len(PANELS) - 2


def test_a_running_mean_begins_and_ends_half_a_window_inside():
  step_N, value_N = np.arange(6.0), np.array([0.0, 3.0, 6.0, 0.0, 30.0, 6.0])
  # window 3: (0+3+6)/3, (3+6+0)/3, (6+0+30)/3, (0+30+6)/3
  steps, smooth = series.smoothed((step_N, value_N), 3)
  assert steps.tolist() == [1, 2, 3, 4]
  np.testing.assert_allclose(smooth, [3, 3, 12, 12], rtol=1e-14)  # 45 times float64's


def test_a_missed_target_is_explained():
  # 1/2, 0, 1: met in half of the updates
  rows = [{'step': i, 'clip/target_met': met} for i, met in enumerate((0.5, 0.0, 1.0))]
  sentence = report.target_sentence(rows, 0.45)
  assert all(words in sentence for words in ('0.45', '50.0 %', 'limits'))
  assert report.target_sentence(rows, None) == report.target_sentence([], 0.45) == ''


# ------- the browser of the tests notices faults of a page


def test_a_request_an_exception_and_a_warning_are_noticed(browser, tmp_path):
  path = tmp_path / 'page.html'
  fault = 'console.warn("w"); f()'
  path.write_text(f'<img src="https://example.org/a.png"><script>{fault}</script>')
  with browser.open(path) as page:
    assert page.requests == ['https://example.org/a.png']
    first, second, third = sorted(page.errors)
    assert 'net::ERR_NAME_NOT_RESOLVED' in first
    assert 'f is not defined' in second
    assert third == 'w'
