"""Computes a Qwen2 from its definition, in float64 on the CPU, to compare with.

Its feed-forward layers may be those of Qwen3-MoE.

Shares no code with the package: no packing, cache, kernel, chunk or rematerialisation.
Every function runs inside `exact`.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Batch, Tree


@contextlib.contextmanager
def exact() -> Iterator[None]:
  """Makes float64 on the CPU the default, and broadcasts like NumPy.

  Raises:
    RuntimeError: JAX_PLATFORMS excludes the CPU.
  """
  on_cpu = jax.default_device(jax.devices('cpu')[0])
  with jax.enable_x64(True), on_cpu, jax.numpy_rank_promotion('allow'):
    yield


def wide(tree: Any) -> Any:
  """Copies a tree to the CPU, its floats as float64."""

  def copy(x: Any) -> Array:
    x = np.asarray(x)
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x.astype(np.float64) if floats else x)

  return jax.tree.map(copy, tree)


def attention(q_BTHC: Array, k_BjKC: Array, v_BjKC: Array, live_BTj: Array) -> Array:
  """Computes softmax(q k / sqrt(C)) v over the live keys of each query."""
  copies, C = q_BTHC.shape[2] // k_BjKC.shape[2], q_BTHC.shape[3]
  k_BjHC, v_BjHC = (jnp.repeat(x, copies, axis=2) for x in (k_BjKC, v_BjKC))
  scores_BHTj = jnp.einsum('bthc,bjhc->bhtj', q_BTHC, k_BjHC) / C**0.5
  scores_BHTj = jnp.where(live_BTj[:, None], scores_BHTj, -jnp.inf)
  return jnp.einsum('bhtj,bjhc->bthc', jax.nn.softmax(scores_BHTj), v_BjHC)


def _norm(x: Array, scale: Array, eps: float) -> Array:
  return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _rotate(x_BTHC: Array, theta: float) -> Array:
  """Rotates coordinates i and i + C / 2 of column t by t theta^(-2 i / C)."""
  T, half = x_BTHC.shape[1], x_BTHC.shape[3] // 2
  angle_Tc = jnp.outer(jnp.arange(T), theta ** -(jnp.arange(half) / half))
  sin_T1c, cos_T1c = jnp.sin(angle_Tc)[:, None], jnp.cos(angle_Tc)[:, None]
  a, b = x_BTHC[..., :half], x_BTHC[..., half:]
  pair = a * cos_T1c - b * sin_T1c, b * cos_T1c + a * sin_T1c
  return jnp.concatenate(pair, -1)


def _experts(w: Tree, y_BTD: Array, spec: ModelSpec, recorded_BTK: Any) -> Array:
  """Computes all experts of every token, then sums the recorded ones, or the best K."""
  share_BTE = jax.nn.softmax(y_BTD @ w['router'])
  _, chosen_BTK = jax.lax.top_k(share_BTE, spec.active)
  if recorded_BTK is not None:
    chosen_BTK = jnp.where(recorded_BTK < spec.experts, recorded_BTK, chosen_BTK)
  used_BTE = share_BTE * jax.nn.one_hot(chosen_BTK, spec.experts).sum(-2)
  if spec.norm_topk:
    used_BTE /= used_BTE.sum(-1, keepdims=True)
  gate, up = (
    jnp.einsum('btd,edf->btef', y_BTD, w[f'expert_{name}']) for name in ('gate', 'up')
  )
  z_BTED = jnp.einsum('btef,efd->bted', jax.nn.silu(gate) * up, w['expert_down'])
  return jnp.einsum('bte,bted->btd', used_BTE, z_BTED)


@functools.partial(jax.jit, static_argnames='spec')
def logprobs(
  params: Tree, tokens_BT: Array, spec: ModelSpec, routes_BTX: Array | None = None
) -> Array:
  """Returns [B, T, V]: the log-probability of every token after columns 0 to t."""
  by_layer = [None] * spec.layers
  if routes_BTX is not None:
    by_layer = jnp.split(routes_BTX, spec.layers, axis=-1)
  x_BTD, T = params['embed'][tokens_BT], tokens_BT.shape[1]
  causal_BTT = jnp.broadcast_to(jnp.tri(T, dtype=bool), (tokens_BT.shape[0], T, T))
  for i in range(spec.layers):
    w = {name: x[i] for name, x in params['layers'].items()}
    y_BTD = _norm(x_BTD, w['attn_norm'], spec.norm_eps)
    q, k, v = (
      jnp.einsum('btd,dhc->bthc', y_BTD, w[name]) + w[f'{name}_bias'] for name in 'qkv'
    )
    q, k = _rotate(q, spec.rope_theta), _rotate(k, spec.rope_theta)
    mixed_BTHC = attention(q, k, v, causal_BTT)
    x_BTD += jnp.einsum('bthc,hcd->btd', mixed_BTHC, w['o'])
    y_BTD = _norm(x_BTD, w['mlp_norm'], spec.norm_eps)
    if spec.experts:
      x_BTD += _experts(w, y_BTD, spec, by_layer[i])
      continue
    x_BTD += (jax.nn.silu(y_BTD @ w['gate']) * (y_BTD @ w['up'])) @ w['down']
  hidden_BTD = _norm(x_BTD, params['final_norm'], spec.norm_eps)
  return jax.nn.log_softmax(hidden_BTD @ params['embed'].T)


def of_tokens(
  params: Tree, tokens_BT: Array, spec: ModelSpec, routes_BTX: Array | None = None
) -> Array:
  """Returns the log-probability [B, T] of each token; 0 in the first column."""
  logp_BTV = logprobs(params, tokens_BT, spec, routes_BTX)[:, :-1]
  logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], 2)[..., 0]
  return jnp.pad(logp_BT, ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnames=('spec', 'low', 'high'))
def gradient(
  params: Tree, batch: Batch, spec: ModelSpec, low: float, high: float
) -> Tree:
  """Returns the gradient of -mean(min(r A, clip(r, low, high) A)), r = pi / mu."""

  def value(params: Tree) -> Array:
    logp_BT = of_tokens(params, batch.tokens_BT, spec, batch.routes_BTX)
    mask_BT = batch.loss_mask_BT
    ratio_BT = jnp.exp(jnp.where(mask_BT, logp_BT - batch.behavior_logp_BT, 0))
    adv_BT = batch.adv_BT
    gain_BT = jnp.minimum(ratio_BT * adv_BT, jnp.clip(ratio_BT, low, high) * adv_BT)
    return -jnp.where(mask_BT, gain_BT, 0).sum() / mask_BT.sum()

  return jax.grad(value)(params)
