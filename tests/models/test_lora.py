"""Adapters: what they add, which weights have one, and that the rest stays frozen."""

import dataclasses
import functools
import json
import math
import os
import pathlib

import jax
import jax.extend
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest
import runs
import safetensors.numpy
from refusals import sentence_of
from runs import last_run, on_devices, saved, source, tiny

from bapo_jax import sharding
from bapo_jax.algorithms import clip
from bapo_jax.learner import learner
from bapo_jax.models import decoder, knobs, layers, logprobs, lora, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.models.layers import Schedule
from bapo_jax.run import experiment, resume
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.tools import export
from bapo_jax.training import build, checkpoint, policy

SPEC = dataclasses.replace(making.SPEC, heads=4, kv_heads=2, ffn=24, vocab=12)
ALL = knobs.LoraConfig().targets


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(spec, rank):
  """New adapters of all projections, with alpha / rank = 2."""
  key = jax.random.key(0)
  return lora.init(spec, key, rank=rank, alpha=2.0 * rank, targets=ALL)


@functools.partial(jax.jit, static_argnames='spec')
def logits(weights, tokens_BT, spec=SPEC):
  """[B, T, V] of whole rows."""
  hidden_BTD = layers.forward(weights, tokens_BT, spec)
  return jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(weights))


def test_new_adapters_add_nothing_and_a_has_the_variance_of_peft():
  spec = dataclasses.replace(SPEC, width=64, ffn=96)
  made = start(spec, 8)
  for path, adapter in transformer.flatten(made).items():
    inputs = math.prod(adapter.a.shape[1:-1])
    assert not adapter.b.any() and adapter.scale == 2
    # Uniform on +-1 / sqrt(n): variance 1 / 3n.
    assert np.abs(adapter.a).max() <= inputs**-0.5
    assert adapter.a.var() * 3 * inputs == pytest.approx(1, abs=0.15), path
  params = making.params(spec)
  tokens_BT = jnp.arange(10).reshape(2, 5)
  np.testing.assert_array_equal(
    logits(lora.attach(params, made), tokens_BT, spec), logits(params, tokens_BT, spec)
  )


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once():
  spec = dataclasses.replace(SPEC, compute='bfloat16', dtype='bfloat16')
  base = transformer.cast(making.params(spec), 'bfloat16')
  made = making.adapters(spec)
  found = decoder.actor(lora.attach(base, made), spec, joined=False)['layers'][1]['up']
  up = transformer.flatten(made)['layers/up']
  wide = base['layers']['up'][1].astype('float32') + up.scale * up.a[1] @ up.b[1]
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


def test_targets_choose_by_the_whole_path():
  chosen = lora.shapes(SPEC, 2, 'layers/(q|v)')
  assert sorted(chosen) == ['layers/q', 'layers/v']
  # [L, D, rank] and [L, rank, H, C]
  assert chosen['layers/q'] == ((2, 16, 2), (2, 2, 4, 8))
  assert len(lora.shapes(SPEC, 2, '.*')) == len(knobs.PROJECTIONS)
  # L (in + out) rank of each: q 16, 32; k and v 16, 16; o 32, 16; three of 16, 24.
  assert lora.count(SPEC, 2, ALL) == 2 * 2 * (48 + 32 + 32 + 48 + 3 * 40)


def test_a_rank_above_the_smaller_side_of_a_weight_is_refused():
  with pytest.raises(ValueError, match=r'lora\.rank=17') as error:
    lora.shapes(SPEC, 17, ALL)
  assert '1 to 16' in str(error.value)


@pytest.mark.parametrize('targets', ['q_proj', 'layers/(q'])
def test_targets_that_match_nothing_are_refused(targets):
  with pytest.raises(ValueError, match='targets=') as error:
    knobs.LoraConfig(targets=targets)
  assert 'layers/(q|v)' in str(error.value) or 'layers/down' in str(error.value)


def test_a_mixture_has_adapters_of_attention_alone():
  spec = dataclasses.replace(SPEC, experts=4, active=2)
  assert set(lora.shapes(spec, 2, ALL)) == {f'layers/{name}' for name in 'qkvo'}
  assert "lora.targets='layers/(gate|up)'" in sentence_of(
    lora.shapes, spec, 2, 'layers/(gate|up)'
  )
  assert not lora.shapes(spec, 0, 'layers/gate')  # adapters are off


