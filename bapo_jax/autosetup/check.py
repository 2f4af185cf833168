"""Runs --mode=check: a dry run that trains nothing and writes nothing.

1. shows prompts as the model sees them, verifies the right answers, looks at the disk;
2. samples responses from the model as it is: can a run learn from their verdicts?
3. times one update and measures its memory;
4. lists findings, each with its way out. The status is 1 if one is a certain mistake.

`short` is the cheap part, with which every new run begins.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Sequence

import jax
import numpy as np

from bapo_jax.autosetup import check_rules, derive, facts
from bapo_jax.autosetup.check_rules import Finding, Sampled
from bapo_jax.autosetup.facts import Facts
from bapo_jax.data import prompts
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.rollout.rollout import Rollout
from bapo_jax.runtime import machine
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.training import budget, build, trainer
from bapo_jax.training.build import Material
from bapo_jax.training.config import Config
from bapo_jax.training.evaluate import WORDS
from bapo_jax.training.resolve import Resolved
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import take

GROUPS = 8  # that are sampled at least, as far as a step has so many
SHOWN = 3  # prompts, and responses
LONGEST = 300  # characters of a response


def check(config: Config, workdir: str) -> int:
  """Runs the whole check; returns the exit status: 1 for a certain mistake, else 0.

  Raises:
    ValueError: one sentence, if the run would be refused.
  """
  if not config.model.path:
    raise ValueError(
      '--mode=check needs a published model; set --config.model.path (the embedded '
      'policy has no weights before its warm start)'
    )
  began, timer = time.perf_counter(), PhaseTimer()
  r = derive.prepare(config, workdir)
  budget.check(r.budget, budget.capacity(r.mesh))
  config, known = r.config, known_of(r)
  knobs, rows = (config.prompts, config.problems), (known.training, known.held_out)
  vision = r.spec.vision
  material = Material(*prompts.load(r.tokenizer, *knobs, vision, rows))
  findings = check_rules.of_config(config, known, free_bytes(workdir))
  log(described(r, known, material, workdir))
  small = dataclasses.replace(r, config=shrunk(config))
  with contextlib.closing(build.make_verifier(config)) as verifier:
    t, s = build.build(small, material, verifier, workdir, timer)
    seconds, rollout = sample(t, s, timer)
    sampled = summary(rollout, r.tokenizer.eos)
    log(shown_responses(config, t, rollout, sampled))
    findings += check_rules.of_responses(config, sampled)
    log(measured(config, t, s, rollout, seconds, timer))
  log(listed(findings))
  log(f'Checked in {time.perf_counter() - began:.0f} s. Nothing was written.')
  return int(any(each.kind == 'mistake' for each in findings))


def short(r: Resolved, material: Material, workdir: str) -> str:
  """Shows one prompt as the model sees it, and what is wrong with the config."""
  findings = check_rules.of_config(r.config, known_of(r), free_bytes(workdir))
  text = prompt_texts(r, material, 1)[0]
  return f'The first prompt, as the model sees it:\n{quoted(text)}\n{listed(findings)}'


def known_of(r: Resolved) -> Facts:
  """Returns the facts of a resolved run."""
  return facts.gather(r.config, r.model, r.mesh, r.schedule)


def free_bytes(workdir: str) -> int:
  """Returns the free bytes where the workdir is, or would be made."""
  path = os.path.abspath(workdir)
  while not os.path.exists(path):
    path = os.path.dirname(path)
  return shutil.disk_usage(path).free


def shrunk(config: Config) -> Config:
  """Returns the config of a step with one minibatch, or with GROUPS groups if larger.

  It is synchronous and has no buffer: it measures one update on fresh responses.
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


