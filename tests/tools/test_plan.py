"""A plan lists what fits, what does not, by how much, and which flags would fit."""

import json
import pathlib
import re
import sys

import jax
import numpy as np
import processes
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from refusals import sentence_of

from bapo_jax import sharding
from bapo_jax.runtime.ahead import Call
from bapo_jax.tools.plan import devices, plan, programs
from bapo_jax.tools.plan.chips import CHIPS
from bapo_jax.training import budget, resolve
from bapo_jax.training import config as config_lib
from benchmarks import hlo, meshes, roofline, seconds
from configs import aime

SMALL = {  # Qwen2.5-1.5B in all but depth
  'model_type': 'qwen2',
  'vocab_size': 151936,
  'hidden_size': 1536,
  'num_hidden_layers': 2,
  'num_attention_heads': 12,
  'num_key_value_heads': 2,
  'intermediate_size': 8960,
  'rope_theta': 1e6,
  'rms_norm_eps': 1e-6,
  'max_position_embeddings': 32768,
}

HALF = SMALL | {  # Qwen2.5-0.5B, whose heads are 64 wide
  'hidden_size': 896,
  'num_hidden_layers': 24,
  'num_attention_heads': 14,
  'intermediate_size': 4864,
}

SEVEN = SMALL | {
  'vocab_size': 152064,
  'hidden_size': 3584,
  'num_hidden_layers': 28,
  'num_attention_heads': 28,
  'num_key_value_heads': 4,
  'intermediate_size': 18944,
}


def small(path):
  """The 7B config, its model's directory with a small config.json and nothing else."""
  (path / 'config.json').write_text(json.dumps(SMALL))
  config = aime.seven()
  config.model.path = str(path)
  config.mesh.update(data=1, fsdp=4, tensor=2)
  config.prompts.update(count=32, max_prompt_tokens=128)
  config.sampler.update(max_new_tokens=1920, max_num_seqs=64, prefill_batch_size=8)
  return config_lib.parse(config.to_dict())


@pytest.fixture
def config(tmp_path):
  return small(tmp_path)


@pytest.fixture
def mesh(config):
  """The config's mesh of the eight virtual devices."""
  return sharding.make(**config.mesh.model_dump(), devices=jax.devices())


@pytest.mark.nightly
@pytest.mark.parametrize(
  ('where', 'slots', 'knobs'),
  [
    # 14 GiB of cache per device, and 3 of temporaries: prefill fits, decoding does not.
    ('v5e:2x2', 192_000, {'sampler.max_new_tokens': 1024}),
    # 68 GiB, and 8 of temporaries: a GPU's compiler does not refuse the program.
    ('h100:1', 1 << 18, {'sampler.max_new_tokens': 1024}),
  ],
)
def test_the_plan_of_a_small_config(topology, tmp_path, where, slots, knobs):
  topology(where)  # skips without its compiler
  flags = ['--mode=plan', f'--topology={where}', f'--workdir={tmp_path / "run"}']
  knobs |= {
    'sft.layers': 1,
    'prompts.count': 16,
    'learner.minibatches': 1,
    'sampler.prefill_batch_size': 8,
    'sampler.max_num_seqs': slots,
  }
  flags += [f'--config.{name}={value}' for name, value in knobs.items()]
  main = sys.executable, '-m', 'bapo_jax.main', '--config=configs/aime.py'
  run = processes.call(*main, *flags, status=1)
  for name in ('train step', 'log-prob pass', 'prefill'):
    assert re.search(rf'^{name} .* fits, \d+\.\d left$', run.stdout, re.M), run.stdout
  (line,) = re.findall(r'^decode .*$', run.stdout, re.M)[:1]
  assert f'GiB too much; --config.sampler.max_num_seqs={slots // 2} fits' in line
  assert not (tmp_path / 'run').exists()  # a plan writes nothing


def run_of(config, mesh, platform='tpu'):
  spec = programs.device_spec(config, platform)
  return programs.resolved(config, spec, mesh)


@pytest.mark.parametrize(
  ('name', 'kind'), [('v5e:2x4', 'int8'), ('v5p:2x2x2', 'compute')]
)
def test_decoding_needs_little_memory_beyond_its_cache(topology, config, name, kind):
  config = config.with_values(sampler={'max_new_tokens': 3968, 'actor_dtype': kind})
  mesh = resolve.make_mesh(config, topology(name))
  found = programs.programs_of(run_of(config, mesh))
  for name in ('decode', 'prefill'):
    row = plan.compiled(found[name])
    # 64 rows over 4 and one of 2 heads: 2 layers, keys and values, 128 wide, bfloat16.
    assert row.program.cache == 64 / 4 * 4096 * 2 * 2 * 128 * 2
    assert row.output < 2**20, 'the slots are not donated'
    if name == 'decode':
      # Six arrays of a device's logits, 16 rows of half the vocabulary; a v5p holds
      # 5.6 of them at once. A copy of one layer's cache (32 MiB) or of its gate and up
      # (26 MiB) would not fit beside them: quantised weights are cast in the product.
      assert row.temporaries < 6 * 16 * 151936 / 2 * 4
      # Two sums of [16, 1536] a layer and the embedding's, and two of the 1187 blocks
      # of the vocabulary in float32: no weight and no cache.
      runs = hlo.in_loops(row.executable.as_text())
      assert max(run.bytes for run in runs) <= max(16 * 1536 * 2, 16 * 1187 * 4)


