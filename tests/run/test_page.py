"""report.html: the numbers of the run's files, whatever texts a model writes."""

import json
import math

import numpy as np
import pytest
import recordings
from pages import Page
from recordings import response

from bapo_jax.run import document, report
from bapo_jax.run import page as page_lib
from bapo_jax.run.page import write
from bapo_jax.run.panels import METRICS, PANELS
from bapo_jax.runtime import metrics
from bapo_jax.training.config import parse

NAN = math.nan
EVIL = (
  '</pre></script><script>document.title = "stolen"</script><img src=x onerror=f()>'
)
EVIL += '\x00\x1b[31m\u202e\ud800 &lt; "\' http://example.org <b>{{data}}</b>\u2028\r'
# As Python writes it, and as the page shows it.
SHOWN = EVIL.replace('\x00', '\\x00').replace('\x1b', '\\x1b').replace('\r', '\\r')
for char in ('\u202e', '\ud800', '\u2028'):
  SHOWN = SHOWN.replace(char, f'\\u{ord(char):04x}')
OPTIONAL = [panel for panel in PANELS if panel.optional]


def workdir(path, rows, groups=(), title='A run', **samples):
  """Writes a run: metrics from step 1, recorded groups of step 2, evaluations."""
  values = {'title': title, 'steps': 9, 'clip': {'rule': 'balanced'}}
  results = {'before': (0.25, 0.03), 'after': (0.5, 0.04)}
  first, last = ({'eval/accuracy': x, 'eval/stderr': y} for x, y in results.values())
  recordings.run(path, [first, *rows, last], parse(values).model_dump())
  for when, recorded in samples.items():
    accuracy, stderr = results[when]
    result = dict(accuracy=accuracy, stderr=stderr, n=200)
    (path / 'eval').mkdir(exist_ok=True)
    text = json.dumps({'result': result, 'samples': recorded})
    step = 0 if when == 'before' else len(rows) + 1
    (path / 'eval' / f'{step}.json').write_text(text)
  if groups:
    recordings.step(path, 2, *({'responses': group} for group in groups))
  return path


def made(path) -> Page:
  return Page(write(path))


def test_the_numbers_are_those_of_the_metrics(tmp_path):
  rng = np.random.default_rng(0)
  rows = [
    {'rollout/reward': rng.normal(), 'learner/grad_norm': 3e5 * 9.0**-n}
    for n in range(1, 60)
  ]
  rows[7]['rollout/reward'] = math.nan
  page = made(workdir(tmp_path, rows))
  written = metrics.read(str(tmp_path))
  for name in ('rollout/reward', 'learner/grad_norm', 'eval/accuracy'):
    exact = {x['step']: x[name] for x in written if not math.isnan(x.get(name, NAN))}
    shown = page.values(name)
    assert shown.keys() == exact.keys()
    found = [shown[step] for step in exact]
    np.testing.assert_allclose(found, list(exact.values()), rtol=5e-6)  # six digits
  first, last, _ = page.cells('rollout/reward')
  # A fifth of 59 steps is 11; the undefined value is left out.
  values = [row['rollout/reward'] for row in rows]
  assert first == f'{np.mean(values[:7] + values[8:11]):.4g}'
  assert last == f'{np.mean(values[-11:]):.4g}'
  assert page.cells('steps')[:2] == ['9', '80']


def test_the_page_has_the_wall_time_of_the_run(tmp_path):
  run = workdir(tmp_path, [{'time/step': 600.0}, {'time/step': 900.0}])
  assert '0:25:00' in dict(made(run).data['tiles'])  # so far: no report is written
  result = dict(accuracy=0.5, stderr=0.1, n=9)
  phases = {'verify': 372.34, 'sample': 3000.0}
  spent = {'wall_s': 3723.4, 'peak_rss_bytes': 3 * 2**29, 'phases': phases}
  report.write(run, result, result, spent, 3)
  shown = made(run)
  assert {'1:02:03', '1.50 GiB'} <= dict(shown.data['tiles']).keys()
  # Phases, the longest first, then what they leave of 3723.4 s.
  assert shown.data['tables']['times'] == [
    ['sample', '3000.0', '80.6'],
    ['verify', '372.3', '10.0'],
    ['other', '351.1', '9.4'],
  ]


