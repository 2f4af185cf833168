"""Workdirs of runs that never ran: their config, metrics and recorded groups."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from bapo_jax.runtime import metrics
from lab import counterfactual


def jsonl(path: pathlib.Path, rows: Iterable) -> str:
  """Writes one line of JSON per row; returns the path."""
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return str(path)


def run(
  path: pathlib.Path, rows: list[dict], config: Any = None, first: int = 0
) -> str:
  """Writes config.json and metrics from a first step; returns the workdir."""
  path.mkdir(parents=True, exist_ok=True)
  if config is not None:
    (path / 'config.json').write_text(json.dumps(config))
  with metrics.writing(path, -1) as write:
    for step, row in enumerate(rows, first):
      write(step, row)
  return str(path)


def response(text: str, right: bool, adv: float | None = None, **values) -> dict:
  """Returns a recorded response, a token per character, that no update computed."""
  found = dict(response=text, correct=right, reward=float(right), advantage=adv)
  found |= dict(taught=True, tokens=len(text), truncated=False, version=[6, 6])
  names = ('pieces', 'sampler_logp', 'learner_logp', 'ratio', 'cut')
  return found | dict.fromkeys(names) | values


def step(workdir: pathlib.Path, step: int, *groups: dict) -> None:
  """Writes groups/<step>.jsonl; a group has responses, and fields of its own."""
  base = dict(step=step, answer='3', source='reused', completed_step=1, prompt='1+2')
  base |= dict(prompt_tokens=3, update=2, low=0.8, high=1.25)
  (workdir / 'groups').mkdir(exist_ok=True)
  rows = (base | {'id': n} | group for n, group in enumerate(groups))
  jsonl(workdir / 'groups' / f'{step}.jsonl', rows)


def neutral(group: Any, reward: float, ratios: list[float], p=0.5, **changed) -> dict:
  """Returns a response as another trainer writes it; p: its tokens' probabilities."""
  logp = [float(np.log(p))] * len(ratios)
  return {
    'group': group,
    'reward': reward,
    'tokens': [*range(len(ratios))],
    'behavior_logp': logp,
    'logp': [float(x + np.log(r)) for x, r in zip(logp, ratios, strict=True)],
  } | changed


def by(found: counterfactual.Recorded, knobs: dict[str, Any]) -> counterfactual.Applied:
  """Applies the rules of these knobs to a recorded batch."""
  return counterfactual.apply(found, counterfactual.config_of(found, knobs))
