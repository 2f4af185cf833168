"""A plan's largest arrays and collectives, of programs small enough to work by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bapo_jax.tools.plan import contents


def test_arrays_of_each_dtype():
  shape = '(bf16[8,4]{1,0:T(8,128)(2,1)}, pred[3], f8e4m3[2,2], f32[], s32[0,7])'
  sizes = [size for size, _ in contents.arrays(shape)]
  assert sizes == [64, 3, 4, 4, 0]


def test_largest_arrays_have_a_device_s_bytes_and_their_source():
  mesh = jax.make_mesh((8,), ('data',))

  def body(weights, x):
    return jnp.sum(jax.lax.sort(x @ weights['w']))

  weights = {'w': jax.ShapeDtypeStruct((64, 100), jnp.float32)}
  x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
  rows = jax.NamedSharding(mesh, P('data'))
  whole = jax.NamedSharding(mesh, P())
  program = jax.jit(body, in_shardings=(whole, rows)).lower(weights, x).compile()
  found = contents.largest(program.as_text(), 100)
  # 512 rows per device: 512 x 100 products, 512 x 64 inputs, 64 x 100 weights.
  assert found[0][:2] == (4 * 512 * 100, 'f32[512,100]')
  assert any('dot_general' in source or 'sort' in source for *_, source in found[:2])
  assert (4 * 512 * 64, 'f32[512,64]', 'x') in found
  assert (4 * 64 * 100, 'f32[64,100]', "weights['w']") in found


def test_inside_of_a_fused_kernel_takes_no_memory():
  text = (
    '%fused (a: f32[9]) -> f32[2] {\n'
    '  %b = f32[1024]{0} broadcast(%a), metadata={op_name="inside"}\n'
    '}\n\nENTRY %main (p: f32[9]) -> f32[2] {\n'
    '  %p = f32[9]{0} parameter(0), metadata={op_name="p"}\n'
    '  ROOT %f = f32[2]{0} fusion(%p), kind=kLoop, calls=%fused\n}'
  )
  assert contents.largest(text) == [(36, 'f32[9]', 'p'), (8, 'f32[2]', 'f')]


def test_collectives_by_kind():
  mesh = jax.make_mesh((8,), ('data',))
  rows = jax.NamedSharding(mesh, P('data'))
  x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
  whole = jax.NamedSharding(mesh, P())
  summed = jax.jit(lambda x: x.sum(0), in_shardings=rows, out_shardings=whole)
  assert contents.collectives(summed.lower(x).compile().as_text()) == {
    'all-reduce': (1, 4 * 32)
  }
  gathered = jax.jit(lambda x: x, in_shardings=rows, out_shardings=whole)
  assert contents.collectives(gathered.lower(x).compile().as_text()) == {
    'all-gather': (1, 4 * 64 * 32)
  }
  started = '  %s = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), dimensions={0}'
  done = '  %d = f32[32]{0} all-gather-done(%s)'
  assert contents.collectives(f'{started}\n{done}') == {'all-gather': (1, 128)}
