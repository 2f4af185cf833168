"""The experiments on Batch Adaptation PO (arXiv:2602.20722) for a small policy.

The protocol is ../protocol.md, and ../protocol2.md for `countdown`. "Settings" is the
paper's table of settings, "section" and "Definition" are of the paper, "script" is its
public code; the rest is ours, and is listed in README.md.
"""

from typing import Any

from configs import base
from configs import countdown as countdown_config
from lab.experiments import Experiment

PAIRS = 'examples/pairs.py:pairs'
TUNING = (100, 101, 102, 103)  # seeds that choose values
TEST = (0, 1, 2, 3, 4, 5, 6, 7)  # seeds that are reported
NAMES = (
  'tuning',
  'main',
  'hardness',
  'delay',
  'countdown_tuning',
  'countdown',
  'still',
)
COUNTDOWN_TEST = tuple(range(300, 316))  # protocol 2
RATES = (3e-5, 1e-4, 3e-4, 1e-3)  # from which each arm of `countdown` gets its own

NONE_REUSABLE = (0.0625, 0.0625)  # no pass rate of eight responses lies there
BALANCED = {'clip.rule': 'balanced', 'clip.target': 0.36}  # chosen in ../balanced_po

ARMS: dict[str, dict[str, Any]] = {
  'grpo': {'batch.rule': 'fresh_only'},
  'dapo': {  # dynamic sampling and clip-higher, arXiv:2503.14476
    'batch.rule': 'learnable_only',
    'clip.high': 1.28,
  },
  'replay': {'batch.rule': 'replay', 'buffer.thresholds.rule': 'everything'},
  'without_x2': {'batch.rule': 'adapted', 'buffer.reevaluate': 0},
  'without_x3': {
    'batch.rule': 'adapted',
    'buffer.thresholds.reusable': NONE_REUSABLE,
  },
  'adapted': {'batch.rule': 'adapted'},  # Definition 3.1
  # The four cells of both methods: grpo, adapted, and these.
  'balanced': {'batch.rule': 'fresh_only', **BALANCED},
  'both': {'batch.rule': 'adapted', **BALANCED},
}
HARDNESS: dict[str, dict[str, Any]] = {
  f'hard{share}': {'problems.custom.hard': share / 100} for share in (0, 60)
}
# v of the settings. m stays 2: with another number of re-evaluations a run of equal
# responses would have another number of updates.
DELAY: dict[str, dict[str, Any]] = {
  f'every{v}': {'rollout.weight_sync_interval': v} for v in (1, 2, 5)
}


def shared() -> dict[str, Any]:
  """What all runs have in common, as nested values."""
  config = base.get_config()
  config.steps = 120
  config.responses = 10_240.0  # 40 steps of GRPO; re-evaluations and extra rounds count
  config.problems.update(source=PAIRS, test_source=PAIRS)
  config.problems.custom.update(train=1024, test=128, hard=0.6, answer='all')
  config.prompts.update(count=32, max_prompt_tokens=21)
  config.sampler.group_size = 8  # G, settings
  config.sampler.max_new_tokens = 84
  config.sampler.max_num_seqs = 256
  config.sampler.prefill_batch_size = 256
  config.model.remat = 'none'
  config.sft.update(clean=700, noisy=80, batch=64, slip=0.5)
  config.learner.update(minibatches=4, grad_accum_steps=1)  # settings: 256 / 64
  config.rollout.weight_sync_interval = 2  # v: 5 in the settings, 2 in the script
  config.buffer.update(
    capacity=256,
    reevaluate=16,  # settings: half as many as a step has prompts
    reeval_interval=2,  # m: 5 in the settings, 2 in the script
    hard_order='fifo',  # section 3
    max_off_policy_steps=3,  # section 3
  )
  config.buffer.thresholds.rule = 'fixed'  # settings
  config.buffer.thresholds.update(
    hard=1 / 8,  # c1, settings
    reusable=(1 / 8, 5 / 8),  # c2 and c3, settings
  )
  config.advantage.rule = 'group_relative'  # section 3
  config.clip.rule = 'fixed'  # settings: epsilon = 0.2
  config.clip.update(low=0.8, high=1.2)
  config.optimizer.lr = 3e-4  # 1e-6 in the settings
  config.loss.kl = 0.0  # script; .001 to .01 in the settings
  config.evaluate.update(every=20, group_size=16)  # their 0 of 16 responses
  config.checkpoint.update(every=1000, keep=1, best=0)
  config.metrics.tensorboard = False
  config.mesh.data = 1
  return config.to_dict()


