"""A decoded token, compiled for a GPU that may be absent, runs few kernels."""

import re

import jax
import pytest

from bapo_jax import sharding
from bapo_jax.models import decoder, transformer
from bapo_jax.rollout import decode
from benchmarks.on_gpu.programs import counts

SLOTS, COLUMNS, VOCAB, N = 64, 512, 32000, 8  # one block of tokens


def compiled(layers, mesh):
  """(kernels per token, copied GiB per token, HLO) with the shapes of a 0.5B."""
  spec = transformer.ModelSpec(
    vocab=VOCAB, width=896, layers=layers, heads=14, kv_heads=2, head_width=64,
    ffn=4864, rope_theta=1e6, qkv_bias=True, tied=True, compute='bfloat16',
    positions=COLUMNS, attention='flash',
  )  # fmt: skip

  def arguments():
    params = transformer.init(spec, jax.random.key(0))
    slots = decode.empty(spec, SLOTS, COLUMNS)
    return decoder.actor(params, spec), slots, jax.random.key(0)

  device = sharding.replicated(mesh)
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
    jax.eval_shape(arguments),
  )
  scalars = (jax.ShapeDtypeStruct((), t, sharding=device) for t in ('float32', 'int32'))
  temperature, n = scalars
  with jax.set_mesh(mesh):
    lowered = decode.run.lower(*args, temperature, n, n, spec=spec, eos=(2,), live=1)
    text = lowered.compile().as_text()
  found = counts(text, (1, N))
  return found['kernels'] / N, found['copied_gib'] / N, text


@pytest.mark.nightly
def test_a_token_runs_ten_kernels_per_layer_and_reads_its_logits_once(topology):
  mesh = sharding.make(devices=topology('h100:1'))
  two, _, _ = compiled(2, mesh)
  four, copied, text = compiled(4, mesh)
  # Four products, two norms, q/k/v, attention, SwiGLU, and the sum of a layer.
  assert (four - two) / 2 <= 10
  assert four <= 4 * 10 + 20
  assert copied * 2**30 < 1024
  # Kernels that read all logits: a gather of some is no reduction.
  logits = rf'%([\w.\-]+) = f32\[{SLOTS},{VOCAB}\]'
  (name,) = set(re.findall(logits + r'\S* fusion\(', text))
  read = re.findall(rf'input_reduce\S* = .* fusion\(.*%{re.escape(name)}[,)]', text)
  assert len(read) == 1, read
