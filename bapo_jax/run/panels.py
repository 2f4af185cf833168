"""Lists the charts of runs and the metrics of their tables, for pages and figures."""

from typing import NamedTuple

from bapo_jax.types import SOURCES


class Panel(NamedTuple):
  """A chart with up to three metrics."""

  title: str
  unit: str  # of the vertical axis
  labels: dict[str, str]  # metric -> its name in the legend
  compared: int = 1  # how many of the metrics the chart of several runs has
  spiky: bool = False  # a spike would flatten the other values on a linear axis
  optional: bool = False  # drawn only if it is recorded

  def caption(self, name: str) -> str:
    """Returns the title of a figure that draws one of the metrics."""
    return ', '.join(filter(None, (self.title, self.labels[name])))


REWARDS = {'rollout/reward': 'fresh responses', 'eval/reward': 'held-out problems'}
SHARES = {'clip/share': 'bounds used', 'clip/share_start': 'start bounds'}
BOUNDS = {'clip/high': 'high', 'clip/low': 'low'}
SIGNS = {'clip/fraction_positive': 'A > 0', 'clip/fraction_negative': 'A < 0'}
LENGTHS = {'rollout/length_right': 'right', 'rollout/length_wrong': 'wrong'}
IDLE = {'overlap/sampler_idle': 'sampler', 'overlap/learner_idle': 'learner'}
FAR = {'teacher/kl': 'teacher', 'loss/reference': 'reference'}
KL = 'KL from behaviour to current policy'
LARGEST = 'Largest ratio of a token'
ROUTES = 'Agreement of the routers'
EXPERTS = 'Tokens of the busiest expert'
# The last six need mesh.rollout, an environment, a teacher, rollout.given, or experts.
PANELS = (
  Panel('Reward', 'mean reward', REWARDS, compared=2),
  Panel('Accuracy on held-out problems', 'accuracy ± error', {'eval/accuracy': ''}),
  Panel('Accuracy of the fresh responses', 'accuracy', {'rollout/accuracy': ''}),
  Panel('Entropy of the policy', 'nats per token', {'loss/entropy': ''}),
  Panel(KL, 'nats per token', {'loss/kl': ''}, spiky=True),
  Panel('Positive share', 'share of the gradient', SHARES),
  Panel('Clip bounds', 'probability ratio', BOUNDS, compared=2),
  Panel('Tokens clipped', 'share', {'clip/fraction': 'all tokens', **SIGNS}),
  Panel('Batch by source', 'share of the seats', {f'batch/{x}': x for x in SOURCES}),
  Panel('Gradient norm', 'norm', {'learner/grad_norm': ''}, spiky=True),
  Panel('Response length', 'tokens', {'rollout/length': 'all', **LENGTHS}),
  Panel('Groups of both verdicts', 'share of the groups', {'batch/learnable': ''}),
  Panel(LARGEST, 'probability ratio', {'loss/ratio_max': ''}, spiky=True),
  Panel('Seconds of a step', 'seconds', {'time/step': ''}),
  Panel('Time without work', 'share of the step', IDLE, compared=2, optional=True),
  Panel('Turns of a response', 'turns', {'rollout/turns': ''}, optional=True),
  Panel('KL to the teacher or first policy', 'nats per token', FAR, optional=True),
  Panel('Given tokens', 'log-probability, nats', {'given/logp': ''}, optional=True),
  Panel(ROUTES, 'share of layers and tokens', {'moe/agree': ''}, optional=True),
  Panel(EXPERTS, 'times the mean', {'moe/load': ''}, optional=True),
)

# Of the tables: first those that a comparison of runs does not fold.
MAIN = 7
NAMES = """
  eval/accuracy eval/reward eval/length rollout/reward loss/entropy loss/kl clip/share
  eval/truncated rollout/accuracy rollout/length rollout/length_right
  rollout/length_wrong rollout/truncated rollout/responses rollout/tokens_per_s
  rollout/logp_diff batch/filled batch/learnable batch/age clip/share_start clip/low
  clip/high clip/moved clip/target_met clip/fraction loss/ratio_max loss/ess
  learner/grad_norm moe/agree moe/load time/step
"""
METRICS = NAMES.split()
