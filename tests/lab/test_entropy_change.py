"""The change of entropy by a rule's step, compared with a plain forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.models import layers, transformer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.training.config import Config
from lab import counterfactual
from lab.counterfactual import Applied, Recorded

SPEC = ModelSpec(
  vocab=16, width=16, layers=2, heads=2, kv_heads=1, head_width=8, ffn=32
)
IDS = [([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10, 11])]
MASK_BT = np.asarray([[1, 1, 1, 1], [1, 1, 0, 0]], bool)


def recorded(ids=IDS):
  fields = dict.fromkeys(Recorded._fields)
  fields |= {'config': Config(), 'loss_mask_BT': MASK_BT}
  return Recorded(**fields | {'ids': ids})


def applied(weight_BT):
  """A rule that gives these weights."""
  nothing = np.zeros_like(weight_BT)
  return Applied(None, nothing, np.zeros(2), np.where(MASK_BT, weight_BT, 0), nothing)


def logprobs(params):
  """Log-probabilities [N, V] before each recorded token, without any padding."""
  rows = []
  for prompt, ids in IDS:
    hidden_TD = layers.forward(params, jnp.asarray([[*prompt, *ids]]), SPEC)[0]
    logp_TV = jax.nn.log_softmax(hidden_TD @ transformer.head(params).T)
    rows.append(logp_TV[len(prompt) - 1 : -1])
  return jnp.concatenate(rows)


def entropy(params):
  logp_NV = np.asarray(logprobs(params), np.float64)
  return -(np.exp(logp_NV) * logp_NV).sum(1).mean()


def objective(params, weight_N):
  """sum(weight * log-probability) of the recorded tokens."""
  tokens_N = np.concatenate([ids for _, ids in IDS])
  return (logprobs(params)[np.arange(len(tokens_N)), tokens_N] * weight_N).sum()


def test_what_is_measured_is_the_entropy_after_a_step_along_the_gradient():
  params = transformer.init(SPEC, jax.random.key(0))
  params = jax.tree.map(lambda x: 2 * x, params)
  weight_BT = np.random.default_rng(1).normal(size=MASK_BT.shape).astype(np.float32)
  step, rules = 3e-6, {'one': applied(weight_BT), 'half': applied(weight_BT / 2)}
  change = counterfactual.entropy_changes(recorded(), rules, (SPEC, params), step)
  gradient = jax.grad(objective)(params, jnp.asarray(weight_BT[MASK_BT]))
  length, norm = (
    sum(float((x**2).sum()) for x in jax.tree.leaves(tree)) ** 0.5
    for tree in (params, gradient)
  )
  after = jax.tree.map(lambda x, g: x + step * length / norm * g, params, gradient)
  expected = entropy(after) - entropy(params)
  (predicted, measured), (half, _) = change['one'], change['half']
  # An entropy of two nats in float32 has an error of some 1e-6.
  assert measured == pytest.approx(expected, abs=5e-6) and abs(expected) > 3e-4
  # The derivative is the limit of the difference, and half the weights give half.
  assert predicted == pytest.approx(expected, rel=0.03)
  assert half == pytest.approx(predicted / 2, rel=1e-4)


def test_a_record_that_the_forward_pass_cannot_read_is_refused():
  with pytest.raises(ValueError, match='token ids'):
    counterfactual.entropy_changes(recorded(None), {}, (SPEC, {}), 1e-3)
