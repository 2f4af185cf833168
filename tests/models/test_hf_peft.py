"""An exported directory of adapters is one that peft loads, with the same logits.

The comparison needs peft (`pip install -r requirements/parity.txt`); without it that
test is skipped.
"""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import making
import numpy as np
import oracles
import pytest
import safetensors.numpy
from runs import saved, source, tiny

from bapo_jax import sharding
from bapo_jax.models import layers, lora, transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.models.knobs import LoraConfig
from bapo_jax.run import experiment
from bapo_jax.tools import export

KNOBS = LoraConfig(rank=3, alpha=6.0)
SPEC = making.SPEC
SEEING = making.SEEING


def reader(tree):
  """From the path of an array to it."""
  leaves = jax.tree.leaves_with_path(tree)
  return {sharding.path_name(path): x for path, x in leaves}.__getitem__


def test_names_shapes_and_config_are_those_of_peft(tmp_path):
  knobs = LoraConfig(rank=2, alpha=3.0, targets='layers/(o|k)')
  get = reader(making.adapters(**knobs.model_dump()))
  model = 'hub:owner/name@main'
  hf_weights.save_adapters(str(tmp_path), get, SPEC, knobs, model, 'bfloat16')
  config = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert (config['r'], config['lora_alpha']) == (2, 3.0)
  assert config['target_modules'] == ['k_proj', 'o_proj']
  assert config['base_model_name_or_path'] == 'owner/name'
  assert config['revision'] == 'main'
  found = safetensors.numpy.load_file(tmp_path / 'adapter_model.safetensors')
  name = 'base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight'
  assert len(found) == 2 * 2 * 2
  a, b = (found[name.format('o', side)] for side in 'AB')
  assert (a.shape, b.shape) == ((2, 16), (16, 2))
  # In their file the inputs of o are H C, heads first.
  expected = get('layers/o/a')[1].reshape(16, 2).T.astype(jnp.bfloat16)
  np.testing.assert_array_equal(a, expected)


@pytest.mark.parametrize('kind', ['qwen2', 'qwen2_5_vl'])
def test_peft_gives_the_logits_of_adapted_and_of_merged_weights(kind, tmp_path):
  torch = pytest.importorskip('torch', reason='needs requirements/parity.txt')
  peft = pytest.importorskip('peft', reason='needs requirements/parity.txt')
  import transformers

  options = {'qkv_bias': True, 'head_width': 8}
  if kind == 'qwen2_5_vl':
    options = {'head_width': 4, 'mrope': SEEING.mrope, 'vision': SEEING.vision}
  spec = dataclasses.replace(SPEC, heads=4, kv_heads=2, ffn=24, vocab=20, **options)
  params = making.params(spec)
  made = making.adapters(spec)
  model = str(tmp_path / 'model')
  adapter = str(tmp_path / 'adapter')
  os.mkdir(model)
  os.mkdir(adapter)
  hf_weights.save(model, transformer.flatten(params).__getitem__, spec)
  config = hf_config.config_of(spec) | {'torch_dtype': 'float32'}
  pathlib.Path(model, 'config.json').write_text(json.dumps(config))
  hf_weights.save_adapters(adapter, reader(made), spec, KNOBS, model, 'float32')
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
  for each in (weights, lora.merge(weights)):
    hidden_BTD = layers.forward(each, jnp.asarray(tokens_BT), spec)
    found = jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(each))
    oracles.close(found, expected, 256)
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
  assert export.export(config, str(workdir), alone, 'float32', 10**9, adapter=True) == 0
  assert export.export(config, str(workdir), merged, 'float32', 10**9) == 0
  found = safetensors.numpy.load_file(f'{alone}/adapter_model.safetensors')
  a, b = (
    found[f'base_model.model.model.layers.1.mlp.down_proj.lora_{x}.weight']
    for x in 'AB'
  )
  name = 'model.layers.1.mlp.down_proj.weight'
  base = safetensors.numpy.load_file(f'{path}/model.safetensors')[name]
  whole = safetensors.numpy.load_file(f'{merged}/model.safetensors')
  scale = config.lora.alpha / 2
  oracles.close(whole[name], base.astype('float32') + scale * b @ a, 16)
  assert {'tokenizer.json', 'adapter_config.json'} <= {
    p.name for p in (tmp_path / 'alone').iterdir()
  }


def test_adapters_of_the_embedded_policy_are_not_exported_alone(tmp_path):
  config = tiny(**{'lora.rank': 2})
  experiment.claim(str(tmp_path), config)
  saved(tmp_path, making.adapters())
  with pytest.raises(ValueError, match='and a published model in'):
    export.export(config, str(tmp_path), '', 'float32', 10**9, adapter=True)
