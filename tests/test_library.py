"""The examples of docs/guide/library.md run."""

import json
import os
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import runs

from bapo_jax import main
from bapo_jax.algorithms import loss
from bapo_jax.data import sources
from bapo_jax.run import library
from bapo_jax.runtime import metrics
from bapo_jax.training import needs

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'guide' / 'library.md').read_text()
EXAMPLES = dict(re.findall(r'```python\n# example: (.*)\n([^`]*)```', PAGE))


def executed(name, **replaced):
  """Runs an example with some of its words replaced; returns its variables."""
  text = EXAMPLES[name]
  for old, new in replaced.items():
    assert old in text
    text = text.replace(old, new)
  variables = {'__name__': 'example'}
  exec(compile(text, f'docs/guide/library.md: {name}', 'exec'), variables)
  return variables


def test_train(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  workdir = tmp_path / 'sums'
  idle = needs.inert(runs.tiny())
  small = {k: v for k, v in runs.TINY.items() if k not in idle} | {'steps': 2}
  small = {k: v for k, v in small.items() if not k.startswith('problems.')}
  given = {"{'steps': 2}": repr(small), "'runs/python'": repr(str(workdir))}
  with runs.on_devices(1):
    executed('train', **given)
  rows = [row for row in metrics.read(str(workdir)) if row['step']]
  assert len(rows) == 2 and all('reward/score' in row for row in rows)
  assert os.path.exists(workdir / 'report.html')


def table():
  """Yields rows with values of NumPy, as `datasets.Dataset` does."""
  for i in range(20):
    yield {
      'problem': [{'role': 'user', 'content': f'{i}+1'}],
      'answer': np.int64(i + 1),
      'marks': np.arange(i, i + 2, dtype=np.float32),
      'judge': {'least': np.float64(0.5), 'used': np.bool_(True)},
    }


def test_rows_may_be_any_iterable_with_numbers_of_numpy(monkeypatch, tmp_path):
  started = []
  monkeypatch.setattr(library.experiment, 'train', lambda *args: started.append(args))
  values = {'rewards': {'rule': 'exact'}}
  given = {'rows': table(), 'held_out': table(), 'reward': constant}
  library.train(values, str(tmp_path), **given)
  ((config, _),) = started
  data = sources.read(config.problems, whole=True)
  assert len(data.training) == len(data.held_out) == 20
  row = data.held_out[3]
  assert (row.problem, row.answer) == ('3+1', '4')
  fields = json.loads(row.fields)
  assert fields['answer'] == 4 and fields['marks'] == [3.0, 4.0]
  assert fields['judge'] == {'least': 0.5, 'used': True}


def constant(sample):
  return 1.0


def test_sampling(tmp_path):
  runs.source(tmp_path / 'model')
  name = 'sample from a Hugging Face directory'
  rows = executed(name, **{'models/my-model': str(tmp_path / 'model')})['rows']
  assert rows.response_mask_BT.shape == (2, 4, 32)
  logp = rows.logp_BT[rows.response_mask_BT]
  assert len(logp) >= 8 and (logp < 0).all()


def test_a_loop_of_ones_own():
  found = executed('packed log-probabilities in a loop of my own')
  assert found['value'] < 4.2 * 0.98  # log(64) at the start


def test_the_printed_command_is_accepted(tmp_path, monkeypatch):
  (text,) = re.findall(r'```python\n# my.py\n([^`]*)```', PAGE)
  (tmp_path / 'my.py').write_text(text)
  monkeypatch.chdir(tmp_path)
  made = []
  for command in re.findall(r'python -m bapo_jax.main ((?:.*\\\n)*.*)', PAGE):
    config, *given = command.replace('\\\n', ' ').split()
    knobs = [x for x in given if x.startswith('--config.')]
    made.append(main.read_config(str(ROOT / config.partition('=')[2]), knobs))
  soft, cut = made
  assert soft.loss.tau == 1.05 and soft.rewards.custom.per_token == 0.01
  assert cut.loss.power == 0.5


def test_the_printed_losses_weigh_as_rules_of_ours(tmp_path):
  (text,) = re.findall(r'```python\n# my.py\n([^`]*)```', PAGE)
  printed = {'__name__': 'my'}
  exec(text, printed)
  found = executed('the bounds and the gradient of my batch')
  # Many ratios of the example are beyond these bounds.
  bounds = found['bounds']._replace(low=jnp.float32(0.8), high=jnp.float32(1.3))
  ours = {'cut': loss.Clipped(), 'soft': loss.Sapo(positive=1.0, negative=1.0)}
  for name, rule in ours.items():
    batch = found['logp_BT'], found['batch'], bounds
    weight_BT = loss.weights(printed[name], *batch)
    wanted_BT = loss.weights(rule, *batch)
    np.testing.assert_allclose(weight_BT, wanted_BT, rtol=1e-5, atol=1e-6)
    assert (wanted_BT == 0).any() == (name == 'cut')
