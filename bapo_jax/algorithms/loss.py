"""Computes the objective of each token: one class per loss rule.

A rule maps (logp_BT, batch, find) to (gain_BT, bounds). `gain_BT` is the objective
of each token, 0 outside the loss mask; its derivative with respect to logp is the
weight of the token in the policy gradient. A rule calls `find` with the ratios that it
clips; `find` searches bounds or returns fixed bounds. In formulas pi is the policy, mu
the policy that sampled the token, A the advantage, and sg stops the gradient.

1. `ratio` compares the policy with the policy that sampled the tokens;
2. the rules: `Clipped` (PPO, GRPO, DAPO) and published alternatives;
3. `divergence` and `from_reference` are the optional penalties; `from_given` is the
   objective of tokens that no policy sampled;
4. `row_scale` defines how rows are averaged; `weights` and `weigher` return the weight
   of each token in the gradient; `finder` puts the loss, clip and mask rule together.
"""

import functools
import math
import typing
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval
from jax import Array

from bapo_jax.knobs import Range, Rising, knob
from bapo_jax.parts import OneOf, Part
from bapo_jax.types import (
  SOURCES,
  Batch,
  Bounds,
  ClipFunction,
  FindBounds,
  LossFunction,
  MaskFunction,
  Weigh,
)

Gain = tuple[Array, Bounds]  # objective of each token [B, T], and the bounds used
Aggregate = Literal['token', 'sequence', 'constant']
Factor = Annotated[float, Interval(gt=0, le=100)]
KlDirection = Literal['behavior_policy', 'policy_behavior', 'squared']
ReferenceEstimator = Literal['weighted', 'k3', 'k2', 'k1_reward']


def log_ratio(logp_BT: Array, old_BT: Array, loss_mask_BT: Array) -> Array:
  """Returns the log-ratio logp_BT - old_BT of each token, nats; 0 outside the mask."""
  return jnp.where(loss_mask_BT, logp_BT - old_BT, 0)


def log_r(logp_BT: Array, batch: Batch) -> Array:
  """Returns log r = log pi - log mu of each token, nats; 0 outside the loss mask."""
  return log_ratio(logp_BT, batch.behavior_logp_BT, batch.loss_mask_BT)


def ratio(logp_BT: Array, batch: Batch) -> Array:
  """Returns r = pi / mu of each token; 1 outside the loss mask."""
  return jnp.exp(log_r(logp_BT, batch))


