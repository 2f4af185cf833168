"""The comparison of runs: groups by seed, intervals by hand, one colour per group."""

import json
import math
import re

import pytest
import recordings
from pages import Page
from refusals import refused, sentence_of

from bapo_jax import main
from bapo_jax.run import comparison, document
from bapo_jax.tools import compare
from bapo_jax.training.config import parse


def run(folder, name, rows, **knobs):
  """Writes a run with these metrics from step 0; knobs by section."""
  return recordings.run(folder / name, rows, parse(knobs).model_dump())


def accuracy(*values, entropy=0.5):
  rows = [{'eval/accuracy': v, 'eval/stderr': 0.01 * (1 + v)} for v in values]
  others = {'loss/entropy': entropy, 'rollout/reward': 0.1, 'time/step': 2.0}
  return [row | others for row in rows]


@pytest.fixture
def three(tmp_path):
  """Two seeds of one config, and a run of another."""
  fixed, long = {'clip': {'rule': 'fixed'}}, accuracy(0.2, 0.6, 0.7, entropy=1.0)
  title = {'title': 'second <b>', 'checkpoint': {'keep': 7}}
  return [
    run(tmp_path, 'fixed/seed-1', long, seed=1, **fixed),
    run(tmp_path, 'balanced', accuracy(0.3, 0.9), seed=1, clip={'rule': 'balanced'}),
    run(tmp_path, 'fixed/seed-2', accuracy(0.2, 0.4), seed=2, **fixed, **title),
  ]


def page_of(paths, to):
  compare.write(paths, str(to))
  return Page(to)


def test_seeds_of_one_config_are_a_group_with_an_interval(three, tmp_path):
  page = page_of(three, tmp_path / 'c.html')
  groups = page.data['groups']
  assert [x['label'] for x in groups] == ['fixed/seed', 'balanced']
  assert [len(x['runs']) for x in groups] == [2, 1]
  # Mean of 0.4 and 0.7; deviation 0.15 sqrt 2, over sqrt 2 is 0.15; t of 1 degree of
  # freedom at 97.5 % is tan(0.475 pi) = 12.7062.
  half = 0.15 * math.tan(0.475 * math.pi)
  assert page.cells('eval/accuracy') == [f'0.6 ± {half:.1f}', '0.900 ± 0.019', '']
  assert page.cells('loss/entropy') == [f'0.8 ± {0.25 * 12.7062:.1f}', '0.5', '']
  for name in ('seed', 'title', 'checkpoint.keep', 'steps'):
    assert not page.cells(name)


def test_a_named_set_is_compared_by_seed_and_alone(tmp_path):
  paths = [
    run(
      tmp_path,
      f'{rule}-{seed}',
      [{'eval/accuracy': 0.5, 'eval/b/accuracy': x, 'eval/b/stderr': 0.02}],
      seed=seed,
      clip={'rule': rule},
    )
    for rule, values in {'fixed': (0.2, 0.4, 0.9), 'balanced': (0.3, 0.7, 1.1)}.items()
    for seed, x in enumerate(values)
  ]
  page = page_of(paths, tmp_path / 'c.html')
  # 0.1, 0.3 and 0.2: see test_differences_are_paired_by_seed.
  difference = f'+0.20 ± {4.302653 * 0.1 / math.sqrt(3):.2f} (n=3)'
  assert page.cells('eval/b/accuracy')[2] == difference
  assert 'eval/b/accuracy' in {row[0] for row in page.data['tables']['finals']}
  alone = page_of([paths[0], paths[3]], tmp_path / 'two.html')
  assert alone.cells('eval/b/accuracy')[:2] == ['0.200 ± 0.020', '0.300 ± 0.020']


def test_evaluations_of_other_settings_are_not_compared(tmp_path):
  cold = {'evaluate': {'sampling': {'temperature': 0.0}}}
  paths = [
    run(
      tmp_path, f'{name}/seed-{seed}', accuracy(0.2, 0.4, entropy=seed), seed=seed, **x
    )
    for name, x in (('warm', {}), ('cold', cold), ('often', {'evaluate': {'every': 7}}))
    for seed in (1, 2, 3)
  ]
  page = page_of(paths, tmp_path / 'c.html')
  sentences = page.data['sentences']
  said = [text for text in sentences if 'held-out accuracy' in text]
  other = [text for text in sentences if 'not compared' in text]
  assert len(said) == 1 and said[0].startswith('often/seed equals warm/seed')
  assert other == [
    'cold/seed and warm/seed were evaluated with different settings (section '
    '`evaluate`), so their evaluations are not compared.'
  ]
  *_, cold_difference, often_difference = page.cells('eval/accuracy')
  assert not cold_difference and '(n=3)' in often_difference
  assert '(n=3)' in page.cells('loss/entropy')[3]


