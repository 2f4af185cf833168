"""Every attention kernel equals the obvious version."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.models import attention, layers

B = 4
T = 40
H = 4
K = 2
C = 8
EPS = 2.0**-23  # of float32


def run(*args, kind, segment_BT=None, **options):
  """Emulates a kernel; cuDNN, which unpacked rows would use, has no emulation."""
  if kind == 'flash' and segment_BT is None:
    segment_BT = jnp.zeros(args[0].shape[:2], jnp.int32)
  return attention.attend(
    *args, kind=kind, segment_BT=segment_BT, interpret=True, **options
  )


KERNELS = {
  kind: functools.partial(run, kind=kind) for kind in ('plain', 'splash', 'flash')
}


def example(kv_heads=K, B=B, T=T, H=H, C=C, dtype='float32', seed=0):
  """Random queries, keys and values, of a standard normal distribution."""
  rng = np.random.default_rng(seed)
  return tuple(
    jnp.asarray(rng.standard_normal((B, T, heads, C), np.float32), dtype)
    for heads in (H, kv_heads, kv_heads)
  )


def segments(T=T):
  """Rows of texts of several lengths, one after the other; the last one is empty."""
  ends = np.asarray([[1, 1, 1], [0.03, 0.05, 1], [0.33, 0.35, 1], [0.5, 0.97, 1]]) * T
  text_BT = (np.arange(T)[None, :, None] >= ends[:, None]).sum(-1)
  return jnp.asarray(np.where(text_BT == 2, -1, text_BT), jnp.int32)


def oracle(q_BTHC, k_BTKC, v_BTKC, segment_BT=None, is_causal=True, window=0):
  """Row by row, head by head, query by query, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q_BTHC, k_BTKC, v_BTKC))
  segment_BT = None if segment_BT is None else np.asarray(segment_BT)
  out = np.zeros_like(q)
  for b, t, h in np.ndindex(q.shape[:3]):
    head = h * k.shape[2] // q.shape[2]
    seen = np.arange(t + 1 if is_causal else q.shape[1])
    seen = seen[-window:]  # of -0: all
    if segment_BT is not None:
      seen = seen[segment_BT[b, seen] == segment_BT[b, t]]
    score = k[b, seen, head] @ q[b, t, h] / np.sqrt(q.shape[-1])
    weight = np.exp(score - score.max())
    out[b, t, h] = weight @ v[b, seen, head] / weight.sum()
  return out


@pytest.mark.parametrize('window', [1, 5, 39, 40, 200])
@pytest.mark.parametrize('T', [40, 200])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('kernel', KERNELS)
def test_a_window_hides_all_but_the_last_columns_of_a_text(
  monkeypatch, kernel, packed, T, window
):
  monkeypatch.setattr(attention, 'WINDOW_BLOCK', 64)
  # 200 columns are several blocks; the windows of 39, 40 and 200 are all columns but
  # one, and all, of a row of 40 or 200.
  args = example(1, B=2, T=T, H=2)
  segment_BT = segments(T)[2:] if packed else None
  attend = functools.partial(KERNELS[kernel], window=window)
  found = jax.jit(attend)(*args, segment_BT=segment_BT)
  expected = oracle(*args, segment_BT, window=window)
  np.testing.assert_allclose(found, expected, atol=32 * EPS * np.abs(expected).max())


@pytest.mark.parametrize(
  ('packed', 'is_causal'), [(False, True), (True, True), (True, False)]
)
@pytest.mark.parametrize('kernel', KERNELS)
def test_a_kernel_equals_the_oracle(kernel, packed, is_causal):
  args = example()
  segment_BT = segments() if packed else None
  attend = functools.partial(KERNELS[kernel], is_causal=is_causal)
  found = jax.jit(attend)(*args, segment_BT=segment_BT)
  expected = oracle(*args, segment_BT, is_causal)
  # A score is a sum of 8 products of up to 10; the weights of 40 values add up to 1.
  np.testing.assert_allclose(found, expected, atol=32 * EPS * np.abs(expected).max())


def with_gradients(kernel, args, seed):
  """Returns what a kernel gives, and the gradients of its sum with random weights."""
  weight_BTHC = np.random.default_rng(seed).standard_normal(args[0].shape, np.float32)

  def total(*args):
    return (kernel(*args).astype(jnp.float32) * weight_BTHC).sum()

  gradient = jax.grad(total, argnums=(0, 1, 2))
  return jax.jit(lambda *args: (kernel(*args), *gradient(*args)))(*args)


