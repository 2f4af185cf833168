"""The records that flow through a training step, and the letters that name their axes.

1. `Prompts` are asked, `Groups` come back: G scored responses to each of P prompts;
2. `Shelves` hold groups between steps: a replay buffer is a Groups with a capacity;
3. `Batch` is the learner's flat view, one row a response.

Every array's name ends in the letters of its axes, and `agree` checks them:

  P prompt groups   G responses per prompt   B = P*G sequences   T token positions
  S decode slots    V vocabulary   D model width   H query heads   K key/value heads
  C head width      F feed-forward width   L layers   R rows prefilled at once
  N problems in a data set
"""

# fmt: off
# ruff: noqa: E501
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Prompts(NamedTuple):
  id_P: Any        # i32   which problem
  tokens_PT: Any   # i32   the prompt from column 0, then padding
  length_P: Any    # i32   tokens in the prompt


class Groups(NamedTuple):
  id_P: Any        # i32   which problem
  tokens_PGT: Any  # i32   prompt, response, padding, from column 0
  chosen_PGT: Any  # bool  True where the policy chose the token
  logp_PGT: Any    # f32   log mu(token), nats, under the distribution sampled; 0 elsewhere
  born_PGT: Any    # i32   learner step of the weights that chose each token; -1 where none
  correct_PG: Any  # bool  the verifier's verdict
  reward_PG: Any   # f32   what the learner sees (the verdict, shaped or not)
  born_P: Any      # i32   learner step at which the group was completed; -1 marks an empty row


class PassRateThresholds(NamedTuple):
  hard: Any        # i32 scalar  most right answers of a group whose problem is hard
  first: Any       # i32 scalar  fewest right answers of a good group
  last: Any        # i32 scalar  most right answers of a good group


class ReplayBuffer(NamedTuple):
  hard: Groups     # problems the policy (almost) always fails; born_P: last tried
  good: Groups     # groups with verdicts of both kinds, whole, as they were written
  used_P: Any      # i32   how often each good group was learned from again
  right: Any       # i32 scalar  right answers among all fresh ones so far
  tried: Any       # i32 scalar  all fresh answers so far
  band: PassRateThresholds       # what is hard and what is good, as it stands


class Batch(NamedTuple):
  tokens_BT: Any   # i32   prompt, response, padding
  mask_BT: Any     # bool  True where the token teaches: chosen, in a kept seat
  logp_BT: Any     # f32   log mu(token), nats
  prox_BT: Any     # f32   log-probability under the proximal policy; log mu where no rule asks
  adv_B: Any       # f32   advantage of the response
  source_B: Any    # i32   where the row comes from: index into SOURCES; -1 marks an empty seat


class Bounds(NamedTuple):
  low: Any         # f32 scalar  ratio below which a negative token is no longer pushed down
  high: Any        # f32 scalar  ratio above which a positive token is no longer pushed up
  cap: Any         # f32 scalar  the most `high` may be for a reused row; inf: no other than `high`
  dual: Any        # f32 scalar  ratio above which a negative token is no longer pushed; inf: none
  start_low: Any   # f32 scalar  `low` before the search
  start_high: Any  # f32 scalar  `high` before the search
  moves: Any       # i32 scalar  steps the search took from its start; 0 where there is none
  met: Any         # bool scalar the target was met; True where there is no target


SOURCES = ('fresh', 'rechecked', 'reused')  # what a batch rule fills its seats from


# fmt: on
def agree(**arrays) -> dict[str, int]:
  """Checks that axes of one letter have one size; returns letter -> size.

  >>> agree(logp_BT=logp_BT, adv_B=adv_B)
  ValueError: adv_B has B=5, but B=4 elsewhere
  """
  size = {}
  for name, array in arrays.items():
    letters = name.rsplit('_', 1)[-1]
    if len(letters) != array.ndim:
      raise ValueError(
        f'{name} promises axes {letters}, but its shape is {array.shape}'
      )
    for letter, n in zip(letters, array.shape, strict=True):
      if size.setdefault(letter, n) != n:
        raise ValueError(
          f'{name} has {letter}={n}, but {letter}={size[letter]} elsewhere'
        )
  return size


def empty_groups(rows: int, group: int, length: int) -> Groups:
  """`rows` empty seats: born at step -1."""
  P, G, T = rows, group, length
  return Groups(
    id_P=jnp.full(P, -1, jnp.int32),
    tokens_PGT=jnp.zeros((P, G, T), jnp.int32),
    chosen_PGT=jnp.zeros((P, G, T), bool),
    logp_PGT=jnp.zeros((P, G, T), jnp.float32),
    born_PGT=jnp.full((P, G, T), -1, jnp.int32),
    correct_PG=jnp.zeros((P, G), bool),
    reward_PG=jnp.zeros((P, G), jnp.float32),
    born_P=jnp.full(P, -1, jnp.int32),
  )


def take(tree, index):
  """Rows `index` of every array in the tree, along axis 0."""
  return jax.tree.map(lambda x: x[index], tree)


def concat(*trees):
  """The rows of several trees of one type, in order."""
  return jax.tree.map(lambda *xs: jnp.concatenate(xs), *trees)


def first_of(id_N, valid_N):
  """True where a row is valid and no earlier valid row has its id."""
  same_NN = (id_N[:, None] == id_N[None]) & valid_N[None]
  return valid_N & ~jnp.tril(same_NN, -1).any(1)


def masked_mean(x, mask):
  """Mean of x where mask holds; 0 where it holds nowhere."""
  return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)


def bind_rule(
  rules: dict[str, Callable], section: str, name: str, knobs: dict
) -> Callable:
  """The rule `name` with its knobs bound; `section` names it in errors.

  `knobs` maps every rule's name to that rule's keywords. All are checked, so that a knob
  misspelt under a rule that is not chosen today does not lie in wait for tomorrow.

  Raises:
    ValueError: no such rule, or a rule has no such knob.
  """
  if name not in rules:
    raise ValueError(
      f'{section}.rule: no rule named {name!r}; choose one of {sorted(rules)}'
    )
  for rule, own in knobs.items():
    if rule not in rules:
      raise ValueError(f'{section}.{rule}: no such rule; the rules are {sorted(rules)}')
    known = [
      p.name
      for p in inspect.signature(rules[rule]).parameters.values()
      if p.kind is p.KEYWORD_ONLY
    ]
    for knob in set(own) - set(known):
      raise ValueError(f'{section}.{rule}.{knob}: no such knob; {rule} knows {known}')
  chosen = dict(knobs.get(name, {}))

  def bound(*args):
    return rules[name](*args, **chosen)

  return bound
