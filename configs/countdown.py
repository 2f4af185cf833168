r"""Countdown, four cells at equal rollouts, on the embedded policy.

  python -m bapo_jax.main --config=configs/countdown.py --workdir=runs/countdown
  SEEDS="0 1 2" launch/sweep.sh                            (the same over seeds, a table)
  python -m bapo_jax.main --config=configs/countdown.py:both ...            (one cell)

|                     | batch `fresh_only` | batch `adapted` |
|---------------------|--------------------|-----------------|
| clip `fixed`        | grpo               | batch           |
| clip `balanced`     | clip               | both            |

Every cell starts from one warm start and ends once it has sampled `config.responses`
responses, re-evaluations counted: a cell that re-evaluates takes fewer steps.

The problems: two or three numbers of 1..9 and a target up to 30, asked as `5 6 3=13`.
The warm start shows the policy of 0.1 M parameters how to try random chains; it then
reaches the target sometimes, and of a good part of the problems never in eight tries.

From Batch Adaptation PO (arXiv:2602.20722, its public script): the actor is refreshed
and the hard shelf re-evaluated every 2 steps, at most half as many problems as a step
asks, groups of 8, bands 1/8 and 1/8 to 5/8. From Balanced PO (arXiv:2510.18927): the
ranges of the bounds.
Two CPU cores; minutes and scores: see LOG.md.
"""

from configs import base

CELLS = (  # name, batch rule, clip rule
  ('grpo', 'fresh_only', 'fixed'),
  ('clip', 'fresh_only', 'balanced'),
  ('batch', 'adapted', 'fixed'),
  ('both', 'adapted', 'balanced'),
)


def get_config(arg: str = ''):
  """The sweep, or one of its cells.

  Raises:
    ValueError: no such cell.
  """
  config = embedded()
  if not arg:
    config.cells = CELLS
    return config
  rules = {name: rules for name, *rules in CELLS}
  if arg not in rules:
    raise ValueError(
      f'configs/countdown.py has no cell {arg!r}; choose one of {sorted(rules)}'
    )
  config.title += f': {arg}'
  config.batch.rule, config.clip.rule = rules[arg]
  return config


def embedded():
  """What the cells have in common."""
  config = base.get_config()
  config.title = 'countdown, tiny'
  config.steps = 60
  config.responses = 30_720.0
  config.problems.update(
    source='countdown', test_source='countdown', train=1280, test=256
  )
  config.problems.countdown.update(
    numbers=(2, 3), largest=9, target=30, wording='short'
  )
  config.model.remat = 'none'  # there is memory enough
  config.prompts.max_prompt_tokens = 10
  config.sampler.max_new_tokens = 48
  config.rewards.rule = 'countdown'
  # The own share of these problems; at 0.42 the bounds sat at their caps (LOG.md).
  config.clip.balanced.target = 0.39
  config.rollout.weight_sync_interval = 2
  config.buffer.update(capacity=256, reevaluated=32, every=2)
  config.sft.update(clean=800, noisy=0)  # what is not learned well slips enough
  config.evaluate.update(every=20, group=8)
  config.metrics.tensorboard = False
  return config
