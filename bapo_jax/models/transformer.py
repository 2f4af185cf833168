"""Defines the policy's parameters: a decoder as a tree of arrays, and its options.

`describe(spec)` lists every parameter once: path -> shape and initialiser. Shapes,
initial values and shardings derive from it. Layers are stacked on a leading axis L.
layers.py runs whole rows through the layers, decoder.py one token per slot.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import Array

from bapo_jax import sharding
from bapo_jax.models import knobs
from bapo_jax.models.vision import spec as vision_spec
from bapo_jax.models.vision.spec import Initialiser
from bapo_jax.types import Routes, Tree

_D = knobs.ModelConfig()
EXPERTS = ('expert_gate', 'expert_up', 'expert_down')  # [L, E, in, out]


class LayerKind(NamedTuple):
  """Says what a layer's attention reads and how it rotates."""

  window: int = 0  # a query attends to the last `window` tokens, its own too; 0: to all
  rotation: str = 'scaled'  # by spec.rope_*; 'plain': by plain_theta alone; 'none'


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Sizes and options of a decoder; the defaults are those of the embedded policy."""

  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  ffn: int  # of the feed-forward layer, or of an expert
  rope_theta: float = 10_000.0  # base of the rotary frequencies
  rope_type: str = 'default'  # a key of rope.RULES
  rope_knobs: tuple[tuple[str, float], ...] = ()
  mrope: tuple[int, ...] = ()  # pairs of a head rotated by time, row and column
  norm_eps: float = 1e-6
  positions: int = 32768
  tied: bool = True
  qkv_bias: bool = True  # Qwen2
  o_bias: bool = False  # Llama and Qwen3 with attention_bias
  qk_norm: str = ''  # 'head': of each head (Qwen3); 'projection': of all (OLMo 2)
  kinds: tuple[LayerKind, ...] = ()  # of each layer; (): LayerKind() for all
  plain_theta: float = 10_000.0  # base of rotation 'plain' (Gemma 3)
  norms: str = 'pre'  # of a block; 'post': after it (OLMo 2); 'sandwich': both (Gemma)
  norm_offset: bool = False  # norms multiply by 1 + scale (Gemma)
  activation: str = 'silu'  # or 'gelu_tanh' (Gemma)
  embed_scale: float = 1.0  # sqrt(width) (Gemma)
  score_scale: float | None = None  # None: head_width ** -.5
  dtype: str = _D.dtype  # of the parameters; norms are always float32
  compute: str = _D.compute  # of the matrix products
  attention: str | None = _D.attention  # see attention.resolve
  actor_dtype: str = 'compute'  # of an actor's projections, see sampler.actor_dtype
  vision: vision_spec.VisionSpec | None = None  # the vision tower; None: text only
  experts: int = 0  # per layer; 0: a dense feed-forward layer
  active: int = 0  # experts that a token uses
  norm_topk: bool = True  # the weights of a token's experts sum to 1
  experts_kernel: str | None = _D.experts_kernel  # see experts.resolve
  replay_routes: str = _D.replay_routes

  @property
  def layer_kinds(self) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer."""
    return self.kinds or (LayerKind(),) * self.layers

  @property
  def widest_window(self) -> int:
    """Returns the largest window of a layer; 0 if no layer has a window."""
    return max(kind.window for kind in self.layer_kinds)

  @property
  def active_ffn(self) -> int:
    """Returns the feed-forward width that a token uses."""
    return self.ffn * (self.active if self.experts else 1)

  @property
  def routes(self) -> Routes | None:
    """Returns the form of recorded routes; None if none are recorded."""
    if not self.experts or self.replay_routes == 'off':
      return None
    dtype = 'uint8' if self.experts < 256 else 'uint16'
    return Routes(self.layers * self.active, dtype)

  @property
  def image_token(self) -> int | None:
    """Returns the token that stands for a merged patch; None for a text-only model."""
    return self.vision.image_token if self.vision else None


