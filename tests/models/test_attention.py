"""Every attention kernel equals the obvious version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.models import attention

B, T, H, K, C = 4, 40, 4, 2, 8


def example(kv_heads: int = K, seed: int = 0):
  rng = np.random.default_rng(seed)
  return tuple(
    jnp.asarray(rng.standard_normal((B, T, heads, C), np.float32))
    for heads in (H, kv_heads, kv_heads)
  )


def segments():
  """Rows of texts of several lengths, one after the other."""
  ends = np.asarray([[40, 40, 40], [1, 2, 40], [13, 14, 40], [20, 39, 40]])
  return jnp.asarray((np.arange(T)[None, :, None] >= ends[:, None]).sum(-1), jnp.int32)


def oracle(q_BTHC, k_BTKC, v_BTKC, segment_BT=None, is_causal=True):
  """Row by row, head by head, query by query, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q_BTHC, k_BTKC, v_BTKC))
  out = np.zeros_like(q)
  for b in range(B):
    for h in range(H):
      own = h * k.shape[2] // H
      for t in range(T):
        seen = np.arange(t + 1 if is_causal else T)
        if segment_BT is not None:
          seen = seen[np.asarray(segment_BT[b, seen] == segment_BT[b, t])]
        score = k[b, seen, own] @ q[b, t, h] / np.sqrt(C)
        share = np.exp(score - score.max())
        out[b, t, h] = share @ v[b, seen, own] / share.sum()
  return out


def plain(q_BTHC, k_BTKC, v_BTKC, segment_BT=None):
  return attention.causal(q_BTHC, k_BTKC, v_BTKC, kind='plain', segment_BT=segment_BT)


def splash(*args):
  return attention.splash(*args, interpret=True)


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('kernel', [plain, splash])
def test_a_kernel_equals_the_oracle(kernel, packed):
  args = (*example(), segments()) if packed else example()
  found = jax.jit(kernel)(*args)
  np.testing.assert_allclose(found, oracle(*args), atol=1e-5)


def test_within_segments_a_query_sees_later_keys():
  # Three segments in each row, the last one as where nothing is.
  segment_BT = jnp.where(segments() == 2, -1, segments())
  kernels = {
    'plain': lambda *args: attention.within_segments(
      *args[:3], kind='plain', segment_BT=args[3]
    ),
    'splash': lambda *args: attention.splash(*args, is_causal=False, interpret=True),
  }
  args = (*example(), segment_BT)
  for name, kernel in kernels.items():
    np.testing.assert_allclose(
      jax.jit(kernel)(*args), oracle(*args, is_causal=False), atol=1e-5, err_msg=name
    )


