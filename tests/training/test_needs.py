"""Knobs without an effect: refused on the command line, listed if a file sets them."""

import re

import jax
import pytest
from refusals import KNOBS, SECTIONS
from runs import plain, tiny

from bapo_jax import main
from bapo_jax.algorithms import clip, loss, masks
from bapo_jax.models import transformer
from bapo_jax.training import build, foreign_names, inputs, needs, resolve
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import parse
from bapo_jax.training.needs import inert
from configs import aime, countdown, geometry

AIME = 'configs/aime.py'
NAME = re.compile(r'\b[a-z_]+(?:\.[a-z_0-9]+)+\b')

SLIPS = [  # overrides, what the sentence must say
  # knobs of another rule than the active one
  ('clip.cap=2', "clip.rule='balanced' has target, low"),
  ('loss.cap=3', "is a knob of rule='decoupled' or 'tis' or 'aspo'"),
  ('clip.balanced.target=0.4', "use clip.target with clip.rule='balanced'"),
  # knobs of something that is switched off
  ('buffer.capacity=128', "set batch.rule='replay' or 'adapted'"),
  ('loss.kl_direction=policy_behavior', 'set loss.kl above 0'),
  ('learner.pack=False learner.share_prompts=2', 'set learner.pack=True'),
  ('loss.rule=decoupled loss.cap=inf loss.beyond_cap=mask', 'set loss.cap below inf'),
  ('rollout.cache=keep', 'set rollout.max_off_policy_steps above 0'),
  ('rollout.max_off_policy_steps=2', 'set rollout.max_tokens_per_step below'),
  ('model.path=models/m sft.width=32', "while model.path='models/m'; remove it"),
  ('problems.level=2', 'did you mean problems.custom.level'),
  ('clip.reused_high=1.2', "set batch.rule='replay' or 'adapted'"),
  ('loss.rule=cispo clip.rule=fixed clip.dual=3', "set loss.rule='clipped'"),
  # names of TRL and verl
  ('actor_rollout_ref.actor.optim.lr=1e-6', '; use optimizer.lr'),
  ('epsilon_high=0.28', "; use clip.high (1 + epsilon) with clip.rule='fixed'"),
  ('sampler.top_p=0.9', 'only evaluations truncate it, by evaluate.sampling.top_p'),
  ('algorithm.gamma=1', 'there is no discount; advantage.rule'),
  # values that mean something else in TRL and verl
  ('clip.rule=fixed clip.high=0.28', '1 + epsilon: 1.28 for an epsilon of 0.28; inf'),
  ('clip.low=0.8', 'clip.rule=fixed has a constant bound), such as 0.6,0.9'),
  ('clip.low=(0.6', 'clip.rule=fixed has a constant bound), such as 0.6,0.9'),
  ('loss.aggregate=seq-mean-token-mean', 'sequence: mean over responses of their tok'),
  ('advantage.rule=gae', 'gae is absent, because it needs a value function; give one'),
  (
    'model.remat=auto',
    "remat='auto': give one of 'full', 'dots', 'none', or None (Act",
  ),
  # our names in another section or without one
  ('temperature=0.6', 'did you mean sampler.temperature or evaluate.sampling.temp'),
  # pairs that leave a rule nothing to use: test_config.py
]


@pytest.mark.parametrize(('given', 'named'), SLIPS)
def test_a_slip_is_refused_with_the_right_knob(given, named):
  flags = [f'--config.{each}' for each in given.split()]
  with pytest.raises(ValueError) as error:
    main.read_config(AIME, flags)
  sentence = str(error.value)
  assert named in sentence and '\n' not in sentence and len(sentence) < 400


def test_the_remedy_of_a_slip_is_accepted():
  for flags in (
    ['clip.high=1.28', 'clip.rule=fixed'],
    ['buffer.capacity=128', 'batch.rule=replay'],
    ['loss.kl_direction=policy_behavior', 'loss.kl=0.01'],
    ['rollout.max_off_policy_steps=0'],  # switches off, whatever a file says
  ):
    main.read_config(AIME, [f'--config.{each}' for each in flags])


def test_one_run_of_an_experiment_that_uses_a_knob_is_enough():
  values = {'loss.kl_direction': 'squared'}
  config = parse(plain(**values))
  assert inert(config)['loss.kl_direction'].because == 'loss.kl=0.0'
  switched = parse(plain(**values, **{'loss.kl': 0.1}))
  assert 'loss.kl_direction' not in inert(switched)
  needs.refuse(values, [config, switched])
  with pytest.raises(ValueError, match='no effect'):
    needs.refuse(values, [config, config])


def test_another_rule_starts_from_its_own_defaults():
  values = plain(**{'clip.target': 0.3, 'loss.kl': 0.1, 'loss.limit': 5.0})
  switched = parse(
    config_lib.merged(values, {'clip.rule': 'unclipped', 'loss.rule': 'tis'})
  )
  assert switched.clip == clip.Unclipped()
  assert switched.loss == loss.Tis(kl=0.1)  # which every loss rule has
  same = parse(config_lib.merged(values, {'clip.rule': 'balanced'}))
  assert same.clip.target == 0.3 and same.loss.limit == 5.0


def test_another_source_drops_the_knobs_that_its_function_lacks():
  values = plain(**{'problems.custom.train': 99, 'problems.custom.level': 2})
  pairs = dict.fromkeys(config_lib.SOURCES, 'examples/pairs.py:pairs')
  custom = parse(config_lib.merged(values, pairs)).problems.custom
  assert (custom.train, custom.level, custom.hard) == (99, 2, 0.0)
  files = dict.fromkeys(config_lib.SOURCES, 'a.jsonl')
  assert parse(config_lib.merged(values, files)).problems.custom.model_dump() == {}
  with pytest.raises(ValueError, match=r'problems\.custom\.hard is not a knob'):
    parse(config_lib.merged(values, files | {'problems.custom.hard': 0.1}))


