"""The experiments of protocols 2 to 4: off-policy methods in settings that can tell.

Those of ../protocol2.md: `s1` has 256 responses per update, so that the search
of Balanced PO stops between its ends; `control` is the setting of the first protocol at
rates at which fixed bounds differ; `recipe_again` repeats its best arm on new seeds,
beside fixed bounds with the same mean; `quantised` trains with actors of low precision;
`depths` samples ahead of the learner, so that data are older than their batch makes
them; `s3` trains SmolLM2-135M-Instruct, whose files are expected in models/.

Those of ../protocol3.md: `yoked` (R), `yoked_s1` (B) and `yoked_depths` (D) give an arm
the bounds that the search of another run chose, with the clip rules of bounds.py.

Those of ../protocol4.md: `routes` trains a policy with experts, with and without replay
of the sampler's routes; `routes_first` records how often the routers agree in the first
of 64 updates.
"""

import functools
from collections.abc import Mapping
from typing import Any

from bapo_jax.methods import METHODS
from configs import base
from lab.experiments import Experiment, run_name

PAIRS = 'examples/pairs.py:pairs'
TUNING = (100, 101)  # seeds that choose values, with the problems of seed 0
CONTROL = tuple(range(200, 216))
TEST = tuple(range(300, 316))
RECIPE_SEEDS = tuple(range(216, 228))
DEPTH_SEEDS = tuple(range(400, 404))
S3_SEEDS = tuple(range(500, 504))
NAMES = (
  'tuning',
  's1',
  'rivals',
  'control',
  'recipe_again',
  'quantised',
  'depths',
  's3',
  'yoked',
  'yoked_s1',
  'yoked_depths',
  'routes',
  'routes_first',
)
YOKED_SEEDS = tuple(range(600, 628))
YOKED_S1_SEEDS = tuple(range(640, 656))
YOKED_DEPTH_SEEDS = tuple(range(660, 668))
ROUTES_SEEDS = tuple(range(700, 708))
ROUTES_TRIAL = (699,)  # of the trial runs of protocol 4
DUAL = 3.0  # of every clipping arm, as in the public code of Balanced PO

# A micro-batch of 8 rows fits a core's cache; see docs/notes/performance.md.
SPLIT = {'grad_accum_steps': 32, 'bounds_pass': 'stored'}


def fixed(low: float, high: float) -> dict[str, Any]:
  """An arm with constant bounds."""
  return {
    'clip.rule': 'fixed',
    'clip.low': low,
    'clip.high': high,
    'clip.dual': DUAL,
  }


OWN_MEAN = (0.85, 2.816)  # of the tuning seeds' runs of `balanced`
RECIPE_MEAN = (0.868, 1.56)  # of the runs of `recipe` in `control`
LIMIT = {'loss.limit': 20.0}  # of |log r|, as in the public code

CLIPPING: dict[str, dict[str, Any]] = {
  'grpo': fixed(0.8, 1.2),
  'clip_higher': fixed(0.8, 1.28),
  'start': fixed(0.6, 1.2),  # where the search begins
  'low85_high282': fixed(*OWN_MEAN),  # what the search gives on average
  'low90_high300': fixed(0.9, 3.0),  # where the search ends
  'balanced': {  # section 5 of the paper
    'clip.rule': 'balanced',
    'clip.target': 0.4,
    'clip.low': (0.6, 0.9),
    'clip.high': (1.2, 3.0),
    'clip.high_step': 0.05,
    'clip.low_step': 0.02,
    'clip.dual': DUAL,
  },
  'recipe': {  # the public code: its search, dual clip, and clamped log-ratio
    'clip.rule': 'recipe',
    **LIMIT,
  },
}
PUBLISHED = {name: dict(method.overrides) for name, method in METHODS.items()}
RIVALS: dict[str, dict[str, Any]] = {
  'balanced': CLIPPING['balanced'],
  'grpo': CLIPPING['grpo'],
  **{name: PUBLISHED[name] for name in ('unclipped', 'tis')},
  'cispo': PUBLISHED['cispo'] | {'clip.high': 1.28},
  **{name: PUBLISHED[name] for name in ('gspo', 'sapo', 'vespo', 'dcpo', 'dppo_tv')},
  **{name: PUBLISHED[name] for name in ('m2po', 'icepop')},
}


