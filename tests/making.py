"""Small records for tests, filled with what tells them apart."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.algorithms import advantage, loss
from bapo_jax.learner import learner, optimizer
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import decoder, logprobs, lora, transformer
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.vision import spec as vision_spec
from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.rewards import PendingVerdicts, Verifier
from bapo_jax.rewards.verifiers import Verdict
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.types import Batch, Groups, Prompts
from lab import experiments

SPEC = transformer.ModelSpec(
  vocab=11, width=16, layers=2, heads=2, kv_heads=1, head_width=8, ffn=16
)

# Tiny models of the kinds that transformers calls qwen2 and qwen3.
QWEN2 = transformer.ModelSpec(
  vocab=20, width=16, layers=2, heads=4, kv_heads=2, head_width=4, ffn=32
)
QWEN3 = dataclasses.replace(QWEN2, qkv_bias=False, qk_norm='head', head_width=8)

MIXTURE = dataclasses.replace(  # called qwen3_moe
  QWEN3, vocab=24, kv_heads=4, head_width=4, ffn=12, experts=8, active=2
)

WINDOW = 4
_LOCAL = transformer.LayerKind(WINDOW, 'plain')
_GLOBAL = transformer.LayerKind()
# Layers of two kinds: like Gemma 3, the period of 3 does not divide the layers; like
# OLMo 3; and like SmolLM3.
GEMMA3 = dataclasses.replace(
  QWEN3,
  layers=4,
  kinds=(_LOCAL, _LOCAL, _GLOBAL, _LOCAL),
  rope_theta=1e6,
  rope_type='linear',
  rope_knobs=(('factor', 8.0),),
  norms='sandwich',
  norm_offset=True,
  activation='gelu_tanh',
  embed_scale=QWEN3.width**0.5,
  score_scale=0.25,
)
OLMO3 = dataclasses.replace(
  QWEN3,
  layers=3,
  kinds=(_LOCAL._replace(rotation='scaled'), _GLOBAL, _LOCAL),
  o_bias=True,
  tied=False,
  qk_norm='projection',
  norms='post',
)
SMOLLM3 = dataclasses.replace(
  QWEN3,
  layers=3,
  kinds=(_GLOBAL, _GLOBAL._replace(rotation='none'), _GLOBAL),
  qk_norm='',
)

TOWER = vision_spec.VisionSpec(
  width=32, layers=2, heads=4, ffn=24, out=16, full_layers=(1,), image_token=5
)
SEEING = dataclasses.replace(
  SPEC, vocab=20, heads=4, kv_heads=4, head_width=4, mrope=(1, 1, 0), vision=TOWER
)

# Contribution and weight of a bound search.
KINDS = [(c, w) for c in ('gradient', 'surrogate') for w in ('one', 'behaviour')]

# The tokens of the embedded policy's tokenizer, in order.
CHARACTERS = ('<pad>', '<eos>', r'\boxed{', *'}\n 0123456789+-*=|modx/()', '<image>')

# Of a tiny model, as a config.json spells them.
SIZES = {
  'vocab_size': 20,
  'hidden_size': 16,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 24,
}


def params(spec=SPEC, seed=0) -> dict:
  """Returns weights with no zero bias and no unit scale left: each of them matters."""
  rng = np.random.default_rng(seed)
  flat = {}
  for path, (shape, scale) in transformer.describe(spec).items():
    noise, start = rng.standard_normal(shape, np.float32), float(scale == 'ones')
    size = 0.3 if isinstance(scale, str) else math.hypot(scale, 0.3)
    flat[path] = jnp.asarray(start + np.float32(size) * noise)
  return transformer.unflatten(flat)


def prompts(length_P, width: int, vocab: int, least: int = 0, seed: int = 0) -> Prompts:
  """Returns prompts of these lengths with random tokens from `least` on."""
  rng = np.random.default_rng(seed)
  P = len(length_P)
  tokens_PT = rng.integers(least, vocab, (P, width), np.int32)
  tokens_PT[np.arange(width) >= length_P[:, None]] = 0
  return Prompts(np.arange(P, dtype=np.int32), tokens_PT, length_P)


def drifted(params, step: int) -> dict:
  """Returns the weights of a later step: a little larger than those of step 0."""
  return jax.tree.map(lambda x: x * (1 + step / 50), params)


def merged(weights):
  """Merges the adapters of a tree, as an export does; other weights are unchanged."""

  def is_adapted(w):
    return isinstance(w, lora.Adapted)

  return jax.tree.map(
    lambda w: lora.merge(w) if is_adapted(w) else w, weights, is_leaf=is_adapted
  )


def adapters(spec=SPEC, size=0.4, **knobs) -> dict:
  """Returns adapters in which neither A nor B is zero; compiles nothing."""
  knobs = LoraConfig(**{'rank': 3, 'alpha': 6.0} | knobs)
  make = functools.partial(lora.init, spec, **knobs.model_dump())
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.float32(rng.normal(0, size, x.shape)),
    jax.eval_shape(make, jax.random.key(0)),
  )


def groups(ids, right, policy_version, G=8, T=3, seed=0) -> Groups:
  """Returns groups with right[i] of G correct responses; version -1 is empty."""
  rng, P = np.random.default_rng(seed), len(ids)
  version_P = jnp.asarray(policy_version, jnp.int32)
  correct_PG = np.arange(G) < np.asarray(right)[:, None]
  return Groups(
    id_P=jnp.asarray(ids, jnp.int32),
    tokens_PGT=jnp.asarray(rng.integers(1, 11, (P, G, T)), jnp.int32),
    # A response has at least one token.
    response_mask_PGT=jnp.asarray((rng.random((P, G, T)) < 0.7) | (np.arange(T) == 0)),
    behavior_logp_PGT=jnp.asarray(-rng.random((P, G, T)), jnp.float32),
    policy_version_PGT=jnp.broadcast_to(version_P[:, None, None], (P, G, T)),
    correct_PG=jnp.asarray(correct_PG),
    decided_PG=jnp.ones((P, G), bool),
    reward_PG=jnp.asarray(correct_PG, jnp.float32),
    teaches_PG=jnp.ones((P, G), bool),
    completed_step_P=version_P,
  )


EPS = float(np.finfo(np.float32).eps)
# Relative error of exp(x - y) for x and y of a few nats: some 4 eps, four times over.
RTOL = 16 * EPS


def close(found, wanted, *, count, terms=None, name=''):
  """Asserts that arrays agree up to the rounding of float32.

  A sum of `count` terms is off by about eps / 2 times sqrt(count) times the size of the
  terms, that of the largest wanted number unless given; eight times that is an error.
  """
  found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
  size = np.abs(wanted).max(initial=0) if terms is None else terms
  allowed = 4 * EPS * np.sqrt(count) * size
  np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed, err_msg=name)


def close_trees(found, wanted, *, count):
  """`close` for every array of two trees of one structure."""
  leaves = jax.tree.leaves_with_path(wanted)
  for (path, y), x in zip(leaves, jax.tree.leaves(found), strict=True):
    close(x, y, count=count, name=jax.tree_util.keystr(path))


def objective(clip_rule, loss_rule='clipped', **knobs) -> objective_lib.Objective:
  """Returns the objective of these rules, on the tiny model if no other is given.

  Knobs that all loss rules have, such as `kl`, are those of the loss rule.
  """
  shared = {k: knobs.pop(k) for k in [*knobs] if k in loss.LossRule.model_fields}
  rule = loss.LossRule.rules.names[loss_rule](**shared)
  rules = {'clip_rule': clip_rule, 'loss_rule': rule}
  return objective_lib.Objective(**{'spec': SPEC, 'temperature': 0.8} | rules | knobs)


def adamw(master=False, **knobs):
  """Returns AdamW after clipping, without a warm-up if none is given."""
  return optimizer.make(
    optimizer.AdamW(**{'warmup': 0, 'b2': 0.999} | knobs), master=master
  )


def batch(adv_B, loss_mask_BT, logp_BT=None, prox_BT=None, source_B=None) -> Batch:
  """Returns fresh rows with these advantages; prox defaults to the behaviour."""
  adv_B, loss_mask_BT = np.asarray(adv_B, np.float32), np.asarray(loss_mask_BT, bool)
  zeros_BT = np.zeros(loss_mask_BT.shape, np.float32)
  logp_BT = zeros_BT if logp_BT is None else np.asarray(logp_BT, np.float32)
  return Batch(
    tokens_BT=np.zeros(loss_mask_BT.shape, np.int32),
    loss_mask_BT=loss_mask_BT,
    behavior_logp_BT=logp_BT,
    prox_BT=logp_BT if prox_BT is None else np.asarray(prox_BT, np.float32),
    adv_BT=np.broadcast_to(adv_B[:, None], loss_mask_BT.shape),
    source_B=np.zeros(len(adv_B), np.int32) if source_B is None else np.int32(source_B),
    on_policy_BT=np.ones(loss_mask_BT.shape, bool),
  )


def same_row(a: Groups, i: int, b: Groups, j: int) -> bool:
  """Returns whether row i of a equals row j of b, bit for bit."""
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(x[i], y[j]) for x, y in pairs)


class OddVerifier(Verifier):
  """Finds responses of an odd number of characters right.

  Args:
    early: verdicts are submitted as soon as a response ends.
  """

  def __init__(self, early: bool = False):
    super().__init__(Verification(rule='exact'))
    self.early = early
    self.submitted: list[tuple[list[str], list[str]]] = []  # (answers, texts) per call

  def starts_early(self, rules) -> bool:
    return self.early and bool(list(rules))

  def verdict(self, text: str) -> Verdict:
    return Verdict(len(text) % 2 == 1, f'{len(text)} characters', text[:1])

  def submit(self, samples) -> PendingVerdicts:
    texts = [sample.response for sample in samples]
    self.submitted.append(([sample.answer for sample in samples], texts))
    return PendingVerdicts([self.verdict(text) for text in texts], samples)


class ScriptedVerifier(OddVerifier):
  """Gives these verdicts, in the order of the responses."""

  def __init__(self, verdicts: Sequence[Verdict]):
    super().__init__()
    self.verdicts = verdicts

  def submit(self, samples) -> PendingVerdicts:
    return PendingVerdicts([*self.verdicts[: len(samples)]], samples)


def generate(
  params, prompts, uid_B, key, *, spec, on_finished=lambda rows: None, **knobs
):
  """Samples G responses to each of P prompts: rows [P * G, T], in their order."""
  P, longest = prompts.tokens_PT.shape
  engine = RolloutEngine(spec, max_prompt_tokens=longest, **knobs)
  rollouts = PartialRollouts(engine, P)
  rollouts.submit(prompts, uid_B)
  if engine.mesh is None:
    actor = decoder.actor(params, spec)
  else:
    actor = decode.sync_actor(params, spec, engine.mesh)
  rollouts.decode(actor, key, on_finished=on_finished)
  return rollouts.rows


def sampled(params, spec, P, G, T, right) -> Groups:
  """Returns groups [P, G, T] that weights sampled, as learner step 5.

  Prompts have four tokens; right[i] of G responses are right.
  """
  rng = np.random.default_rng(0)
  prompts = Prompts(
    np.arange(P, dtype=np.int32),
    rng.integers(2, 11, (P, 4)).astype(np.int32),
    np.full(P, 4, np.int32),
  )
  rows = generate(
    params,
    prompts,
    np.arange(P * G, dtype=np.uint32),
    jax.random.key(1),
    spec=spec,
    group_size=G,
    max_new_tokens=T - 4,
    temperature=1.0,
    eos=(1,),
    max_num_seqs=P * G,
    prefill_batch_size=P * G,
    tokens_per_dispatch=T - 4,
  )
  found = groups(range(P), right, [5] * P, G, T)._replace(
    tokens_PGT=rows.tokens_BT.reshape(P, G, T),
    response_mask_PGT=rows.response_mask_BT.reshape(P, G, T),
    behavior_logp_PGT=rows.logp_BT.reshape(P, G, T),
  )
  if spec.experts:
    found = found._replace(routes_PGTX=rows.routes_BTX.reshape(P, G, T, -1))
  return found


def exact_tokens(seed, B=8, T=6, negative=0.5):
  """Returns random (ratio_BT, batch) on a coarse grid: float32 sums are exact."""
  rng = np.random.default_rng(seed)
  ratio_BT = np.round(64 * np.exp(rng.normal(0, 0.5, (B, T)))).astype(np.float32) / 64
  sign_B = np.where(rng.random(B) < negative, -1, 1)
  return ratio_BT, batch(
    sign_B * rng.integers(0, 9, B) / 4,
    rng.random((B, T)) < 0.9,
    logp_BT=np.log(np.float32(0.5) ** rng.integers(0, 5, (B, T))),
    source_B=rng.integers(0, 3, B),
  )


def weigh(ratio_BT, batch):
  """Returns a function bounds -> r A per token: the clipped loss's, none cut."""
  adv_BT = jnp.asarray(batch.adv_BT)
  return lambda bounds: jnp.where(adv_BT == 0, 0, ratio_BT * adv_BT)


