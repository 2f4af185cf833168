"""The contract of samplers: equal prompts, actor and step give equal groups anywhere.

tests/run/test_overlap.py and test_remote_sampler.py compare whole runs.
"""

import queue
import threading

import jax
import making
import numpy as np
import runs
from runs import PARTIAL, same, tiny

from bapo_jax import sharding
from bapo_jax.runtime import signals
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, remote_sampler, resolve
from bapo_jax.training.remote_sampler import Links, RemoteSampler
from bapo_jax.training.sampler import ThreadSampler
from bapo_jax.training.submission import Actor
from bapo_jax.training.trainer import next_round

KNOBS = {'rollout.depth': 2, 'batch.rule': 'adapted'} | PARTIAL


class Loopback:
  """A `Link` between threads: copies arrays to the devices of a mesh."""

  def __init__(self, mesh):
    self.mesh, self.values = mesh, queue.SimpleQueue()

  def send(self, value):
    self.values.put(value)

  def receive(self):
    def copied(x):
      if not isinstance(x, jax.Array):
        return x
      return jax.device_put(x, sharding.replicated(self.mesh))

    return jax.tree.map(copied, self.values.get())


def submissions(sampler, t, s):
  """Submits four steps with different weights; returns their groups and the rest."""
  futures = []
  for step in range(4):
    weights = making.drifted(s.params, step)
    actor = Actor(sampler.place(t.actor(weights)), step)
    if step % 2:
      actor = Actor(sampler.place(t.actor(s.params)), 0, newest=actor)
    hard_P = np.asarray([3, 5, -1][: step + 1], np.int32)
    _, chosen = next_round(t, s.replace(prompt_round=step), hard_P)
    futures.append(sampler.submit(chosen, actor, step))
  sampled = [future.result() for future in futures]
  return [(x.groups, x.described()) for x in sampled], sampler.state()


def test_three_places_sample_the_same():
  found = []
  for rollout in (0, 1):
    config = tiny(**KNOBS, **{'mesh.rollout': rollout})
    verifier = making.OddVerifier()
    with runs.on_devices(1 + rollout):
      r = resolve.resolve(config)
      t, s = build.start(config, PhaseTimer(), verifier)
      assert isinstance(t.sampler, ThreadSampler) == bool(rollout)
      found.append(submissions(t.sampler, t, s))
      t.sampler.close()

  links = Links(Loopback(r.rollout_mesh), Loopback(r.mesh))
  there = build.rollout_sampler(r, build.tabulate(r), verifier)
  remote = RemoteSampler(links, r.mesh, PhaseTimer())
  serving = threading.Thread(
    target=remote_sampler.serve, args=(there, links, signals.Stop()), daemon=True
  )
  serving.start()
  found.append(submissions(remote, t, s))
  remote.close(0)
  serving.join(60)
  assert not serving.is_alive()

  (here, partial), *others = found
  ages = [np.ptp(groups.policy_version_PGT.max(2)) for (groups, _), _ in here]
  assert max(ages) > 0 and partial, 'or no response continues with other weights'
  for groups, state in others:
    assert same(groups, here)
    assert same(state, partial)