class LossRule(Part):
  """The objective of a token, and how it is averaged over tokens.

  Its class variables declare what a rule needs.
  """

  arguments = ('logp_BT', 'batch', 'find')
  returns = ('gain_BT', 'found')
  # Clip bounds 'cut' the gradient of a token, 'limit' its weight, or are 'ignored'.
  bounds: ClassVar[Literal['cut', 'limit', 'ignored']] = 'cut'
  needs_proximal: ClassVar[bool] = False  # reads Batch.prox_BT
  weighs_sampler: ClassVar[bool] = False  # corrects the sampler's log-probabilities
  clips_surrogate: ClassVar[bool] = False  # the gain is min(r A, clip(r, low, high) A)

  aggregate: Aggregate = knob(
    'token',
    'token: mean over all tokens; sequence: mean over responses of their token mean; '
    'constant: mean over responses of their sum / max_new_tokens.',
  )
  kl: float = knob(
    0.0,
    'Cost per nat of divergence from mu, the policy that sampled the batch.',
    least=0,
    most=1000,
  )
  kl_direction: KlDirection = knob(
    'behavior_policy',
    'The divergence: behavior_policy, KL(mu || pi); policy_behavior, KL(pi || mu); '
    'squared, (log r)^2 / 2.',
    needs='loss.kl',
  )

  entropy: float = knob(
    0.0,
    'Bonus per nat of entropy of the policy at each token, with an exact gradient.',
    least=0,
    most=1000,
  )
  reference: float = knob(
    0.0,
    "Cost per nat of divergence from the teacher; without teacher.path from the run's "
    "first weights, GRPO's beta.",
    least=0,
    most=1000,
  )
  reference_estimator: ReferenceEstimator = knob(
    'weighted',
    "The divergence from the teacher's p: weighted, r k3 (DeepSeek-V3.2); k3 of p / pi "
    '(GRPO); k2, (log pi - log p)^2 / 2; k1_reward takes log mu - log p off the '
    'advantage.',
    needs='loss.reference',
  )

  given: float = knob(
    1.0,
    'Factor on the objective of given responses, a mean over their tokens alone; their '
    'share of the tokens weighs them like sampled ones (LUFFY).',
    least=0,
    most=1000,
    needs='rollout.given',
  )
  given_gamma: float = knob(
    0.1,
    'gamma of A pi / (pi + gamma), the objective of a given token; LUFFY has 0.1.',
    above=0,
    most=1000,
    needs=('rollout.given', 'loss.given'),
  )
  imitation: float = knob(
    0.0,
    'Cost per nat of cross-entropy on given responses, or on messages of the '
    'environment, a mean over these tokens alone.',
    least=0,
    most=1000,
    needs='unsampled',
  )

  @property
  def reads_all(self) -> bool:
    """Whether tokens without an advantage have a gradient too."""
    return bool(self.kl or self.entropy or self.reference or self.imitation)

  @property
  def reference_in_reward(self) -> float:
    """The part of `reference` that is taken off advantages, not off the objective.

    Advantages change before the bounds are searched, so a clip rule cuts this cost, and
    a rule that balances the policy gradient counts it.
    """
    return self.reference if self.reference_estimator == 'k1_reward' else 0.0

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    """Returns (gain_BT, bounds): the objective of each token, and the bounds used.

    Args:
      logp_BT: log pi of each token, nats.
      batch: the tokens with their advantages and the log-probabilities under mu.
      find: ratios that the rule clips [B, T] -> the bounds to clip with.
    """
    raise NotImplementedError

  def fault(self, result, example) -> str:
    """Says what is wrong with the gradient, or with bounds that `find` did not give."""
    logp_BT = example['logp_BT']
    batch = example['batch']
    clip = example['clip']
    given = example['found']
    weigh = jax.jit(functools.partial(weights, self))
    weight_BT = weigh(logp_BT, batch, given)
    if (result[1].high != given.high).any():
      return (
        'does not return the bounds of `find`, so no clip rule has an effect; return '
        '(gain_BT, find(ratio_BT)), and declare bounds="ignored" if it ignores bounds'
      )
    free = given._replace(low=0.1, high=math.inf, dual=math.inf)
    free_BT = weigh(logp_BT, batch, free)
    if not jnp.isfinite(weight_BT).all() or not free_BT.any():
      return 'has a gradient of 0 or nan; return a gain that depends on logp_BT'
    reads = clip.gives == 'bounds' and self.bounds != 'ignored'
    if reads and jnp.array_equal(weight_BT, free_BT):
      return (
        f'does not use the bounds that `find` returns, so clip.rule={clip.rule!r} has '
        "no effect; choose clip.rule='unclipped'"
      )
    # All ratios and advantages are 1.
    old_BT = batch.behavior_logp_BT
    if weigh(old_BT, batch._replace(adv_BT=-old_BT), given).sum() < 0:
      return (
        'lowers the probability of tokens with a positive advantage; return the gain, '
        'which is maximised, and not a loss'
      )
    return ''


def _cap(default: float, ratio: str) -> Any:
  sentence = f'Upper limit of {ratio}, the weight of a token; inf: none.'
  return knob(default, sentence, above=0, infinite=True)


class Clipped(LossRule):
  """PPO's clipped surrogate, min(r A, clip(r, low, high) A), r = pi / mu.

  It is Eq. 7 of arXiv:1707.06347. Bounds.dual keeps the gain of a token with A < 0 at
  dual A or above: dual-clip PPO (arXiv:1912.09729). `limit` clamps |log r|, nats; the
  public code of Balanced PO clamps at 20.
  """

  clips_surrogate = True

  rule: Literal['clipped'] = 'clipped'
  limit: float = knob(
    math.inf,
    'Clamps the log-ratio of a token to [-limit, limit], nats; inf: not clamped.',
    above=0,
    infinite=True,
  )

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    if self.limit < math.inf:
      log_r_BT = jnp.clip(log_r_BT, -self.limit, self.limit)
    bounds = find(jnp.exp(log_r_BT))
    return _cut_off(log_r_BT, batch, bounds), bounds