def common() -> dict[str, Any]:
  """Returns what the experiments of every policy have in common, as nested values."""
  config = base.get_config()
  config.sampler.group_size = 8
  config.model.remat = 'full'
  config.batch.rule = 'fresh_only'
  config.advantage.rule = 'group_relative'
  config.loss.kl = 0.0
  config.checkpoint.update(every=1000, keep=1, best=0)
  config.metrics.tensorboard = False
  config.mesh.data = 1
  return config.to_dict()


def shared() -> dict[str, Any]:
  """Returns the policy of 0.1 M parameters and its problems, as nested values."""
  values = common()
  values['problems'] |= {'source': PAIRS, 'test_source': PAIRS}
  values['problems']['custom'] |= {'train': 1024, 'test': 256, 'hard': 0.3}
  values['problems']['custom']['seed'] = 1  # tuning: 0
  values['prompts']['max_prompt_tokens'] = 21
  values['sampler'] |= {'max_num_seqs': 256, 'prefill_batch_size': 256}
  values['sft'] |= {'clean': 700, 'noisy': 80, 'batch': 64, 'slip': 0.5}
  values['evaluate']['group_size'] = 4
  return values


def s1() -> dict[str, Any]:
  """Returns the setting S1: 256 responses per update, four epochs."""
  values = shared()
  values['steps'] = 10
  values['prompts']['count'] = 128
  values['sampler']['max_new_tokens'] = 60
  values['learner'] |= SPLIT | {'minibatches': 4, 'epochs': 4}
  values['optimizer']['lr'] = 6e-4
  values['evaluate']['every'] = 2
  return values


def control() -> dict[str, Any]:
  """Returns the setting S2: 16 responses per update, 16 disjoint updates."""
  values = shared()
  values['steps'] = 40
  values['prompts']['count'] = 32
  values['sampler']['max_new_tokens'] = 120
  # Few slots, since lengths differ much, and micro-batches of 4 rows: a quarter faster.
  values['sampler'] |= {'max_num_seqs': 64, 'prefill_batch_size': 64}
  values['learner'] |= SPLIT | {'minibatches': 16, 'grad_accum_steps': 4}
  values['evaluate']['every'] = 10
  return values


def depths() -> dict[str, Any]:
  """Returns the setting of `depths`: S1 with four disjoint updates of 64 responses."""
  values = s1()
  values['steps'] = 40
  values['prompts']['count'] = 32
  values['learner'] |= {'epochs': 1, 'grad_accum_steps': 8}
  values['evaluate']['every'] = 8
  return values


def with_experts() -> dict[str, Any]:
  """Returns S2 for 20 steps, with the policy of configs/experts.py."""
  values = control()
  values['steps'] = 20
  values['sft'] |= {'experts': 8, 'active': 2, 'ffn': 96}
  values['optimizer']['lr'] = 6e-4
  values['evaluate']['every'] = 5
  return values


def s3() -> dict[str, Any]:
  """Returns the setting S3: a published model whose weights are sent every 4 steps."""
  values = common()
  values['steps'] = 8
  values['model'] |= {'path': 'models/SmolLM2-135M-Instruct', 'remat': 'none'}
  values['tokenizer']['template'] = 'chat:{problem}'
  values['problems']['source'] = 'papers/bench/sums_train.jsonl'
  values['problems']['test_source'] = 'papers/bench/sums_test.jsonl'
  values['rewards']['rule'] = 'gsm8k'
  values['prompts'] |= {'count': 16, 'max_prompt_tokens': 40}
  values['sampler'] |= {'max_new_tokens': 40, 'temperature': 0.6}
  values['sampler'] |= {'max_num_seqs': 64, 'prefill_batch_size': 64}
  values['rollout']['weight_sync_interval'] = 4
  values['learner'] |= SPLIT | {'minibatches': 4, 'grad_accum_steps': 4}
  values['optimizer'] |= {'lr': 1e-5, 'warmup': 0}
  values['evaluate'] |= {'every': 8, 'group_size': 4}
  values['evaluate']['sampling']['temperature'] = 0.6
  return values


