"""An export of the embedded policy means the same to AutoTokenizer and AutoModel alone.

A reader who has only transformers must get our tokens and our texts.
"""

import json

import jax
import pytest
import transformers
from runs import saved, tiny

from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.run import experiment
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.tools import export
from bapo_jax.training import build, inputs

TEXTS = (
  ''.join(tokenizer_lib.CHARACTERS[2:]),
  '  7 * 8 =  \\boxed{56}\n\n',
  '\\boxed{\\boxed{}}',
  ' \n \n\n  (1/2) ',
)


def test_auto_tokenizer_reads_and_writes_every_text_as_we_do(tmp_path):
  ours = tokenizer_lib.load('characters', '{problem}\n')
  tokenizer_lib.save(ours, 'characters', str(tmp_path))
  config = hf_config.config_of(inputs.open_model(tiny()).spec)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert 'Qwen2' in type(theirs).__name__
  assert len(theirs) == len(tokenizer_lib.CHARACTERS) == len(ours.backend)
  assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)
  strings = [*TEXTS, '29x+25=5 mod 9\n', '24x=56 mod 16|5x=3\n', '3 7 25=46\n']
  rows = tokenizer_lib.encode(ours, strings)
  assert theirs(strings, add_special_tokens=False)['input_ids'] == rows
  assert theirs(strings)['input_ids'] == rows
  assert theirs.batch_decode(rows) == ours.backend.batch_decode(rows) == strings
  chat = [{'role': 'user', 'content': '3 * 5 = '}]
  options = {'tokenize': False, 'add_generation_prompt': True}
  prompt = theirs.apply_chat_template(chat, **options)
  assert prompt == ours.backend.apply_chat_template(chat, **options) == '3 * 5 = \n'


def test_transformers_alone_responds_as_we_do(warm, one_device, tmp_path):
  torch = pytest.importorskip(
    'torch', reason='parity needs torch: pip install -r requirements/parity.txt'
  )
  torch.set_num_threads(1)
  config, workdir = tiny(**{'evaluate.sampling.temperature': 0.0}), str(warm())
  experiment.claim(workdir, config)
  t, s = build.start(config, workdir, PhaseTimer())
  _, samples = experiment.evaluation(t, s.params, 0)
  saved(workdir, jax.device_get(s.params))
  assert export.export(config, workdir, str(tmp_path / 'out'), 'float32', 10**9) == 0
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