def sample(t: Trainer, s: TrainState, timer: PhaseTimer) -> tuple[float, Rollout]:
  """Compiles the sampler, then returns (seconds, the first groups of the run)."""
  key = trainer.step_keys(t.config.seed, 0).fresh
  with timer('compile'):
    s = trainer.sync_actor_if_due(t, s)
    t.engine.warm_up(s.actor, key, places=t.config.prompts.count, refreshed=False)
  began = time.perf_counter()
  found = trainer.sample_fresh(t, s, 0, key)
  return time.perf_counter() - began, found


def summary(rollout: Rollout, eos: Sequence[int]) -> Sampled:
  """Summarizes a rollout for the findings."""
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


def prompt_texts(r: Resolved, material: Material, n: int) -> list[str]:
  """Decodes the first prompts of the training problems, special tokens included."""
  training = material.problems
  return tokenizer_lib.decode_prompts(
    r.tokenizer, training.tokens_NT[:n], training.length_N[:n], r.spec.image_token
  )


def quoted(text: str) -> str:
  """Puts a bar before every line of a text."""
  return '\n'.join(f'  | {line}' for line in text.split('\n'))


def described(r: Resolved, known: Facts, material: Material, workdir: str) -> str:
  """Describes the prompts, their lengths, the right answers and the disk."""
  config, found = r.config, material.problems
  verified = known.verified(config.rewards.rule)
  lines = [f'Check of {config.model.path} on {config.problems.source}']
  for i, text in enumerate(prompt_texts(r, material, SHOWN)):
    answer = found.answer[i]
    lines.append(
      f'prompt {i + 1}, {found.length_N[i]} tokens, right answer {answer[:40]!r}:\n'
      f'{quoted(text)}'
    )
  training, held_out = known.lengths(config.tokenizer.template)
  disk = r.budget.disk / 1e9
  lines += [
    f'prompts    {lengths(training)} (training), {lengths(held_out)} (held out); '
    f'limit {config.prompts.max_prompt_tokens}',
    f'answers    {verified.right} of {verified.tried} are right by their own verifier '
    f'({config.rewards.rule})',
    f'disk       checkpoints {disk:.3g} GB, free {free_bytes(workdir) / 1e9:.3g} GB',
  ]
  return '\n'.join(lines)


def lengths(tokens: Sequence[int]) -> str:
  """Describes the number and the lengths of prompts in tokens."""
  low, mid, high = np.percentile(tokens, [0, 50, 100]).astype(int)
  return f'{len(tokens)} of {low} to {high} tokens, median {mid}'


def shown_responses(
  config: Config, t: Trainer, rollout: Rollout, sampled: Sampled
) -> str:
  """Describes some responses with their verdicts, and statistics of all."""
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
  """Times one update on a minibatch of these groups; describes a step and memory."""
  groups = rollout.groups
  per_update = config.seats // config.learner.minibatches
  spread_P = np.asarray(groups.correct_PG.astype(float).std(1))
  chosen = np.argsort(-spread_P)[:per_update]  # those that teach
  teaching = int((spread_P[chosen] > 0).sum())
  one = t.config.with_values(prompts={'count': per_update}, learner={'minibatches': 1})
  with timer('compile'):
    step = build.compile_train_step(t, s)
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
    f'groups had mixed verdicts); '
    f'{config.steps} steps {config.steps * total / 3600:.2g} h\n'
    f'memory     {peak(t)}; compiling took {timer.seconds["compile"]:.0f} s'
  )


def peak(t: Trainer) -> str:
  """Describes the peak of memory so far."""
  device = t.mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'peak_bytes_in_use' in stats:
    return f'at most {stats["peak_bytes_in_use"] / 2**30:.3g} GiB of a device'
  return f'at most {machine.peak_rss() / 2**30:.3g} GiB of the host'


def listed(findings: Sequence[Finding]) -> str:
  """Formats all findings, the worst first."""
  order = ('mistake', 'warning', 'note')
  lines = sorted(findings, key=lambda each: order.index(each.kind))
  if not lines:
    return 'No problems found.'
  return '\n'.join(derive.wrapped(each.line, '') for each in lines)