@pytest.mark.parametrize(
  ('compute', 'packed', 'is_causal'),
  [('float32', True, True), ('float32', True, False), ('bfloat16', False, True)],
)
def test_blocks_of_queries_equal_xla(compute, packed, is_causal):
  # Values and gradients of three blocks of queries, the last one shorter.
  T = 200
  args = example(B=4, T=T, H=6, dtype=compute, seed=3)
  segment_BT = segments(T) if packed else None

  def xla(*args):
    same = None
    if segment_BT is not None:
      same = segment_BT[:, None, :, None] == segment_BT[:, None, None, :]
    return jax.nn.dot_product_attention(
      *args, mask=same, is_causal=is_causal, implementation='xla'
    )

  plain = functools.partial(
    KERNELS['plain'], segment_BT=segment_BT, is_causal=is_causal
  )

  pairs = zip(with_gradients(plain, args, 4), with_gradients(xla, args, 4), strict=True)
  # Some ten roundings of the largest term, in the dtype of the products.
  rounding = 32 * EPS if compute == 'float32' else 8 * 2.0**-8
  for found, expected in pairs:
    assert found.dtype == expected.dtype
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, atol=rounding * np.abs(expected).max())


@pytest.mark.parametrize(
  ('T', 'packed', 'is_causal', 'window'),
  [
    (40, True, True, 0),
    (300, False, True, 0),
    (40, True, False, 0),
    (40, True, True, 5),
    (300, False, True, 70),
  ],
)
@pytest.mark.parametrize('kernel', attention.FUSED)
def test_a_fused_kernel_has_the_gradient_of_plain(
  monkeypatch, kernel, T, packed, is_causal, window
):
  monkeypatch.setattr(attention, 'WINDOW_BLOCK', 64)
  # 300 columns are three blocks of keys and three of queries; two heads share a key.
  args = example(B=4 if packed else 1, T=T, H=4 if packed else 2, kv_heads=1, seed=2)
  segment_BT = segments() if packed else None
  knobs = {'segment_BT': segment_BT, 'is_causal': is_causal, 'window': window}
  (_, *found), (_, *expected) = (
    with_gradients(functools.partial(KERNELS[kind], **knobs), args, 1)
    for kind in (kernel, 'plain')
  )
  for a, b in zip(found, expected, strict=True):
    assert np.abs(b).max() > 0.1
    # The gradient of a key is a sum over up to T queries.
    np.testing.assert_allclose(a, b, atol=4 * T**0.5 * EPS * np.abs(b).max())


def units(T=T):
  """Rows of units, as of packing.Cells: (segment_BT, Shared).

  A unit is a prompt and responses: rows 4 to 7 with the prompt of 5, 254 to 257, whose
  lower bits begin again, two with a long prompt, and one alone. The rest is empty.
  """
  row_BT, owner_BT, prompt_BT = (np.zeros((B, T), np.int32) for _ in range(3))
  for b, (rows, owner, prompt) in enumerate(
    [
      ((4, 5, 6, 7), 5, 9),
      ((254, 255, 256, 257), 254, 1),
      ((0, 1), 0, 20),
      ((3,), 3, 0),
    ]
  ):
    ends = np.linspace(prompt, T - 4, len(rows) + 1).astype(int)
    row_BT[b] = np.repeat((owner, *rows, -1), np.diff([0, *ends, T]))
    owner_BT[b] = np.where(row_BT[b] >= 0, owner, -1)
    prompt_BT[b] = np.arange(T) < prompt
  reads = attention.Shared(owner_BT, np.where(prompt_BT, row_BT, -2))
  return jnp.asarray(row_BT), jax.tree.map(jnp.asarray, reads)