def quantised() -> dict[str, Any]:
  """Returns the embedded default with the actor's precision left to the arms."""
  config = base.get_config()
  config.steps = 80
  config.evaluate.update(every=40, group_size=8)
  config.checkpoint.update(every=1000, keep=1, best=0)
  config.metrics.tensorboard = False
  config.mesh.data = 1
  return config.to_dict()


DEPTHS = {f'depth{k}': {'rollout.depth': k} for k in (0, 1, 4, 16)}
AHEAD = {  # the arms of `depths`
  **{arm: RIVALS[arm] for arm in ('balanced', 'grpo', 'unclipped', 'tis', 'cispo')},
  **{arm: RIVALS[arm] for arm in ('m2po', 'icepop')},
  'decoupled': PUBLISHED['decoupled'],
}
BFLOAT16 = {'model.compute': 'bfloat16'}
INT8 = {'model.compute': 'bfloat16', 'sampler.actor_dtype': 'int8'}
PRECISION: dict[str, dict[str, Any]] = {
  'bfloat16': BFLOAT16,
  'bfloat16_tis': BFLOAT16 | PUBLISHED['tis'],
  'int8': INT8,
  'int8_tis': INT8 | PUBLISHED['tis'],
  'int8_decoupled': INT8 | {'loss.rule': 'decoupled'},
}


RULES = 'papers/bench/bounds.py'
WIDE_SHARE = {'lr0.0006': 0.54, 'lr0.0008': 0.45}  # of `recipe` in protocol 2


def constant(low: float, high: float, search: str) -> dict[str, Any]:
  """An arm with constant bounds that records what a search would have chosen."""
  knobs = {'low': low, 'high': high, 'search': search}
  return _rule('constant', knobs)


