"""The experiments on Balanced PO (arXiv:2510.18927) for a small policy.

The protocol is ../protocol.md. "Section" and "Fig." are of the paper, "script" is its
public code; what the paper leaves open, or what a policy of 0.1 M parameters needs
otherwise, is ours, and is listed in README.md.
"""

from collections.abc import Iterable
from typing import Any

from configs import base
from lab.experiments import Experiment

PAIRS = 'examples/pairs.py:pairs'
TUNING = (100, 101, 102, 103)  # seeds that choose values
TEST = (0, 1, 2, 3, 4, 5, 6, 7)  # seeds that are reported
NAMES = (
  'imbalance',
  'tuning',
  'main',
  'staleness',
  'entropy',
  'partial',
  'plane',
)

# Wrong to right length -> limit of a response in tokens; the solutions of `even` try
# every candidate, so that right and wrong ones are equally long.
IMBALANCE: dict[str, dict[str, Any]] = {
  'even': {'problems.custom.stops': False, 'sampler.max_new_tokens': 56},
  'ratio1.5': {'sampler.max_new_tokens': 68},
  'ratio2': {'sampler.max_new_tokens': 120},
  'ratio3': {'sampler.max_new_tokens': 160},
}
# Updates per rollout batch, the staleness of Fig. 2 and 11.
UPDATES: dict[str, dict[str, Any]] = {
  'k1': {'learner.minibatches': 1},
  'k4': {'learner.minibatches': 4},
  'k16': {'learner.minibatches': 16},
  'k16epochs': {'learner.minibatches': 4, 'learner.epochs': 4},
}


def fixed(low: float, high: float) -> dict[str, Any]:
  """An arm with constant bounds."""
  return {'clip.rule': 'fixed', 'clip.low': low, 'clip.high': high}


def balanced(target: float) -> dict[str, Any]:
  """Algorithm 1, section 4."""
  return {
    'clip.rule': 'balanced',
    'clip.target': target,  # rho_0: 0.4 in section 5, chosen by tuning here
    'clip.low': (0.6, 0.9),  # [a-, b-], section 5
    'clip.high': (1.2, 3.0),  # [a+, b+], section 5
    'clip.high_step': 0.05,  # delta_1, section 5
    'clip.low_step': 0.02,  # delta_2, section 5
  }


TARGET = 0.36  # 0.4 in section 5; the tuning seeds' choice
OWN_MEAN = (0.764, 2.193)  # of the tuning seeds' runs at TARGET; .69 and 2.06 in Fig. 8

ARMS: dict[str, dict[str, Any]] = {
  'grpo': fixed(0.8, 1.2),  # the baseline of Fig. 2 and 11
  'clip_higher': fixed(0.8, 1.28),  # Fig. 11
  'start': fixed(0.6, 1.2),  # where the search begins
  'low76_high219': fixed(*OWN_MEAN),  # what the search gives on average
  'low90_high300': fixed(0.9, 3.0),  # where the search ends
  'balanced': balanced(TARGET),
  'recipe': {  # script: its search, dual clip, and clamped log-ratio
    'clip.rule': 'recipe',
    'loss.limit': 20.0,
    'learner.bounds_scope': 'micro_batch',
  },
  'gspo': {  # arXiv:2507.18071: one ratio per response
    **fixed(0.9997, 1.0004),
    'loss.rule': 'sequence',
    'loss.aggregate': 'sequence',
  },
  'cispo': {**fixed(0.0, 1.28), 'loss.rule': 'cispo'},  # arXiv:2506.13585
  'decoupled': {**fixed(0.8, 1.2), 'loss.rule': 'decoupled'},  # arXiv:2505.24298
  'grpo_slow': {**fixed(0.8, 1.2), 'optimizer.lr': 1e-4},  # the best rate for GRPO
}
PLANE = ('balanced', 'grpo', 'low76_high219')


