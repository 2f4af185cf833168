"""--mode=check of a model that sees: its prompts have room for their pictures."""

import json

import oracles
import pytest
from pictured import DRAWN, png
from runs import tiny

from bapo_jax.autosetup import check, check_rules, facts
from bapo_jax.data.made import drawn
from bapo_jax.models import transformer
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.tools import export
from bapo_jax.training import build, inputs, resolve


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  """Of a run on drawn pictures with a model that is read from a directory."""
  path = str(tmp_path_factory.mktemp('model'))
  embedded = tiny(**DRAWN)
  model = inputs.open_model(embedded)
  spec, tokenizer = model.spec, model.tokenizer
  flat = transformer.flatten(oracles.noisy(spec, 0))
  hf_weights.save(path, flat.__getitem__, spec)
  export.write_configs(path, embedded, model, 'float32')
  tokenizer.backend.save_pretrained(path)
  own = {'model.path': path, 'tokenizer.template': '{problem}\n'}
  return tiny(**{k: v for k, v in DRAWN.items() if 'tower' not in k} | own)


def test_lengths_count_what_pictures_take(config, one_device):
  known = facts.gather(config, inputs.read(config))
  problems = drawn.generate(config.problems)
  # 16 tokens of a picture, and 'x1 mod 10' with its newline.
  assert known.lengths('{problem}\n') == (
    [26] * config.problems.train,
    [26] * config.problems.test,
  )
  assert [row.problem for row in known.training] == [
    p.text for p in problems[: config.problems.train]
  ]
  assert known.verified('aime').right == known.verified('aime').tried > 0


def test_a_new_run_shows_a_prompt(config, one_device, tmp_path):
  r = resolve.resolve(config)
  material = build.tabulate(r)
  shown = check.short(r, material, str(tmp_path))
  assert '  | (<image> x 16)x' in shown and '<image><image>' not in shown


def test_a_problem_of_the_same_text_with_another_picture_is_another(
  config, one_device, tmp_path
):
  paths = []
  for name in ('train', 'test'):
    (tmp_path / f'{name}.png').write_bytes(png(28, 28, len(paths)))
    row = {'problem': '<image>1', 'answer': '3', 'images': [f'{name}.png']}
    paths.append(tmp_path / f'{name}.jsonl')
    paths[-1].write_text(json.dumps(row))

  def overlap(source, test_source):
    problems = {'source': str(source), 'test_source': str(test_source)}
    asked = config.model_copy(
      update={'problems': config.problems.model_copy(update=problems)}
    )
    files = inputs.read(asked)
    found = check_rules._overlap(asked, facts.gather(asked, files))
    return [finding.name for finding in found]

  assert overlap(*paths) == []
  assert overlap(paths[0], paths[0]) == ['overlap']
  assert overlap('drawn', 'drawn') == []