def products(function, argument):
  """The sorted shapes of all products in a program, those in its loops included."""
  found = set()

  def visit(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'dot_general':
        found.add(tuple(sorted(equation.outvars[0].aval.shape)))
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        visit(inner)

  visit(jax.make_jaxpr(function)(argument).jaxpr)
  return found


@pytest.mark.parametrize('tied', [False, True])
def test_no_product_of_the_gradient_is_as_large_as_a_frozen_weight(tied):
  spec = dataclasses.replace(SPEC, tied=tied, ffn=40, vocab=56)
  base = making.params(spec)
  tokens_BT = jnp.zeros((2, 6), jnp.int32)

  def loss(weights):
    return logprobs.sequence_stats(weights, tokens_BT, spec, 1.0).logp_BT.sum()

  shapes = {
    path: tuple(sorted(shape[1:] if path.startswith('layers') else shape))
    for path, (shape, _) in transformer.describe(spec).items()
    if path in knobs.PROJECTIONS or path in ('embed', 'head')
  }
  full = products(jax.grad(loss), base)
  unmerged = products(
    jax.grad(lambda made: loss(lora.attach(base, made))), making.adapters(spec)
  )
  if not tied:
    del shapes['embed']  # read by row: without a product
  for path, shape in shapes.items():
    assert shape in full, path
    assert shape not in unmerged, path


# ------- training adapters: their gradient, on one device and on eight, and what stays


NARROW = dataclasses.replace(making.QWEN2, vocab=24, head_width=8, tied=False)
P = 4
G = 4
T = 12
TEMPERATURE = 0.8
PLAIN = optax.sgd(1.0)  # the weights move by the gradient itself


batch = functools.partial(
  making.off_policy, spec=NARROW, P=P, G=G, T=T, temperature=TEMPERATURE
)


def gradients(before, after):
  """path -> gradient of each array."""
  moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)
  return by_path(moved)


def by_path(tree):
  """path -> array"""
  leaves = jax.tree.leaves_with_path(tree)
  return {sharding.path_name(path): x for path, x in leaves}


def close(found, expected, name):
  assert np.abs(expected).max() > 0, name
  making.close(
    found, expected, count=P * G * T * NARROW.width * NARROW.layers, name=name
  )


def step_of(schedule, parts):
  """Returns a jitted update."""
  knobs = {'schedule': schedule, 'grad_accum_steps': parts, 'spec': NARROW}
  objective = making.objective(clip.Balanced(target=0.4), **knobs)
  return jax.jit(functools.partial(learner.learn, tx=PLAIN, objective=objective))


@functools.cache
def of_all_weights():
  """(base, adapters, rows, path -> gradient of the merged weights, metrics)."""
  base, params = making.params(NARROW), making.adapters(NARROW, 0.1)
  merged = making.merged(lora.attach(base, params))
  rows = batch(merged)
  whole, _, metrics, _ = step_of(Schedule('none'), 1)(merged, PLAIN.init(merged), rows)
  return base, params, rows, gradients(merged, whole), metrics


@pytest.mark.parametrize(
  ('schedule', 'parts', 'devices'),
  [
    (Schedule('full'), 1, 1),
    (Schedule('dots'), 2, 1),
    (Schedule('none', bounds_pass='stored'), 2, 1),
    (Schedule('dots', sequence_sharding=True), 2, 8),
  ],
)
def test_the_gradient_is_that_of_all_weights_projected(schedule, parts, devices):
  """W' = W + s A B: dA = s dW' B^T and dB = s A^T dW', layer by layer."""
  base, params, rows, d_weights, expected = of_all_weights()
  step = step_of(schedule, parts)
  mesh = sharding.make(2, 2, 2) if devices == 8 else None
  held = params, base
  if mesh:
    held = jax.device_put(held, sharding.shardings(held, mesh))
    rows = jax.device_put(rows, sharding.over_rows(mesh))
  step = sharding.under(mesh, step)
  after, _, metrics, _ = step(held[0], PLAIN.init(params), rows, held[1])
  assert 0 < metrics['clip/fraction'] < 1
  # Advantages of both signs cancel in the loss: its error is that of terms of about 1.
  making.close(metrics['loss/value'], expected['loss/value'], count=P * G * T, terms=1)
  found = gradients(params, after)
  for path, adapter in transformer.flatten(params).items():
    rank = adapter.a.shape[-1]
    for i in range(NARROW.layers):
      a = np.asarray(adapter.a[i]).reshape(-1, rank)
      b = np.asarray(adapter.b[i]).reshape(rank, -1)
      d_w = d_weights[path][i].reshape(len(a), -1)
      d_a = found[f'{path}/a'][i]
      d_b = found[f'{path}/b'][i]
      close(d_a.reshape(a.shape), adapter.scale * d_w @ b.T, f'{path}/a')
      close(d_b.reshape(b.shape), adapter.scale * a.T @ d_w, f'{path}/b')


# ------ an exported directory of adapters is one that peft loads, with the same logits


KNOBS = LoraConfig(rank=3, alpha=6.0)
SMALL = making.SPEC
SEEING = making.SEEING


def test_the_config_is_that_of_peft(tmp_path):
  knobs = LoraConfig(rank=2, alpha=3.0, targets='layers/(o|k)')
  get = by_path(making.adapters(**knobs.model_dump())).__getitem__
  model = 'hub:owner/name@main'
  hf_weights.save_adapters(str(tmp_path), get, SMALL, knobs, model, 'bfloat16')
  config = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert (config['r'], config['lora_alpha']) == (2, 3.0)
  assert config['target_modules'] == ['k_proj', 'o_proj']
  assert config['base_model_name_or_path'] == 'owner/name'
  assert config['revision'] == 'main'