def test_a_knob_is_shown_for_the_rules_that_have_it(three, tmp_path):
  page = page_of(three, tmp_path / 'c.html')
  assert page.cells('clip.rule')[:2] == ['fixed', 'balanced']
  assert page.cells('clip.target')[:2] == ['-', '0.42']
  *values, meaning = page.cells('clip.low')
  assert values == ['0.8', '[0.6, 0.9]']
  assert re.match(r'Lower bound of the ratio.* / First and last value', meaning)
  # Without a replay buffer it has no effect.
  assert not page.cells('clip.reused_high')
  # An older version had other knobs, and a moved file cannot be read.
  values = parse({'clip': {'rule': 'fixed'}}).model_dump()
  values['clip'] = {'rule': 'moved.py:bounds', 'lower': 0.7}
  old = recordings.run(tmp_path / 'old', accuracy(0.5), values)
  page = page_of([*three, old], tmp_path / 'c.html')
  assert page.cells('clip.lower') == ['-', '-', '0.7', '']


def test_differences_are_paired_by_seed(tmp_path, capsys):
  # Seeds 1 to 3 of both; seed 4 only of one, and seed 3 without reward.
  base = {1: (0.2, 1.0), 2: (0.4, 2.0), 3: (0.9, None), 4: (0.0, 9.0)}
  other = {3: (1.1, 7.0), 1: (0.3, 1.5), 2: (0.7, 2.5)}
  paths = []
  for rule, values in {'fixed': base, 'balanced': other}.items():
    for seed, (right, reward) in values.items():
      row = {'eval/accuracy': right} | ({'rollout/reward': reward} if reward else {})
      made = run(tmp_path, f'{rule}-{seed}', [row], seed=seed, clip={'rule': rule})
      paths.append(made)
  page = page_of(paths, tmp_path / 'c.html')
  # 0.1, 0.3 and 0.2: mean 0.2, deviation 0.1, t of two degrees of freedom 4.3027.
  difference = f'+0.20 ± {4.302653 * 0.1 / math.sqrt(3):.2f}'
  assert page.cells('eval/accuracy')[2] == f'{difference} (n=3)'
  assert page.cells('rollout/reward')[2] == '+0.5 ± 0 (n=2)'
  for output in (' '.join(page.data['sentences']), capsys.readouterr().out):
    assert (
      f'balanced leads fixed in held-out accuracy: {difference}, the mean' in output
    )
    assert 'paired over 3 seeds. The interval includes 0' in output


@pytest.mark.parametrize(
  ('other', 'words'),
  [
    ((0.5, 0.6, 0.7), 'leads .* The interval excludes 0'),  # 0.3 for every seed
    ((0.1, 0.2, 0.3), 'trails .* The interval excludes 0'),
    ((0.2, 0.3, 0.4), 'equals .* The interval includes 0'),
    ((0.2, 0.3, 0.7), 'leads .* The interval includes 0'),
  ],
)
def test_the_result_says_who_leads(other, words, tmp_path):
  paths = [
    run(tmp_path, f'{rule}-{seed}', accuracy(value), seed=seed, clip={'rule': rule})
    for rule, values in {'fixed': (0.2, 0.3, 0.4), 'balanced': other}.items()
    for seed, value in enumerate(values)
  ]
  (sentence,) = comparison.results(comparison.grouped(compare.read(paths)))
  assert re.match(f'balanced {words}', sentence)


def test_curves_are_overlaid_in_the_colours_of_their_groups(browser, three, tmp_path):
  page_of(three, tmp_path / 'c.html')
  with browser.open(tmp_path / 'c.html') as page:
    panel = "DATA.panels.find((x) => x.title === 'Accuracy on held-out problems')"
    exact = page.evaluate(f'curvesOf({panel}).map((x) => x.exact)')
    # At step 1 the mean of 0.4 and 0.6, and 0.9; step 2 is only in one of two seeds.
    assert exact == [[[0, 0.2], [1, 0.5]], [[0, 0.3], [1, 0.9]]]
    drawn = (
      f"[...chartOf({panel}).querySelectorAll('.curve')].map((x) => x.classList[1])"
    )
    assert page.evaluate(drawn) == ['c0', 'c1']
    reward = page.evaluate("document.querySelector('figure output').textContent")
    assert reward == 'mean reward (fresh responses, dashed: held-out problems)'


def test_runs_are_paired_by_all_their_seeds(tmp_path):
  def seeded(name, warm, right, rule):
    knobs = {'seed': 1, 'sft': {'seed': warm}, 'clip': {'rule': rule}}
    return run(tmp_path, name, accuracy(right), **knobs)

  paths = [
    *(seeded(f'a{warm}', warm, 0.1 * warm, 'fixed') for warm in (1, 2, 3)),
    *(seeded(f'b{warm}', warm, 0.1 * warm + 0.2, 'balanced') for warm in (3, 2)),
  ]
  fixed, balanced = comparison.grouped(compare.read(paths))
  name = 'eval/accuracy'
  found = comparison.paired(*(comparison.by_seed(x, name) for x in (fixed, balanced)))
  assert found == pytest.approx([0.2, 0.2])