def test_what_no_user_set_is_not_listed_as_set(tmp_path):
  problems = {'source': 'a.jsonl', 'test_source': 'b.jsonl'}
  config = parse({'model': {'path': 'm'}, 'problems': problems, 'steps': None})
  run = workdir(tmp_path, [{}])
  (run / 'config.json').write_text(json.dumps(config.model_dump()))
  ran = {'config': config.model_dump() | {'steps': 9}, 'decided': {'steps': 9}}
  (run / 'resolved.json').write_text(json.dumps(ran))
  page = made(run)
  assert page.cells('model.path') and not page.cells('tokenizer.path')
  value, *_, meaning = page.cells('steps')
  assert value == '9' and meaning.startswith('Derived. ')


def test_a_default_is_that_of_the_rule(tmp_path):
  clip = {'rule': 'fixed', 'high': 1.28}
  page = made(recordings.run(tmp_path, [{}], parse({'clip': clip}).model_dump()))
  assert page.cells('clip.high')[:2] == ['1.28', '1.2']
  assert page.cells('clip.rule')[:2] == ['fixed', 'balanced']
  assert not page.cells('clip.low') and not page.cells('clip.target')


def test_mixed_groups_come_first_and_the_verifier_is_explained(tmp_path):
  right, wrong = response('yes', True), response('no', False)
  cut = dict(pieces=['a', 'b<', 'c'], ratio=[1.0, 2.5, None], cut=[2, 1, 0])
  groups = [[right, right], [right, wrong | {'taught': False}]]
  by_token = {'advantages': [2.0, 2.0, -1.0]}
  groups.append([right, right, response('ab<c', False, **cut | by_token)])
  sample = dict(problem='1+2?', answer='3', response='so 3', correct=True)
  sample |= dict(extracted='3', reason='', parts={})
  lost = sample | dict(correct=False, extracted='12', reason='not 3')
  data = made(workdir(tmp_path, [{}, {}], groups, before=[lost], after=[sample])).data
  problems = data['asked']['problems']
  # Problem 1 has both verdicts, but only its right response was part of the loss.
  heads = [problem['head'].removeprefix('Problem ') for problem in problems]
  assert heads == ['2: 2 of 3 right', '1: 1 of 2 right', '0: 2 of 2 right']
  _, _, marked = problems[0]['responses']
  assert marked['text'] == [
    ['a', 'mark', 'ratio 1, masked, advantage +2.00'],
    ['b<', 'mark', 'ratio 2.5, clipped, advantage +2.00'],
    ['c', '', 'advantage -1.00'],
  ]
  assert 'mean advantage ' in marked['head'][1][0]
  (change,) = data['changed']['problems']
  before, after = (''.join(x[0] for x in r['head']) for r in change['responses'])
  assert before == 'Before: wrong; the verifier read 12 (not 3)'
  assert after == 'After: right; the verifier read 3'
  assert data['changed']['text'].startswith(
    'Of 1 responses: 1 wrong before, right after; 0 right before'
  )
  assert 'from 0.250 ± 0.030 to 0.500 ± 0.040 on 200 held-out problems' in ' '.join(
    data['sentences']
  )


def test_undecided_responses_are_counted_and_other_problems_are_not_paired(tmp_path):
  sample = dict(problem='1+2?', answer='', response='so 3', correct=None)
  sample |= dict(extracted=None, reason='timeout', parts={})
  two = [sample, sample | {'correct': True}]
  changed = made(workdir(tmp_path / 'a', [{}], before=two, after=two)).data['changed']
  assert '; 1 undecided before or after' in changed['text']
  fewer = made(workdir(tmp_path / 'b', [{}], before=two[1:], after=two)).data['changed']
  assert fewer['text'] == ''


def hostile(path):
  sample = dict(problem=EVIL, answer=EVIL, response=EVIL, correct=False)
  sample |= dict(extracted=EVIL, reason=EVIL, parts={})
  pieces = dict(pieces=[EVIL, EVIL], ratio=[1.0, 2.0], cut=[0, 1])
  groups = [[response(EVIL, True), response(EVIL, False, **pieces)]]
  rows = [{'rollout/reward': 0.5 + 0.1 * n, 'time/step': 1.0} for n in range(30)]
  run = workdir(path, rows, groups, EVIL, before=[sample], after=[sample])
  return run, made(run)