@pytest.mark.nightly
@pytest.mark.parametrize(
  ('where', 'tensor', 'slots', 'model'),
  [
    ('v5e:2x2', 4, 32, SEVEN),
    ('v5p:2x2x1', 1, 256, SEVEN),
    ('v6e:2x2', 4, 64, SEVEN),
    ('h100:4', 1, 256, SEVEN),
    ('v5e:2x2', 1, 256, HALF),
    ('v5p:2x2x1', 1, 256, HALF),
    ('v6e:2x2', 1, 256, HALF),
    ('h100:4', 1, 256, HALF),
  ],
)
def test_decoding_copies_no_layer(topology, tmp_path, where, tensor, slots, model):
  found = topology(where)
  (tmp_path / 'config.json').write_text(json.dumps(model))
  config = aime.seven()
  config.model.path = str(tmp_path)
  config.mesh.tensor, config.sampler.max_num_seqs = tensor, slots
  config = config_lib.parse(config.to_dict())
  mesh = resolve.make_mesh(config, found)
  run = run_of(config, mesh, platform=found[0].platform)
  program = programs.programs_of(run)['decode']
  with jax.set_mesh(mesh):
    text = program.call.lower().as_text()
  assert 'ragged_decode' in text, 'attention reads the whole cache'
  row = plan.compiled(program)
  layers, heads = model['num_hidden_layers'], model['num_key_value_heads']
  width = model['hidden_size'] // model['num_attention_heads']
  # Slots over 4 / tensor devices, heads over tensor; keys and values in two bytes.
  assert row.program.cache == slots / 4 * 9216 * layers * 2 * heads * width * 2
  assert row.output < 2**20, 'the slots are not donated'
  share = row.temporaries / row.program.cache
  assert share < 0.1
  assert share < 1 / (2 * layers), 'room for a copy of the keys of a layer'


def test_the_compiler_is_told_a_single_device_too():
  # Since jax 0.11, kernels are lowered for the kind of device of the ambient mesh.
  seen = []

  def function(x):
    seen.append(jax.sharding.get_abstract_mesh())
    return x

  mesh = sharding.make(1, 1, 1, jax.devices()[:1])
  call = Call(mesh, jax.jit(function), jax.ShapeDtypeStruct((2,), 'float32'))
  plan.compiled(programs.Program(call))
  assert seen == [mesh.abstract_mesh]