def test_single_runs_are_paired_by_their_held_out_problems(tmp_path):
  paths = []
  for rule, rights in {'fixed': '1001', 'balanced': '1111'}.items():
    rows = [row | {'eval/a/accuracy': 0.5} for row in accuracy(0.5, 0.5)]
    paths.append(run(tmp_path, rule, rows, clip={'rule': rule}))
    samples = [
      {'id': i, 'problem': 'x', 'set': 'ab'[i // 2]}
      | {'correct': right == '1', 'tokens': 2}
      for i, right in enumerate(rights)
    ]
    (tmp_path / rule / 'eval').mkdir()
    text = json.dumps({'result': {'accuracy': 0.5}, 'samples': samples})
    (tmp_path / rule / 'eval' / '1.json').write_text(text)
  page = page_of(paths, tmp_path / 'c.html')
  # 0, 1, 1 and 0: mean 1/2.
  assert re.match(r'\+0\.5.* \(n=4\)', page.cells('eval/accuracy')[2])
  # 0 and 1 of set a: deviation sqrt(1/2), over sqrt 2; t of 1 degree of freedom 12.7.
  assert page.cells('eval/a/accuracy')[2] == '+0.5 ± 6.4 (n=2)'
  (sentence,) = page.data['sentences']
  assert 'paired over 4 held-out problems of one run each' in sentence


def test_what_cannot_be_compared_is_refused(three, tmp_path):
  cases = [
    ([three[0], three[0] + '/'], 'two or more different workdirs'),
    ([*three, str(tmp_path / 'balancd')], 'balancd does not exist'),
  ]
  for paths, words in cases:
    assert words in refused(['compare', *paths, f'--to={tmp_path}/c.html'])
  many = [run(tmp_path, f'n{n}', accuracy(0.5), steps=n + 1) for n in range(9)]
  assert '9 different configs, and a page has 8 colours' in sentence_of(
    compare.write, many, str(tmp_path / 'c.html')
  )
  assert not (tmp_path / 'c.html').exists()
  style = document.read('page.css')
  assert style.count(f'.c{compare.COLOURS - 1} {{ color') == 1
  assert f'.c{compare.COLOURS} ' not in style


def test_a_browser_shows_the_page_and_hides_a_group(browser, three, tmp_path):
  page_of(three, tmp_path / 'c.html')
  with browser.open(tmp_path / 'c.html', 390, touch=True) as page:
    assert page.evaluate('document.documentElement.scrollWidth') == 390
    count = (
      "[...document.querySelectorAll('.curve')].filter(c => c.getClientRects().length"
      " && c.style.display !== 'none').length"
    )
    shown = page.evaluate(count)
    buttons = "[...document.querySelectorAll('.groups button')]"
    names = page.evaluate(f'{buttons}.map((x) => x.innerText)')
    assert names == ['fixed/seed (2 seeds)', 'balanced']
    page.evaluate(f'{buttons}[0].click()')
    assert page.evaluate(count) == shown / 2
    hidden = "[...document.querySelectorAll('.curve.c0')].map((c) => c.style.display)"
    assert {*page.evaluate(hidden)} == {'none'}
    assert page.errors == page.requests == []


def test_files_of_a_workdir_are_read_without_a_config(three, tmp_path):
  def started(*words):
    assert main.start(main.parse(['bapo', *words])) == 0

  started('compare', *three, f'--to={tmp_path}/c.html')
  started('--mode=report', f'--workdir={three[0]}')
  started('report', three[1])
  for name in ('c.html', 'fixed/seed-1/report.html', 'balanced/report.html'):
    assert (tmp_path / name).exists()
  assert 'has no recorded group' in refused(['show', three[0]])
  words = ['report', three[0], '--config.clip.rul=fixed']  # a misspelt knob is refused
  assert 'no knob --config.clip.rul' in refused(words)


def test_only_a_page_of_ours_is_replaced(three, tmp_path):
  mine = tmp_path / 'my.py'
  mine.write_text('print(1)')
  assert 'my.py exists, and this program did not write' in sentence_of(
    compare.write, three, str(mine)
  )
  assert mine.read_text() == 'print(1)'
  page = tmp_path / 'c.html'
  for _ in range(2):
    compare.write(three, str(page))
  line = refused(['compare', *three, f'--to={tmp_path}'])
  assert f'{tmp_path} cannot be used (Is a directory)' in line


def test_no_column_of_a_table_is_cut_off_on_paper(browser, tmp_path):
  paths = [
    run(tmp_path, f'a_long_name_of_an_arm_{n}', accuracy(0.5, 0.6), steps=n + 1)
    for n in range(4)
  ]
  page_of(paths, tmp_path / 'c.html')
  with browser.open(tmp_path / 'c.html', 720) as page:
    cut = "[...document.querySelectorAll('.scroll')]"
    cut += '.filter((x) => x.scrollWidth > x.clientWidth)'
    assert page.evaluate(f'{cut}.length')  # it scrolls on a screen
    page.emulate(media='print')
    assert page.evaluate(f'{cut}.length') == 0
