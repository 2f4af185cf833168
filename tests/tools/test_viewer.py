"""The viewer draws the groups that a run recorded; keys turn pages."""

import io
import json
import math
import re

import numpy as np
import oracles
import pytest
from making import groups, params
from rich.console import Console

from bapo_jax.algorithms import advantage, replay_buffer
from bapo_jax.data import tokenizer
from bapo_jax.models import layers, transformer
from bapo_jax.tools import recorded_groups, viewer
from bapo_jax.training import checkpoint, config, resolve, weights
from bapo_jax.training.config import Config

TEXT = tokenizer.load('characters', '{problem}\n')


def screen(terminal=False):
  return Console(file=io.StringIO(), width=78, force_terminal=terminal, _environ={})


def printed(workdir, number=None, views='', terminal=False, keys=None):
  console = screen(terminal)
  assert viewer.show(Config(), str(workdir), number, views, console, keys) == 0
  return console.file.getvalue()


def evaluated(tmp_path, *problems, rule='group_relative'):
  """A run with one evaluation: each problem, its responses and their verdicts."""
  made = Config().with_values(advantage={'rule': rule})
  (tmp_path / 'config.json').write_text(json.dumps(config.plain(made)))
  samples = [
    {'problem': f'{problem} mod 7', 'answer': '3', 'response': text, 'correct': right}
    for problem, responses in problems
    for text, right in responses
  ]
  (tmp_path / 'eval').mkdir()
  for step, recorded in ((0, samples[:1]), (10, samples), (9, samples[:1])):
    path = tmp_path / 'eval' / f'{step}.json'
    path.write_text(json.dumps({'result': {'accuracy': 0.5}, 'samples': recorded}))
  return tmp_path


TWO = (
  ('1+2', [('so 3', True), ('so 4', False), ('so 5', False), ('so 3!', True)]),
  ('2+3', [('so 5', False)]),
)


