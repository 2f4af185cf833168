"""Custom functions by path: their knobs, their declarations and what is refused."""

import json
import pathlib

import pytest
from refusals import sentence_of
from runs import plain, tiny

import bapo_jax
from bapo_jax import custom_code
from bapo_jax.training import config, refusals
from bapo_jax.training.config import from_json, overrides

HERE = pathlib.Path(__file__).parent
MY = f'{HERE / "my_functions.py"}'


def check(made):
  """Raises the first refusal of a custom rule."""
  refusals.judge(refusals.of_custom_rules(made))


SAPO = {'loss.rule': f'{MY}:sapo', 'clip.rule': 'unclipped'}


def test_keyword_arguments_are_knobs():
  made = tiny(**SAPO, **{'loss.tau': 2})
  assert made.loss.tau == 2.0 and made.loss.bounds == 'ignored'
  stored = json.loads(json.dumps(made.model_dump()))
  assert from_json(stored) == made  # tuples, custom knobs too
  assert tiny(**SAPO).loss.tau == 1.0
  # A title may be a file's name.
  assert tiny(**SAPO, title='a, b.py').code == made.code


def test_command_line_arguments_set_custom_knobs_in_any_order():
  given = ['--config.loss.tau=2', f'--config.loss.rule={MY}:sapo']
  assert overrides(given)['loss.tau'] == 2.0
  values = {'buffer': {'thresholds': {'rule': f'{MY}:rate'}}}
  with pytest.raises(ValueError, match=r'buffer.thresholds.rule=.* no function of'):
    overrides(['--config.buffer.thresholds.x=1'], values)
  # The message names the whole knob before its value is validated, too.
  for part in ('rewards', 'problems'):
    name = 'rule' if part == 'rewards' else 'source'
    with pytest.raises(ValueError, match=rf'^{part}\.{name}=.*:none names no function'):
      overrides(['--config.steps=1'], {part: {name: f'{MY}:none'}})


@pytest.mark.parametrize(
  ('knobs', 'message'),
  [
    ({**SAPO, 'loss.tau': 'hot'}, r"^loss\.tau='hot': give a number \(tau of"),
    (
      {**SAPO, 'loss.low': 1.0},
      r'^loss\.low is not a knob; rule=.* has aggregate, kl, .*reference.*, tau$',
    ),
    (
      {'loss.rule': f'{MY}:nothing'},
      r'^loss\.rule=.*:nothing names no function of',
    ),
    ({'rewards.rule': f'exact,{MY}'}, r'^rewards\.rule=.*py names no fun.*: .*sapo'),
    (
      {'loss.rule': f'{MY}:signs'},
      r'called with \(logp_BT, batch, find\): .* signs\(logp_BT, b',
    ),
    ({'loss.rule': f'{MY}:sapo'}, r"clip\.rule='balanced' has no effect, because"),
    ({'loss.rule': 'mine'}, r'one of .* or path/to/file\.py:function$'),
    ({'rewards.rule': f'exact,{MY}:brief', 'rewards.weights': (1.0,)}, 'give 2 numb'),
    (
      {'rewards.rule': f'{MY}:halves', 'advantage.rule': f'{MY}:signs'},
      r"^advantage\.rule=.*:signs reads one .*:halves returns steps; declare reads='gr",
    ),
  ],
)
def test_what_cannot_work_is_refused_by_name(knobs, message):
  with pytest.raises(ValueError, match=message):
    tiny(**knobs)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('def f(logp_BT, batch, find, *, x): ...', 'x has no default; give it a default'),
    ('raise KeyError(3)', r'raises KeyError: 3 \(own\.py, line \d+\)$'),
    (
      'import bapo_jax\n@bapo_jax.declare(bounds="cuts")\n'
      'def f(logp_BT, batch, find): ...',
      r"declares bounds='cuts'; give one of \('cut', 'limit', 'ignored'\)",
    ),
    (
      'import bapo_jax\n@bapo_jax.declare(batched=True)\n'
      'def f(logp_BT, batch, find): ...',
      r'declares batched=True; this part accepts bounds, clips_surrogate',
    ),
    *(
      (
        f'def f(logp_BT, batch, find, *, {name}: float = 1.0): ...',
        rf'^loss\.rule=.*:f: the argument {name} has a reserved name; rename it$',
      )
      for name in ('model_config', '_x', 'copy', 'bounds', 'kl', 'rule')
    ),
  ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, message):
  path = tmp_path / 'own.py'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    tiny(**{'loss.rule': f'{path}:f', 'clip.rule': 'unclipped'})