@pytest.mark.parametrize('kernel', KERNELS)
def test_segments_share_columns(kernel):
  q, k, v = example(seed=5)
  segment_BT, shared = units()
  knobs = {'segment_BT': segment_BT, 'shared': shared}
  found = with_gradients(functools.partial(KERNELS[kernel], **knobs), (q, k, v), 6)
  # Each segment again with its shared columns alone, by another function.
  wanted = np.zeros(q.shape)
  for b in range(B):
    for row in set(np.asarray(segment_BT[b]).tolist()):
      is_mine = np.asarray(segment_BT[b] == row)
      owner = shared.reads_BT[b][is_mine][0]
      (at,) = np.nonzero(is_mine | np.asarray(shared.shared_BT[b] == owner))
      out = oracle(*(x[b : b + 1, at] for x in (q, k, v)))
      wanted[b, is_mine] = out[0, is_mine[at]]
  np.testing.assert_allclose(found[0], wanted, atol=32 * EPS * np.abs(wanted).max())
  expected = with_gradients(functools.partial(KERNELS['plain'], **knobs), (q, k, v), 6)
  for a, b in zip(found[1:], expected[1:], strict=True):
    np.testing.assert_allclose(a, b, atol=4 * T**0.5 * EPS * np.abs(b).max())


@pytest.mark.parametrize('kv_heads', [1, 4])
@pytest.mark.parametrize('kernel', attention.FUSED)
def test_a_fused_kernel_is_split_over_rows_and_heads(kernel, kv_heads):
  # A single head for four shards is copied; four heads are shared out.
  args = example(kv_heads)
  segment_BT = segments()
  mesh = sharding.make(data=2, fsdp=1, tensor=4)
  with sharding.current(mesh):
    rows = sharding.over_rows(mesh)
    placed = jax.device_put(args, rows)
    ids_BT = jax.device_put(segment_BT, rows)
    spread = jax.jit(KERNELS[kernel])(*placed, segment_BT=ids_BT)
  assert spread.sharding.shard_shape(spread.shape) == (B // 2, T, H // 4, C)
  np.testing.assert_allclose(spread, oracle(*args, segment_BT), atol=32 * EPS * 4)


@pytest.mark.parametrize('kernel', attention.FUSED)
def test_dots_saves_the_results_of_a_fused_kernel(kernel):
  # The backward pass of `full` runs the kernel once more. Splash is saved
  # by name: its call stays in the jaxpr, where nothing reads its result.
  args = example(B=1, T=128)
  used = {'splash': f'name={attention.ATTENDED}', 'flash': '= pallas_call['}[kernel]

  def kernels(remat):
    layer = layers.REMAT[remat](lambda *args: jnp.sin(KERNELS[kernel](*args)))
    gradient = jax.value_and_grad(lambda *args: layer(*args).sum())
    return str(jax.make_jaxpr(gradient)(*args)).count(used)

  assert kernels('dots') == kernels('none') == kernels('full') - 1


def compiled(device, function, *shapes):
  """Compiles a function for one device that is not attached."""
  mesh = sharding.make(devices=device)
  place = sharding.replicated(mesh)
  program = jax.jit(function, in_shardings=place, out_shardings=place)
  with jax.set_mesh(mesh):
    lowered = program.lower(*shapes)
  return lowered.compile()


def test_a_window_of_a_packed_row_of_32k_takes_two_gib(topology):
  # 32 heads of 128 and a window of 4,096, as in OLMo 3 7B.
  shapes = [jax.ShapeDtypeStruct((1, 32_768, 32, 128), jnp.bfloat16)] * 3
  segment_BT = jax.ShapeDtypeStruct((1, 32_768), jnp.int32)

  def gradient(q, k, v, segment_BT):
    run = functools.partial(attention.attend, kind='flash', window=4096)
    run = functools.partial(run, segment_BT=segment_BT)
    return jax.grad(lambda *args: run(*args).astype('float32').sum(), (0, 1, 2))(
      q, k, v
    )

  program = compiled(topology('h100:1'), gradient, *shapes, segment_BT)
  assert program.memory_analysis().temp_size_in_bytes < 2 * 2**30


@pytest.mark.parametrize(
  ('device', 'name'),
  [('h100:1', '"sliding_window_length": 512'), ('v5e:2x2', 'splash_mha')],
)
def test_a_window_reaches_the_kernel_of_unpacked_rows(device, name, topology):
  q, k = (jax.ShapeDtypeStruct((1, 2048, n, 128), jnp.bfloat16) for n in (4, 2))
  kind = 'flash' if device.startswith('h100') else 'splash'
  run = functools.partial(attention.attend, kind=kind, window=512)
  program = compiled(topology(device)[:1], run, q, k, k)
  assert name in program.as_text()


@pytest.mark.parametrize('gpu', ['a100-40', 'h100', 'b200', 'rtx6000'])
def test_a_packed_row_of_32k_takes_less_than_a_gib(gpu, topology):
  # 28 query and 4 key heads of 128, as in Qwen2.5-7B; a mask [T, T] would take 4.2 GiB.
  T = 32_768
  GIB = 2**30
  q, k, out = (
    jax.ShapeDtypeStruct((1, T, heads, 128), jnp.bfloat16) for heads in (28, 4, 28)
  )
  segment_BT = jax.ShapeDtypeStruct((1, T), jnp.int32)
  kind = attention.resolve(None, 'gpu', jnp.bfloat16, 128)

  def gradient(q, k, v, segment_BT, out):
    run = functools.partial(attention.attend, kind=kind, segment_BT=segment_BT)
    return jax.vjp(run, q, k, v)[1](out)

  program = compiled(topology(f'{gpu}:1'), gradient, q, k, k, segment_BT, out)
  assert program.memory_analysis().temp_size_in_bytes < GIB


def test_the_first_trace_of_a_kernel_leaves_compiled_programs_valid():
  # Since jax 0.11 importing Pallas changes the keys of jit: f would compile again.
  code = """if True:
    import jax, jax.numpy as jnp
    from bapo_jax.models import attention
    attention.resolve(None, 'gpu', 'bfloat16', 64)
    traces = []
    f = jax.jit(lambda x: traces.append(x) or x)
    f(1)
    from bapo_jax.models import ragged
    new, cache = 2 * (jnp.ones((1, 1, 16)),), (
      jnp.ones((1, 1, 16, 128)), jnp.ones((1, 1, 128, 16)))
    q, at = jnp.ones((1, 1, 16)), jnp.ones(1, int)
    jax.eval_shape(ragged.attend, q, new, cache, at, at)
    f(1)
    assert len(traces) == 1, traces
  """
  subprocess.run([sys.executable, '-c', code], check=True)


def test_auto_chooses_the_kernel_of_the_platform():
  wanted = {
    ('cpu', 'bfloat16'): 'plain',
    ('tpu', 'float32'): 'splash',
    ('gpu', 'bfloat16'): 'flash',
    ('gpu', 'float32'): 'plain',
  }
  for (platform, compute), kind in wanted.items():
    for given in (None, kind):
      assert attention.resolve(given, platform, compute, 64) == kind
  # The shared memory of a GPU bounds the heads; the compiler takes 256, see below.
  assert attention.resolve(None, 'gpu', 'bfloat16', 256) == 'flash'
  assert attention.resolve(None, 'gpu', 'bfloat16', 260) == 'plain'
  for lacking in (
    ('splash', 'cpu', 'float32', 64),
    ('flash', 'gpu', 'float32', 64),
    ('flash', 'gpu', 'bfloat16', 260),
  ):
    with pytest.raises(ValueError, match=r'model\.attention'):
      attention.resolve(*lacking)


@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('C', [20, 136])
def test_heads_that_cudnn_lacks_use_the_other_kernel(C, is_causal):
  # Rows that are not packed, as of prompts; cuDNN itself needs a GPU.
  args = example(B=2, C=C)
  run = functools.partial(
    attention.attend, kind='flash', is_causal=is_causal, interpret=True
  )
  expected = oracle(*args, is_causal=is_causal)
  found = jax.jit(run)(*args)
  np.testing.assert_allclose(found, expected, atol=C * EPS * np.abs(expected).max())


@pytest.mark.parametrize('gpu', ['a100-40', 'h100'])
@pytest.mark.parametrize('C', [12, attention.WIDEST])
def test_prompts_compile_with_heads_that_cudnn_lacks(gpu, C, topology):
  q, k = (jax.ShapeDtypeStruct((2, 40, n, C), jnp.bfloat16) for n in (4, 2))
  run = functools.partial(attention.attend, kind='flash')
  assert compiled(topology(f'{gpu}:1'), run, q, k, k)


def test_blocks_of_keys_are_smaller_for_wide_heads():
  # A v5e has no room for 1,536 keys of 256 channels; 2,048 of 128 are as large as
  # 1,024 of 256.
  blocks = [attention.key_block(9216, n) for n in (128, 256, 384)]
  assert blocks == [1536, 1024, 512]
  assert [attention.key_block(32768, n) for n in (128, 256)] == [2048, 1024]
