"""The records of a training step, the letters of their axes, and the rules' signatures.

1. `Prompts` go into a rollout, `Groups` come out: G scored responses per prompt;
2. `ReplayBuffer` keeps groups between steps, in two Groups of fixed capacity, and
   `History` counts the verdicts on each problem;
3. `Batch` is the learner's flat view, one row per response;
4. a `Function` is the type of all rules of one kind, such as all loss rules.

Every array's name ends in the letters of its axes, and `agree` checks them:

  P prompt groups   G responses per prompt   B = P*G sequences   T token positions
  S decode slots    V vocabulary   D model width   H query heads   K key/value heads
  C head width      F feed-forward width   L layers   R rows prefilled at once
  N problems in a data set   X numbers of a token's route, K chosen experts in each of L layers

and for pictures:

  I pictures of a prompt   Z patches   M merged patches   W windows   E numbers of a patch
"""

# fmt: off
# ruff: noqa: E501
import functools
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32, UInt, UInt8

Tree = Any  # a pytree of arrays, as JAX has them
Mask = Any  # a bool array; None: True everywhere
AnyTree = TypeVar('AnyTree')
AnyArray = TypeVar('AnyArray', Array, np.ndarray)


class Prompts(NamedTuple):
  id_P: Int32[np.ndarray, ' P']        # problem id; -1 marks an empty row
  tokens_PT: Int32[np.ndarray, 'P T']  # the prompt from column 0, then padding
  length_P: Int32[np.ndarray, ' P']    # tokens in the prompt


class Pictures(NamedTuple):
  pixels_PZE: UInt8[Array, 'P Z E']  # the patches of a prompt's pictures, one picture after the other, then zeros
  grid_PI2: Int32[Array, 'P I 2']    # patches of each picture along height and width; 0 for no picture
  window_PW: Bool[Array, 'P W']      # True for each window of the pictures, from column 0


class EmbeddedPictures(NamedTuple):
  merged_PMD: Float[Array, 'P M D']  # the merged patches, as the vision tower embeds them
  grid_PI2: Int32[Array, 'P I 2']    # as in Pictures


class Groups(NamedTuple):
  id_P: Int32[Array, ' P']                     # problem id; -1 marks an empty row
  tokens_PGT: Int32[Array, 'P G T']            # prompt, response, padding, from column 0
  response_mask_PGT: Bool[Array, 'P G T']      # True where the policy sampled the token, or the response is given
  behavior_logp_PGT: Float32[Array, 'P G T']   # log mu(token), nats, under the distribution sampled from; 0 elsewhere
  policy_version_PGT: Int32[Array, 'P G T']    # learner step of the weights that sampled each token, or GIVEN; -1 elsewhere
  correct_PG: Bool[Array, 'P G']               # the verifier's verdict; False where it has none
  decided_PG: Mask                             # bool, False where the verifier has no verdict: the response is in no mean of its group, nor in the loss; None: see learner.settled
  reward_PG: Float32[Array, 'P G']             # the reward that the learner sees (the verdict, shaped or not)
  teaches_PG: Bool[Array, 'P G']               # False where the response is left out of the loss; its reward stays in its group
  completed_step_P: Int32[Array, ' P']         # learner step at which the group was completed; -1 marks an empty row
  step_reward_PGT: Float32[Array, 'P G T'] | None = None  # reward of the step that ends at the token; 0 elsewhere; None: the run has no step rewards
  step_end_PGT: Bool[Array, 'P G T'] | None = None        # True at the last token of a step
  routes_PGTX: UInt[Array, 'P G T X'] | None = None       # experts that the sampler used when it read the token; the dtype's maximum where it read none; None: not recorded


class PassRateThresholds(NamedTuple):
  hard_max: Int32[Array, '']      # largest number of correct responses of a hard group
  reusable_min: Int32[Array, '']  # smallest number of correct responses of a reusable group
  reusable_max: Int32[Array, '']  # largest number of correct responses of a reusable group


class ReplayBuffer(NamedTuple):
  hard: Groups                       # problems that the policy (almost) always fails, the last to enter first; completed_step_P: last attempt
  reusable: Groups                   # groups with right and wrong responses, whole, as they were sampled
  usage_count_P: Int32[Array, ' P']  # how often each reusable group was trained on again; -1: promoted, and not trained on yet
  num_correct: Int32[Array, '']      # correct fresh responses so far
  num_responses: Int32[Array, '']    # fresh responses so far
  thresholds: PassRateThresholds     # the thresholds in force