def test_the_newest_evaluation_is_paged_by_problem(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  first = printed(workdir)
  assert 'group 1 of 2: evaluation at step 10' in first
  assert '1+2 mod 7' in first and 'right answer: 3' in first
  # Two right, two wrong: mean 1/2, deviation 1/2, so +1 and -1.
  lines = [line for line in first.splitlines() if 'advantage' in line]
  assert lines == [
    '1/4 ✓ right  reward 1.00  advantage +1.00',
    '2/4 ✗ wrong  reward 0.00  advantage -1.00',
    '3/4 ✗ wrong  reward 0.00  advantage -1.00',
    '4/4 ✓ right  reward 1.00  advantage +1.00',
  ]
  assert '--show_group=1..2 prints another group' in first
  second = printed(workdir, 2)
  assert 'group 2 of 2' in second and '1/1 ✗ wrong' in second
  assert 'advantage +0.00' in second and '--show_group' not in second


def response(text, right, adv, **numbers):
  """A response of groups/<step>.jsonl, its tokens its characters."""
  found = dict(response=text, correct=right, reward=float(right), advantage=adv)
  found |= dict(taught=True, tokens=len(text), truncated=False, version=[6, 6])
  names = ('pieces', 'sampler_logp', 'learner_logp', 'ratio', 'cut')
  return found | dict.fromkeys(names) | numbers


def record(workdir, step, responses, **values):
  """Leaves a recorded step of one group in the workdir."""
  group = dict(step=step, id=4, answer='3', source='reused', completed_step=6)
  group |= dict(prompt='1+2 mod 7\n', prompt_tokens=9, update=2, low=0.8, high=1.25)
  (workdir / 'groups').mkdir(exist_ok=True)
  path = workdir / 'groups' / f'{step}.jsonl'
  path.write_text(json.dumps(group | values | {'responses': responses}) + '\n')


def test_what_the_newest_step_trained_on_comes_first(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  logp = np.log([0.5, 0.95]).tolist()
  cut = dict(pieces=['4', '3'], sampler_logp=logp, ratio=[1.3, None], cut=[1, 0])
  record(workdir, 7, [response('43', True, 1.5, **cut), response('x' * 9, False, -0.5)])
  record(workdir, 6, [])
  drawn = printed(workdir, 1)
  assert 'group 1 of 3: problem 4, trained on in step 7, reused' in drawn
  assert '1/2 ✓ right  reward 1.00  advantage +1.50  2 tokens' in drawn
  assert '2/2 ✗ wrong  reward 0.00  advantage -0.50' in drawn
  assert '\x1b[32m43' in printed(workdir, 1, terminal=True)
  assert '4⟨.50⟩3' in printed(workdir, 1, 'p')
  with_bounds = ' '.join(printed(workdir, 1, 'c').split())
  assert '4[1.30]3' in with_bounds and 'xxxxxxxxx' in with_bounds
  assert '3[' not in with_bounds
  assert 'the bounds of update 2 of step 7, 0.80 and 1.25' in with_bounds


def test_where_the_pictures_of_a_group_lie(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  assert 'picture' not in printed(workdir)
  path = workdir / 'eval' / '10.json'
  held = json.loads(path.read_text())
  for sample in held['samples'][:4]:
    sample['pictures'] = ['pictures/a.png', 'pictures/b.jpg']
  path.write_text(json.dumps(held))
  record(workdir, 7, [response('43', True, 1.5)], pictures=['pictures/c.png'])
  wide = Console(file=io.StringIO(), width=500, _environ={})
  for number in (1, 2, 3):
    viewer.show(Config(), str(workdir), number, '', wide)
  shown = re.findall(r'picture: (\S+)', wide.file.getvalue())
  names = ('c.png', 'a.png', 'b.jpg')  # trained on; evaluated; without a picture
  assert shown == [f'{workdir}/pictures/{name}' for name in names]


def test_a_group_that_no_update_had_says_so(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  alone = response('4', True, 0.0, pieces=['4'], sampler_logp=[0.0])
  record(workdir, 8, [alone], update=None, low=None, high=None)
  assert 'No update of the step had this group' in printed(workdir, 1, 'c')


def test_a_view_of_tokens_explains_why_it_is_empty(tmp_path):
  drawn = ' '.join(printed(evaluated(tmp_path, *TWO), 1, 'pc').split())
  assert 'An evaluation records text only' in drawn and '⟨' not in drawn


def test_responses_have_the_colour_of_their_advantage(tmp_path):
  drawn = printed(evaluated(tmp_path, *TWO), 1, terminal=True)
  assert '\x1b[32mso 3\x1b[0m' in drawn and '\x1b[31mso 4\x1b[0m' in drawn
  # A group of one has no advantage, and no colour.
  assert '\x1b[31mso' not in printed(tmp_path, 2, terminal=True)


@pytest.mark.parametrize('rule', advantage.RULES)
def test_a_group_of_one_is_compared_with_nobody(rule, tmp_path):
  # The mean of the others, of which there are none, would be no number.
  drawn = printed(evaluated(tmp_path, ('1', [('so 3', True)]), rule=rule), 1)
  assert 'reward 1.00  advantage +0.00' in drawn


def test_a_response_cannot_steer_the_terminal_nor_be_read_as_markup(tmp_path):
  nasty = 'a\x1b[2Jb\x07[bold]c[/bold]\x9bd\x7f'
  drawn = printed(evaluated(tmp_path, ('1', [(nasty, True)])), 1)
  assert r'a\x1b[2Jb\x07[bold]c[/bold]\x9bd\x7f' in drawn


def test_of_a_long_response_both_ends_are_shown_or_all(tmp_path):
  long = 'begin ' + 'x' * 5000 + ' end'
  workdir = evaluated(tmp_path, ('1', [(long, True)]))
  short = printed(workdir, 1)
  assert 'begin' in short and ' end' in short
  assert '3010 characters left out' in short and short.count('x') < 2010
  assert printed(workdir, 1, 'a').count('x') >= 5000


def test_keys_turn_pages_and_switch_views(tmp_path):
  workdir = evaluated(tmp_path, *TWO)
  # First page; back stays; next; next stays; probabilities; away again; quit.
  drawn = printed(workdir, terminal=True, keys='bnnp?pq' + 'n')
  drawn = re.sub(r'\x1b\[[\d;]*[A-Za-z]', '', drawn)
  pages = drawn.split('group ')[1:]
  assert [p[0] for p in pages] == list('1122222')
  explained = ['records text only' in p for p in pages]
  assert explained == [False] * 4 + [True] * 2 + [False]
  assert 'n: next, b: back, p: token probabilities' in drawn


@pytest.fixture
def buffered(tmp_path):
  """(config, workdir) of a run whose buffer holds problems 5, 8 and an empty row."""
  model = dict(width=16, layers=2, heads=2, kv_heads=1, head_width=8, ffn=16)
  made = Config().with_values(
    batch={'rule': 'adapted'}, model=model, sampler={'temperature': 0.5}
  )
  (tmp_path / 'config.json').write_text(json.dumps(config.plain(made)))
  reusable = groups(ids=[5, 3, 8], right=[1, 1, 3], policy_version=[1, -1, 2], G=4, T=6)
  prompt, response = (np.asarray(i) for i in tokenizer.encode(TEXT, ['3*', '567']))
  tokens_PGT = np.zeros((3, 4, 6), np.int32)
  tokens_PGT[:, :, :2], tokens_PGT[:, :, 2:5] = prompt, response
  response_mask_PGT = np.zeros((3, 4, 6), bool)
  response_mask_PGT[:, :, 2:5] = True
  behavior_logp_PGT = np.where(response_mask_PGT, np.log([1, 1, 0.5, 0.95, 0.25, 1]), 0)
  reusable = reusable._replace(
    tokens_PGT=tokens_PGT,
    response_mask_PGT=response_mask_PGT,
    behavior_logp_PGT=behavior_logp_PGT.astype(np.float32),
  )
  spec = resolve.open_model(made).spec
  with checkpoint.manager(str(tmp_path), 2) as checkpoints:
    buffer = replay_buffer.init(1, 4, 1)._replace(reusable=reusable)
    arrays = {'buffer': buffer, 'params': params(spec)}
    checkpoint.save(checkpoints, 3, arrays, {})
  return made, str(tmp_path)


def test_the_replay_buffer_is_read_with_probabilities(buffered):
  _, workdir = buffered
  found = recorded_groups.read(workdir)
  assert [g.source for g in found] == [
    'problem 8, step 2, replay buffer of step 3',
    'problem 5, step 1, replay buffer of step 3',
  ]
  assert [g.prompt for g in found] == ['3*', '3*']
  # One right of four: mean 1/4, deviation sqrt(3)/4, so +sqrt(3) and -1/sqrt(3).
  adv = [r.advantage for r in found[1].responses]
  np.testing.assert_allclose(adv, [3**0.5, *[-(3**-0.5)] * 3], rtol=1e-4)
  for response in found[0].responses:
    assert response.text == '567' and response.pieces == ['5', '6', '7']
    np.testing.assert_allclose(np.exp(response.logp_T), [0.5, 0.95, 0.25], rtol=1e-6)
  drawn = printed(workdir, 1, 'p')
  assert '5⟨.50⟩67⟨.25⟩' in drawn and 'mean probability 0.57' in drawn
  assert '567' in printed(workdir, 1) and '⟨' not in printed(workdir, 1)
  assert 'No step has reported clip bounds yet' in printed(workdir, 1, 'c')


def test_another_checkpoint_is_shown_with_what_was_known_by_then(buffered, monkeypatch):
  config, workdir = buffered
  with checkpoint.manager(workdir, 2) as checkpoints:
    buffer = replay_buffer.init(2, 4, 6)
    buffer = buffer._replace(reusable=groups([9, 9], [1, 1], [4, -1], G=4, T=6))
    arrays = {'buffer': buffer, 'params': params(resolve.open_model(config).spec, 1)}
    checkpoint.save(checkpoints, 5, arrays, {}, accuracy=0.5)
  monkeypatch.setattr(tokenizer, 'decode_responses', lambda *_: ['?'] * 4)

  def sources(which):
    return [group.source for group in recorded_groups.read(workdir, which)]

  assert (
    sources('newest')
    == sources('best')
    == ['problem 9, step 4, replay buffer of step 5']
  )
  assert sources('3') == [
    'problem 8, step 2, replay buffer of step 3',
    'problem 5, step 1, replay buffer of step 3',
  ]
  with pytest.raises(ValueError, match=r'checkpoint=4: .* \[3, 5\]'):
    sources('4')
  assert recorded_groups.last_step(workdir, '3') == 3
  assert recorded_groups.last_step(workdir, 'newest') == math.inf
  embed = [weights.read_params(workdir, step)('embed') for step in (3, 5)]
  assert not np.array_equal(*embed)
  (group,) = recorded_groups.read(workdir, '3')[:1]
  ratios = [recorded_groups.ratios(config, workdir, w)(group)[0] for w in ('3', 'best')]
  assert not np.allclose(*ratios)


def test_ratios_are_those_of_the_checkpoint_to_the_behaviour(buffered):
  config, workdir = buffered
  (group, _) = recorded_groups.read(workdir)
  found = recorded_groups.ratios(config, workdir)(group)
  # Column t - 1 says what the policy makes of token t, at the sampler's temperature.
  spec = resolve.open_model(config).spec
  tokens_GT = np.asarray(group.arrays.tokens_PGT[0])
  weights = params(spec)
  hidden_GTD = layers.forward(weights, tokens_GT, spec)[:, 1:4]
  logp_GT, *_ = oracles.logprob_oracle(
    hidden_GTD, transformer.head(weights), tokens_GT[:, 2:5], 0.5
  )
  expected_GT = np.exp(np.asarray(logp_GT)) / np.asarray([0.5, 0.95, 0.25])[None]
  np.testing.assert_allclose(np.stack(found), expected_GT, rtol=1e-4)
  other = config.with_values(model={'width': 32})
  with pytest.raises(ValueError, match=r'was trained with model\.width=16, not 32'):
    recorded_groups.ratios(other, workdir)


def test_tokens_that_would_be_clipped_carry_their_ratio(buffered):
  _, workdir = buffered
  found = recorded_groups.read(workdir)
  bounds = {'step': 7, 'clip/low': 0.8, 'clip/high': 1.2}
  ratios = [np.asarray([0.7, 1.2, 1.3])] * 4

  def drawn(views):
    console = screen()
    console.print(viewer.page(found, 1, set(views), bounds, lambda _: ratios))
    return console.file.getvalue().splitlines()

  # A token at its bound is cut. The first response is right, the others are wrong.
  marked = [line for line in drawn('c') if line.startswith('5')]
  assert marked == ['56[1.20]7[1.30]', *['5[0.70]67'] * 3]
  marked = [line for line in drawn('pc') if line.startswith('5')]
  assert marked == ['5⟨.50⟩6[1.20]7⟨.25⟩[1.30]', *['5⟨.50⟩[0.70]67⟨.25⟩'] * 3]
  assert 'mean bounds of step 7, 0.80 and 1.20' in ' '.join(
    ' '.join(drawn('c')).split()
  )


def test_nothing_recorded_and_no_such_group_are_one_sentence(tmp_path):
  with pytest.raises(ValueError, match='holds no run; train there first'):
    viewer.show(Config(), str(tmp_path), None, '')
  evaluated(tmp_path, *TWO)
  with pytest.raises(ValueError, match=r'--show_group=3: give 1 to 2'):
    viewer.show(Config(), str(tmp_path), 3, '')
  with pytest.raises(ValueError, match=r"--show_with=px: no \['x'\]"):
    viewer.show(Config(), str(tmp_path), 1, 'px')
  for path in (tmp_path / 'eval').iterdir():
    path.unlink()
  with pytest.raises(ValueError, match='has no group recorded yet'):
    viewer.show(Config(), str(tmp_path), None, '')