def describe(spec: ModelSpec) -> dict[str, Initialiser]:
  """Lists the parameters: path -> (shape, scale).

  A scale is the standard deviation of the initial values, 'ones' or 'zeros'.
  """
  V = spec.vocab
  D = spec.width
  F = spec.ffn
  L = spec.layers
  H = spec.heads
  K = spec.kv_heads
  C = spec.head_width
  # Output projections shrink with depth, so that the residual stream keeps its size.
  inner = D**-0.5
  outer = (2 * L) ** -0.5
  one = 'zeros' if spec.norm_offset else 'ones'
  tree: dict[str, Initialiser] = {
    'embed': ((V, D), 0.02 if D > 512 else D**-0.5),
    'final_norm': ((D,), one),
    'layers/attn_norm': ((L, D), one),
    'layers/q': ((L, D, H, C), inner),
    'layers/k': ((L, D, K, C), inner),
    'layers/v': ((L, D, K, C), inner),
    'layers/o': ((L, H, C, D), outer * (H * C) ** -0.5),
    'layers/mlp_norm': ((L, D), one),
  }
  for name in ('attn', 'mlp'):
    if spec.norms != 'pre':
      tree[f'layers/{name}_post_norm'] = ((L, D), one)
    if spec.norms == 'post':
      del tree[f'layers/{name}_norm']
  if E := spec.experts:
    tree |= {
      'layers/router': ((L, D, E), inner),
      'layers/expert_gate': ((L, E, D, F), inner),
      'layers/expert_up': ((L, E, D, F), inner),
      'layers/expert_down': ((L, E, F, D), outer * F**-0.5),
    }
  else:
    tree |= {
      'layers/gate': ((L, D, F), inner),
      'layers/up': ((L, D, F), inner),
      'layers/down': ((L, F, D), outer * F**-0.5),
    }
  if spec.qkv_bias:
    heads = {'q': H, 'k': K, 'v': K}
    tree |= {f'layers/{name}_bias': ((L, n, C), 'zeros') for name, n in heads.items()}
  if spec.o_bias:
    tree['layers/o_bias'] = ((L, D), 'zeros')
  if spec.qk_norm:
    whole = spec.qk_norm == 'projection'
    for name, n in (('q', H), ('k', K)):
      tree[f'layers/{name}_norm'] = ((L, n, C) if whole else (L, C), one)
  if not spec.tied:
    tree['head'] = ((V, D), inner)
  if spec.vision:
    tower = vision_spec.describe(spec.vision)
    tree |= {f'vision/{path}': entry for path, entry in tower.items()}
  return tree


def abstract(spec: ModelSpec) -> Tree:
  """Returns the parameter tree as ShapeDtypeStructs."""
  flat = {
    path: jax.ShapeDtypeStruct(shape, jnp.float32)
    for path, (shape, _) in describe(spec).items()
  }
  return jax.eval_shape(lambda tree: cast(tree, spec.dtype), unflatten(flat))


def unflatten(flat: dict[str, Any]) -> Tree:
  """Converts a dict of path -> array to a tree."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(tree: Tree) -> dict[str, Any]:
  """Converts a tree to a dict of path -> array."""
  return traverse_util.flatten_dict(tree, sep='/')


@jax.jit(static_argnames='spec')  # eager: one compile per shape
def init(spec: ModelSpec, key: Array) -> Tree:
  """Returns random parameters, initialised as in `describe`."""
  flat: dict[str, Array] = {}
  for i, (path, (shape, scale)) in enumerate(sorted(describe(spec).items())):
    if isinstance(scale, str):
      flat[path] = {'ones': jnp.ones, 'zeros': jnp.zeros}[scale](shape, jnp.float32)
    else:
      flat[path] = scale * jax.random.normal(jax.random.fold_in(key, i), shape)
  return cast(unflatten(flat), spec.dtype)


@functools.cache  # a search over meshes counts the same model 10^5 times
def count(spec: ModelSpec, below: str = '') -> int:
  """Counts the parameters whose paths begin with `below`."""
  entries = describe(spec).items()
  return sum(math.prod(shape) for path, (shape, _) in entries if path.startswith(below))


def cast(params: Tree, dtype: str) -> Tree:
  """Casts the parameters to a dtype; norms stay float32.

  Products cast weights to `spec.compute`. Casting beforehand gives the same results,
  bit for bit, and a decoder then reads half as many bytes.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.astype(
      jnp.float32 if sharding.path_name(path).endswith('norm') else dtype
    ),
    params,
  )


def head(params: Tree) -> Array:
  """Returns the output projection [V, D]; the embedding if the weights are tied."""
  return params.get('head', params['embed'])