def test_the_programs_are_those_of_the_run(config, mesh):
  run = run_of(config, mesh)
  assert run.spec.attention == 'splash' and run.spec.tied is False
  found = programs.programs_of(run)
  params, opt, batch = found['train step'].call.args
  assert found['train step'].call.kwargs == {'base': None}
  assert batch.tokens_BT.shape == (32 // 4 * 16, 128 + 1920)
  assert batch.tokens_BT.sharding.spec == P('fsdp')  # data=1 is omitted
  # Parameters and two moments in float32 over 8 devices; vectors are replicated.
  vectors = sum(x.size for x in jax.tree.leaves(params) if x.sharding.spec == P())
  matrices = sum(x.size for x in jax.tree.leaves(params)) - vectors
  biases = 2 * (12 + 2 + 2) * 128 * (1 / 2 - 1 / 8)  # over tensor alone
  own = 12 * (matrices / 8 + biases + vectors)
  held = programs.bytes_per_device((params, opt))
  assert held == pytest.approx(own, rel=1e-6)
  counted = run.budget
  assert held == pytest.approx(counted.weights + counted.moments, rel=1e-3)
  # Beside a few numbers of an empty buffer, a run holds these while it decodes, and the
  # moments and the actor while it scores.
  others = {name: program.resident for name, program in found.items()}
  scored = programs.bytes_per_device((opt, found['decode'].call.args[0]))
  wanted = {'train step': 0, 'log-prob pass': scored, 'prefill': held, 'decode': held}
  assert others == pytest.approx(wanted, abs=100)


def test_the_largest_of_the_shapes_of_a_run_is_planned(config, mesh):
  ages = {'max_off_policy_steps': 1, 'weight_sync_interval': 2}
  config = config.with_values(evaluate={'group_size': 1}, rollout=ages)
  found = programs.programs_of(run_of(config, mesh))
  assert [*found] == ['train step', 'log-prob pass', 'prefill', 'refresh', 'decode']
  # Eight responses of groups of 16 answer at most two prompts; in evaluations eight.
  assert found['prefill'].call.args[2].shape == (8, 128)
  assert found['refresh'].call.kwargs['columns'] == 2048
  actor = programs.bytes_per_device(found['decode'].call.args[0])
  assert found['train step'].resident == pytest.approx(actor, abs=100)


VISION = {  # Qwen2.5-VL's tower in all but depth
  'depth': 2,
  'fullatt_block_indexes': [1],
  'hidden_size': 1280,
  'intermediate_size': 3420,
  'num_heads': 16,
  'out_hidden_size': 1536,
}
SEEING = SMALL | {
  'model_type': 'qwen2_5_vl',
  'image_token_id': 151655,
  'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]},
  'vision_config': VISION,
}


@pytest.fixture
def seeing(config, tmp_path):
  """The config with a vision model, and room for 256 tokens of a picture."""
  (tmp_path / 'config.json').write_text(json.dumps(SEEING))
  return config.with_values(prompts={'max_prompt_tokens': 256 + programs.TEXT})


@pytest.fixture
def mixture(config):
  """The config with an embedded policy of eight experts."""
  values = config_lib.parse(aime.tiny().to_dict()).model_dump()
  kept = {name: getattr(config, name).model_dump() for name in ('prompts', 'sampler')}
  values |= kept | {'mesh': config.mesh.model_dump()}
  values['model'] |= {'compute': 'bfloat16'}
  values['sft'] |= {'experts': 8, 'kv_heads': 4}
  return config_lib.parse(values)


@pytest.mark.parametrize('kind', ['config', 'adapters', 'seeing', 'mixture'])
def test_every_program_is_lowered_for_an_absent_tpu(request, mesh, kind):
  config = request.getfixturevalue('config' if kind == 'adapters' else kind)
  config = config.with_values(lora={'rank': 4 * (kind == 'adapters')})
  run = run_of(config, mesh)
  found = programs.programs_of(run)
  seen = {'tower'} if kind == 'seeing' else set()
  assert found.keys() == seen | {'train step', 'log-prob pass', 'prefill', 'decode'}
  for name, program in found.items():
    call = program.call
    with sharding.current(mesh):
      traced = call.function.trace(*call.args, **call.kwargs)
      text = traced.lower(lowering_platforms=('tpu',)).as_text()
    assert 'tpu_custom_call' in text, 'no kernel of a TPU'
    assert ('ragged_dot' in text) == (kind == 'mixture')
    assert seconds.works(run, found)[name].cost.flops > 0


UNKNOWN = ['v9:2x2', 'v5p', 'v5p:4', 'v5p:2xb', '', 'h100', 'h100:2x2x2', 'h100:0']


@pytest.mark.parametrize('name', UNKNOWN)
def test_an_unknown_topology_is_refused(name):
  with pytest.raises(ValueError, match=f'--topology={name!r}'):
    devices.attach(name)


def test_the_compilers_refusal_is_read(config, mesh):
  program = programs.programs_of(run_of(config, mesh))['decode']
  program = program._replace(resident=2**30)
  own = programs.bytes_per_device(program.call.args)
  assert own > program.cache > 0
  for message, needed in {
    'Used 28.9G of 15.75G hbm. Exceeded hbm capacity by 13.1G': 29.9 * 2**30,
    'memory required for HLO temporaries (32.00M) exceeds available HBM (15.75G)': (
      2**30 + 2**25 + own
    ),
    'RESOURCE_EXHAUSTED: something else': float('inf'),
    'Used 1.50M of 1.00M smem. Exceeded smem capacity by 513.1K.': float('inf'),
  }.items():
    assert plan.bytes_needed(message, program) == pytest.approx(needed)


def test_what_a_pass_moves_between_devices(config, mesh):
  # fsdp=4, tensor=2; bfloat16. The weights of half the heads, of which three quarters
  # come from others; then two sums a layer of [columns, 1536], half of them twice.
  run = run_of(config, mesh)
  found = programs.programs_of(run)
  passes = 16 * 32 // config.micro_batch_rows  # of all responses of a step
  size = 2 * sum(x.size for x in jax.tree.leaves(found['train step'].call.args[0]))
  sums = 2 * 2 * 1536 * 2
  works = seconds.works(run, found)
  for name, columns, gathered in (
    ('log-prob pass', 16 * 32 * 2048, passes * size / 2 * 3 / 4),
    ('prefill', 2 * 128, 0),
    ('decode', 64, 0),
  ):
    received = sum(t.received(mesh.shape) for t in works[name].traffic)
    assert received == gathered + columns / 4 * sums


def test_the_links_are_those_of_the_compiled_program(config, mesh):
  run = run_of(config, mesh)
  chip = CHIPS['v5p']
  works = seconds.works(run, programs.programs_of(run))

  def link_seconds(prefill):
    linked = dict.fromkeys(works) | {'prefill': prefill}
    text = seconds.table(linked, chip, run, works)
    return float(re.search(r'^prefill(?: +\S+){2} +(\S+)', text, re.M)[1])

  counted = sum(t.received(mesh.shape) for t in works['prefill'].traffic)
  assert link_seconds(None) == pytest.approx(counted / chip.links, rel=1e-3)
  assert link_seconds(3 * counted) == pytest.approx(3 * counted / chip.links, rel=1e-3)


# ----- the search tries all meshes, refuses with a reason, and counts as the plan does


CHIP = CHIPS['v5p']


def searched(config, memory):
  """(found, refused) on the eight virtual devices."""
  spec = programs.device_spec(config, 'tpu')
  return meshes.search(config, spec, CHIP, jax.devices(), memory)


def test_a_plan_needs_config_json_alone(monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  written = aime.seven()
  config, path = config_lib.parse(written.to_dict()), pathlib.Path(written.model.path)
  sentence = sentence_of(meshes.run, config, 'h100:8')
  assert sentence.startswith(f'--config.model.path={path}: found no config.jso')
  assert f'`hf download <name> config.json --local-dir {path}`' in sentence
  path.mkdir(parents=True)
  (path / 'config.json').write_text(json.dumps(SEVEN))
  assert meshes.run(config, 'h100:8')
  assert f'{path} on h100:8: 8 devices of ' in capsys.readouterr().out


def test_knobs_of_this_machine_are_named(config):
  derived = config.with_values(prompts={'count': None}, optimizer={'lr': None})
  warning, _ = plan.heading(derived, 'h100:2x8', CHIP, range(16)).splitlines()
  assert 'not from h100:2x8: prompts.count; give' in warning


def test_what_does_not_divide_is_refused_with_its_reason(config):
  found, refused = searched(config, 2.0**60)
  # 12 heads divide over 1, 2 and 4.
  assert len(found) == 4 + 3 + 2 and set(refused) == {'1x1x8'}
  assert 'heads=12 does not divide over mesh.tensor=8' in str(refused['1x1x8'])
  one = {'sampler': {'group_size': 1}, 'learner': {'minibatches': 1}}
  few = config.with_values(prompts={'count': 3}, **one)
  _, refused = searched(few, 2.0**60)
  reason = 'the 3 rows of a minibatch do not divide over data x fsdp'
  assert str(refused['8x1x1']) == reason


def test_the_choice_is_the_fastest_that_fits(config, mesh):
  spec = programs.device_spec(config, 'tpu')
  memory = 8.0 * 2**30
  best = meshes.judge(programs.resolved(config, spec, mesh), CHIP, memory)
  assert best.update_bytes <= memory and best.decode_bytes <= memory
  times = []
  for steps in (1, 2, 4, 8, 16, 32):  # 128 rows over 4 shards
    sizes = budget.sizes_of(config, spec)._replace(grad_accum_steps=steps)
    decided = budget.choose_schedule(sizes, spec, mesh, memory)
    if budget.count(sizes, spec, decided, mesh).update <= memory:
      shape, rows, T = dict(mesh.shape), config.minibatch_rows, config.row_length
      traffic = roofline.train_traffic(spec, decided, shape, rows, T, steps)
      linked = sum(t.received(shape) for t in traffic)
      cost = roofline.train(spec, decided, shape, rows, T, steps)
      times.append(max(cost.seconds(CHIP, linked).values()))
  assert len(times) > 1 and max(best.update.values()) == min(times)
  tokens = config.prompts.count * config.sampler.group_size / best.slots
  tokens *= config.sampler.max_new_tokens
  own = config.updates_per_step * min(times) + tokens * max(best.token.values())
  assert best.seconds == pytest.approx(own)
  assert f'--config.learner.grad_accum_steps={best.grad_accum_steps}' in best.flags


def test_bytes_from_other_hosts_take_the_network(config):
  # Of the other seven shards that a device gathers, its host of four receives four,
  # which is one per device. The other six arrive over NVLink.
  chip, found = meshes.count('h100:2x4')
  spec = programs.device_spec(config, 'gpu')
  mesh = Mesh(np.asarray(found).reshape(1, 8, 1), sharding.AXES)
  run = programs.resolved(config, spec, mesh)
  update = meshes.judge(run, chip, 2.0**60).update
  assert update['links'] * chip.links == pytest.approx(
    6 * update['network'] * chip.network
  )
  assert update['network'] > update['links'] > 0
