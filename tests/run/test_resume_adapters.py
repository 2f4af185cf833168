"""What a checkpoint of adapters has, and what a finished run may leave out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from runs import last_run, one_device, tiny

from bapo_jax.models import lora, transformer
from bapo_jax.run import resume
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, checkpoint, inputs, policy


@pytest.fixture(scope='module')
def resumed(adapter_run):
  """Returns (trainer, state at step 0, state after the last step) of the adapters."""
  config, workdir, verifier = adapter_run
  with one_device():
    t, s = build.start(config, str(workdir), PhaseTimer(), verifier())
    with checkpoint.manager(str(workdir), 9, 1) as checkpoints:
      return t, s, resume.resume(checkpoints, t, s)[0]


def test_a_checkpoint_of_adapters_has_no_other_weight(adapter_run, resumed):
  for step in range(1, adapter_run.config.steps + 1):
    arrays = last_run(adapter_run.workdir, step).arrays
    names = [name for name in arrays if not name.startswith(('buffer', 'partial'))]
    assert {name.rpartition('/')[2] for name in names} <= {'a', 'b', 'count'}
    # The older adapters that decode the next step.
    assert any(name.startswith('actor') for name in names) == bool(step % 2)
  _, first, last = resumed
  for path, adapter in transformer.flatten(first.params).items():
    assert not np.array_equal(transformer.flatten(last.params)[path].b, adapter.b)


def test_adapters_are_read_merged_into_the_model(adapter_run, resumed):
  config, workdir, _ = adapter_run
  t, _, last = resumed
  read = policy.reader(config, inputs.open_model(config), str(workdir), 4)
  for path, w in transformer.flatten(lora.merge(t.weights(last.params))).items():
    np.testing.assert_array_equal(read(path), w)


def test_adapters_of_other_frozen_weights_are_refused(adapter_run, resumed):
  t, s, _ = resumed
  other = jax.tree.map(jnp.copy, t.base)
  embed = other['embed']
  other['embed'] = embed.at[1, 2].set(jnp.nextafter(embed[1, 2], jnp.float32(9)))
  t = dataclasses.replace(t, base=other)
  with (
    checkpoint.manager(str(adapter_run.workdir), 9, 1) as checkpoints,
    pytest.raises(ValueError, match=r'frozen weights.*model\.path'),
  ):
    resume.resume(checkpoints, t, s)


def test_a_fingerprint_is_of_the_numbers_and_their_places():
  rng = np.random.default_rng(0)
  a, b = jnp.asarray(rng.normal(size=(4, 8, 6)), jnp.float32), jnp.ones(3)
  found = policy.fingerprint({'a': a, 'b': b})
  assert found == policy.fingerprint({'a': jnp.copy(a), 'b': jnp.copy(b)})
  swapped = a.at[0, 0, 0].set(a[3, 7, 5]).at[3, 7, 5].set(a[0, 0, 0])
  turned, narrow = a.reshape(8, 4, 6).reshape(4, 8, 6)[::-1], a.astype(jnp.bfloat16)
  others = [{'a': x, 'b': b} for x in (swapped, turned, narrow)]
  others += [{'a': a, 'c': b}, {'a': a, 'b': -b}]
  assert len({found, *map(policy.fingerprint, others)}) == 6
  mesh = jax.make_mesh((4, 2), ('x', 'y'))
  layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x', None, 'y'))
  assert policy.fingerprint({'a': jax.device_put(a, layout), 'b': b}) == found
  assert policy.fingerprint(None) == ''


def test_a_finished_run_may_leave_its_optimiser_out(whole_run, tmp_path):
  workdir = runs.truncated(whole_run, tmp_path / 'run', 3)
  knobs = runs.RECORDED['whole'] | {'checkpoint.final': 'weights'}
  assert runs.train(tiny(**knobs), workdir) == 0
  names = set(last_run(workdir).arrays)
  assert 'params/embed' in names
  assert not any(name.startswith(('opt', 'actor')) for name in names)
  with pytest.raises(ValueError, match=r'checkpoint\.final'):
    runs.train(tiny(**knobs | {'steps': 5}), workdir)