def test_within_segments_in_several_blocks():
  rng, T = np.random.default_rng(5), 200
  args = [jnp.asarray(rng.standard_normal((2, T, 4, 8), np.float32)) for _ in range(3)]
  segment_BT = jnp.asarray(np.arange(T)[None] // np.asarray([[70], [90]]))
  found = attention.within_segments(*args, kind='plain', segment_BT=segment_BT)
  wanted = jax.nn.dot_product_attention(
    *args, mask=segment_BT[:, None, :, None] == segment_BT[:, None, None, :]
  )
  np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize(
  ('length', 'size'),
  [(1, 1), (88, 88), (127, 127), (128, 64), (200, 67), (256, 64), (9216, 1152)],
)
def test_few_blocks_of_queries(length, size):
  assert attention.query_block(length) == size


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('compute', ['float32', 'bfloat16'])
def test_blocks_of_queries_are_the_whole(compute, packed):
  # Three blocks, the last shorter, against XLA's own attention, in both directions.
  rng, T = np.random.default_rng(3), 200
  args = [
    jnp.asarray(rng.standard_normal((2, T, heads, 8)), compute) for heads in (6, 2, 2)
  ]
  weight = jnp.asarray(rng.standard_normal((2, T, 6, 8)), jnp.float32)
  segment_BT = jnp.asarray(np.arange(T)[None] // np.asarray([[70], [90]]))
  mask = segment_BT[:, None, :, None] == segment_BT[:, None, None, :]

  def xla(*args):
    return jax.nn.dot_product_attention(
      *args, mask=mask if packed else None, is_causal=True, implementation='xla'
    )

  def blocks(*args):
    return attention.causal(
      *args, kind='plain', segment_BT=segment_BT if packed else None
    )

  def both(kernel):
    total = lambda *x: (kernel(*x).astype(jnp.float32) * weight).sum()  # noqa: E731
    return kernel(*args), *jax.grad(total, argnums=(0, 1, 2))(*args)

  off = 2e-6 if compute == 'float32' else 2e-2
  for found, wanted in zip(both(blocks), both(xla), strict=True):
    assert found.dtype == wanted.dtype
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, atol=off * np.abs(wanted).max())


def test_splash_has_the_gradient_of_plain():
  weight = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, H, C)))

  def total(kernel):
    return jax.jit(
      jax.grad(lambda *args: (kernel(*args, segments()) * weight).sum(), (0, 1, 2))
    )

  for a, b in zip(total(splash)(*example()), total(plain)(*example()), strict=True):
    assert np.abs(b).max() > 0.1
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
  ('length', 'columns'), [(128, 128), (9216, 1536), (33792, 1536), (66560, 1024)]
)
def test_the_kernel_writes_few_gradients_of_queries(length, columns):
  # One per block of keys: 18, 66 and 130 of them with blocks of 512.
  assert attention.key_block(length) == columns


def test_wide_blocks_of_keys_have_the_gradient_of_plain():
  rng, T = np.random.default_rng(2), 3072  # two blocks of keys, six of queries
  arrays = [
    jnp.asarray(rng.standard_normal((1, T, n, 8)), jnp.float32) for n in (2, 1, 1)
  ]
  weight = jnp.asarray(rng.standard_normal((1, T, 2, 8)), jnp.float32)

  def gradient(kernel):
    return jax.jit(jax.grad(lambda *x: (kernel(*x) * weight).sum(), argnums=(0, 1, 2)))

  assert attention.key_block(T) == 1536
  for a, b in zip(gradient(splash)(*arrays), gradient(plain)(*arrays), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_splash_is_split_over_rows_and_heads(kv_heads):
  # One head for four shards is copied; four are shared out.
  args, devices = example(kv_heads), sharding.make(data=2, fsdp=1, tensor=4)
  with sharding.current(devices):
    spread = jax.jit(splash)(*jax.device_put(args, sharding.over_rows(devices)))
  assert spread.sharding.shard_shape(spread.shape) == (B // 2, T, H // 4, C)
  np.testing.assert_allclose(spread, plain(*args), atol=1e-5)


def test_auto_chooses_the_kernel_of_the_platform():
  wanted = {
    ('cpu', 'bfloat16'): 'plain',
    ('tpu', 'bfloat16'): 'splash',
    ('tpu', 'float32'): 'splash',
    ('gpu', 'bfloat16'): 'cudnn',
    ('gpu', 'float32'): 'plain',
  }
  for (platform, compute), kind in wanted.items():
    assert attention.resolve('auto', platform, compute) == kind
    assert attention.resolve(kind, platform, compute) == kind
    assert attention.resolve('plain', platform, compute) == 'plain'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (('flash', 'cpu', 'float32'), "no kind 'flash'"),
    (('splash', 'cpu', 'float32'), 'splash needs a tpu, this is a cpu'),
    (('cudnn', 'tpu', 'bfloat16'), 'cudnn needs a gpu, this is a tpu'),
    (('cudnn', 'gpu', 'float32'), 'needs model.compute=bfloat16, not float32'),
  ],
)
def test_a_kernel_that_the_platform_lacks_is_refused(arguments, message):
  with pytest.raises(ValueError) as error:
    attention.resolve(*arguments)
  assert str(error.value).startswith('model.attention') and message in str(error.value)