class Decoupled(LossRule):
  """min(prox / mu, cap) times the clipped surrogate of r = pi / prox.

  This is the decoupled objective of arXiv:2110.00641, section 3, as AReaL uses it
  (arXiv:2505.24298, section 5.2). prox is the policy at the start of the learner step.
  If this policy sampled the batch, the objective with truncation is the PPO form of TIS
  (Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training"). In the first update of a step r is 1 however stale the data are, so that
  the clip rule `balanced` has nothing to balance there.

  `beyond_cap` applies to tokens with prox / mu > `cap`: 'truncate' limits the factor
  to the cap (TIS), 'mask' sets the gain to 0 (`behav_imp_weight_cap` of AReaL's code).
  """

  needs_proximal = True
  weighs_sampler = True

  rule: Literal['decoupled'] = 'decoupled'
  cap: float = _cap(2.0, 'prox / mu')
  beyond_cap: Literal['truncate', 'mask'] = knob(
    'truncate',
    'Above `cap`: truncate the weight to the cap (TIS), or mask the token (AReaL).',
    needs='capped',
  )

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    # The clip compares with prox, not mu: the trust region is around the weights of the
    # step's start, and prox / mu alone corrects for the age of the data.
    log_r_BT = log_ratio(logp_BT, batch.prox_BT, batch.loss_mask_BT)
    stale_BT = jnp.exp(log_r(batch.prox_BT, batch))
    bounds = find(jnp.exp(log_r_BT))
    above = self.cap if self.beyond_cap == 'truncate' else 0.0
    factor_BT = jnp.where(stale_BT > self.cap, above, stale_BT)
    # A constant of the data: it scales the objective and has no gradient.
    factor_BT = _finite_without_advantage(factor_BT, batch)
    if self.beyond_cap == 'mask':  # before exp: 0 times a ratio that overflows is nan
      log_r_BT = jnp.where(stale_BT > self.cap, 0, log_r_BT)
    return factor_BT * _cut_off(log_r_BT, batch, bounds), bounds


class SequenceRatio(LossRule):
  """PPO's clipped surrogate with one ratio s per response: GSPO.

  s = (pi(y) / mu(y))^(1/|y|) for response y (arXiv:2507.18071, Eq. 5 and 7). It is
  computed token by token, as GSPO-token (Eq. 13 and 14), whose A is the token's: value
  and gradient are equal if all tokens of a response have one advantage.
  The paper averages over responses (loss.aggregate='sequence') and has narrow bounds
  (clip.low=0.9997, high=1.0004).
  """

  rule: Literal['sequence'] = 'sequence'

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    # The value of s with the gradient of the token: so a token-wise advantage keeps its
    # own tokens, as in GSPO-token.
    length_B = jnp.maximum(batch.loss_mask_BT.sum(1), 1)
    mean_B = jax.lax.stop_gradient(log_r_BT.sum(1) / length_B)
    ahead_BT = log_r_BT - jax.lax.stop_gradient(log_r_BT)  # 0 with the gradient of logp
    log_s_BT = jnp.where(batch.loss_mask_BT, mean_B[:, None] + ahead_BT, 0)
    bounds = find(jnp.exp(log_s_BT))
    return _cut_off(log_s_BT, batch, bounds), bounds


class Gmpo(LossRule):
  """s A with s the geometric mean of the clipped ratios of a response: GMPO.

  arXiv:2507.20673: log s is the mean over the response's tokens of log r, at most
  log high if A > 0, else at least log low, A of the token. The weight of a token inside
  its bound is s A, and 0 otherwise. A bound changes the weights of all tokens of a
  response, so no clip rule can search it; there is no dual clip. The paper averages
  over responses (loss.aggregate='sequence') and has wide bounds, e^-0.4 and e^0.4.
  """

  bounds = 'limit'

  rule: Literal['gmpo'] = 'gmpo'

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    bounds = find(jnp.exp(log_r_BT))
    up_BT = batch.adv_BT > 0
    # Clipped as logarithms: a ratio that underflows still counts in the mean.
    top = jnp.log(_high(batch, bounds))
    bottom = jnp.log(bounds.low)
    # A clipped token still counts in the mean, with its bound, and has no gradient.
    inside_BT = jnp.where(up_BT, log_r_BT < top, log_r_BT > bottom)
    clipped_BT = jnp.where(
      up_BT, jnp.minimum(log_r_BT, top), jnp.maximum(log_r_BT, bottom)
    )
    length_B1 = jnp.maximum(batch.loss_mask_BT.sum(1, keepdims=True), 1)
    total_B1 = jnp.where(batch.loss_mask_BT, clipped_BT, 0).sum(1, keepdims=True)
    # 0 with the gradient of logp, for the tokens inside their bounds.
    ahead_BT = log_r_BT - jax.lax.stop_gradient(log_r_BT)
    log_s_BT = jax.lax.stop_gradient(total_B1 / length_B1)
    log_s_BT = log_s_BT + jnp.where(inside_BT, ahead_BT, 0)
    # 0 times a mean that overflows is nan.
    counts_BT = batch.loss_mask_BT & (batch.adv_BT != 0)
    gain_BT = jnp.exp(jnp.where(counts_BT, log_s_BT, 0)) * batch.adv_BT
    return jnp.where(batch.loss_mask_BT, gain_BT, 0), bounds


