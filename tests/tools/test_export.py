"""What a run saved is what an exported directory holds, with all that loads it."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import making
import numpy as np
import pictured
import processes
import pytest
import transformers
from flax import traverse_util
from refusals import refused, sentence_of
from runs import SOURCE, saved, source, tiny
from safetensors.numpy import load_file

from bapo_jax import main, sharding
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.run import experiment
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.tools import export
from bapo_jax.training import build, inputs
from bapo_jax.training.inputs import Model


@pytest.fixture(scope='module', params=['embedded', 'from a directory'])
def run(request, tmp_path_factory):
  """(config, workdir, its parameters) of a run that has a checkpoint of step 1."""
  path = tmp_path_factory.mktemp('run')
  workdir, config = str(path / 'work'), tiny()
  if request.param == 'from a directory':
    name = source(path / 'source')
    config = tiny(**{'model.path': name, 'tokenizer.path': name})
  experiment.claim(workdir, config)
  params = making.params(inputs.open_model(config).spec, 1)
  layout = sharding.shardings(params, sharding.make(2, 2, 2))
  saved(workdir, jax.device_put(params, layout))
  return config, workdir, traverse_util.flatten_dict(params, sep='/').__getitem__


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_was_trained_is_what_is_exported(run, dtype, tmp_path):
  config, workdir, get = run
  to = tmp_path / 'out'
  assert export.export(config, workdir, str(to), dtype, 3e-6) == 0
  assert not list(tmp_path.glob('*.part'))
  files = sorted(to.glob('*.safetensors'))
  assert len(files) > 1
  for file in files:
    held = load_file(file)
    assert {x.dtype for x in held.values()} == {jnp.dtype(dtype)}
    assert sum(x.nbytes for x in held.values()) <= 3000
  spec = hf_config.read_spec(str(to), config.model.compute)
  found = hf_weights.load(str(to), spec, sharding.make())
  found = traverse_util.flatten_dict(found, sep='/')
  assert set(found) == set(transformer.describe(spec))
  for name, array in found.items():
    expected = np.asarray(get(name)).astype(jnp.dtype(dtype)).astype('float32')
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_everything_that_loads_it_is_there(run):
  config, workdir, _ = run
  assert export.export(config, workdir, '', 'bfloat16', 1.0) == 0
  to = f'{workdir}/export/1'
  described = transformers.AutoConfig.from_pretrained(to)
  written = json.loads(pathlib.Path(to, 'config.json').read_text())
  assert written['torch_dtype'] == 'bfloat16' and 'dtype' not in written
  tokenizer = transformers.AutoTokenizer.from_pretrained(to)
  problem, ours = '3 * 5 = ', tokenizer_lib.load(tokenizer_lib.EMBEDDED, '').backend
  assert tokenizer(problem)['input_ids'] == ours(problem)['input_ids']
  chat = [{'role': 'user', 'content': problem}]
  prompt = tokenizer.apply_chat_template(chat, tokenize=False)
  generation = transformers.GenerationConfig.from_pretrained(to)
  if config.model.path:
    kept = {k: v for k, v in SOURCE.items() if k != 'dtype'}
    assert written == kept | {'torch_dtype': 'bfloat16'}
    assert (generation.eos_token_id, generation.top_p) == ([1, 4], 0.95)
    assert prompt == f'Q: {problem}\n'
  else:
    assert described.architectures == ['Qwen2ForCausalLM']
    assert described.eos_token_id == generation.eos_token_id == [1]
    assert generation.temperature == config.sampler.temperature
    assert prompt == f'{problem}\n'
  ends = (1, 4) if config.model.path else (1,)
  assert tokenizer_lib.load(to, config.tokenizer.template).eos == ends
  assert 'export/1 is not an empty directory; give a' in sentence_of(
    export.export, config, workdir, '', 'bfloat16', 1.0
  )


def test_a_workdir_without_a_checkpoint_is_left_alone(tmp_path):
  for workdir in (tmp_path, tmp_path / 'none'):
    assert 'has no checkpoint; train there first' in sentence_of(
      export.export, tiny(), str(workdir), '', 'float32', 1.0
    )
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('size', [100, 2500, 6000])
def test_an_export_to_a_full_disk_is_one_sentence_and_leaves_nothing(
  run, size, tmp_path
):
  _, workdir, _ = run
  (tmp_path / 'out.part').mkdir()  # of someone else
  flags = ['export', workdir, f'--to={tmp_path}/out']
  inputs.open_model(main.config_of(main.parse(['bapo', *flags])))  # while there is room
  with processes.small_files(size):
    line = refused(flags)
  assert 'out.bapo_jax.part' in line and 'cannot be used (File too large); free' in line
  assert os.listdir(tmp_path) == ['out.part']


def test_an_export_to_a_file_is_refused_by_name(run, tmp_path):
  (tmp_path / 'a').write_text('mine')
  line = refused(['export', run[1], f'--to={tmp_path}/a'])
  assert f'--to={tmp_path}/a is not an empty directory' in line
  line = refused(['export', run[1], f'--to={tmp_path}/a/b'])
  assert f'{tmp_path}/a/b.bapo_jax.part cannot be used (Not a directory)' in line
  assert (tmp_path / 'a').read_text() == 'mine'


def test_an_export_names_all_tokens_at_which_responses_end(tmp_path):
  source_path = source(tmp_path / 'source')
  (tmp_path / 'source' / 'generation_config.json').write_text('{"eos_token_id": [4]}')
  config = tiny(**{'model.path': source_path, 'tokenizer.path': source_path})
  model = inputs.open_model(config)
  (tmp_path / 'out').mkdir()
  export.write_configs(str(tmp_path / 'out'), config, model, 'float32')
  written = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
  assert set(written['eos_token_id']) == set(model.tokenizer.eos) == {1, 4}


def test_an_export_needs_no_function_of_the_run(tmp_path):
  """Of any stored config, the part that an export reads is valid by itself."""
  workdir = tmp_path / 'work'
  (tmp_path / 'my.py').write_text('def judge(sample):\n  return 1.0\n')
  path = source(tmp_path / 'source')
  config = tiny(
    **{'model.path': path, 'rewards.rule': f'{tmp_path}/my.py:judge'}
    | {'problems.source': 'a.jsonl', 'problems.test_source': 'b.jsonl'}
    | {'sampler.group_size': 64, 'sampler.max_num_seqs': 512}
  )
  experiment.claim(str(workdir), config)
  saved(workdir, making.params(inputs.open_model(config).spec, 1))
  (tmp_path / 'my.py').unlink()
  args = main.parse(['bapo', 'export', str(workdir), f'--to={tmp_path}/out'])
  assert main.start(args) == 0
  assert (tmp_path / 'out' / 'config.json').exists()


SIZE = {'shortest_edge': 784, 'longest_edge': 1568}


OLD = {'preprocessor_config.json': {'min_pixels': 784, 'do_rescale': True}}
# As transformers 5 writes it: within the processor. That of version 4 is added.
NEW = {'processor_config.json': {'image_processor': {'size': SIZE}, 'other': 3}}
ADDED = {'preprocessor_config.json': {'size': SIZE}}


@pytest.mark.parametrize(('pictures', 'alone'), [(OLD, {}), (NEW, ADDED)])
def test_what_a_source_says_of_its_pictures_is_preserved(tmp_path, pictures, alone):
  source, to = tmp_path / 'source', tmp_path / 'out'
  source.mkdir(), to.mkdir()
  config = hf_config.config_of(making.SEEING) | {'video_token_id': 7}
  files = {'config.json': config} | pictures
  for name, content in files.items():
    (source / name).write_text(json.dumps(content))
  config = tiny(**{'model.path': str(source)})
  model = Model(str(source), pictured.reader(), making.SEEING)
  export.write_configs(str(to), config, model, 'bfloat16')
  for name, content in (files | alone).items():
    written = json.loads((to / name).read_text())
    written.pop('torch_dtype', None)
    assert written == content
  now, before = (hf_config.read_spec(str(path), 'float32') for path in (to, source))
  assert now == before


# --- exports read by AutoTokenizer and AutoModel alone


def test_transformers_alone_responds_as_we_do(tmp_path, one_device):
  torch = pytest.importorskip(
    'torch', reason='parity needs torch: pip install -r requirements/parity.txt'
  )
  torch.set_num_threads(1)
  config, workdir = (
    tiny(**{'evaluate.sampling.temperature': 0.0}),
    str(tmp_path / 'run'),
  )
  experiment.claim(workdir, config)
  t, s = build.start(config, PhaseTimer())
  _, samples = experiment.evaluation(t, s.params, 0)
  saved(workdir, jax.device_get(s.params))
  assert export.export(config, workdir, str(tmp_path / 'out'), 'float32', 1.0) == 0
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out').eval()
  responses, length = [], config.sampler.max_new_tokens
  for sample in samples:
    prompt = tokenizer(f'{sample["problem"]}\n', return_tensors='pt')
    with torch.no_grad():
      row = model.generate(**prompt, do_sample=False, max_new_tokens=length)
    row = row[0, prompt['input_ids'].shape[1] :]
    responses.append(tokenizer.decode(row, skip_special_tokens=True))
  assert responses == [sample['response'] for sample in samples]
  assert len(set(responses)) > 4