def test_a_knob_is_not_refused_because_of_a_knob_that_is_derived_later():
  config = parse(plain(**{'learner.grad_accum_steps': 1}))
  assert 'learner.bounds_scope' in inert(config)
  undecided = config.with_values(learner={'grad_accum_steps': None})
  assert 'learner.bounds_scope' not in inert(undecided)


def test_needs_name_knobs():
  for need in needs.FACTS.values():
    # config files, and paths to a custom function, are no knobs
    text = need.remedy.replace('path/to/file.py:function', '')
    assert set(NAME.findall(text)) <= KNOBS, need.remedy
  for text in (*foreign_names.KNOBS.values(), *foreign_names.ABSENT.values()):
    names = set(NAME.findall(text)) - {'metrics.jsonl'}
    assert names <= KNOBS | SECTIONS, text
  # A foreign name that is also ours would hide our knob.
  assert not set(foreign_names.KNOBS) & KNOBS


# Every knob has an effect in one of these.
EVERYWHERE = [
  {},
  {'clip.rule': 'fixed', 'learner.grad_accum_steps': 4},
  *({'loss.rule': x, 'clip.rule': 'unclipped'} for x in ('tis', 'sapo', 'vespo')),
  {'loss.rule': 'aspo', 'clip.rule': 'dcpo'},
  {'loss.rule': 'fipo'},
  *({'mask.rule': rule} for rule in masks.MaskRule.rules.names),
  {'loss.rule': 'decoupled', 'loss.kl': 0.1},
  {'batch.rule': 'adapted', 'buffer.thresholds.rule': 'moving'},
  {'batch.rule': 'adapted'},
  {'batch.rule': 'replay'},
  {'batch.rule': 'learnable_only'},
  {'teacher.path': 'a', 'loss.reference': 0.1},
  {'rollout.environment': 'feedback'},
  {'rollout.max_off_policy_steps': 1, 'rollout.max_tokens_per_step': 6.0},
  {'rewards.rule': 'math', 'mesh.tensor': 2, 'lora.rank': 2},
  {'sft.experts': 4, 'loss.kl': 0.1},
  {'sft.tower.layers': 1, 'rewards.shaping.overlong_penalty': 1.0},
  {'prompts.rule': 'by_difficulty'},
  {'optimizer.schedule': 'cosine', 'optimizer.weight_decay': 0.1},
  {'rollout.given': 1, 'loss.imitation': 0.1},
]


def test_every_knob_has_an_effect_in_some_config(tmp_path):
  (tmp_path / 'own.py').write_text('def one(sample):\n  return 1.0\n')
  own = {'rewards.rule': f'{tmp_path}/own.py:one'}
  configs = [parse(plain(**overrides)) for overrides in (*EVERYWHERE, own)]
  idle = set.intersection(*({*inert(config)} for config in configs))
  assert not idle


# Rules, and knobs of the objective with another value than their default.
LOSS = {'loss.kl': 0.1, 'loss.aggregate': 'sequence'}
OBJECTIVE = [
  (
    {'clip.rule': 'fixed'},
    {'clip.low': 0.7, 'clip.high': 1.3, 'clip.dual': 4.0, 'loss.limit': 5.0} | LOSS,
  ),
  (
    {'clip.rule': 'balanced', 'clip.resolution': 'continuous'},
    {'clip.target': 0.3, 'clip.high': (1.1, 2.0), 'clip.low_step': 0.01}
    | {'clip.dual': 4.0, 'clip.order': 'lower'},
  ),
  (
    {'clip.rule': 'fixed', 'loss.rule': 'cispo'},
    {'clip.low': 0.7, 'clip.high': 1.3, 'loss.kl_direction': 'squared'} | LOSS,
  ),
  (
    {'loss.rule': 'decoupled', 'clip.rule': 'fixed'},
    {'loss.cap': 3.0, 'loss.beyond_cap': 'mask'},
  ),
]


def objective(**overrides) -> str:
  """Returns the program of one optimiser update with these knobs."""
  config = tiny(**overrides)
  mesh = resolve.make_mesh(config, jax.devices()[:1])
  spec = inputs.open_model(config).spec
  params = transformer.abstract(spec)
  opt = jax.eval_shape(build.optimizer(config).init, params)
  step = build.make_train_step(config, spec)
  batch = build.abstract_batch(config, mesh)
  return re.sub('0x[0-9a-f]+', '', str(jax.make_jaxpr(step)(params, opt, batch)))


@pytest.mark.parametrize(('active', 'others'), OBJECTIVE, ids=str)
def test_a_knob_changes_the_update_if_and_only_if_it_is_not_inert(active, others):
  idle = set(inert(tiny(**active)))
  before = objective(**active)
  assert objective(**active, **{k: x for k, x in others.items() if k in idle}) == before
  for name, value in others.items():
    if name not in idle:
      assert objective(**active, **{name: value}) != before, name


VARIANTS = [
  *(
    (aime, x) for x in ('tiny', 'recipe', 'balanced_paper', 'batch_paper', '7b', '32b')
  ),
  *((countdown, x) for x in ('', 'grpo', 'clip', 'batch', 'both')),
  *((geometry, x) for x in ('tiny', '3b', '7b')),
]


@pytest.mark.parametrize(('file', 'variant'), VARIANTS)
def test_config_files_set_no_knob_without_an_effect(file, variant):
  config = parse(file.get_config(variant).to_dict())
  idle = set(config_lib.changed(config)) & set(inert(config))
  # The cells of countdown share a buffer, which two of them do not use.
  assert not {x for x in idle if file is not countdown or not x.startswith('buffer.')}
