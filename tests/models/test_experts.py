"""A mixture of experts, against loops over tokens and experts in float64."""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import making
import numpy as np
import pytest
from absl import flags

from bapo_jax import sharding
from bapo_jax.models import decoder, experts, layers, transformer
from bapo_jax.models.transformer import ModelSpec

SPEC = making.MIXTURE
KERNELS = ('blocks', 'ragged', 'dense')
N = 40


def with_kernel(kernel: str, **knobs) -> ModelSpec:
  return dataclasses.replace(SPEC, experts_kernel=kernel, **knobs)


@functools.cache
def layer() -> dict:
  """The weights of one layer."""
  params = making.params(SPEC)['layers']
  return {name: x[0] for name, x in params.items()}


def tokens(seed: int = 0, n: int = N) -> jax.Array:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal((n, SPEC.width)), jnp.float32)


def slow(w: dict, y: np.ndarray, norm_topk: bool) -> tuple[np.ndarray, list[set[int]]]:
  """Computes every token by itself, expert after expert."""
  w = {name: np.asarray(x, np.float64) for name, x in w.items()}
  rows, sets = [], []
  for h in np.asarray(y, np.float64):
    logits = h @ w['router']
    share = np.exp(logits - logits.max())
    share /= share.sum()
    chosen = sorted(range(SPEC.experts), key=lambda e: -share[e])[: SPEC.active]
    total = sum(share[e] for e in chosen) if norm_topk else 1.0
    row = np.zeros(SPEC.width)
    for e in chosen:
      gate, up = h @ w['expert_gate'][e], h @ w['expert_up'][e]
      inner = gate / (1 + np.exp(-gate)) * up
      row += share[e] / total * (inner @ w['expert_down'][e])
    rows.append(row)
    sets.append(set(chosen))
  return np.stack(rows), sets


@pytest.mark.parametrize('norm_topk', [True, False])
@pytest.mark.parametrize('kernel', KERNELS)
def test_a_layer_equals_a_loop_over_tokens_and_experts(kernel, norm_topk):
  spec = with_kernel(kernel, norm_topk=norm_topk)
  out, chosen = jax.jit(functools.partial(experts.mlp, spec=spec))(layer(), tokens())
  wanted, sets = slow(layer(), np.asarray(tokens()), norm_topk)
  np.testing.assert_allclose(out, wanted, atol=1e-5)
  assert [set(row) for row in chosen.used.tolist()] == sets
  assert (chosen.used == chosen.live).all()


def test_gradients_equal_differences_and_those_of_all_kernels():
  y_ND = tokens(n=16)
  out_ND = tokens(1, n=16)

  def value(w, y_ND, spec):
    return (experts.mlp(w, y_ND, spec)[0] * out_ND).sum()

  grads = {}
  for kernel in KERNELS:
    grad = jax.jit(jax.grad(value, (0, 1)), static_argnums=2)
    grads[kernel] = grad(layer(), y_ND, with_kernel(kernel))
  for kernel in KERNELS[1:]:
    making.close_trees(grads[kernel], grads['blocks'], count=64 * SPEC.width)
  # Differences of the loops in float64, along a random direction of each weight.
  rng = np.random.default_rng(2)
  for name in ('router', *transformer.EXPERTS):
    step = rng.standard_normal(layer()[name].shape)
    ends = []
    for sign in (1, -1):
      moved = np.asarray(layer()[name], np.float64) + sign * 1e-5 * step
      out, _ = slow(layer() | {name: moved}, np.asarray(y_ND), True)
      ends.append((out * np.asarray(out_ND, np.float64)).sum())
    slope = (ends[0] - ends[1]) / 2e-5
    np.testing.assert_allclose(
      (grads['blocks'][0][name] * step).sum(), slope, rtol=1e-3
    )


@pytest.mark.parametrize('kernel', KERNELS)
def test_all_tokens_on_one_expert_and_none_on_others(kernel):
  # Recorded routes put all copies on experts 3 and 5; six experts have no row.
  recorded_NK = jnp.broadcast_to(jnp.asarray([3, 5], jnp.uint8), (N, 2))
  value = jax.jit(
    lambda w: (experts.mlp(w, tokens(), with_kernel(kernel), recorded_NK)[0] ** 2).sum()
  )
  grad = jax.jit(jax.grad(value))(layer())
  used = np.asarray(jnp.abs(grad['expert_up']).sum((1, 2))) > 0
  assert np.flatnonzero(used).tolist() == [3, 5]
  assert np.abs(grad['router']).max() > 0  # through the weights of the experts
  alone = {name: layer()[name][jnp.asarray([3, 5])] for name in transformer.EXPERTS}
  two = dataclasses.replace(with_kernel('dense'), experts=2)
  part = layer() | alone | {'router': layer()['router'][:, jnp.asarray([3, 5])]}
  out, *_ = experts.mlp(layer(), tokens(), with_kernel(kernel), recorded_NK)
  # With both experts used, the weights are those of a softmax over these two.
  np.testing.assert_allclose(out, experts.mlp(part, tokens(), two)[0], atol=1e-5)