class Cispo(LossRule):
  """sg(clip(r, low, high)) A log pi: CISPO (arXiv:2506.13585, Eq. 4-5).

  The bounds cut no token. The paper has no lower bound (clip.low=0).
  """

  bounds = 'limit'

  rule: Literal['cispo'] = 'cispo'

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    bounds = find(jnp.exp(log_r_BT))
    # The weight is clipped and the token kept: rare words that PPO cuts go on learning.
    weight_BT = jnp.clip(jnp.exp(log_r_BT), bounds.low, _high(batch, bounds))
    return _reinforce(weight_BT, logp_BT, batch), bounds


class Tis(LossRule):
  """sg(min(r, cap)) A log pi: truncated importance sampling.

  The truncation is Eq. 2 of Ionides (2008); its use in REINFORCE follows Yao et al.
  (2025), "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". No
  other clip applies: clip.rule must be 'unclipped'.
  """

  bounds = 'ignored'
  weighs_sampler = True

  rule: Literal['tis'] = 'tis'
  cap: float = _cap(2.0, 'pi / mu')

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    ratio_BT = ratio(logp_BT, batch)
    return _reinforce(jnp.minimum(ratio_BT, self.cap), logp_BT, batch), find(ratio_BT)


class Reinforce(LossRule):
  """A log pi, without any weight for stale data: REINFORCE (Williams, 1992).

  With loss.kl > 0 and loss.kl_direction='squared' it is Direct Reward Optimisation
  (arXiv:2405.19107) in the form that has advantages instead of a value function.
  """

  bounds = 'ignored'

  rule: Literal['reinforce'] = 'reinforce'

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    ratio_BT = ratio(logp_BT, batch)
    return _reinforce(jnp.ones_like(ratio_BT), logp_BT, batch), find(ratio_BT)


class Sapo(LossRule):
  """(4 / tau) sigmoid(tau (r - 1)) A: SAPO (arXiv:2511.20347).

  A soft gate replaces the clip. The weight of a token is 4 s (1 - s) r A with
  s = sigmoid(tau (r - 1)): A at r = 1, falling to 0 on both sides. tau is `positive` if
  A > 0, else `negative`. The paper's average is loss.aggregate='sequence'.
  """

  bounds = 'ignored'

  rule: Literal['sapo'] = 'sapo'
  positive: float = knob(
    1.0, 'Temperature of the gate of tokens with A > 0.', least=1e-3, most=1e3
  )
  negative: float = knob(
    1.05, 'Temperature of the gate of tokens with A <= 0.', least=1e-3, most=1e3
  )

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    # Limited where the gate is saturated: slope 0 times an infinite r would be nan.
    ratio_BT = jnp.exp(jnp.minimum(log_r_BT, 20))
    tau_BT = jnp.where(batch.adv_BT > 0, self.positive, self.negative)
    # Its gradient, 4 s (1 - s) r A, comes from differentiating the gate: no weight by
    # hand.
    gate_BT = jax.nn.sigmoid(tau_BT * (ratio_BT - 1))
    gain_BT = 4 / tau_BT * gate_BT * batch.adv_BT
    return jnp.where(batch.loss_mask_BT, gain_BT, 0), find(jnp.exp(log_r_BT))


