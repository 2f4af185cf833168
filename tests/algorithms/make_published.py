"""Runs the published code of off-policy rules on made tokens and prints the results.

    python -m tests.algorithms.make_published CLONES > tests/algorithms/published.json

CLONES is a folder with bare clones of the repositories in SOURCES, as OWNER+NAME/repo.
Only functions are taken from their files, so that none of them has to be installed;
torch computes in float64. The file in this folder was made from the commits that it
names. No code of these repositories is part of this project.
"""

import ast
import json
import math
import pathlib
import subprocess
import sys
import types
import typing

import numpy as np
import torch

SOURCES = {  # name -> (repository, file, function)
  'dppo': (
    'NovaSky-AI/SkyRL',
    'skyrl/backends/skyrl_train/utils/ppo_utils.py',
    'dppo_policy_loss',
  ),
  'sapo': (
    'NovaSky-AI/SkyRL',
    'skyrl/backends/skyrl_train/utils/ppo_utils.py',
    'sapo_policy_loss',
  ),
  'vespo': ('huggingface/trl', 'trl/trainer/grpo_trainer.py', 'get_gamma_weights'),
  'opsm': ('huggingface/trl', 'trl/trainer/grpo_trainer.py', 'get_off_policy_mask'),
  'icepop': (
    'THUDM/slime',
    'slime/backends/megatron_utils/loss.py',
    'icepop_function',
  ),
  'm2po': (
    'inclusionAI/AReaL',
    'areal/trainer/ppo/actor.py',
    '_apply_m2po_masking _get_m2po_loss_mask',
  ),
  'dcpo': (
    'lime-RL/DCPO',
    'verl/trainer/ppo/core_algos.py',
    'compute_policy_loss_dcpo get_clip_low_high',
  ),
  'aspo': (
    'wizard-III/Archer2.0',
    'verl/trainer/ppo/core_algos.py',
    'compute_policy_loss_archer',
  ),
  'fipo': (
    'modelscope/ms-swift',
    'swift/megatron/trainers/grpo_trainer.py',
    '_compute_fipo_influence',
  ),
}


def tokens() -> dict[str, np.ndarray]:
  """Makes responses with ratios from 0.13 to 7.4, and probabilities up to nearly 1."""
  rng = np.random.default_rng(7)
  B, T = 8, 12
  log_q = -rng.exponential(1.5, (B, T)) - 1e-3
  spread = np.asarray([0.0, 0.05, 0.3, 0.3, 0.8, 0.8, 1.5, 1.5])[:, None]
  log_p = np.minimum(log_q + spread * rng.normal(size=(B, T)), -1e-4)
  length = np.asarray([12, 9, 12, 5, 12, 12, 7, 12])[:, None]
  adv = np.asarray([1.2, -0.8, 0.6, -1.4, 0.9, -0.7, 1.1, -1.3])
  return {
    'log_q': log_q,
    'log_p': log_p,
    'mask': np.arange(T)[None] < length,
    'adv': adv,
  }


def take(clones: pathlib.Path, name: str) -> tuple[types.SimpleNamespace, str]:
  """Returns the functions of one source, and where they came from."""
  repository, path, functions = SOURCES[name]
  git = ['git', '-C', str(clones / repository.replace('/', '+') / 'repo')]

  def run(*args: str) -> str:
    return subprocess.run(
      [*git, *args], capture_output=True, text=True, check=True
    ).stdout

  wanted, found = functions.split(), []
  for node in ast.walk(ast.parse(run('show', f'HEAD:{path}'))):
    if isinstance(node, ast.FunctionDef) and node.name in wanted:
      node.decorator_list, node.returns = [], None
      for argument in node.args.args + node.args.kwonlyargs:
        argument.annotation = None
      found.append(node)
  space = dict(vars(typing)) | {'torch': torch, 'math': math} | stand_ins()
  exec(compile(ast.Module(found, []), path, 'exec'), space)
  where = f'{repository}@{run("rev-parse", "HEAD").strip()[:12]} {path}: {functions}'
  return types.SimpleNamespace(**{n: space[n] for n in wanted}), where


def stand_ins() -> dict[str, typing.Any]:
  """Returns what the functions call: sums instead of means, no other correction."""

  def total(loss_mat, loss_mask, **_):
    return (loss_mat * loss_mask).sum()

  def mean(x, mask, **_):
    return (x * mask).sum() / mask.sum()

  return {
    'verl_F': types.SimpleNamespace(masked_mean=mean),
    'masked_mean': mean,
    'agg_loss': total,
    'reduce_loss': lambda loss, mask: total(loss, mask),
    'apply_off_policy_correction': lambda loss, a, b, mask, c: (loss, mask, {}),
    'safe_exp_delta': lambda d, clip, out_dtype: d.clamp(-clip, clip).exp(),
    'AlgoConfig': (),
    'PolicyLossType': None,
  }