class History(NamedTuple):               # of each training problem, on the host; groups of all processes, hard problems included
  tries_N: Int32[np.ndarray, ' N']      # responses with a verdict
  right_N: Int32[np.ndarray, ' N']      # right responses among them, as the verdict counts them: of a graded reward, those from rewards.right_from on
  last_step_N: Int32[np.ndarray, ' N']  # learner step at which its last group was completed; -1: never
  waiting_N: Int32[np.ndarray, ' N']    # its groups that are submitted and not completed


class Batch(NamedTuple):
  tokens_BT: Int32[Array, 'B T']           # prompt, response, padding
  loss_mask_BT: Bool[Array, 'B T']         # True where the token is trained on: sampled, in a filled seat
  behavior_logp_BT: Float32[Array, 'B T']  # log mu(token), nats
  prox_BT: Float32[Array, 'B T']           # log-probability under the proximal policy, nats; log mu where the loss rule reads none
  adv_BT: Float32[Array, 'B T']            # advantage of the token, times the weight of its source
  source_B: Int32[Array, ' B']             # index into SOURCES; -1 marks an empty seat
  on_policy_BT: Bool[Array, 'B T']         # True where the weights before the step's first update sampled the token
  update_B: Int32[Array, ' B'] | None = None  # number of this optimiser update, equal in all rows; step s of n updates has s n to s n + n - 1, even if its batch is underfilled
  reference_BT: Float32[Array, 'B T'] | None = None  # log-probability under the teacher, or the first weights, nats; None: not computed
  pictures: EmbeddedPictures | Pictures | None = None  # of the P prompts, each with B / P consecutive responses; None: a text model
  routes_BTX: UInt[Array, 'B T X'] | None = None  # as in Groups
  given_BT: Mask = None  # bool, True where the token is trained on and no policy sampled it, see `loss.from_given`; None: nowhere

  @property
  def trained_BT(self) -> Array:
    """The mask of all tokens that are trained on, sampled or not."""
    return self.loss_mask_BT if self.given_BT is None else self.loss_mask_BT | self.given_BT

  def only(self, keep_BT: Array) -> 'Batch':
    """Returns the batch in which no other token is trained on."""
    given_BT = None if self.given_BT is None else self.given_BT & keep_BT
    return self._replace(loss_mask_BT=self.loss_mask_BT & keep_BT, given_BT=given_BT)


class TokenStats(NamedTuple):
  logp_BT: Float32[Array, 'B T']        # log pi(token), nats
  entropy_BT: Float32[Array, 'B T']     # H, the entropy of the distribution of the token, nats
  covariance_BT: Float32[Array, 'B T']  # Cov_pi[pi, log pi] = sum over words of pi^2 (log pi + H); no gradient
  agree_BT: Float32[Array, 'B T'] | None = None  # share of the layers whose router would use the recorded experts of the token before; None: none are recorded


class UpdatedTokens(NamedTuple):
  logp_BT: Float32[Array, 'B T']   # log pi(token), nats, of the weights before the update; 0 where it was not computed
  ratio_BT: Float32[Array, 'B T']  # the ratio that the loss rule clipped; 0 outside the loss mask
  cut_BT: UInt8[Array, 'B T']      # index into CUTS: why a token with A != 0 has no gradient


class Bounds(NamedTuple):              # a bound is a scalar, or has an axis B or the axes B, T
  low: Float32[Array, '']         # ratio below which a negative token is no longer pushed down
  high: Float32[Array, '']        # ratio above which a positive token is no longer pushed up
  cap: Float32[Array, '']         # upper limit of `high` for reused rows; inf: none
  dual: Float32[Array, '']        # ratio above which a negative token is no longer pushed; inf: none
  start_low: Float32[Array, '']   # `low` before the search
  start_high: Float32[Array, '']  # `high` before the search
  search_steps: Int32[Array, '']  # steps of the search from its start; 0 without a search
  target_met: Bool[Array, '']     # the target share is met; True without a target, False without evidence
  no_evidence: Bool[Array, '']    # a search found no token with a gradient, and left the start bounds
  negatives_only: Bool[Array, '']  # a search found tokens with A < 0 and none with A > 0
  keep_BT: Bool[Array, 'B T'] | None = None  # False: the token leaves the objective, by a mask or clip rule; None: no mask