class Vespo(LossRule):
  """sg(phi(W)) A log pi, W = pi(y) / mu(y) of response y: VESPO.

  arXiv:2602.10693: phi(W) = W^a e^(b (1 - W)) is 1 at W = 1 and falls to 0 on both
  sides. (a, b) are `positive` if A of the token is >= 0, else `negative`. log W is
  limited to [log 1e-8, 20], as in the public code.
  """

  bounds = 'ignored'

  rule: Literal['vespo'] = 'vespo'
  positive: Range[Factor] = knob(
    (2.0, 3.0),
    'Power of pi(y) / mu(y) and rate of its decay for responses with A >= 0.',
  )
  negative: Range[Factor] = knob(
    (3.0, 2.0),
    'Power of pi(y) / mu(y) and rate of its decay for responses with A < 0.',
  )

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    # Clamped by token, then by response, in the order of the public code: the two
    # clamps do not commute.
    total_B = jnp.clip(log_r_BT, -20, 20).sum(1)
    log_w_B1 = jnp.clip(total_B, math.log(1e-8), 20)[:, None]
    up_BT = batch.adv_BT >= 0
    a_BT, b_BT = (
      jnp.where(up_BT, *pair) for pair in zip(self.positive, self.negative, strict=True)
    )
    phi_BT = jnp.exp(a_BT * log_w_B1 + b_BT * (1 - jnp.exp(log_w_B1)))
    return _reinforce(phi_BT, logp_BT, batch), find(jnp.exp(log_r_BT))


class Aspo(LossRule):
  """The clipped surrogate with 1 / r for tokens with A > 0: ASPO.

  arXiv:2510.06062: with the weight r, a token with A > 0 gets a larger update after its
  probability has risen. The weight 1 / r gives a larger update to a token whose
  probability has fallen. The bounds cut tokens as in `clipped`. The weight, r or 1 / r,
  is at most `cap`; unlike in dual-clip PPO, a token above the cap keeps its gradient.
  """

  rule: Literal['aspo'] = 'aspo'
  cap: float = _cap(3.0, 'the ratio (A < 0) or its inverse (A > 0)')

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    bounds = find(jnp.exp(log_r_BT))
    cut_BT, edge_BT = _crossed(log_r_BT, batch, bounds)
    sign_BT = jnp.where(batch.adv_BT > 0, -1, 1)
    fixed_BT = jax.lax.stop_gradient(jnp.where(cut_BT, 0, log_r_BT))
    # The value of a weight, with the gradient of logp: 1 at ahead_BT.
    ahead_BT = jnp.exp(jnp.where(cut_BT, 0, log_r_BT) - fixed_BT)
    full_BT = jnp.exp(sign_BT * fixed_BT)
    # The gradient of the branch not taken is 0 times its weight, which must be finite:
    # neither an infinite cap nor a ratio that overflows.
    weight_BT = jnp.minimum(full_BT, self.cap)
    capped_BT = jnp.where(batch.loss_mask_BT, weight_BT * logp_BT, 0)
    live_BT = jnp.where(full_BT > self.cap, capped_BT, weight_BT * ahead_BT)
    gain_BT = jnp.where(cut_BT, edge_BT**sign_BT, live_BT) * batch.adv_BT
    return jnp.where(batch.loss_mask_BT, gain_BT, 0), bounds


