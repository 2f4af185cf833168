"""The search tries all meshes, refuses with a reason, and counts as the plan does."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_plan import SEVEN, small

from bapo_jax import sharding
from bapo_jax.models.layers import Schedule
from bapo_jax.tools.plan import devices, plan, programs, roofline, search
from bapo_jax.training import budget
from bapo_jax.training import config as config_lib
from configs import aime

CHIP = roofline.CHIPS['v5p']


@pytest.fixture
def config(tmp_path):
  return small(tmp_path)


def mesh_of(*shape):
  return Mesh(np.asarray(jax.devices()).reshape(shape), sharding.AXES)


def searched(config, memory):
  """(found, refused) on the eight virtual devices."""
  spec = programs.device_spec(config, 'tpu')
  return search.search(config, spec, CHIP, jax.devices(), memory)


def test_every_layout_is_tried_once():
  found = [tuple(shape.values()) for shape in search.shapes(64)]
  # 2^6 in three factors: 8 choose 2 ways.
  assert len(found) == len(set(found)) == 28
  assert {math.prod(shape) for shape in found} == {64}


def test_a_plan_needs_config_json_alone(monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  written = aime.seven()
  config, path = config_lib.parse(written.to_dict()), pathlib.Path(written.model.path)
  with pytest.raises(ValueError) as error:
    plan.run_search(config, 'h100:8')
  assert str(error.value).startswith(f'--config.model.path={path}: found no config.jso')
  assert f'`hf download <name> config.json --local-dir {path}`' in str(error.value)
  assert 'again' not in str(error.value) and 'hub:' not in str(error.value)
  path.mkdir(parents=True)
  (path / 'config.json').write_text(json.dumps(SEVEN))
  assert plan.run_search(config, 'h100:8')
  assert 'on h100:8: 8 devices of ' in capsys.readouterr().out


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


def test_what_does_not_fit_is_refused_with_its_size(config):
  spec = programs.device_spec(config, 'tpu')
  mesh = mesh_of(8, 1, 1)
  # The state of the learner and the actor, whole on each device, and one slot too few.
  job = programs.Job(config, spec, Schedule(), mesh)
  held = programs.learner_state(job), programs.actor(job)
  counted = budget.count(*job)
  own = counted.decoding - counted.cache
  assert own == pytest.approx(programs.bytes_per_device(held), rel=1e-5)
  with pytest.raises(ValueError, match=r'^an update needs \d+ GiB'):
    search.judge(job, CHIP, 2.0**30)
  cache = budget.cache_bytes(spec, config.row_length, 1)
  with pytest.raises(ValueError, match=r'^decoding needs '):
    search._decoding(job, CHIP, own + cache - 1)
  slots, needed, _ = search._decoding(job, CHIP, own + cache)
  assert (slots, needed) == (8, own + cache)
  found, refused = searched(config, 1.0)
  assert not found and len(refused) == 10
  assert 'heads=12' in str(refused['1x1x8'])  # before it is counted


def test_the_choice_is_the_fastest_that_fits(config):
  spec = programs.device_spec(config, 'tpu')
  mesh = mesh_of(1, 4, 2)
  memory = 8.0 * 2**30
  best = search.judge(programs.Job(config, spec, Schedule(), mesh), CHIP, memory)
  assert best.update_bytes <= memory and best.decode_bytes <= memory
  times = []
  for steps in (1, 2, 4, 8, 16, 32):  # 128 rows over 4 shards
    changed = config.with_values(learner={'grad_accum_steps': steps})
    decided = budget.choose_schedule(changed, spec, mesh, memory)
    if budget.count(changed, spec, decided, mesh).update <= memory:
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
  chip, found = devices.count('h100:2x4')
  spec = programs.device_spec(config, 'gpu')
  mesh = Mesh(np.asarray(found).reshape(1, 8, 1), sharding.AXES)
  job = programs.Job(config, spec, Schedule(), mesh)
  update = search.judge(job, chip, 2.0**60).update
  assert update['links'] * chip.links == pytest.approx(
    6 * update['network'] * chip.network
  )
  assert update['network'] > update['links'] > 0


def test_the_fastest_come_first_and_the_flags_run(config):
  found, refused = searched(config, 2.0**60)
  assert [c.seconds for c in found] == sorted(c.seconds for c in found)
  text = search.table(found, refused)
  _, *lines = text.splitlines()
  names = [search.name(c.shape) for c in found]
  assert [line.split()[0] for line in lines[:5]] == names[:5]
  slower = ', '.join(names[5:])
  assert f'not {slower}: it fits and is slower' in lines
  assert f'not 1x1x8: {refused["1x1x8"]}' in lines
  given = config_lib.overrides(found[0].flags.split())
  assert given['mesh.tensor'] == found[0].shape['tensor']
  assert search.table([], {'8x1x1': ValueError('no')}).splitlines()[1:] == [
    'not 8x1x1: no'
  ]


def test_a_search_compiles_nothing(monkeypatch, config):
  monkeypatch.setattr(plan.devices_lib, 'attach', None)
  monkeypatch.setattr(plan, 'compiled', None)
  said = []
  assert plan.run_search(config, 'v5p:2x2x2', said.append)
  assert said[0].endswith('on v5p:2x2x2: 8 devices of 95.74 GiB')
  monkeypatch.setattr(plan, 'room', lambda _: 1.0)
  assert not plan.run_search(config, 'v5p:2x2x2', said.append)