@pytest.mark.parametrize(
  ('gain_BT', 'uses'),
  [
    ('logp_BT', False),
    ('logp_BT * bounds.low', True),
    ('jnp.log(bounds.high) * 0 + logp_BT', False),
    ('jax.jit(jnp.maximum)(logp_BT, logp_BT * bounds.low)', True),
    ('logp_BT * jax.lax.stop_gradient(bounds.dual)', True),
  ],
)
def test_a_rule_that_asks_for_bounds_uses_them(tmp_path, gain_BT, uses):
  path = tmp_path / 'own.py'
  text = 'import jax, jax.numpy as jnp\ndef f(logp_BT, batch, find):\n'
  text += f'  bounds = find(jnp.exp(logp_BT))\n  return {gain_BT}, bounds'
  path.write_text(text)
  config = {'loss.rule': f'{path}:f'}
  if uses:
    check(tiny(**config))
  else:
    message = "does not use the bounds .* clip.rule='balanced' has no effect"
    with pytest.raises(ValueError, match=message):
      check(tiny(**config))
  check(tiny(**config, **{'clip.rule': 'unclipped'}))


def test_every_slot_takes_a_function_that_fits():
  own = {
    'loss': 'sapo',
    'clip': 'dppo_tv',
    'mask': 'likely',
    'advantage': 'signs',
    'batch': 'all_fresh',
    'rewards.shaping': 'half_for_truncated',
  }
  made = tiny(**{f'{slot}.rule': f'{MY}:{name}' for slot, name in own.items()})
  check(made)
  by_token = {'advantage.rule': f'{MY}:first_token', 'rewards.rule': f'{MY}:halves'}
  check(tiny(**by_token, **{'batch.rule': f'{MY}:all_fresh'}))
  assert f'{MY} {custom_code.digest(f"{MY}:sapo")}' in made.code.values()
  assert made.clip.gives == 'mask'


def test_the_digest_follows_the_text(tmp_path):
  path = tmp_path / 'own.py'
  path.write_text('def f(reward_PG): return reward_PG')
  place = f'{path}:f'
  first, function = custom_code.digest(place), custom_code.load(place)
  assert custom_code.load(place).function is function.function
  path.write_text('def f(reward_PG): return -reward_PG')
  assert custom_code.digest(place) != first and custom_code.load(place)(1) == -1


def test_a_registered_function_has_a_path():
  def f(reward_PG, *, scale: float = 2.0):
    return reward_PG * scale

  place = custom_code.register(f)
  values = plain(**{'advantage.rule': place, 'advantage.scale': 3.0})
  assert config.parse(values).advantage.scale == 3.0
  assert 'has no name; define it by `def' in sentence_of(
    custom_code.register, lambda reward_PG: reward_PG
  )
  with pytest.raises(ValueError, match=r'python:gone: .* by bapo_jax\.train'):
    custom_code.load('python:gone')


FORMS = """
from __future__ import annotations
import functools, typing
import bapo_jax, jax

if typing.TYPE_CHECKING:
  from nowhere import Batch, Find, Positive

@bapo_jax.declare(bounds='ignored')
def typed(logp_BT: jax.Array, batch: Batch, find: Find, *, tau: Positive = 2.0):
  return logp_BT * tau, find(logp_BT)

class Rule:
  def __init__(self, power): self.power = power

  @bapo_jax.declare(bounds='ignored')
  def __call__(self, logp_BT, batch, find, *, tau: float = 2.0):
    return logp_BT ** self.power * tau, find(logp_BT)

called = Rule(3)
method = called.__call__
partial = functools.partial(typed, tau=2.0)
twice = functools.partial(functools.partial(called), tau=2.0)
traced = jax.jit(typed, static_argnames='find')
"""