class Fipo(LossRule):
  """The clipped surrogate times the influence of later tokens: FIPO.

  arXiv:2603.19835: the influence of token t is exp(sum over s >= t of d^(s - t) log
  r_s), d = 2^(-1 / `half_life`), clipped to `limits`: a token counts more if
  the tokens after it have become more likely. For A < 0 and r > `safety` the influence
  is at most 1.
  """

  rule: Literal['fipo'] = 'fipo'
  half_life: float = knob(
    32.0, 'Tokens after which a later token counts half.', above=0, most=1e6
  )
  limits: Rising[Factor] = knob((0.8, 1.2), 'Smallest and largest influence.')
  safety: float = knob(
    4.0,
    'Ratio above which the influence of a token with A < 0 is at most 1; inf: none.',
    above=0,
    infinite=True,
  )

  def __call__(self, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
    log_r_BT = log_r(logp_BT, batch)
    bounds = find(jnp.exp(log_r_BT))
    fixed_BT = jax.lax.stop_gradient(log_r_BT)
    # x_t = log r_t + d x_(t+1) as an associative scan: log2 T steps, no loop over
    # tokens.
    decay_BT = jnp.full_like(fixed_BT, 2 ** (-1 / self.half_life))

    def join(later: tuple[Array, Array], here: tuple[Array, Array]):
      return later[0] * here[0], here[1] + here[0] * later[1]

    _, future_BT = jax.lax.associative_scan(
      join, (decay_BT, fixed_BT), reverse=True, axis=1
    )
    influence_BT = jnp.clip(jnp.exp(future_BT), *self.limits)
    # Later tokens may not amplify the punishment of a token that has become likely.
    risky_BT = (batch.adv_BT < 0) & (jnp.exp(fixed_BT) > self.safety)
    influence_BT = jnp.where(risky_BT, jnp.minimum(influence_BT, 1), influence_BT)
    return influence_BT * _cut_off(log_r_BT, batch, bounds), bounds


Loss = Annotated[
  LossRule,
  OneOf(
    'Loss rule: the objective of a token.',
    Clipped,
    Decoupled,
    SequenceRatio,
    Gmpo,
    Cispo,
    Tis,
    Reinforce,
    Sapo,
    Vespo,
    Aspo,
    Fipo,
  ),
]


def divergence(logp_BT: Array, batch: Batch, direction: KlDirection) -> Array:
  """Returns an estimate of the divergence of each token, nats; 0 outside the mask.

  All are convex in log r near r = 1, with minimum 0 there, and never negative. Value
  and gradient of the first two are unbiased for tokens sampled from mu.

  Args:
    logp_BT: log pi of each token, nats.
    direction: 'behavior_policy', KL(mu || pi) as r - 1 - log r (k3 of Schulman, 2020,
      "Approximating KL Divergence"); 'policy_behavior', KL(pi || mu) of
      arXiv:2602.20722 as r log r - (r - 1), the importance-weighted log-ratio;
      'squared', (log r)^2 / 2 (k2 of Schulman), the penalty of Direct Reward
      Optimisation (arXiv:2405.19107).
  """
  log_r_BT = log_r(logp_BT, batch)
  if direction == 'behavior_policy':
    return k3(log_r_BT)
  if direction == 'squared':
    return jnp.square(log_r_BT) / 2
  return jnp.exp(log_r_BT) * log_r_BT - jnp.expm1(log_r_BT)


def k3(log_r: Array) -> Array:
  """Returns r - 1 - log r: k3 of Schulman (2020), "Approximating KL Divergence"."""
  return jnp.expm1(log_r) - log_r


def from_reference(
  logp_BT: Array, batch: Batch, estimator: ReferenceEstimator = 'weighted'
) -> Array:
  """Returns an estimate of KL(pi || p) of each token, nats; 0 outside the mask.

  p is the reference; the batch must have log p. For tokens sampled from mu, the value
  of 'weighted' is unbiased and its expected gradient is that of KL(pi || p), for any
  mu. With mu = pi the gradient of 'k2' is the same, and that of 'k3' is the gradient of
  KL(p || pi). With mu != pi these two have the gradient of neither.

  Like the paper, 'weighted' limits no weight. r is at most 1 / mu: a token that mu
  hardly ever samples weighs much (loss/ratio_max), and r overflows only if
  mu < e^-88; such an update is not finite, so it is skipped (learner/skipped).

  Args:
    logp_BT: log pi of each token, nats.
    estimator: 'weighted', r k3(log(p / pi)) with r = pi / mu of the token, under every
      loss rule (DeepSeek-V3.2, arXiv:2512.02556, Eq. 7); 'k3', k3(log(p / pi))
      (arXiv:2402.03300, Eq. 4); 'k2', (log pi - log p)^2 / 2 (Schulman, 2020). For
      'k1_reward' see `LossRule.reference_in_reward`.
  """
  assert batch.reference_BT is not None and estimator != 'k1_reward'
  log_q_BT = log_ratio(batch.reference_BT, logp_BT, batch.loss_mask_BT)
  if estimator == 'k3':
    return k3(log_q_BT)
  if estimator == 'k2':
    return jnp.square(log_q_BT) / 2
  # r k3(log q) = p / mu - r (1 + log q). As a product it would be nan where pi
  # underflows: r is 0 there, and q infinite.
  far_BT = log_r(batch.reference_BT, batch)
  return jnp.exp(far_BT) - ratio(logp_BT, batch) * (1 + log_q_BT)


def from_given(rule: LossRule, logp_BT: Array, batch: Batch) -> Array:
  """Returns the objective of tokens that no policy sampled; 0 elsewhere.

  It is `given` A pi / (pi + `given_gamma`) + `imitation` log pi. The first term is the
  shaped objective of mixed-policy GRPO (LUFFY, arXiv:2504.14945, Eq. 8), which has no
  clip: mu is unknown, so the paper takes 1, and the weight of a token is A gamma pi /
  (pi + gamma)^2, most where pi = gamma. Messages have A = 0, so the second term alone
  trains on them.

  Args:
    logp_BT: log pi of each token, nats.
  """
  # pi / (pi + gamma), which does not divide 0 by 0 where pi underflows.
  shaped_BT = jax.nn.sigmoid(logp_BT - math.log(rule.given_gamma))
  gain_BT = rule.given * shaped_BT * batch.adv_BT + rule.imitation * logp_BT
  return jnp.where(batch.given_BT, gain_BT, 0)


def _cut_off(log_r_BT: Array, batch: Batch, bounds: Bounds) -> Array:
  """Returns r A for tokens that are not cut, and the crossed bound times A for others.

  The result is 0 outside the loss mask; a cut token has no gradient.
  """
  cut_BT, edge_BT = _crossed(log_r_BT, batch, bounds)
  # Masked before exp: a cut ratio that overflows would give 0 * inf, which is nan.
  live_BT = jnp.exp(jnp.where(cut_BT, 0, log_r_BT))
  gain_BT = jnp.where(cut_BT, edge_BT, live_BT) * batch.adv_BT
  return jnp.where(batch.loss_mask_BT, gain_BT, 0)


def _crossed(log_r_BT: Array, batch: Batch, bounds: Bounds) -> tuple[Array, Array]:
  """Returns (cut_BT, edge_BT): the tokens that are cut, and the bound they crossed.

  A token is cut if A > 0 and r >= high, or if A < 0 and r <= low or r >= dual. A token
  with A = 0 is always cut: it has no gain, and 0 times a ratio that overflows is nan.
  """
  # The largest float for one that overflows, which no bound of inf cuts.
  ratio_BT = jnp.nan_to_num(jnp.exp(jax.lax.stop_gradient(log_r_BT)), nan=jnp.nan)
  high_BT = _high(batch, bounds)
  floor_BT = jnp.where(ratio_BT >= bounds.dual, bounds.dual, bounds.low)
  below_BT = (ratio_BT <= bounds.low) | (ratio_BT >= bounds.dual)
  edge_BT = jnp.where(batch.adv_BT > 0, high_BT, floor_BT)
  below_BT |= batch.adv_BT == 0
  cut_BT = jnp.where(batch.adv_BT > 0, ratio_BT >= high_BT, below_BT)
  return cut_BT, edge_BT


def _reinforce(weight_BT: Array, logp_BT: Array, batch: Batch) -> Array:
  """Returns sg(weight) A log pi; 0 outside the loss mask."""
  weight_BT = jax.lax.stop_gradient(_finite_without_advantage(weight_BT, batch))
  gain_BT = weight_BT * batch.adv_BT * logp_BT
  return jnp.where(batch.loss_mask_BT, gain_BT, 0)


def _finite_without_advantage(weight_BT: Array, batch: Batch) -> Array:
  """Replaces weights of tokens with A = 0 by 1, because 0 times an overflow is nan."""
  return jnp.where(batch.adv_BT == 0, 1, weight_BT)


def _high(batch: Batch, bounds: Bounds) -> Array:
  """Returns the upper bound of each row [B, 1], at most bounds.cap for reused rows."""
  reused_B1 = (batch.source_B == SOURCES.index('reused'))[:, None]
  return jnp.where(reused_B1, jnp.minimum(bounds.high, bounds.cap), bounds.high)


def gain(rule: LossFunction, logp_BT: Array, batch: Batch, find: FindBounds) -> Gain:
  """Applies a loss rule, then the mask of the bounds: (gain_BT, bounds).

  A masked token has gain 0 and no gradient, under every loss rule.
  """
  gain_BT, bounds = rule(logp_BT, batch, find)
  if (keep_BT := bounds.keep_BT) is None:
    return gain_BT, bounds
  # Held before the rule: a ratio that overflows would give 0 * inf behind it.
  held_BT = jnp.where(keep_BT, logp_BT, jax.lax.stop_gradient(logp_BT))
  return jnp.where(keep_BT, rule(held_BT, batch, lambda _: bounds)[0], 0), bounds


def weights(rule: LossFunction, logp_BT: Array, batch: Batch, bounds: Bounds) -> Array:
  """Returns d gain / d logp, the weight of each token in the policy gradient."""

  def total(logp_BT: Array) -> Array:
    return gain(rule, logp_BT, batch, lambda _: bounds)[0].sum()

  return jax.grad(total)(logp_BT)


def weigher(rule: LossFunction, logp_BT: Array, batch: Batch, scale_B: Array) -> Weigh:
  """Returns a function that maps clip bounds to the tokens' weights in the gradient.

  Args:
    logp_BT: log pi of each token, nats.
    scale_B: see `row_scale`. The weights are relative to the largest scale, so that
      they equal `weights` to the last bit if all rows have the same scale.
  """
  # A share is a quotient, so a common factor of all rows is free to choose.
  relative_B1 = (scale_B / scale_B.max())[:, None]

  def weigh(bounds: Bounds) -> Array:
    return weights(rule, logp_BT, batch, bounds) * relative_B1

  return weigh


def masked(bounds: Bounds, keep_BT: Array | None) -> Bounds:
  """Adds a mask to bounds, which may have one already; None adds no mask."""
  if keep_BT is None:
    return bounds
  both_BT = keep_BT if bounds.keep_BT is None else bounds.keep_BT & keep_BT
  return bounds._replace(keep_BT=both_BT)


def finder(
  rules: tuple[LossFunction, ClipFunction, MaskFunction],
  logp_BT: Array,
  batch: Batch,
  scale_B: Array,
) -> FindBounds:
  """Returns a function that masks tokens and searches bounds for the others.

  Args:
    rules: the loss, clip and mask rule.
    logp_BT: log pi of each token, nats; bounds and mask have no gradient.
    scale_B: see `row_scale`; weights rows as in the loss.
  """
  loss_rule, clip_rule, mask_rule = rules
  logp_BT = jax.lax.stop_gradient(logp_BT)
  keep_BT = mask_rule(logp_BT, batch)
  others = batch  # not for the loss rule: a response's ratio counts its masked tokens
  if keep_BT is not None:
    others = batch._replace(loss_mask_BT=batch.loss_mask_BT & keep_BT)
  weigh = weigher(loss_rule, logp_BT, batch, scale_B)

  def find(ratio_BT: Array) -> Bounds:
    # Without the barrier the compiler fuses the search into the loss, and the gradient
    # of unclipped tokens may differ between clip rules in the last bit.
    bounds = clip_rule(jax.lax.stop_gradient(ratio_BT), others, weigh)
    return jax.lax.optimization_barrier(masked(bounds, keep_BT))

  return find


def clipped_ratio(
  rule: LossFunction, logp_BT: Array, batch: Batch, bounds: Bounds
) -> Array:
  """Returns the ratio of each token that the rule passes to `find`."""
  ratios = []

  def find(ratio_BT: Array) -> Bounds:
    ratios.append(ratio_BT)
    return bounds

  rule(logp_BT, batch, find)
  return ratios[0]


def row_scale(loss_mask_BT: Array, aggregate: Aggregate, length: int) -> Array:
  """Returns the factor [B] of each row's sum of gains in the objective.

  Computed from the whole minibatch, so that micro-batches and devices add up exactly.

  Args:
    aggregate: 'token', the mean over all tokens (DAPO, arXiv:2503.14476, Eq. 8);
      'sequence', the mean over rows of their token means (GRPO, arXiv:2402.03300,
      Eq. 3); 'constant', the mean over rows of sums / length (Dr. GRPO,
      arXiv:2503.20783, section 3.2).
    length: the divisor of 'constant': the maximum length of a response, tokens.
  """
  length_B = loss_mask_BT.sum(1)
  rows = jnp.maximum((length_B > 0).sum(), 1)
  if aggregate == 'token':
    return jnp.broadcast_to(1 / jnp.maximum(length_B.sum(), 1), length_B.shape)
  if aggregate == 'sequence':
    return 1 / (rows * jnp.maximum(length_B, 1))
  if aggregate == 'constant':
    return jnp.broadcast_to(1 / (rows * length), length_B.shape)
  typing.assert_never(aggregate)