class Config(types.SimpleNamespace):
  """Holds settings, read as attributes or by `get`."""

  def get(self, name, default=None):
    return getattr(self, name, default)


def losses(clones: pathlib.Path) -> typing.Iterator[tuple[str, str, typing.Any]]:
  """Yields (name, source, function of (p, q, A, mask) to the loss, summed)."""
  f, where = take(clones, 'dppo')
  for kind, delta in (('tv', 0.2), ('kl', 0.05)):
    knobs = Config(dppo_type=f'binary_{kind}', delta_low=delta, delta_high=delta)
    config = Config(dppo=knobs, off_policy_correction=None)
    yield (
      f'dppo_{kind}',
      where,
      lambda p, q, A, m, f=f, c=config: f.dppo_policy_loss(p, q, A, c, m)[0],
    )
  f, where = take(clones, 'sapo')
  config = Config(
    sapo=Config(tau_pos=1.0, tau_neg=1.05),
    loss_reduction='sequence_mean',
    off_policy_correction=None,
  )
  yield 'sapo', where, lambda p, q, A, m: f.sapo_policy_loss(p, q, A, config, m)[0]
  g, where = take(clones, 'vespo')
  yield (
    'vespo',
    where,
    lambda p, q, A, m: (
      -(g.get_gamma_weights(A[:, :1], (p - q).detach(), m, None) * A * p * m).sum()
    ),
  )
  h, where = take(clones, 'opsm')
  yield (
    'opsm',
    where,
    lambda p, q, A, m: (
      -(h.get_off_policy_mask(A[:, :1], p, q, m, 0.1) * (p - q).exp() * A * m).sum()
    ),
  )
  i, where = take(clones, 'icepop')
  limits = Config(tis_clip_low=0.5, tis_clip=5.0)
  yield (
    'icepop',
    where,
    lambda p, q, A, m: i.icepop_function(
      limits,
      pg_loss=(-A * p * m),
      train_log_probs=[p.detach()],
      rollout_log_probs=[q],
      loss_masks=[m],
    )[0].sum(),
  )
  j, where = take(clones, 'm2po')
  yield (
    'm2po',
    where,
    lambda p, q, A, m: (
      -(j._apply_m2po_masking(q, p.detach(), m.bool(), 0.04) * (p - q).exp() * A).sum()
    ),
  )
  k, where = take(clones, 'dcpo')
  config_k = Config(
    clip_type='dynamic',
    clip_ratio=0.2,
    clip_ratio_low=0.16,
    clip_ratio_high=0.2,
    clip_ratio_c=3.0,
  )
  yield (
    'dcpo',
    where,
    lambda p, q, A, m: k.compute_policy_loss_dcpo(q, p, A, m, config=config_k)[0],
  )
  n, where = take(clones, 'aspo')
  yield (
    'aspo',
    where,
    lambda p, q, A, m: n.compute_policy_loss_archer(
      q, p, A, m.bool(), torch.zeros_like(m, dtype=torch.bool), 0.2, 0.2, 0.2, 0.2
    )[0],
  )
  o, where = take(clones, 'fipo')
  me = Config(
    args=Config(delta=None),
    fipo_gamma=2 ** (-1 / 32),
    fipo_clip_range=0.2,
    fipo_clip_high_only=False,
    fipo_safety_threshold=4.0,
  )

  def fipo(p, q, A, m):
    ratio = (p - q).exp()
    weight, _ = o._compute_fipo_influence(me, p - q, ratio, A, m.bool())
    gain = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    return -(gain * weight * m).sum()

  yield 'fipo', where, fipo


def main() -> None:
  """Prints the tokens, and the objective and gradient of each rule, as JSON."""
  made = tokens()
  q, mask = torch.tensor(made['log_q']), torch.tensor(made['mask'], dtype=torch.float64)
  adv = torch.tensor(made['adv'])[:, None].expand(mask.shape)
  rules = {}
  for name, where, loss in losses(pathlib.Path(sys.argv[1])):
    p = torch.tensor(made['log_p'], requires_grad=True)
    value = -loss(p, q, adv, mask)
    value.backward()
    assert p.grad is not None
    rules[name] = {
      'source': where,
      'gain': value.item(),
      'weight': (p.grad * mask).tolist(),
    }
  lists = {name: x.tolist() for name, x in made.items()}
  json.dump({'tokens': lists, 'rules': rules}, sys.stdout, indent=None)


if __name__ == '__main__':
  main()
