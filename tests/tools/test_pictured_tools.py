"""Tools on a run with pictures: every number is one of the policy that sees them."""

import json

import numpy as np
import oracles
import pytest
from making import groups, params
from pictured import DRAWN
from runs import tiny

from bapo_jax.algorithms import replay_buffer
from bapo_jax.data import prompts
from bapo_jax.models import transformer
from bapo_jax.models.vision import sequence
from bapo_jax.tools import recorded_groups
from bapo_jax.training import build, checkpoint, config, policy, resolve, weights

MADE = tiny(**DRAWN | {'batch.rule': 'adapted', 'sampler.temperature': 0.5})


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """(workdir, material, whole weights): its buffer holds problems 5 and 2."""
  workdir = str(tmp_path_factory.mktemp('run'))
  with open(f'{workdir}/config.json', 'w') as file:
    json.dump(config.plain(MADE), file)
  material = build.read(MADE, resolve.open_model(MADE), workdir)
  whole = params(resolve.open_model(MADE).spec)
  weights.save_params(policy.warm_start_path(MADE, workdir), whole)
  trained = {name: x for name, x in whole.items() if name != policy.TOWER}
  T = MADE.row_length
  held = groups([5, 3, 2], [1, 1, 3], [1, -1, 2], G=4, T=T)
  tokens_PGT, mask_PGT = np.zeros((3, 4, T), np.int32), np.zeros((3, 4, T), bool)
  for p, i in enumerate([5, 3, 2]):
    n = material.problems.length_N[i]
    tokens_PGT[p, :, :n] = material.problems.tokens_NT[i, :n]
    tokens_PGT[p, :, n : n + 3], mask_PGT[p, :, n : n + 3] = [4, 5, 6], True
  held = held._replace(tokens_PGT=tokens_PGT, response_mask_PGT=mask_PGT)
  identity = [prompts.fingerprint(x) for x in (material.problems, material.held_out)]
  with checkpoint.manager(workdir, 2) as checkpoints:
    buffer = replay_buffer.init(1, 4, 1)._replace(reusable=held)
    arrays = {'buffer': buffer, 'params': trained}
    checkpoint.save(checkpoints, 3, arrays, {'problems': identity})
  return workdir, material, whole


@pytest.fixture(autouse=True)
def nothing_read_before():
  """Problems are read once for a page."""
  recorded_groups.gallery_of.cache_clear()


def test_groups_of_the_buffer_name_their_pictures(run):
  workdir, material, _ = run
  found = recorded_groups.read(workdir)
  assert [group.source[:9] for group in found] == ['problem 2', 'problem 5']
  for group, i in zip(found, (2, 5), strict=True):
    (path,) = group.pictures
    with open(path, 'rb') as file:
      assert (file.read(),) == material.problems.pictures[i]


def test_ratios_are_those_of_the_policy_that_sees_the_picture(run, one_device):
  workdir, material, whole = run
  group, _ = recorded_groups.read(workdir)
  found = recorded_groups.ratios(MADE, workdir)(group)
  spec = resolve.open_model(MADE).spec
  seen = recorded_groups.gallery_of(workdir, 3).of([2] * 4)
  tokens_GT = group.arrays.tokens_PGT[0]
  n = material.problems.length_N[2]
  hidden_GTD = sequence.forward(whole, tokens_GT, seen, spec)
  logp_GT, *_ = oracles.logprob_oracle(
    hidden_GTD[:, n - 1 : n + 2],
    transformer.head(whole),
    tokens_GT[:, n : n + 3],
    0.5,
  )
  expected_GT = np.exp(
    np.asarray(logp_GT) - group.arrays.behavior_logp_PGT[0, :, n : n + 3]
  )
  np.testing.assert_allclose(np.stack(found), expected_GT, rtol=1e-4)


def test_pictures_of_other_problems_are_not_taken_for_them(run, monkeypatch, capsys):
  workdir, *_ = run
  other = MADE.with_values(problems={'seed': 1})
  monkeypatch.setattr(recorded_groups, '_config_of', lambda workdir: other)
  assert [group.pictures for group in recorded_groups.read(workdir)] == [(), ()]
  assert 'pictures of the replay buffer are not named' in capsys.readouterr().out
  with pytest.raises(ValueError, match='has other problems or pictures than at step 3'):
    recorded_groups.ratios(MADE, workdir)
