"""Compares a tiny model on every device with the same model in float64 on the CPU.

1. the sampler writes greedy text and draws text at temperature 1;
2. one optimiser update runs on rows with positive and negative advantages, in packed
   micro-batches;
3. `compare` holds the recorded log-probabilities, the text, the gradient and the new
   weights against oracle.py.

Runs on the CPU, on one device and on a mesh of all devices, in float32 (products at
their highest precision, which is not the default of GPUs and TPUs) and in bfloat16.

`run_experts` repeats this for a mixture of experts, with each kernel that multiplies by
experts on this platform. The update reads random recorded routes, and the oracle the
routes that were recorded: without them rounding would choose other experts.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from bapo_jax import sharding
from bapo_jax.learner.optimizer import AdamW
from bapo_jax.models import attention, experts, transformer
from bapo_jax.models.layers import Schedule
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.rollout import decode
from bapo_jax.rollout.decode import Rows
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.training import build
from bapo_jax.training.config import Config
from bapo_jax.types import Batch, Prompts, Tree
from benchmarks.first_contact import oracle
from benchmarks.first_contact.figures import Context, Figure

SPEC = transformer.ModelSpec(
  vocab=256, width=64, layers=2, heads=4, kv_heads=2, head_width=32, ffn=128
)
EXPERTS_SPEC = dataclasses.replace(SPEC, ffn=64, experts=8, active=2)
PROMPTS, GROUP, PROMPT, NEW = 4, 4, 8, 16
LOW, HIGH, LR = 0.8, 1.2, 1e-3
EPS = {'float32': 2.0**-23, 'bfloat16': 2.0**-8}
# Roundings that (log-probabilities, gradients) may be off by, relative to the largest.
# exp, log and sine are computed in float32, to several roundings on some platforms, so
# float32 gets more of them. A CPU needs 2 and 8 in float32, 1 and 5 in bfloat16.
ROUNDINGS = {'float32': (16, 64), 'bfloat16': (4, 16)}
STEP_ROUNDINGS = 8  # of float32: the weights and the square root of the moment


class Found(NamedTuple):
  """Holds the results of one device or mesh, on the host."""

  greedy: Rows
  drawn: Rows
  logp_BT: np.ndarray  # of the batch, by the learner
  moments: Tree  # after the update: (mu, nu)
  params: Tree  # after the update


def weights(spec: ModelSpec) -> Tree:
  """Returns random parameters, the same on every platform, and none of them 0."""
  rng, flat = np.random.default_rng(0), {}
  for path, (shape, scale) in transformer.describe(spec).items():
    start, spread = (scale == 'ones', 0.3) if isinstance(scale, str) else (0, scale)
    flat[path] = np.float32(start + spread * rng.standard_normal(shape))
  return transformer.unflatten(flat)


def example(spec: ModelSpec, params: Tree) -> Batch:
  """Returns rows off-policy by 0.05 or 0.5 nats per token, far from the bounds.

  With experts, the recorded routes are random.
  """
  rng, B, T = np.random.default_rng(1), PROMPTS * GROUP, PROMPT + NEW
  tokens_BT = rng.integers(1, spec.vocab, (B, T), np.int32)
  length_B = rng.integers(PROMPT + 1, T + 1, B)
  column_T = np.arange(T)
  loss_mask_BT = (column_T >= PROMPT) & (column_T < length_B[:, None])
  routes_BTX = None
  if spec.routes:
    order = rng.random((B, T, spec.layers, spec.experts)).argsort(-1)
    routes_BTX = order[..., : spec.active].reshape(B, T, -1).astype(spec.routes.dtype)
  with oracle.exact():
    rows = jax.tree.map(jax.numpy.asarray, (tokens_BT, routes_BTX))
    logp_BT = oracle.of_tokens(oracle.wide(params), rows[0], spec, rows[1])
    logp_BT = np.asarray(logp_BT)
  away_BT = rng.choice([-0.5, -0.05, 0.05, 0.5], (B, T))
  old_BT = np.where(loss_mask_BT, logp_BT + away_BT, 0).astype(np.float32)
  adv_B1 = np.where(np.arange(B) % 2, -1.0, 0.7)[:, None]
  fields: dict[str, Any] = {  # on the host: every place puts them on its devices
    'tokens_BT': tokens_BT,
    'loss_mask_BT': loss_mask_BT,
    'behavior_logp_BT': old_BT,
    'prox_BT': old_BT,
    'adv_BT': np.broadcast_to(adv_B1, tokens_BT.shape).astype(np.float32),
    'source_B': np.zeros(B, np.int32),
    'on_policy_BT': loss_mask_BT,
    'routes_BTX': routes_BTX,
  }
  return Batch(**fields)


def config_of(spec: ModelSpec) -> Config:
  """Returns one update on the whole batch by the clipped surrogate."""
  return Config().with_values(
    model={'compute': spec.compute},
    clip={'rule': 'fixed', 'low': LOW, 'high': HIGH},
    prompts={'count': PROMPTS, 'max_prompt_tokens': PROMPT},
    sampler={'group_size': GROUP, 'max_new_tokens': NEW},
    learner={'minibatches': 1, 'grad_accum_steps': 2},
    optimizer={'lr': LR, 'warmup': 0},
  )


def sampled(actor: Tree, spec: ModelSpec, mesh: Mesh, temperature: float) -> Rows:
  """Samples GROUP responses to each prompt through half as many slots."""
  engine = RolloutEngine(
    spec,
    max_prompt_tokens=PROMPT,
    max_new_tokens=NEW,
    group_size=GROUP,
    eos=(0,),
    temperature=temperature,
    max_num_seqs=max(8, sharding.row_shards(mesh)),
    prefill_batch_size=8,
    tokens_per_dispatch=4,
    mesh=mesh if mesh.size > 1 else None,
  )
  rng, ids = np.random.default_rng(2), np.arange(PROMPTS, dtype=np.int32)
  tokens_PT = rng.integers(1, spec.vocab, (PROMPTS, PROMPT), np.int32)
  length_P = np.arange(PROMPT, PROMPT - PROMPTS, -1, dtype=np.int32)
  tokens_PT[np.arange(PROMPT) >= length_P[:, None]] = 0
  rollouts = PartialRollouts(engine, PROMPTS)
  uid_B = np.arange(PROMPTS * GROUP, dtype=np.uint32)
  rollouts.submit(Prompts(ids, tokens_PT, length_P), uid_B)
  rollouts.decode(actor, jax.random.key(3))
  return jax.device_get(rollouts.rows)


def compute(spec: ModelSpec, params: Tree, batch: Batch, mesh: Mesh) -> Found:
  """Samples and updates on a mesh."""
  config, device = config_of(spec), mesh.devices.flat[0]
  kind = attention.resolve(None, device.platform, spec.compute, spec.head_width)
  spec = dataclasses.replace(spec, attention=kind)
  precision: contextlib.AbstractContextManager = contextlib.nullcontext()
  if spec.compute == 'float32':
    precision = jax.default_matmul_precision('highest')
  with jax.default_device(device), precision:
    params = jax.device_put(params, sharding.shardings(params, mesh))
    actor = decode.sync_actor(params, spec, mesh)
    greedy, drawn = (sampled(actor, spec, mesh, t) for t in (0.0, 1.0))
    init = build.optimizer(config).init
    layout = sharding.shardings(jax.eval_shape(init, params), mesh)
    opt = jax.jit(init, out_shardings=layout)(params)
    step = build.make_train_step(config, spec, Schedule('dots'))
    placed = jax.device_put(batch, sharding.layout_of_rows(batch, mesh))
    params, opt, _, tokens = sharding.under(mesh, step)(params, opt, placed)
  moments = optax.tree.get(opt, 'mu'), optax.tree.get(opt, 'nu')
  return Found(greedy, drawn, *jax.device_get((tokens.logp_BT, moments, params)))


def compare(
  found: Found, spec: ModelSpec, params: Tree, batch: Batch
) -> Iterator[tuple[str, float, str, float]]:
  """Yields (name, error, unit, limit) of what was computed with `params`."""
  eps, (of_logp, of_gradient) = EPS[spec.compute], ROUNDINGS[spec.compute]
  with oracle.exact():
    exact = oracle.wide(params)
    rows = batch.tokens_BT, spec, batch.routes_BTX
    logp_BT = np.asarray(oracle.of_tokens(exact, *rows))
    limit = of_logp * eps * np.abs(logp_BT).max()
    off_BT = np.where(batch.loss_mask_BT, np.abs(found.logp_BT - logp_BT), 0)
    yield 'log-probabilities, learner', off_BT.max(), 'nats', limit

    mask_BT = np.asarray(found.drawn.response_mask_BT)
    rows = found.drawn.tokens_BT, spec, found.drawn.routes_BTX
    logp_BT = np.asarray(oracle.of_tokens(exact, *rows))
    off_BT = np.where(mask_BT, np.abs(found.drawn.logp_BT - logp_BT), 0)
    yield 'log-probabilities, sampler', off_BT.max(), 'nats', limit

    # A token may replace the best only if rounding can exchange the two.
    mask_BT = np.asarray(found.greedy.response_mask_BT)
    rows = found.greedy.tokens_BT, spec, found.greedy.routes_BTX
    every_BTV = np.asarray(oracle.logprobs(exact, *rows))
    best_BT = np.pad(every_BTV.max(-1)[:, :-1], ((0, 0), (1, 0)))
    chosen_BT = np.asarray(oracle.of_tokens(exact, *rows))
    lost = np.where(mask_BT, best_BT - chosen_BT, 0).max()
    yield 'greedy text, behind the best', lost, 'nats', 2 * limit

    grads = oracle.gradient(exact, oracle.wide(batch), spec, LOW, HIGH)
    grads = jax.tree.map(np.asarray, grads)
  k = config_of(spec).optimizer
  assert isinstance(k, AdamW)
  mu, nu = found.moments
  # The first moment is (1 - b1) times the gradient, scaled down to norm 1 at most.
  scale = (1 - k.b1) / max(1.0, optax.tree.norm(grads) / k.max_norm)
  size = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  off = jax.tree.map(lambda g, m: np.abs(m / scale - g).max() / size, grads, mu)
  error, limit = max(jax.tree.leaves(off)), of_gradient * eps
  yield 'gradient', error, 'of the largest', limit

  # AdamW (arXiv:1711.05101) from its own moments: the new weights are float32 anyway.
  def missed(before, after, m, v) -> float:
    step = (m / (1 - k.b1)) / (np.sqrt(np.float64(v) / (1 - k.b2)) + 1e-8)
    return np.abs(before - LR * step - after).max() / LR

  error = max(jax.tree.leaves(jax.tree.map(missed, params, found.params, mu, nu)))
  largest = max(np.abs(w).max() for w in jax.tree.leaves(params))
  limit = STEP_ROUNDINGS * EPS['float32'] * largest / LR
  yield 'new weights', error, 'of a step', limit


def places() -> dict[str, Mesh]:
  """Returns the meshes to compute on: the CPU, one device, and all devices."""
  devices = jax.devices()
  found = {'cpu': sharding.make(1, 1, 1, jax.devices('cpu')[:1])}
  if devices[0].platform != 'cpu':
    found[devices[0].platform] = sharding.make(1, 1, 1, devices[:1])
  if (n := len(devices)) > 1:
    tensor = 2 if n % 4 == 0 else 1
    fsdp = 2 if n % 2 == 0 else 1
    found[f'{n} devices'] = sharding.make(-1, fsdp, tensor)
  return found


def run(context: Context, params: Tree | None = None) -> Iterator[Figure]:
  """Yields the errors of every place and dtype; `params` are on the devices."""
  exact = weights(SPEC)
  batch = example(SPEC, exact)
  for where, mesh in places().items():
    for compute_dtype in list(EPS)[: 1 if context.small else None]:
      spec = dataclasses.replace(SPEC, compute=compute_dtype)
      found = compute(spec, params or exact, batch, mesh)
      for name, error, unit, limit in compare(found, spec, exact, batch):
        yield Figure(f'{name}, {compute_dtype}, {where}', error, unit, limit)


def run_experts(context: Context) -> Iterator[Figure]:
  """Yields the errors of every kernel in both dtypes, then of a mesh of all devices."""
  params = weights(EXPERTS_SPEC)
  batch = example(EXPERTS_SPEC, params)
  auto = experts.resolve(None, jax.default_backend())
  alone = sharding.make(1, 1, 1, jax.devices()[:1])
  meshes = {kernel: (kernel, alone) for kernel in sorted({'blocks', 'dense', auto})}
  for where, mesh in places().items():
    if mesh.size > 1:
      meshes[f'{auto}, {where}'] = auto, mesh
  for name, (kernel, mesh) in meshes.items():
    for dtype in list(EPS)[: 1 if context.small else None]:
      spec = dataclasses.replace(EXPERTS_SPEC, compute=dtype, experts_kernel=kernel)
      found = compute(spec, params, batch, mesh)
      for what, error, unit, limit in compare(found, spec, params, batch):
        yield Figure(f'{what}, {name}, {dtype}', error, unit, limit)