def test_texts_take_no_effect_and_nothing_is_fetched(browser, tmp_path):
  run, page = hostile(tmp_path)
  tags = [tag for tag, _ in page.tags]
  assert tags.count('script') == 2 and 'img' not in tags
  assert not [c for c in page.text if not c.isprintable() and c != '\n']
  addresses = [a for a in page.addresses() if not a.startswith('http://')]
  assert addresses == []
  with browser.open(run / 'report.html') as shown:
    assert shown.evaluate('document.title') == SHOWN
    assert shown.evaluate("document.querySelectorAll('img, pre b').length") == 0
    assert shown.evaluate("document.querySelector('h1').textContent") == SHOWN
    texts = (
      "[...document.querySelectorAll('pre.of-wrong, mark')].map(x => x.textContent)"
    )
    assert shown.evaluate(texts) == [2 * SHOWN, SHOWN, SHOWN, SHOWN]
    assert shown.errors == shown.requests == []


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
          const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();
          // 32 steps from 0 to 31 between the ends of the axis, with margins of 4 %.
          const share = (4 + 0.04 * 31) / (1.08 * 31);
          const clientX = box.left + box.width * (46 + share * 346) / 400;
          svg.dispatchEvent(new PointerEvent('pointermove', { clientX }));
          return figure.querySelector('output').textContent;
        })()"""
      )
      assert said == 'step 4: fresh responses 0.8'


def test_a_long_run_stays_small_and_keeps_its_spikes(browser, tmp_path):
  names = [name for panel in PANELS for name in panel.labels]
  rng = np.random.default_rng(0)
  rows = [dict(zip(names, rng.random(len(names)), strict=True)) for _ in range(3000)]
  rows[1234]['rollout/reward'] = 50.0
  page = made(workdir(tmp_path, rows))
  assert len(page.text) < 2_000_000
  with browser.open(tmp_path / 'report.html') as shown:
    drawn = "thinned(series(RUNS[0], 'rollout/reward'))"
    assert shown.evaluate(f'{drawn}.length') <= 400
    assert shown.evaluate(f'{drawn}.find(([, value]) => value === 50)') == [1235, 50]
    size = "document.querySelector('main').innerHTML.length"
    assert shown.evaluate(size) < 1_000_000


def test_of_very_long_runs_every_nth_step_is_shown(tmp_path, monkeypatch):
  monkeypatch.setattr(page_lib, 'MOST_ROWS', 10)
  rows = [{'rollout/reward': float(i)} for i in range(25)]
  rows[13]['eval/accuracy'] = 0.5
  (group,) = made(workdir(tmp_path, rows)).data['groups']
  (run,) = group['runs']
  # Steps 0, 14 and 26, the last, were evaluated.
  assert run['step'] == [0, 3, 6, 9, 12, 14, 15, 18, 21, 24, 26]


@pytest.mark.parametrize('panel', OPTIONAL, ids=lambda panel: panel.title)
def test_what_few_runs_record_is_drawn_where_it_is_recorded(tmp_path, panel):
  without = made(workdir(tmp_path / 'without', [{'time/step': 2.0}]))
  assert panel.title not in without.titles()
  recorded = {name: (n + 1) / 4 for n, name in enumerate(panel.labels)}
  page = made(workdir(tmp_path / 'with', [recorded]))
  assert panel.title in page.titles()
  assert [page.values(name)[1.0] for name in recorded] == [*recorded.values()]


def test_every_panel_draws_metrics_of_the_glossary():
  names = {name for panel in PANELS for name in panel.labels}
  assert names | set(METRICS) <= set(metrics.GLOSSARY)


@pytest.fixture(scope='module')
def drawn(browser, tmp_path_factory):
  """The page of one run: two metrics, five evaluations, a spike."""
  rows = []
  for n in range(100):
    shares = {'clip/share': 0.3 + n / 1000, 'clip/share_start': 0.3}
    rows.append(shares | {'learner/grad_norm': 90.0 if n == 50 else 1.0})
    if n % 25 == 5:
      rows[-1] |= {'eval/accuracy': n / 100, 'eval/stderr': 0.1}
  path = tmp_path_factory.mktemp('drawn')
  workdir(path, rows)
  write(path)
  with browser.open(path / 'report.html') as page:
    yield page
    assert page.errors == page.requests == []


def figure(title):
  """JavaScript: the figure of a panel."""
  return (
    "[...document.querySelectorAll('figure')].find("
    f"(x) => x.querySelector('b').textContent === '{title}')"
  )


def test_a_chart_has_the_curves_levels_and_bars_of_its_panel(drawn):
  def shown(title, selector):
    return drawn.evaluate(f"{figure(title)}.querySelectorAll('{selector}').length")

  # A pale line of all values and a bold mean per metric, and the target.
  assert shown('Positive share', 'path.bold') == 2
  assert shown('Positive share', 'path.pale') == 2
  keys = (
    f"[...{figure('Positive share')}.querySelectorAll('span')].map(x => x.innerText)"
  )
  assert drawn.evaluate(keys) == ['bounds used', 'start bounds', 'target']
  assert shown('Positive share', 'svg line.level') == 1
  # Evaluations are not smoothed; they have dots, and bars of their error.
  accuracy = 'Accuracy on held-out problems'
  assert shown(accuracy, 'circle') == 6 and shown(accuracy, 'path.pale') == 0
  bars = drawn.evaluate(f"{figure(accuracy)}.querySelector('.bar').getAttribute('d')")
  assert bars.count('M') == 6
  # The spike makes the axis logarithmic: its numbers are powers of ten, times 2 or 5.
  texts = (
    f"[...{figure('Gradient norm')}.querySelectorAll('text')].map(x => x.textContent)"
  )
  assert {'1', '5', '20', '100'} <= {*drawn.evaluate(texts)}
  texts = texts.replace('Gradient norm', 'Positive share')
  assert not {'1', '20'} & {*drawn.evaluate(texts)}
  assert 'not recorded' in drawn.evaluate(f'{figure("Clip bounds")}.innerText')


def test_a_running_mean_begins_and_ends_half_a_window_inside(drawn):
  points = [[i, y] for i, y in enumerate((0.0, 3.0, 6.0, 0.0, 30.0, 6.0))]
  # window 3: (0+3+6)/3, (3+6+0)/3, (6+0+30)/3, (0+30+6)/3
  assert drawn.evaluate(f'smoothed({points}, 3)') == [[1, 3], [2, 3], [3, 12], [4, 12]]
  assert drawn.evaluate(f'smoothed({points}, 5)') == points  # too few
  # The mean at the steps of all curves.
  assert drawn.evaluate('averaged([[[0, 1], [1, 2]], [[1, 4], [2, 9]]])') == [[1, 3]]


def test_a_page_prints_dark_on_white(browser, tmp_path):
  run, _ = hostile(tmp_path)
  with browser.open(run / 'report.html') as page:
    for media, scheme in (('screen', 'dark'), ('print', 'dark'), ('print', 'light')):
      features = [{'name': 'prefers-color-scheme', 'value': scheme}]
      page.emulate(media=media, features=features)
      ink = page.evaluate('getComputedStyle(document.body).color')
      assert (ink == 'rgb(29, 33, 38)') == (media == 'print')
    width = (
      'document.documentElement.scrollWidth - document.documentElement.clientWidth'
    )
    assert page.evaluate(width) == 0


def test_the_frame_has_the_policy_that_marks_our_pages():
  assert f'content="{document.MARK}"' in document.read('page.html')


# ------- the results of a run as sentences and JSON: the numbers by hand, gaps as gaps


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
def test_gaps_are_shown_as_gaps(browser, tmp_path, rows):
  recordings.run(tmp_path, rows, parse({}).model_dump(), first=1)
  made(tmp_path)
  with browser.open(tmp_path / 'report.html') as page:
    gaps = page.evaluate("document.querySelectorAll('figure .empty').length")
    assert gaps >= len(PANELS) - len(OPTIONAL) - 2
    assert page.errors == []


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
