"""The change of entropy by a rule's step, beside plain NumPy on a tiny policy."""

import jax
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


@pytest.fixture(scope='module')
def policy():
  params = transformer.init(SPEC, jax.random.key(0))
  return SPEC, jax.tree.map(lambda x: 2 * x, params)


def recorded(ids=IDS, pictured=False):
  fields = dict.fromkeys(Recorded._fields)
  fields |= {'config': Config(), 'loss_mask_BT': MASK_BT}
  return Recorded(**fields | {'ids': ids, 'pictured': pictured})


def applied(weight_BT):
  """A rule that gives these weights."""
  nothing = np.zeros_like(weight_BT)
  return Applied(None, nothing, np.zeros(2), np.where(MASK_BT, weight_BT, 0), nothing)


def distributions(params):
  """Probabilities [V] before each recorded token, row by row, without any padding."""
  found = []
  for prompt, ids in IDS:
    tokens_1T = np.asarray([[*prompt, *ids]], np.int32)
    hidden_TD = np.asarray(layers.forward(params, tokens_1T, SPEC), np.float64)[0]
    logits_TV = hidden_TD @ np.asarray(transformer.head(params), np.float64).T
    p_TV = np.exp(logits_TV - logits_TV.max(1, keepdims=True))
    p_TV /= p_TV.sum(1, keepdims=True)
    found += list(p_TV[len(prompt) - 1 : -1])
  return np.asarray(found)


def entropy(params):
  p_NV = distributions(params)
  return -(p_NV * np.log(p_NV)).sum(1).mean()


def objective(params, weight_BT):
  """sum(weight * log-probability) of the recorded tokens."""
  p_NV = distributions(params)
  tokens_N = np.concatenate([ids for _, ids in IDS])
  return (np.log(p_NV[range(len(p_NV)), tokens_N]) * weight_BT[MASK_BT]).sum()


def test_what_is_measured_is_the_entropy_after_a_step_along_the_gradient(policy):
  rng = np.random.default_rng(1)
  weight_BT = rng.normal(size=MASK_BT.shape).astype(np.float32)
  step = 3e-6
  found = counterfactual.entropy_changes(
    recorded(),
    {'one': applied(weight_BT), 'half': applied(weight_BT / 2)},
    policy,
    step,
  )
  # The gradient by differences of the plain objective, in the largest of the arrays.
  flat, tree = jax.tree.flatten(policy[1])
  length = sum(float((x**2).sum()) for x in flat) ** 0.5
  gradient = jax.tree.flatten(jax.grad(lambda p: _objective(p, weight_BT))(policy[1]))[
    0
  ]
  i = int(np.argmax([x.size for x in flat]))
  at = np.unravel_index(int(np.abs(gradient[i]).argmax()), flat[i].shape)
  moved = [
    objective(
      tree.unflatten([*flat[:i], flat[i].at[at].add(d), *flat[i + 1 :]]), weight_BT
    )
    for d in (-1e-2, 1e-2)
  ]
  assert float(gradient[i][at]) == pytest.approx((moved[1] - moved[0]) / 2e-2, rel=1e-2)
  norm = sum(float((x**2).sum()) for x in gradient) ** 0.5
  after = [x + step * length / norm * g for x, g in zip(flat, gradient, strict=True)]
  expected = entropy(tree.unflatten(after)) - entropy(policy[1])
  assert found['one'][1] == pytest.approx(expected, abs=5e-6)
  assert abs(expected) > 3e-4
  # The derivative is what the difference tends to, and half the weight is half of it.
  assert found['one'][0] == pytest.approx(expected, rel=0.03)
  assert found['half'][0] == pytest.approx(found['one'][0] / 2, rel=1e-4)


def _objective(params, weight_BT):
  """`objective`, to be differentiated."""
  total = 0.0
  for (prompt, ids), weight_T in zip(IDS, weight_BT, strict=True):
    tokens_1T = np.asarray([[*prompt, *ids]], np.int32)
    hidden_TD = layers.forward(params, tokens_1T, SPEC)[0]
    logp_TV = jax.nn.log_softmax(hidden_TD @ transformer.head(params).T)
    for t, token in enumerate(ids):
      total += weight_T[t] * logp_TV[len(prompt) - 1 + t, token]
  return total


def test_raising_what_is_likely_lowers_the_entropy(policy):
  p_NV = distributions(policy[1])
  tokens_N = np.concatenate([ids for _, ids in IDS])
  weight_BT = np.zeros(MASK_BT.shape, np.float32)
  # A = log p less its mean under p: along its gradient the entropy falls.
  logp_N = np.log(p_NV[range(len(p_NV)), tokens_N])
  weight_BT[MASK_BT] = logp_N + -(p_NV * np.log(p_NV)).sum(1)
  found = counterfactual.entropy_changes(
    recorded(), {'a': applied(weight_BT)}, policy, 1e-3
  )
  opposite = counterfactual.entropy_changes(
    recorded(), {'a': applied(-weight_BT)}, policy, 1e-3
  )
  assert found['a'][0] == pytest.approx(-opposite['a'][0], rel=1e-4)


@pytest.mark.parametrize(
  ('ids', 'pictured', 'message'), [(None, False, 'token ids'), (IDS, True, 'pictures')]
)
def test_a_record_that_the_forward_pass_cannot_read_is_refused(
  policy, ids, pictured, message
):
  with pytest.raises(ValueError, match=message):
    counterfactual.entropy_changes(recorded(ids, pictured), {}, policy, 1e-3)
