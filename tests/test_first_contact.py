"""First contact with an accelerator: each check can fail, and a section ends alone."""

import dataclasses
import json
import pathlib

import jax
import jsonschema
import numpy as np
import pytest

from bapo_jax import sharding
from bapo_jax.models import attention
from benchmarks.first_contact import kernels, parity, section
from benchmarks.first_contact.__main__ import contact
from benchmarks.first_contact.figures import Context, Figure, Section, Skip

ROOT = pathlib.Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / 'benchmarks/first_contact/schema.json').read_text())
TINY = dataclasses.replace(parity.SPEC, layers=1, width=32, head_width=8, vocab=32)


def in_process(sections):
  """Returns a start function that runs sections in this process."""
  return lambda name, context: section.perform(sections[name], context)


def run(sections, seconds=600.0):
  document = contact(
    Context(small=True, seconds=seconds), in_process(sections), sections
  )
  jsonschema.validate(json.loads(json.dumps(document)), SCHEMA)
  return document


def states(document):
  return {x['name']: x['state'] for x in document['sections']}


def beyond(found, spec, params, batch):
  checks = parity.compare(found, spec, params, batch)
  return {name for name, error, _, limit in checks if not error <= limit}


@pytest.fixture(scope='module')
def computed():
  """Computes on one device, in float32, what `parity.compare` reads."""
  params = parity.weights(TINY)
  batch = parity.example(TINY, params)
  mesh = sharding.make(1, 1, 1, jax.devices()[:1])
  return parity.compute(TINY, params, batch, mesh), params, batch


def test_the_tiny_model_equals_the_oracle(computed):
  found, params, batch = computed
  assert not beyond(found, TINY, params, batch)
  assert found.greedy.response_mask_BT.any() and found.drawn.response_mask_BT.any()


def test_one_weight_off_by_a_percent_fails_parity(computed):
  found, params, batch = computed
  layers = params['layers'] | {'q': params['layers']['q'].copy()}
  layers['q'][0, 3, 1, 2] *= 1.01
  failed = beyond(found, TINY, params | {'layers': layers}, batch)
  assert {'log-probabilities, learner', 'log-probabilities, sampler', 'gradient'} <= {
    *failed
  }


def test_a_wrong_text_step_or_number_fails_parity(computed):
  found, params, batch = computed
  tokens_BT = found.greedy.tokens_BT
  mask_BT = found.greedy.response_mask_BT
  other_BT = np.where(mask_BT, (tokens_BT + 1) % TINY.vocab, tokens_BT)
  wrong = found._replace(greedy=found.greedy._replace(tokens_BT=other_BT))
  assert beyond(wrong, TINY, params, batch) == {'greedy text, behind the best'}
  late = found._replace(
    params=found.params | {'embed': found.params['embed'] + 2e-2 * parity.LR}
  )
  assert beyond(late, TINY, params, batch) == {'new weights'}
  nan = found._replace(logp_BT=found.logp_BT * np.nan)
  assert 'log-probabilities, learner' in beyond(nan, TINY, params, batch)


def not_causal(*args, **kwargs):
  return attention.attend(*args, **kwargs, kind='plain', is_causal=False)


def one_column_more(q_SHC, segments, position_S):
  return attention.cached(q_SHC, segments, position_S + 1)


def test_every_kernel_is_checked_and_a_wrong_one_fails(monkeypatch):
  monkeypatch.setitem(kernels.EMULATED, 'wrong', not_causal)
  monkeypatch.setitem(kernels.DECODING, 'late', one_column_more)
  figures = list(kernels.run(Context(small=True)))
  failed = {x.name.split(', float32')[0] for x in figures if not x.passed}
  wrong = {'wrong', 'wrong, gradient', 'decoding, late'}
  assert failed == {*wrong, 'decoding, late, bfloat16'}
  good = {'plain', 'splash', 'splash, gradient', 'decoding, cached', 'decoding, ragged'}
  checked = {x.name.split(', float32')[0] for x in figures if x.limit}
  assert good <= checked


def test_sections_end_alone_and_only_checks_change_the_status():
  def good(context):
    yield Figure('x', 1.0, 'ms')

  def missing(context):
    yield Figure('x', float('nan'), 'ms', limit=1.0)

  def broken(context):
    yield Figure('x', 1.0, 'ms')
    raise OSError('no such\ndevice')

  def skipped(context):
    raise Skip('no model')
    yield

  sections = {
    'missing': Section(missing, 0),
    'broken': Section(broken, 0),
    'skipped': Section(skipped, 0, decides=True),
    'large': Section(good, 1e4, decides=True),
    'good': Section(good, 0, decides=True),
  }
  document = run(sections)
  assert document['status'] == 0
  ends = ['failed', 'failed', 'skipped', 'skipped', 'passed']
  assert [*states(document).values()] == ends
  _, broke, *_ = document['sections']
  assert broke['reason'] == 'OSError: no such device' and len(broke['figures']) == 1
  for wrong in (missing, broken):
    decisive = {'wrong': Section(wrong, 0, decides=True), 'good': sections['good']}
    assert run(decisive)['status'] == 1


def test_a_crash_and_a_lack_of_time_are_results(capfd):
  crashed = section.start('rates', Context(), {'JAX_PLATFORMS': 'nosuch'})
  assert crashed['state'] == 'failed' and 'nosuch' in crashed['reason']
  assert 'Traceback' in capfd.readouterr().err
  late = section.start('rates', Context(seconds=0.2))
  assert late['state'] == 'skipped' and 'out of time' in late['reason']
