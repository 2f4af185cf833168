"""Runs other samplers with the same weights: transformers' generate and Tunix's.

Each is a function (prompts, lengths, batch) -> seconds: a batch at a time, stopped at
the longest of the batch, since none of the two fills a slot again. No end token stops a
batch early. Versions: requirements/peers.txt.
"""

import dataclasses
import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.types import Prompts, Tree

Peer = Callable[[Prompts, np.ndarray, int], float]


def in_torch(params: Tree, spec: ModelSpec, group: int, greedy: bool) -> Peer:
  """Returns transformers' sampler with these weights, in float32.

  Args:
    group: responses per prompt.
    greedy: whether to take the likeliest token instead of sampling.
  """
  import torch
  import transformers

  with tempfile.TemporaryDirectory() as path:
    flat = transformer.flatten(jax.tree.map(np.asarray, params))
    hf_weights.save(path, flat.__getitem__, spec, 'float32')
    with open(f'{path}/config.json', 'w') as file:
      json.dump(hf_config.config_of(spec), file)
    net = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
  net.eval()
  net.generation_config.eos_token_id = None
  torch.manual_seed(0)
  drawn = {} if greedy else {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}

  def run(prompts: Prompts, wanted_B: np.ndarray, batch: int) -> float:
    rows = torch.from_numpy(np.repeat(prompts.tokens_PT, group, 0)).long()
    begun = time.perf_counter()
    for first in range(0, len(rows), batch):
      net.generate(
        rows[first : first + batch],
        attention_mask=torch.ones_like(rows[first : first + batch]),
        do_sample=not greedy,
        max_new_tokens=int(wanted_B[first : first + batch].max()),
        pad_token_id=0,
        **drawn,
      )
    return time.perf_counter() - begun

  return run


def missing_tunix(spec: ModelSpec) -> str:
  """Returns why Tunix's sampler cannot run this model here, or ''."""
  if importlib.util.find_spec('tunix') is None:
    return 'google-tunix is not installed: requirements/peers.txt, and its PYTHONPATH'
  plain = dataclasses.replace(spec, qkv_bias=False, o_bias=False, qk_norm='')
  if spec != plain or spec.rope_type != 'default' or not spec.tied:
    return 'only tied Llama models with plain rotary frequencies are carried over'
  return ''


def in_tunix(params: Tree, spec: ModelSpec, group: int, longest: int) -> Peer:
  """Returns Tunix's greedy sampler with these weights, in float32.

  Args:
    group: responses per prompt.
    longest: tokens of a prompt and its response, at most: the size of its cache.
  """
  from flax import nnx

  sampler = importlib.import_module('tunix.generate.sampler')
  tokens: list[list[int]] = []
  made = sampler.Sampler(
    _llama(nnx, params, spec),
    _Given(tokens),
    sampler.CacheConfig(longest, spec.layers, spec.kv_heads, spec.head_width),
  )
  seen: set[tuple[int, int]] = set()

  def generate(batch: int, prompt: int, new: int) -> None:
    texts = [str(i) for i in range(batch)]
    made(texts, new, max_prompt_length=prompt, eos_tokens=[-1])

  def run(prompts: Prompts, wanted_B: np.ndarray, batch: int) -> float:
    rows = np.repeat(prompts.tokens_PT, group, 0)
    seconds = 0.0
    for first in range(0, len(rows), batch):
      tokens[:] = rows[first : first + batch].tolist()
      new = int(wanted_B[first : first + batch].max())
      # Each length is a program of its own: compiled before it is timed.
      if (len(tokens), new) not in seen:
        generate(len(tokens), rows.shape[1], new)
        seen.add((len(tokens), new))
      begun = time.perf_counter()
      generate(len(tokens), rows.shape[1], new)
      seconds += time.perf_counter() - begun
    return seconds

  return run


def _llama(nnx: Any, params: Tree, spec: ModelSpec) -> Any:
  """Returns Tunix's Llama with these weights."""
  model = importlib.import_module('tunix.models.llama3.model')
  net = model.Llama3(
    model.ModelConfig(
      num_layers=spec.layers,
      vocab_size=spec.vocab,
      embed_dim=spec.width,
      hidden_dim=spec.ffn,
      num_heads=spec.heads,
      head_dim=spec.head_width,
      num_kv_heads=spec.kv_heads,
      rope_theta=int(spec.rope_theta),
      norm_eps=spec.norm_eps,
      weight_tying=True,
    ),
    rngs=nnx.Rngs(0),
  )
  net.embedder.input_embedding.value = params['embed']
  net.final_norm.w.value = params['final_norm']
  for i, layer in enumerate(net.layers):
    w = jax.tree.map(lambda x, i=i: jnp.array(x[i]), params['layers'])
    layer.input_layernorm.w.value = w['attn_norm']
    layer.post_attention_layernorm.w.value = w['mlp_norm']
    for name in 'qkvo':
      getattr(layer.attn, f'{name}_proj').w.value = w[name]
    for name in ('gate', 'up', 'down'):
      getattr(layer.mlp, f'{name}_proj').kernel.value = w[name]
  return net


class _Given:
  """A tokenizer whose texts are indices of tokenized rows."""

  def __init__(self, rows: list[list[int]]):
    self.rows = rows

  def encode(self, text: str) -> list[int]:
    """Returns the row with this index."""
    return self.rows[int(text)]

  def decode(self, ids: list[int]) -> str:
    """Returns '', because texts are not compared."""
    del ids
    return ''

  def bos_id(self) -> int:
    """Returns 0: prompts get no such token."""
    return 0

  def eos_id(self) -> int:
    """Returns a token that is never sampled."""
    return -1

  def pad_id(self) -> int:
    """Returns a token that no prompt contains."""
    return 0