class LogpDiff(NamedTuple):
  total: Float32[Array, '']    # sum of |learner logp - sampler logp| over tokens of the same weights, nats
  largest: Float32[Array, '']  # largest of these differences; 0 without tokens
  tokens: Int32[Array, '']     # tokens compared


Source = Literal['fresh', 'reevaluated', 'reused']  # of the groups in a batch
SOURCES: tuple[Source, ...] = typing.get_args(Source)
GIVEN = int(np.iinfo(np.int32).max)  # version of the tokens of a given response, which no policy sampled
Unsampled = Literal['', 'given', 'messages']  # tokens that no policy sampled and that are trained on
# Of a token: not cut; no gradient by bounds or loss rule; left out by Bounds.keep_BT.
CUTS = ('', 'clipped', 'masked')


# fmt: on
def agree(**arrays: Any) -> dict[str, int]:
  """Checks that axes with the same letter have the same size; returns letter -> size.

  >>> agree(logp_BT=logp_BT, source_B=source_B)
  ValueError: source_B has B=5, but B=4 elsewhere
  """
  size = {}
  for name, array in arrays.items():
    letters = name.rsplit('_', 1)[-1]
    if len(letters) != array.ndim:
      raise ValueError(f'{name} must have axes {letters}, not shape {array.shape}')
    for letter, n in zip(letters, array.shape, strict=True):
      if (other := size.setdefault(letter, n)) != n:
        raise ValueError(f'{name} has {letter}={n}, but {letter}={other} elsewhere')
  return size


class Routes(NamedTuple):
  """The form of recorded routes, of a model with experts."""

  numbers: int  # X
  dtype: str

  @property
  def none(self) -> int:
    """Returns the mark of a token without a recorded route."""
    return int(np.iinfo(self.dtype).max)

  def empty(self, *shape: int) -> Array:
    """Returns routes [*shape, X] in which none is recorded."""
    return jnp.full((*shape, self.numbers), self.none, self.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))  # one program, not nine
def empty_groups(
  rows: int, group: int, length: int, steps: bool = False, routes: Routes | None = None
) -> Groups:
  """Returns `Groups` of `rows` empty rows, marked by id -1 and completed_step -1.

  `steps` adds the arrays of step rewards, `routes` those of experts.
  """
  P, G, T = rows, group, length
  return Groups(
    id_P=jnp.full(P, -1, jnp.int32),
    tokens_PGT=jnp.zeros((P, G, T), jnp.int32),
    response_mask_PGT=jnp.zeros((P, G, T), bool),
    behavior_logp_PGT=jnp.zeros((P, G, T), jnp.float32),
    policy_version_PGT=jnp.full((P, G, T), -1, jnp.int32),
    correct_PG=jnp.zeros((P, G), bool),
    decided_PG=jnp.ones((P, G), bool),
    reward_PG=jnp.zeros((P, G), jnp.float32),
    teaches_PG=jnp.ones((P, G), bool),
    completed_step_P=jnp.full(P, -1, jnp.int32),
    step_reward_PGT=jnp.zeros((P, G, T), jnp.float32) if steps else None,
    step_end_PGT=jnp.zeros((P, G, T), bool) if steps else None,
    routes_PGTX=routes.empty(P, G, T) if routes else None,
  )


def take(tree: AnyTree, index: Any) -> AnyTree:
  """Returns rows `index` (integers, a mask or a slice) of every array."""
  return jax.tree.map(lambda x: x[index], tree)


def concat(*trees: AnyTree) -> AnyTree:
  """Concatenates the rows of several trees of one type."""
  return jax.tree.map(lambda *xs: jnp.concatenate(xs), *trees)


def ended(
  response_mask_PGT: AnyArray, is_end_PGT: AnyArray, cut_length: int | None = None
) -> AnyArray:
  """Marks the responses [P, G] whose last sampled token is an end token.

  Turns before the last end with such a token too. With stop strings, responses of fewer
  than `cut_length` tokens ended as well; one that a string ends at exactly this length
  is not told from a truncated one. Takes arrays of JAX or of NumPy.
  """
  count_PGT = response_mask_PGT.cumsum(-1)
  last_PGT = response_mask_PGT & (count_PGT == count_PGT[..., -1:])
  ended_PG = (last_PGT & is_end_PGT).any(-1)
  if cut_length is None:
    return ended_PG
  length_PG = response_length(response_mask_PGT)
  return ended_PG | ((length_PG > 0) & (length_PG < cut_length))