# The ablation of the paper, on Countdown.
ABLATION: dict[str, dict[str, Any]] = {
  'grpo_fresh': {'batch.rule': 'fresh_only', 'rollout.weight_sync_interval': 1},
  'grpo': ARMS['grpo'],
  'grpo_epochs': {**ARMS['grpo'], 'learner.epochs': 2},
  'dapo': {**ARMS['dapo'], 'evaluate.every': 2},
  'dapo_more': {**ARMS['dapo'], 'evaluate.every': 2, 'responses': 2.6 * 10_240},
  'replay': ARMS['replay'],
  'without_x2': ARMS['without_x2'],
  'without_x3': ARMS['without_x3'],
  'adapted': ARMS['adapted'],
}
TUNED_RATE = dict.fromkeys(ABLATION, 1e-4) | {'grpo_epochs': 3e-5}  # by its tuning
# Twice as many responses by the same weights: what `newly_solved` is without training.
STILL = {
  **ARMS['grpo'],
  'optimizer.lr': 1e-12,
  'responses': 256.0,
  'evaluate.group_size': 32,
}


def on_countdown() -> dict[str, Any]:
  """Returns what all runs of the ablation have in common, as nested values."""
  config = countdown_config.embedded()
  config.steps = 200
  config.responses = 10_240.0  # re-evaluations and extra rounds count
  config.problems.custom.seed = 1  # tuning: 0
  config.prompts.count = 32
  config.sampler.update(group_size=8, max_num_seqs=256, prefill_batch_size=256)
  config.learner.minibatches = 4
  config.rollout.weight_sync_interval = 5  # v, settings
  config.buffer.update(capacity=256, reevaluate=16, reeval_interval=5)  # m, settings
  config.buffer.update(hard_order='fifo', max_off_policy_steps=6)
  config.buffer.thresholds.rule = 'fixed'
  config.buffer.thresholds.update(hard=1 / 8, reusable=(1 / 8, 5 / 8))
  config.advantage.rule = 'group_relative'
  config.clip.rule = 'fixed'
  config.clip.update(low=0.8, high=1.2)
  config.loss.kl = 0.0
  config.evaluate.update(every=4, group_size=16)
  config.checkpoint.update(every=1000, keep=1, best=0)
  config.mesh.data = 1
  return config.to_dict()


def ablation(tuning: bool) -> Experiment:
  """Returns the ablation on Countdown, or the runs that choose its rates."""
  values = on_countdown()
  if not tuning:
    arms = {
      arm: {**knobs, 'optimizer.lr': TUNED_RATE[arm]} for arm, knobs in ABLATION.items()
    }
    return Experiment(values, arms, COUNTDOWN_TEST)
  values['problems']['custom']['seed'] = 0
  rates = {f'lr{lr:g}': {'optimizer.lr': lr} for lr in RATES}
  return Experiment(values, ABLATION, TUNING[:2], {'rate': rates})


def get_experiment(name: str) -> Experiment:
  """One of NAMES.

  Raises:
    KeyError: no such experiment.
  """
  two = {arm: ARMS[arm] for arm in ('grpo', 'adapted')}
  rates = {
    f'lr{lr:g}': ARMS['grpo'] | {'optimizer.lr': lr} for lr in (1e-4, 3e-4, 1e-3)
  }
  return {
    'tuning': Experiment(shared(), rates, TUNING[:2]),
    'main': Experiment(shared(), ARMS, TEST),
    'hardness': Experiment(shared(), two, TEST[:4], {'hardness': HARDNESS}),
    'delay': Experiment(shared(), two, TEST[:4], {'delay': DELAY}),
    'countdown_tuning': ablation(tuning=True),
    'countdown': ablation(tuning=False),
    'still': Experiment(on_countdown(), {'still': STILL}, COUNTDOWN_TEST),
  }[name]