def test_a_token_does_not_depend_on_the_other_tokens():
  run = jax.jit(functools.partial(experts.mlp, spec=with_kernel('blocks')))
  out, *_ = run(layer(), tokens())
  others = tokens(7).at[::2].set(tokens()[::2])
  assert (run(layer(), others)[0][::2] == out[::2]).all()


MESHES = ({'data': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}, {'fsdp': 2, 'tensor': 4})


@pytest.mark.parametrize('sizes', MESHES, ids=str)
@pytest.mark.parametrize('kernel', ['blocks', 'ragged'])
def test_a_mesh_changes_no_value_and_no_gradient(sizes, kernel):
  spec = with_kernel(kernel)
  params = making.params(spec, 1)
  tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 12)))

  def value(params, tokens_BT):
    return (layers.forward(params, tokens_BT, spec) ** 2).mean()

  wanted = jax.jit(jax.value_and_grad(value))(params, tokens_BT)
  mesh = sharding.make(**{'data': 1} | sizes)
  split = jax.device_put(params, sharding.shardings(params, mesh))
  rows = jax.device_put(tokens_BT, sharding.over_rows(mesh))
  with sharding.current(mesh):
    found = jax.jit(jax.value_and_grad(value))(split, rows)
  making.close_trees(found, wanted, count=2e4)


def test_an_int8_actor_rounds_each_output_of_each_expert():
  spec = dataclasses.replace(SPEC, actor_dtype='int8')
  actor = decoder.actor(making.params(SPEC, 2), spec)
  w = actor['layers'][0]
  whole = np.asarray(making.params(SPEC, 2)['layers']['expert_up'][0], np.float64)
  scale_EF = np.asarray(w['expert_up'].scale, np.float64)
  np.testing.assert_allclose(scale_EF, np.abs(whole).max(1) / 127, rtol=1e-6)
  error = np.asarray(w['expert_up'].values) * scale_EF[:, None] - whole
  assert (np.abs(error) <= 0.501 * scale_EF[:, None]).all()
  assert isinstance(w['router'], jax.Array)
  again = decoder.actor(decoder.params_of(actor, spec), spec)
  jax.tree.map(np.testing.assert_array_equal, again, actor)
  read = {
    name: jnp.asarray(w[name].values * w[name].scale[:, None])
    for name in transformer.EXPERTS
  }
  of_read, *_ = experts.mlp(w | read, tokens(), SPEC)
  for kernel in KERNELS:
    out, *_ = experts.mlp(w, tokens(), with_kernel(kernel))
    making.close(out, of_read, count=SPEC.width * SPEC.ffn)


def test_kernels_of_other_platforms_are_refused():
  with pytest.raises(ValueError, match='needs a gpu and the package tokamax'):
    experts.resolve('tokamax', 'cpu')
  assert experts.resolve(None, 'cpu') == 'blocks'
  assert experts.resolve(None, 'tpu') == 'ragged'


def test_tokamax_reads_no_command_line_and_looks_for_no_gpu(monkeypatch):
  # As tokamax 0.0.12: it parses sys.argv if nobody has, and then asks its flag.
  knobs = flags.FlagValues()
  monkeypatch.setattr(flags, 'FLAGS', knobs)
  flags.DEFINE_bool('tokamax_cross_compile', False, '', flag_values=knobs)
  monkeypatch.setattr(sys, 'argv', ['train.py', '--unknown'])

  def ragged_dot(*arrays, implementation):
    if not knobs.is_parsed():
      knobs(sys.argv)
    assert knobs.tokamax_cross_compile and implementation == 'triton'
    return jax.lax.ragged_dot(*arrays)

  library = types.SimpleNamespace(ragged_dot=ragged_dot)
  monkeypatch.setitem(sys.modules, 'tokamax', library)
  out, _ = experts.mlp(layer(), tokens(), with_kernel('tokamax'))
  wanted, _ = slow(layer(), np.asarray(tokens()), SPEC.norm_topk)
  np.testing.assert_allclose(out, wanted, atol=1e-5)