def response_length(response_mask_PGT: AnyArray) -> AnyArray:
  """Returns the tokens [P, G] from the first sampled one to the last, both included.

  The messages between turns count, as they do in sampler.max_new_tokens. Takes arrays
  of JAX or of NumPy.
  """
  outside_PG = response_mask_PGT.argmax(-1) + response_mask_PGT[..., ::-1].argmax(-1)
  return (response_mask_PGT.shape[-1] - outside_PG) * response_mask_PGT.any(-1)


def first_of(id_N: Array, valid_N: Array) -> Array:
  """Marks the valid rows whose id no earlier valid row has."""
  same_NN = (id_N[:, None] == id_N[None]) & valid_N[None]
  return valid_N & ~jnp.tril(same_NN, -1).any(1)


def trained_on(groups: Groups) -> Array:
  """Marks the responses [P, G] in the loss: not left out, and at least one token."""
  return groups.teaches_PG & groups.response_mask_PGT.any(2)


def passing(groups: Groups, low: int | Array, high: int | Array) -> Array:
  """Marks the groups [P] with `low` to `high` of G right responses, both included.

  If some responses are undecided, the pass rate is that of the others; a group without
  a verdict is not marked.
  """
  n_P = groups.decided_PG.sum(1)
  right_P = groups.correct_PG.sum(1) * groups.correct_PG.shape[1]
  return (n_P > 0) & (right_P >= low * n_P) & (right_P <= high * n_P)


def learnable(groups: Groups) -> Array:
  """Marks the groups [P] with right and wrong responses and with unequal rewards.

  Mixed verdicts alone are not enough: rewards may be shaped, and the rewards of
  responses that are left out of the loss do not count.
  """
  k_P = groups.correct_PG.sum(1)
  trained_PG = trained_on(groups)
  most_P = jnp.where(trained_PG, groups.reward_PG, -jnp.inf).max(1)
  least_P = jnp.where(trained_PG, groups.reward_PG, jnp.inf).min(1)
  both_P = (k_P > 0) & (k_P < groups.decided_PG.sum(1))
  return both_P & (most_P > least_P) & (groups.completed_step_P >= 0)


def masked_mean(x: Array, mask: Array) -> Array:
  """Returns the mean of x over the mask; 0 if the mask is empty."""
  return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)


# Bounds -> weight_BT, the gradient of a loss rule: d objective / d logp per token, up to
# a common factor.
Weigh = Callable[[Bounds], Array]
# Ratios that the loss rule clips, [B, T] -> the bounds to clip with: searched, or given.
FindBounds = Callable[[Array], Bounds]


# (ratio_BT, batch, weigh) -> the bounds at which a loss rule clips these ratios.
ClipFunction = Callable[[Array, Batch, Weigh], Bounds]
# (logp_BT, batch) -> keep_BT, False for masked tokens; or None, which keeps all tokens.
MaskFunction = Callable[[Array, Batch], Array | None]
# (logp_BT, batch, find) -> (gain_BT, bounds): the objective of each token, and the bounds
# used. Training maximises the gain, which is 0 outside the loss mask.
LossFunction = Callable[[Array, Batch, FindBounds], tuple[Array, Bounds]]
# (rate, G) -> the thresholds for groups of G, given the share of right responses.
ThresholdFunction = Callable[[Array, int], PassRateThresholds]
# (fresh, reevaluated, buffer, now, key, seats) -> `seats` groups and source_P, their
# indices into SOURCES (-1 if empty).
BatchFunction = Callable[..., tuple[Groups, Array]]


class AdvantageFunction(Protocol):
  # 'rewards', or 'groups': called with Groups, and returns adv_PGT.
  reads: ClassVar[Any]

  @property
  def custom(self) -> bool:
    """Whether it is a user's function, which takes no valid_PG."""

  def __call__(self, reward_PG: Any, valid_PG: Array | None = None, /) -> Array:
    """Returns adv_PG, the advantages within each group; 0 where all rewards are equal.

    Rewards outside valid_PG, if given, are not compared.
    """