def _rule(name: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
  of_rule = {f'clip.{knob}': value for knob, value in knobs.items()}
  return {'clip.rule': f'{RULES}:{name}'} | of_rule


REPLAYING = _rule('recorded', {'search': 'recipe'}) | LIMIT
YOKED: dict[str, dict[str, Any]] = {  # the donors first, and those who read them last
  'recipe': CLIPPING['recipe'],
  'coin': _rule('coin', {'search': 'recipe'}) | LIMIT,
  'low80_high120': constant(0.8, 1.2, 'recipe') | LIMIT,
  'low80_high200': constant(0.8, 2.0, 'recipe') | LIMIT,
  'low95_high120': constant(0.95, 1.2, 'recipe') | LIMIT,
  'low95_high200': constant(0.95, 2.0, 'recipe') | LIMIT,
  'yoked': REPLAYING,
}
YOKED_S1: dict[str, dict[str, Any]] = {
  'balanced': CLIPPING['balanced'],
  'low80_high120': constant(0.8, 1.2, 'balanced'),
  'low80_high300': constant(0.8, 3.0, 'balanced'),
  'low90_high120': constant(0.9, 1.2, 'balanced'),
  'low90_high300': constant(0.9, 3.0, 'balanced'),
  'yoked': _rule('recorded', {'search': 'balanced'}),
}


REPLAYED = {  # the arms of `routes`
  f'{arm}_{routes}': overrides | {'model.replay_routes': routes}
  for arm, overrides in (
    ('grpo', CLIPPING['grpo']),
    ('balanced', CLIPPING['balanced']),
    ('gspo', PUBLISHED['gspo']),
  )
  for routes in ('on', 'measure')
}
COMPUTED = {x: {'model.compute': x} for x in ('float32', 'bfloat16')}
STALENESS = {  # updates per step
  'updates1': {'learner.minibatches': 1, 'learner.grad_accum_steps': 64},
  'updates16': {'learner.minibatches': 16},
  'updates64': {'learner.minibatches': 16, 'learner.epochs': 4},
}


def partner(seed: int) -> int:
  """Returns the other seed of a pair: 600 and 601 are partners."""
  return seed ^ 1


def of_run(name: str, arm: str, levels: Mapping[str, str], seed: int) -> dict[str, Any]:
  """Returns the knobs of one run: its problems, the donor, and the coin."""
  knobs: dict[str, Any] = {'problems.custom.seed': seed}
  if arm == 'yoked':
    donor = 'balanced' if name == 'yoked_s1' else 'recipe'
    knobs['clip.results'] = f'papers/bench/results/{name}'
    knobs['clip.donor'] = run_name(donor, levels, partner(seed))
  if arm == 'coin':
    knobs['clip.wide'] = WIDE_SHARE[levels['rate']]
    knobs['clip.draw'] = seed
  return knobs


def yoked(
  name: str,
  values: dict[str, Any],
  arms: Mapping[str, dict[str, Any]],
  seeds: tuple[int, ...],
  factors: Mapping[str, Mapping[str, dict[str, Any]]] = {},
) -> Experiment:
  """Returns an experiment of protocol 3: pair of seeds by pair, donors first."""
  each = functools.partial(of_run, name)
  return Experiment(values, arms, seeds, factors, each, block=2)


def get_experiment(name: str) -> Experiment:
  """Returns one of NAMES.

  Raises:
    KeyError: no such experiment.
  """
  rates = {f'lr{lr:g}': {'optimizer.lr': lr} for lr in (6e-4, 8e-4)}
  two = {arm: CLIPPING[arm] for arm in ('balanced', 'grpo')}
  repeated = {arm: CLIPPING[arm] for arm in ('recipe', 'low90_high300')}
  repeated['low87_high156'] = fixed(*RECIPE_MEAN) | LIMIT
  ahead = {x: YOKED[x] for x in ('recipe', 'low80_high120', 'low95_high200', 'yoked')}
  deep = control()
  deep['optimizer']['lr'] = 6e-4
  depth = {x: DEPTHS[x] for x in ('depth4', 'depth16')}
  tuning = s1()
  tuning['problems']['custom']['seed'] = 0
  return {
    'tuning': Experiment(tuning, two, TUNING),
    's1': Experiment(s1(), CLIPPING, TEST),
    'rivals': Experiment(s1(), RIVALS, TEST),
    'control': Experiment(control(), CLIPPING, CONTROL, {'rate': rates}),
    'recipe_again': Experiment(control(), repeated, RECIPE_SEEDS, {'rate': rates}),
    'quantised': Experiment(quantised(), PRECISION, TEST[:3]),
    's3': Experiment(s3(), two, S3_SEEDS),
    'depths': Experiment(depths(), AHEAD, DEPTH_SEEDS, {'depth': DEPTHS}),
    'yoked': yoked('yoked', control(), YOKED, YOKED_SEEDS, {'rate': rates}),
    'yoked_s1': yoked('yoked_s1', s1(), YOKED_S1, YOKED_S1_SEEDS),
    'yoked_depths': yoked(
      'yoked_depths', deep, ahead, YOKED_DEPTH_SEEDS, {'depth': depth}
    ),
    'routes': Experiment(
      with_experts(),
      REPLAYED,
      ROUTES_SEEDS,
      {'precision': COMPUTED, 'staleness': STALENESS},
      lambda arm, levels, seed: {'problems.custom.seed': seed},
    ),
    'routes_first': Experiment(
      with_experts(),
      {arm: x for arm, x in REPLAYED.items() if arm.endswith('_measure')},
      ROUTES_TRIAL,
      {
        'precision': {'bfloat16': COMPUTED['bfloat16']},
        'staleness': {'updates64': STALENESS['updates64']},
      },
      lambda arm, levels, seed: {'problems.custom.seed': seed},
    ),
  }[name]
