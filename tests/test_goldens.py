"""Three updates of every published method, as one line of numbers of goldens.txt.

A change of any preset or rule is a change of its line. The policy is a table of logits,
so that a line depends on the rules alone. To write the file again:

  cd tests && PYTHONPATH=.. python -c 'import conftest, test_goldens as t; t.write()'

It imports conftest first, whose flags of XLA decide how sums are rounded.
"""

import pathlib

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest

from bapo_jax.algorithms import loss, replay_buffer
from bapo_jax.learner import learner
from bapo_jax.learner.objective import Objective
from bapo_jax.methods import METHODS
from bapo_jax.runtime import machine
from bapo_jax.training.config import Config, merged, parse
from bapo_jax.types import take

FILE = pathlib.Path(__file__).parent / 'goldens.txt'
PLACE = f'# processor {machine.processor()}, jax {jax.__version__}'
IDS, G, T, V = 16, 8, 3, 11
RATE = 8.0


def table(seed):
  """Log-probabilities [IDS, T, V] of a policy."""
  logits = np.random.default_rng(seed).normal(size=(IDS, T, V))
  return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))


# The weights before the first update: some way from the policy that sampled.
START = table(0) + 0.8 * table(4)


def scored(logits, groups):
  """log-probability [P, G, T] of the tokens of groups."""
  logp_PGTV = jax.nn.log_softmax(logits)[groups.id_P][:, None]
  logp_PGTV = jnp.broadcast_to(logp_PGTV, (*groups.tokens_PGT.shape, V))
  return jnp.take_along_axis(logp_PGTV, groups.tokens_PGT[..., None], 3)[..., 0]


def sampled(ids, right, step):
  """Groups sampled at a step by the policy of table(0)."""
  groups = making.groups(ids, right, [step] * len(ids), G=G, T=T, seed=step)
  groups = groups._replace(tokens_PGT=jnp.clip(groups.tokens_PGT, 0, V - 1))
  logp_PGT = jnp.where(groups.response_mask_PGT, scored(table(0), groups), 0)
  return groups._replace(behavior_logp_PGT=logp_PGT)


def batch_of(config):
  """The groups of a step, after a step whose groups entered the buffer."""
  k = config.buffer
  shape = k.capacity * config.batch.uses_buffer, G, T
  buffer = replay_buffer.init(*shape, thresholds=k.thresholds)
  earlier = sampled(range(8), [0, 1, 3, 4, 5, 7, 8, 2], 0)
  nothing = take(earlier, slice(0))
  if config.batch.uses_buffer:
    buffer, _ = replay_buffer.insert(
      buffer,
      earlier,
      nothing,
      earlier,
      jnp.zeros(8, int),
      0,
      thresholds=k.thresholds,
      max_off_policy_steps=k.max_off_policy_steps,
      max_reuse=k.max_reuse,
      hard_order=k.hard_order,
    )
  fresh = sampled(range(8, 16), [0, 2, 8, 4, 1, 5, 8, 6], 1)
  again = sampled([0], [1], 1) if config.batch.reevaluates else nothing
  key = jax.random.key(0)
  return config.batch(fresh, again, buffer, 1, key, config.batch.seats(8))


def line(name):
  """Value, norm of the gradient, advantages and bounds of three updates of a method."""
  config = parse(merged(Config().model_dump(), METHODS[name].overrides))
  groups, source_P = batch_of(config)
  objective = Objective(
    clip_rule=config.clip,
    mask_rule=config.mask,
    loss_rule=config.loss,
    spec=making.SPEC,
    temperature=1.0,
    length=T,
  )
  id_B = jnp.repeat(groups.id_P, G)

  @jax.jit
  def update(logits, number):
    batch = learner.flatten(
      groups,
      source_P,
      config.advantage,
      prox_PGT=scored(START, groups),
      weights=config.credit['weights'],
      number=number,
    )
    scale_B = loss.row_scale(batch.loss_mask_BT, config.loss.aggregate, T)

    def value_of(logits):
      logp_PGT = scored(logits, groups)
      logp_BT = logp_PGT.reshape(batch.tokens_BT.shape)
      logp_BTV = jax.nn.log_softmax(logits)[id_B]
      entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
      find = objective.search(logp_BT, batch, scale_B)
      return objective.loss(logp_BT, batch, scale_B, find, entropy_BT)

    (value, bounds), slope = jax.value_and_grad(value_of, has_aux=True)(logits)
    kept = 1.0 if bounds.keep_BT is None else bounds.keep_BT.mean()
    limits = [jnp.mean(x) for x in (bounds.low, bounds.high)]
    numbers = [
      value,
      jnp.linalg.norm(slope),
      jnp.abs(batch.adv_BT).sum(),
      *limits,
      kept,
    ]
    return logits - RATE * slope, jnp.stack([jnp.float32(x) for x in numbers])

  logits = START
  numbers = []
  for i in range(3):
    logits, row = update(logits, i)
    numbers += [f'{x:.9g}' for x in np.asarray(row).tolist()]
  return f'{name} {" ".join(numbers)}'


@pytest.mark.parametrize('name', METHODS)
def test_three_updates_of_a_method_give_its_line(name):
  place, *lines = FILE.read_text().splitlines()
  stored = next(x for x in lines if x.startswith(f'{name} '))
  found = line(name)
  if place == PLACE:
    assert found == stored
  numbers = (np.float32(x.split()[1:]) for x in (found, stored))
  np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-6)


def write():
  """Writes goldens.txt."""
  FILE.write_text('\n'.join([PLACE, *map(line, METHODS), '']))
