"""--mode=check: a dry run, which trains nothing and writes nothing.

1. prompts as the model sees them, right answers against themselves, disk;
2. responses by the model as it is, with their verdicts: can a run learn from them?
3. one update, for its seconds and its memory;
4. findings, each with its way out. Status 1 where one of them is a mistake for certain.

`short` is the part that costs next to nothing: a new run begins with it.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bapo_jax.autosetup import check_rules, derive, derive_sizes, facts
from bapo_jax.autosetup.check_rules import Finding, Sampled
from bapo_jax.autosetup.facts import Facts
from bapo_jax.data import pictured_problems, prompts
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision import tower
from bapo_jax.rollout.rollout import Rollout
from bapo_jax.runtime import machine
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.training import frozen, policy, setup, trainer
from bapo_jax.training.config import Config
from bapo_jax.training.evaluate import WORDS
from bapo_jax.training.setup import Material
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import take

GROUPS = 8  # that are sampled at least, as far as a step has so many
SHOWN = 3  # prompts, and responses
LONGEST = 300  # characters of a response


def check(config: Config, workdir: str) -> int:
  """Runs all of it; returns the exit status: 1 where a mistake is certain, else 0.

  Raises:
    ValueError: one sentence, where the run would be refused.
  """
  if not config.model.path:
    raise ValueError(
      '--mode=check is for a model of yours; give --config.model.path (the embedded '
      'policy has no weights before its warm start)'
    )
  began, timer = time.perf_counter(), PhaseTimer()
  setup.check_available(config)
  known = facts.gather(config, available=True)
  tokenizer = policy.load_tokenizer(config)
  policy.check_vocabulary(config, tokenizer)
  material = Material(tokenizer, *problems(config, known, tokenizer))
  findings = check_rules.of_config(config, known, free_bytes(workdir))
  log(described(config, known, material, workdir))
  small = shrunk(config)
  with contextlib.closing(setup.make_verifier(small)) as verifier:
    t, s = start(small, material, verifier, timer)
    seconds, rollout = sample(t, s, timer)
    sampled = summary(rollout, tokenizer.eos)
    log(shown_responses(config, t, rollout, sampled))
    findings += check_rules.of_responses(config, sampled)
    log(measured(config, t, s, rollout, seconds, timer))
  log(listed(findings))
  log(f'Checked in {time.perf_counter() - began:.0f} s; nothing was written.')
  return int(any(each.kind == 'mistake' for each in findings))


def short(config: Config, material: Material, workdir: str) -> str:
  """One prompt as the model sees it, and what is wrong with the config; for `train`."""
  known = facts.gather(config, available=True)
  findings = check_rules.of_config(config, known, free_bytes(workdir))
  text = prompt_texts(material, 1, known.spec)[0]
  return f'The first prompt, as the model sees it:\n{quoted(text)}\n{listed(findings)}'


def problems(
  config: Config, known: Facts, tokenizer: tokenizer_lib.Tokenizer
) -> tuple[prompts.Problems, prompts.Problems]:
  """Training and held-out problems as `prompts.load` returns them, nothing stored."""
  if known.pictured:
    vision = tower.vision_of(known.spec)
    knobs = config.prompts, config.problems
    return pictured_problems.tables(tokenizer, *knobs, known.pictured, vision)
  training, held_out = known.training, known.held_out
  if config.problems.overlap == 'drop':
    both, _ = prompts.dedup.overlap(training, held_out)
    training = [row for i, row in enumerate(training) if i not in both]
  most, drop = config.prompts.max_prompt_tokens, config.prompts.overlong == 'drop'
  found = (
    prompts.tokenize(tokenizer, training, most, drop=drop),
    prompts.tokenize(tokenizer, held_out, most, drop=False),
  )
  prompts.check_count(found[0], config.prompts.count)
  return found


def free_bytes(workdir: str) -> int:
  """Bytes that are free where the workdir is, or would be made."""
  path = os.path.abspath(workdir)
  while not os.path.exists(path):
    path = os.path.dirname(path)
  return shutil.disk_usage(path).free


def shrunk(config: Config) -> Config:
  """The config of a step with one minibatch of the run's shape, or with GROUPS groups.

  Synchronous, without a buffer: what is measured is one update on fresh responses.
  """
  groups = config.seats // config.learner.minibatches
  count = min(-(-GROUPS // groups) * groups, config.prompts.count)
  return config.with_values(
    prompts={'count': count},
    learner={'minibatches': max(count // groups, 1), 'epochs': 1},
    batch={'rule': 'fresh_only', 'max_extra_rounds': 0},
    rollout={'max_off_policy_steps': 0, 'max_tokens_per_step': float('inf')},
    sampler={
      'max_num_seqs': min(
        config.sampler.max_num_seqs, count * config.sampler.group_size
      )
    },
  )


def start(
  config: Config, material: Material, verifier: Any, timer: PhaseTimer
) -> tuple[Trainer, TrainState]:
  """Trainer and state at step 0."""
  mesh = setup.make_mesh(config)
  spec, weights = policy.load(config, '', material.tokenizer, mesh, timer)
  base, params = frozen.trained(config, spec, weights, mesh)
  t = setup.make_trainer(config, material, spec, mesh, verifier, timer, base)
  return t, setup.initial_state(t, params)


def sample(t: Trainer, s: TrainState, timer: PhaseTimer) -> tuple[float, Rollout]:
  """(seconds, the first groups of the run), its programs compiled before."""
  key = trainer.step_keys(t.config.seed, 0).fresh
  with timer('compile'):
    s = trainer.sync_actor_if_due(t, s)
    t.engine.warm_up(s.actor, key, places=t.config.prompts.count, refreshed=False)
  began = time.perf_counter()
  found = trainer.sample_fresh(t, s, 0, key)
  return time.perf_counter() - began, found


def summary(rollout: Rollout, eos: Sequence[int]) -> Sampled:
  """What the findings need of a rollout."""
  groups = rollout.groups
  mask_PGT, tokens_PGT = (
    np.asarray(x) for x in (groups.response_mask_PGT, groups.tokens_PGT)
  )
  shape = mask_PGT.shape[:2]
  read = [verdict.answer is not None for verdict in rollout.verdicts]
  return Sampled(
    correct_PG=np.asarray(groups.correct_PG),
    truncated_PG=np.asarray(~(mask_PGT & np.isin(tokens_PGT, eos)).any(2)),
    read_PG=np.asarray(read).reshape(shape),
    undecided=sum(verdict.right is None for verdict in rollout.verdicts),
  )


def prompt_texts(material: Material, n: int, spec: ModelSpec) -> list[str]:
  """The first prompts of the training problems, special tokens and all."""
  found = material.problems
  return tokenizer_lib.decode_prompts(
    material.tokenizer, found.tokens_NT[:n], found.length_N[:n], spec.image_token
  )


def quoted(text: str) -> str:
  """Lines of a text, each after a bar."""
  return '\n'.join(f'  | {line}' for line in text.split('\n'))


def described(config: Config, known: Facts, material: Material, workdir: str) -> str:
  """The prompts, their lengths, the right answers and the disk."""
  found, verified = material.problems, known.verified(config.rewards.rule)
  lines = [f'Check of {config.model.path} on {config.problems.source}']
  for i, text in enumerate(prompt_texts(material, SHOWN, known.spec)):
    answer = found.answer[i]
    lines.append(
      f'prompt {i + 1}, {found.length_N[i]} tokens, right answer {answer[:40]!r}:\n'
      f'{quoted(text)}'
    )
  training, held_out = known.lengths(config.tokenizer.template)
  disk = derive_sizes.budget_of(config, known)[1].disk / 1e9
  lines += [
    f'prompts    {lengths(training)} (training), {lengths(held_out)} (held out); '
    f'limit {config.prompts.max_prompt_tokens}',
    f'answers    {verified.right} of {verified.tried} are right by their own verifier '
    f'({config.rewards.rule})',
    f'disk       checkpoints {disk:.3g} GB, free {free_bytes(workdir) / 1e9:.3g} GB',
  ]
  return '\n'.join(lines)


def lengths(tokens: Sequence[int]) -> str:
  """Prompts by their tokens."""
  low, mid, high = np.percentile(tokens, [0, 50, 100]).astype(int)
  return f'{len(tokens)} of {low} to {high} tokens, median {mid}'


def shown_responses(
  config: Config, t: Trainer, rollout: Rollout, sampled: Sampled
) -> str:
  """Some responses with their verdicts, and what all of them are worth."""
  ids = np.repeat(np.asarray(rollout.groups.id_P), t.config.sampler.group_size)
  order = sorted(range(len(ids)), key=lambda i: (i % t.config.sampler.group_size, i))
  right = [i for i in order if rollout.verdicts[i].right][:1]
  chosen = [*right, *(i for i in order if i not in right)][:SHOWN]
  lines = []
  for i in chosen:
    verdict = rollout.verdicts[i]
    text = rollout.texts[i]
    text = text if len(text) <= LONGEST else f'{text[:LONGEST]}...'
    lines.append(
      f'response to {t.problems.text[ids[i]][:60]!r}, right answer '
      f'{t.problems.answer[ids[i]][:40]!r}: {WORDS[verdict.right]} ({verdict.reason})\n'
      f'{quoted(text)}'
    )
  groups, n = len(sampled.correct_PG), sampled.correct_PG.size
  tokens = float(np.asarray(rollout.groups.response_mask_PGT).sum(2).mean())
  lines += [
    f'accuracy   {check_rules.accuracy(sampled)} of {n} responses at temperature '
    f'{config.sampler.temperature:g}, before any training',
    f'learnable  {sampled.mixed} of {groups} groups have right and wrong responses',
    f'length     {tokens:.3g} tokens on average, {sampled.truncated_PG.mean():.0%} cut '
    f'at {config.sampler.max_new_tokens}; an answer found in '
    f'{sampled.read_PG.mean():.0%}',
  ]
  return '\n'.join(lines)


def measured(
  config: Config,
  t: Trainer,
  s: TrainState,
  rollout: Rollout,
  seconds: float,
  timer: PhaseTimer,
) -> str:
  """Seconds of a step and memory, by one update on a minibatch of these groups."""
  groups = rollout.groups
  per_update = config.seats // config.learner.minibatches
  spread_P = np.asarray(groups.correct_PG.astype(float).std(1))
  chosen = np.argsort(-spread_P)[:per_update]  # those that teach
  teaching = int((spread_P[chosen] > 0).sum())
  one = t.config.with_values(prompts={'count': per_update}, learner={'minibatches': 1})
  with timer('compile'):
    step = setup.compile_train_step(t, s)
  t = dataclasses.replace(t, config=one, train_step=step)
  key = trainer.step_keys(config.seed, 0).update
  batch, source_P = take(groups, chosen), np.zeros(per_update, np.int32)
  began = time.perf_counter()
  trainer.update(t, s, batch, jax.numpy.asarray(source_P), key)
  update = time.perf_counter() - began
  sampling = seconds * config.prompts.count / len(spread_P)
  total = sampling + update * config.updates_per_step
  return (
    f'a step     about {total:.3g} s: sampling {sampling:.3g}, '
    f'{config.updates_per_step} updates of {update:.3g} ({teaching} of {per_update} '
    f'groups taught); {config.steps} steps {config.steps * total / 3600:.2g} h\n'
    f'memory     {peak(t)}; compiling took {timer.seconds["compile"]:.0f} s'
  )


def peak(t: Trainer) -> str:
  """The most memory used so far."""
  device = t.mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'peak_bytes_in_use' in stats:
    return f'at most {stats["peak_bytes_in_use"] / 2**30:.3g} GiB of a device'
  return f'at most {machine.peak_rss() / 2**30:.3g} GiB of the host'


def listed(findings: Sequence[Finding]) -> str:
  """All findings, the worst first."""
  order = ('mistake', 'warning', 'note')
  lines = sorted(findings, key=lambda each: order.index(each.kind))
  if not lines:
    return 'Nothing is wrong, as far as was looked.'
  return '\n'.join(derive.wrapped(each.line, '') for each in lines)