def shared() -> dict[str, Any]:
  """What all runs have in common, as nested values."""
  config = base.get_config()
  config.steps = 40
  config.problems.update(source=PAIRS, test_source=PAIRS)
  config.problems.custom.update(train=1024, test=256, hard=0.3)
  config.prompts.update(count=32, max_prompt_tokens=21)
  config.sampler.group_size = 8
  config.sampler.max_new_tokens = 120  # as level ratio2
  config.sampler.max_num_seqs = 256
  config.sampler.prefill_batch_size = 256
  config.model.remat = 'none'
  config.sft.update(clean=700, noisy=80, batch=64, slip=0.5)
  config.batch.rule = 'fresh_only'  # GRPO's batch, section 5
  config.advantage.rule = 'group_relative'  # GRPO's advantage, section 5
  config.loss.kl = 0.0  # script
  config.learner.minibatches = 16
  config.learner.grad_accum_steps = 1
  config.optimizer.lr = 3e-4  # 2e-6 in section 5; chosen as ../protocol.md says
  config.evaluate.update(every=10, group_size=4)
  config.checkpoint.update(every=1000, keep=1, best=0)
  config.metrics.tensorboard = False
  config.mesh.data = 1
  return config.to_dict()


def crossed(
  arms: Iterable[str],
  seeds: tuple[int, ...],
  imbalance: Iterable[str] = ('ratio2',),
  updates: Iterable[str] = ('k16',),
) -> Experiment:
  """Arms by imbalance by updates; the levels are those of the main comparison."""
  return Experiment(
    shared(),
    {arm: ARMS[arm] for arm in arms},
    seeds,
    {
      'imbalance': {level: IMBALANCE[level] for level in imbalance},
      'updates': {level: UPDATES[level] for level in updates},
    },
  )


def get_experiment(name: str) -> Experiment:
  """One of NAMES.

  Raises:
    KeyError: no such experiment.
  """
  return {
    # Whether the levels are what they promise, before they are used.
    'imbalance': crossed(('grpo',), TUNING[:2], IMBALANCE, ('k1', 'k16')),
    'tuning': crossed((), TUNING[:2])._replace(arms=tuning()),
    'main': crossed(ARMS, TEST),
    'staleness': crossed(('grpo',), TEST, updates=UPDATES),
    # Without k1, where ratios are 1 and bounds do the same.
    'plane': crossed(PLANE, TEST[:4], ('even', 'ratio2', 'ratio3'), ('k4', 'k16')),
    # Fig. 7: the entropy rises with a higher upper bound, falls with a lower lower one.
    'entropy': Experiment(
      shared(),
      {'grpo': fixed(0.8, 1.2), 'high': fixed(0.8, 1.5), 'low': fixed(0.5, 1.2)},
      TEST[:4],
      {'updates': {'k16': UPDATES['k16']}},
    ),
    # Fig. 12: token budgets of a learner step, here per decode slot.
    'partial': Experiment(
      shared(),
      {arm: ARMS[arm] for arm in ('grpo', 'balanced')},
      TEST[:4],
      {'budget': {'tokens28': partial(28.0), 'tokens56': partial(56.0)}},
    ),
  }[name]


def tuning() -> dict[str, dict[str, Any]]:
  """The learning rate, by GRPO alone; the target; the bounds of GSPO."""
  rates = {
    f'lr{lr:g}': ARMS['grpo'] | {'optimizer.lr': lr} for lr in (1e-4, 3e-4, 1e-3)
  }
  targets = {f'target{t:.2f}': balanced(t) for t in (0.32, 0.36, 0.40, 0.44)}
  narrow = {'gspo_paper': ARMS['gspo']}
  return rates | targets | narrow | {'gspo_wide': ARMS['gspo'] | fixed(0.97, 1.04)}


def partial(budget: float) -> dict[str, Any]:
  """Partial rollouts that stop at so many tokens per slot and step."""
  return {
    'rollout.max_off_policy_steps': 4,
    'rollout.max_tokens_per_step': budget,
  }