@pytest.mark.parametrize(
  'name', ['typed', 'called', 'method', 'partial', 'twice', 'traced']
)
def test_whatever_can_be_called_is_a_function(tmp_path, name):
  path = tmp_path / 'own.py'
  path.write_text(FORMS)
  place = {'loss.rule': f'{path}:{name}', 'clip.rule': 'unclipped'}
  assert tiny(**place).loss.tau == 2.0
  made = tiny(**place, **{'loss.tau': 3})  # a number, as its default
  assert made.loss.tau == 3.0 and made.loss.bounds == 'ignored'
  check(made)
  rule = made.loss
  power = 3 if name in ('called', 'method', 'twice') else 1
  assert rule(2.0, None, lambda r: r)[0] == 2.0**power * 3


# ------------------------------------------------------------------- neighbours


NEIGHBOURS = {
  'my.py': (
    'import helper, tree.leaf, numpy\nfrom tree import leaf\n'
    'from second import name as other\n'
    'def names():\n'
    '  import lazy\n'
    '  return helper.name, tree.leaf.name, leaf.name, other, lazy.name\n'
  ),
  'helper.py': "import colorsys, second\nname = f'{second.name} {colorsys.name}'\n",
  'second.py': "name = 'FOLDER'\n",
  'lazy.py': "name = 'FOLDER'\n",
  'colorsys.py': "name = 'FOLDER'\n",  # of the standard library as well
  'tree/__init__.py': '',
  'tree/leaf.py': 'import tree\nfrom second import name\nfrom . import twig\n',
  'tree/twig.py': '',
  'numpy/data.txt': '',  # no package
}


def beside(folder, **texts):
  """Writes the files above into a folder, whose name they have."""
  for name, text in {**NEIGHBOURS, **texts}.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace('FOLDER', folder.name))
  return folder


def test_each_file_finds_its_own_neighbours(tmp_path):
  import colorsys

  functions = {
    name: custom_code.load(f'{beside(tmp_path / name) / "my.py"}:names')
    for name in ('one', 'two')
  }
  for name, function in functions.items():
    assert function() == (f'{name} {name}', name, name, name, name)
  assert not hasattr(colorsys, 'name')


def test_files_of_a_folder_share_their_neighbours(tmp_path):
  text = 'import second\ndef module(): return second\n'
  folder = beside(tmp_path / 'one', **{'a.py': text, 'b.py': text})
  a, b = (custom_code.load(f'{folder / name}:module')() for name in ('a.py', 'b.py'))
  assert a is b


def test_the_package_is_no_neighbour(tmp_path):
  files = {'my.py': 'import bapo_jax\ndef package(): return bapo_jax\n'}
  folder = beside(tmp_path / 'one', **files, **{'bapo_jax/__init__.py': ''})
  assert custom_code.load(f'{folder / "my.py"}:package')().declare is bapo_jax.declare


def test_a_link_has_the_neighbours_of_its_file_and_its_own(tmp_path):
  folder = beside(tmp_path / 'one')
  (folder / 'second.py').unlink()
  link = tmp_path / 'two' / 'linked.py'
  link.parent.mkdir()
  link.symlink_to(folder / 'my.py')
  (link.parent / 'second.py').write_text("name = 'two'")
  names = custom_code.load(f'{link}:names')()
  assert names == ('two one', 'two', 'two', 'two', 'one')


def test_a_config_file_finds_its_neighbours_and_may_define_a_dataclass(tmp_path):
  text = (
    'from __future__ import annotations\nimport dataclasses, typing, helper\n'
    'from bapo_jax.training.config import defaults\n'
    '@dataclasses.dataclass\n'
    'class Sizes:\n'
    '  shared: typing.ClassVar[int] = 0\n'
    '  steps: int = 3\n'
    'def get_config():\n'
    '  values = defaults()\n'
    '  values.update(steps=Sizes().steps, title=helper.name)\n'
    '  return values\n'
  )
  for name in ('one', 'two'):
    folder = beside(tmp_path / name, **{'a.b.py': text})
    values = config.load(str(folder / 'a.b.py'))
    assert (values['steps'], values['title']) == (3, f'{name} {name}')