@pytest.mark.parametrize('kind', ['qwen2', 'qwen2_5_vl'])
def test_peft_gives_the_logits_of_adapted_and_of_merged_weights(kind, tmp_path):
  torch = pytest.importorskip('torch', reason='needs requirements/parity.txt')
  peft = pytest.importorskip('peft', reason='needs requirements/parity.txt')
  import transformers

  options = {'qkv_bias': True, 'head_width': 8}
  if kind == 'qwen2_5_vl':
    options = {'head_width': 4, 'mrope': SEEING.mrope, 'vision': SEEING.vision}
  spec = dataclasses.replace(SMALL, heads=4, kv_heads=2, ffn=24, vocab=20, **options)
  params = making.params(spec)
  made = making.adapters(spec)
  model = str(tmp_path / 'model')
  adapter = str(tmp_path / 'adapter')
  os.mkdir(model)
  os.mkdir(adapter)
  hf_weights.save(model, transformer.flatten(params).__getitem__, spec)
  config = hf_config.config_of(spec) | {'torch_dtype': 'float32'}
  pathlib.Path(model, 'config.json').write_text(json.dumps(config))
  get = by_path(made).__getitem__
  hf_weights.save_adapters(adapter, get, spec, KNOBS, model, 'float32')
  seeing = transformers.Qwen2_5_VLForConditionalGeneration
  theirs = seeing if spec.vision else transformers.AutoModelForCausalLM
  theirs = theirs.from_pretrained(model)
  theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
  adapted = [name for name, _ in theirs.named_modules() if name.endswith('.lora_A')]
  assert len(adapted) == 7 * spec.layers
  tokens_BT = np.random.default_rng(0).integers(0, 20, (3, 9))
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens_BT)).logits.numpy()
  weights = lora.attach(params, jax.tree.map(jnp.asarray, made))
  for each in (weights, making.merged(weights)):
    hidden_BTD = layers.forward(each, jnp.asarray(tokens_BT), spec)
    found = jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(each))
    making.close(found, expected, count=4096)
  plain = layers.forward(params, jnp.asarray(tokens_BT), spec)
  assert np.abs(plain - hidden_BTD).max() > 0.1


def test_a_checkpoint_is_exported_as_adapters_and_merged(tmp_path):
  path = source(tmp_path / 'source')
  workdir = tmp_path / 'run'
  config = tiny(**{'model.path': path, 'lora.rank': 2, 'sampler.max_new_tokens': 8})
  experiment.claim(str(workdir), config)
  spec = hf_config.read_spec(path, 'float32')
  made = making.adapters(spec, **config.lora.model_dump())
  saved(workdir, made)
  alone = str(tmp_path / 'alone')
  merged = str(tmp_path / 'merged')
  assert export.export(config, str(workdir), alone, 'float32', adapter=True) == 0
  assert export.export(config, str(workdir), merged, 'float32') == 0
  found = safetensors.numpy.load_file(f'{alone}/adapter_model.safetensors')
  a, b = (
    found[f'base_model.model.model.layers.1.mlp.down_proj.lora_{x}.weight']
    for x in 'AB'
  )
  name = 'model.layers.1.mlp.down_proj.weight'
  base = safetensors.numpy.load_file(f'{path}/model.safetensors')[name]
  whole = safetensors.numpy.load_file(f'{merged}/model.safetensors')
  scale = config.lora.alpha / 2
  making.close(whole[name], base.astype('float32') + scale * b @ a, count=16)
  assert (tmp_path / 'alone' / 'tokenizer.json').exists()


# ------------ what a checkpoint of adapters has, and what a finished run may leave out


@pytest.fixture(scope='module')
def resumed(adapter_run):
  """Returns (trainer, state at step 0, state after the last step) of the adapters."""
  config, workdir, verifier = adapter_run
  with on_devices(1):
    t, s = build.start(config, PhaseTimer(), verifier())
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


def test_a_run_resumes_only_with_the_random_numbers_of_its_start(adapter_run, resumed):
  t, s, _ = resumed
  words = r"partitionable': True.* then, .*partitionable': False.* now.*--workdir"
  with (
    checkpoint.manager(str(adapter_run.workdir), 9, 1) as checkpoints,
    jax.threefry_partitionable(False),
    pytest.raises(ValueError, match=words),
  ):
    resume.resume(checkpoints, t, s)


def test_a_fingerprint_is_of_the_numbers_and_their_places():
  rng = np.random.default_rng(0)
  a, b = jnp.asarray(rng.normal(size=(4, 8, 6)), jnp.float32), jnp.ones(3)
  found = policy.fingerprint({'a': a, 'b': b})
  others = [{'a': a[::-1], 'b': b}, {'a': a, 'c': b}, {'a': a, 'b': -b}]
  assert len({found, *map(policy.fingerprint, others)}) == 4
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
  assert 'checkpoint.final' in sentence_of(
    runs.train, tiny(**knobs | {'steps': 5}), workdir
  )