def applied(rules, logp_BT, batch):
  """Returns (sum of gains, weights) under a loss, a clip and a mask rule."""
  logp_BT = jnp.asarray(logp_BT)
  find = loss.finder(rules, logp_BT, batch, jnp.ones(len(logp_BT)))

  def total(logp_BT):
    return loss.gain(rules[0], logp_BT, batch, find)[0].sum()

  return jax.value_and_grad(total)(logp_BT)


def mixed_tokens(B=8, T=5, seed=0):
  """Returns (logp_BT, batch) with most combinations of sign, side and mask."""
  rng = np.random.default_rng(seed)
  logp_BT, old_BT, prox_BT = (
    -rng.random((B, T)).astype(np.float32) * 2 for _ in range(3)
  )
  adv_B = np.asarray([1, -1, 2, -2, 0, 0.5, -0.5, 1])[:B]
  loss_mask_BT = rng.random((B, T)) < 0.8
  return logp_BT, batch(adv_B, loss_mask_BT, old_BT, prox_BT, [0, 1, 2, 2] * (B // 4))


def off_policy(params, spec, P, G, T, temperature) -> Batch:
  """Returns a batch off-policy by half a nat per token: part of it is clipped."""
  made = groups(range(P), [1, 2, 3, 2], [0] * P, G, T)
  rows = learner.flatten(made, jnp.zeros(P, int), advantage.GroupRelative())
  logp_BT = logprobs.sequence_stats(params, rows.tokens_BT, spec, temperature).logp_BT
  noise_BT = 0.5 * jax.random.normal(jax.random.key(0), logp_BT.shape)
  loss_mask_BT = rows.loss_mask_BT & (jnp.arange(T) >= 3)[None]
  return rows._replace(loss_mask_BT=loss_mask_BT, behavior_logp_BT=logp_BT + noise_BT)


def result(run=None, evaluations=((0, 0.0),), **changed) -> experiments.Result:
  """Returns what an experiment stores of a run; evaluations are (step, accuracy)."""
  made = {
    'arm': 'a',
    'levels': {},
    'seed': 0,
    'commit': 'c0ffee',
    'versions': {'code': 'a'},
    'diverged': False,
    'planned': 10,
    'evaluations': [[step, right, 0.01, 8.0 * step] for step, right in evaluations],
    'right': {'0': [0, 1], '10': [1, 1]},
    'group_size': 4,
    'steps': {name: [] for name in experiments.STEP_METRICS},
    'seconds': 9.0,
  }
  if run is not None:
    made |= {'config': experiments.fingerprint(run.config)}
    made |= {name: getattr(run, name) for name in ('arm', 'levels', 'seed')}
  return made | changed
