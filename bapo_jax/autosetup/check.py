"""Runs --mode=check: a dry run that trains nothing and writes nothing to the workdir.

1. shows prompts, knobs and the free disk space, and verifies right answers;
2. samples responses before any training, to show whether a run can learn from them;
3. times one step and measures its memory, both after an untimed first call;
4. lists findings with their remedies. The exit status is 1 if any is a mistake.

Every new run first shows `short`: one prompt, and the findings about the config.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bapo_jax.autosetup import check_rules, derive, facts, knob_lists
from bapo_jax.autosetup.check_rules import Finding, Sampled
from bapo_jax.autosetup.facts import Facts
from bapo_jax.data import conversation
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.rollout.rollout import Rollout
from bapo_jax.runtime import ahead, cache, machine
from bapo_jax.runtime.progress import PhaseTimer, log
from bapo_jax.training import budget, build, trainer
from bapo_jax.training.build import Material
from bapo_jax.training.config import Config
from bapo_jax.training.evaluate import WORDS, mean_of_decided
from bapo_jax.training.resolve import Resolved
from bapo_jax.training.state import Trainer, TrainState
from bapo_jax.types import ended, response_length, take

GROUPS = 8  # sampled at least, unless a step has fewer
SHOWN = 3  # prompts, and responses
LONGEST = 300  # characters of a response


def check(config: Config, workdir: str = '') -> int:
  """Runs the whole check; returns exit status 1 if a finding is a mistake, else 0.

  If a run has begun in the workdir, the check uses the knobs derived for this run.
  Without --workdir it uses no run: that of the default workdir may have another model.

  Args:
    config: the config to check.
    workdir: directory of a run to continue

  Raises:
    ValueError: a run with this config could not start.
  """
  began = time.perf_counter()
  r = derive.prepare(config, workdir)
  budget.check(r.budget, budget.capacity(r.mesh))
  cache.share_programs(config.cache)
  config = r.config
  known = facts.gather(r.config, r.inputs)
  # The check samples even if the run trains on a record.
  material = build.tabulate(r)._replace(record=None)
  findings = check_rules.of_config(r, known, free_bytes(workdir))
  log(derive.screen(config, r.derived))
  log(described(r, known, material, workdir))
  small = dataclasses.replace(r, config=shrunk(config), rollout_mesh=None)
  with contextlib.closing(build.make_verifier(config)) as verifier:
    t, s = build.build(small, material, verifier, PhaseTimer())
    seconds, rollout = sample(t, s)
    sampled = summary(rollout, r.tokenizer.eos, config.sampler.cut_length)
    log(shown_responses(t, rollout, sampled))
    findings += check_rules.of_responses(config, sampled)
    log(measured(r, t, s, rollout, seconds))
  log(listed(findings))
  seconds = time.perf_counter() - began
  log(f'Checked in {seconds:.0f} s. Nothing was written to the workdir.')
  return int(any(each.kind == 'mistake' for each in findings))


def short(r: Resolved, material: Material, workdir: str) -> str:
  """Describes one prompt as the model reads it, and the findings about the config."""
  known = facts.gather(r.config, r.inputs)
  findings = check_rules.of_config(r, known, free_bytes(workdir))
  text = prompt_texts(r, material, 1)[0]
  return f'The first prompt, as the model sees it:\n{quoted(text)}\n{listed(findings)}'


def free_bytes(workdir: str) -> int:
  """Returns the free bytes of the disk of the workdir, which may not exist yet."""
  path = pathlib.Path(workdir).absolute()
  return shutil.disk_usage(next(x for x in (path, *path.parents) if x.exists())).free


def shrunk(config: Config) -> Config:
  """Returns the config of a smaller step: the fewest minibatches with GROUPS groups.

  The step is synchronous and trains once on fresh responses, without a replay buffer.
  """
  groups = config.seats // config.learner.minibatches
  count = min(-(-GROUPS // groups) * groups, config.prompts.count)
  slots = min(config.sampler.max_num_seqs, count * config.sampler.group_size)
  return config.with_values(
    prompts={'count': count},
    learner={'minibatches': max(count // groups, 1), 'epochs': 1},
    batch={'rule': 'fresh_only', 'max_extra_rounds': 0},
    rollout={'records': '', 'max_off_policy_steps': 0, 'max_tokens_per_step': math.inf},
    sampler={'max_num_seqs': slots},
  )


def sample(t: Trainer, s: TrainState) -> tuple[float, Rollout]:
  """Samples the run's first groups twice; returns (seconds of the second, rollout).

  Uses the prompts and the noise of the first groups of the run's first step. The first
  call is slower: it compiles small programs and starts the verifier's processes.
  """
  with t.timer('compile'):
    s = trainer.sync_actor_if_due(t, s)
    kept = ahead.compile_all(t.sampler.programs())
  actor = trainer.actor_of(t, s)
  _, first = trainer.next_round(t, s)
  t.sampler.submit(first, actor, 0).result()
  del kept  # the first call has found its programs
  began = time.perf_counter()
  sampled = t.sampler.submit(first, actor, 0).result()
  return time.perf_counter() - began, sampled.fresh


def summary(
  rollout: Rollout, eos: Sequence[int], cut_length: int | None = None
) -> Sampled:
  """Reduces a rollout to the values from which `of_responses` finds mistakes."""
  groups = rollout.groups
  mask_PGT = np.asarray(groups.response_mask_PGT)
  correct_PG = np.where(groups.decided_PG, groups.correct_PG, np.nan)
  ended_PG = ended(mask_PGT, np.isin(groups.tokens_PGT, eos), cut_length)
  read = [verdict.answer is not None for verdict in rollout.verdicts]
  undecided = [x.reason for x in rollout.verdicts if x.right is None]
  read_PG = np.reshape(read, correct_PG.shape)
  return Sampled(correct_PG, np.logical_not(ended_PG), read_PG, undecided)


def prompt_texts(r: Resolved, material: Material, n: int) -> list[str]:
  """Decodes the first prompts of the training problems, special tokens included."""
  problems = material.problems
  return tokenizer_lib.decode_prompts(
    r.tokenizer, problems.tokens_NT[:n], problems.length_N[:n], r.spec.image_token
  )


def quoted(text: str) -> str:
  """Puts a bar before every line of a string."""
  return '\n'.join(f'  | {line}' for line in text.split('\n'))


def described(r: Resolved, known: Facts, material: Material, workdir: str) -> str:
  """Describes prompts and knobs, verified right answers, and the disk space."""
  config = r.config
  found = material.problems
  verified = known.verified(config.rewards.rule)
  lines = [
    f'prompt {i + 1}, {found.length_N[i]} tokens, right answer '
    f'{found.rows[i].answer[:40]!r}:\n{quoted(text)}\n'
    for i, text in enumerate(prompt_texts(r, material, SHOWN))
  ]
  answers = 'not verified, because the rule needs a response'
  if verified.tried:
    answers = f'{verified.right} of {verified.tried} are right by their own verifier'
  training, held_out = known.lengths(config.tokenizer.template)
  disk = r.budget.disk / 2**30
  free = free_bytes(workdir) / 2**30
  return (
    f'Check of {r.config.model.path or r.model.directory} on '
    f'{config.problems.source}\n{"".join(lines)}'
    f'prompts    {lengths(training)} (training), {lengths(held_out)} (held out); '
    f'limit {config.prompts.max_prompt_tokens}\n'
    f'answers    {answers} ({config.rewards.rule})\n'
    f'{knob_lists.lines(r.user, config, indent="")}\n'
    f'products   in {config.model.compute}\n'
    f'disk       checkpoints {disk:.3g} GiB, free {free:.3g} GiB'
  )


def lengths(tokens: Sequence[int]) -> str:
  """Describes the number and the lengths of prompts in tokens."""
  low, mid, high = np.percentile(tokens, [0, 50, 100]).astype(int)
  return f'{len(tokens)} of {low} to {high} tokens, median {mid}'


def shown_responses(t: Trainer, rollout: Rollout, sampled: Sampled) -> str:
  """Describes some responses with verdicts, and statistics of all responses."""
  knobs = t.config.sampler
  G = knobs.group_size
  ids = np.repeat(np.asarray(rollout.groups.id_P), G)
  verdicts = rollout.verdicts
  order = sorted(range(len(ids)), key=lambda i: (i % G, i))  # a response per group
  right = [i for i in order if verdicts[i].right][:1]
  lines = []
  for i in [*right, *(i for i in order if i not in right)][:SHOWN]:
    verdict = verdicts[i]
    text = conversation.script(rollout.conversations.get(i, ())[1:]) or rollout.texts[i]
    text = text if len(text) <= LONGEST else f'{text[:LONGEST]}...'
    row = t.problems.rows[ids[i]]
    lines.append(
      f'response to {row.problem[:60]!r}, right answer '
      f'{row.answer[:40]!r}: {WORDS[verdict.right]} ({verdict.reason})\n'
      f'{quoted(text)}\n'
    )
  accuracy = mean_of_decided(sampled.correct_PG)
  tokens = float(response_length(np.asarray(rollout.groups.response_mask_PGT)).mean())
  return (
    f'{"".join(lines)}'
    f'accuracy   {accuracy["mean"]:.3f} ± {accuracy["stderr"]:.3f} of '
    f'{len(verdicts)} responses at temperature {knobs.temperature:g}, before any '
    f'training\n'
    f'learnable  {sampled.mixed} of {len(verdicts) // G} groups have right and wrong '
    f'responses; only these produce a gradient, and below {check_rules.FEW:.0%} of the '
    f'groups a warning follows\n'
    f'length     {tokens:.3g} tokens on average, {sampled.truncated_PG.mean():.0%} cut '
    f'at {knobs.max_new_tokens}; an answer found in {sampled.read_PG.mean():.0%}'
  )


def measured(
  r: Resolved, t: Trainer, s: TrainState, rollout: Rollout, seconds: float
) -> str:
  """Times one update on a minibatch of these groups; describes step time and memory.

  `r` is the run, and `t` the trainer of its config after `shrunk`. `t` sampled the
  rollout in `seconds`.
  """
  config = r.config
  groups = rollout.groups
  updates = r.config.updates_per_step
  per_update = config.seats // config.learner.minibatches
  spread_P = np.asarray(groups.correct_PG.astype(float).std(1, where=groups.decided_PG))
  chosen = np.argsort(-spread_P)[:per_update]  # groups with mixed verdicts first
  teaching = int((spread_P[chosen] > 0).sum())
  sizes = {'prompts': {'count': per_update}, 'learner': {'minibatches': 1}}
  with t.timer('compile'):
    step = build.train_program(t, s.params, s.opt).lower().compile()
    step = functools.partial(step, base=t.base)
  machine.trim()  # as a run does, see experiment.compiled
  t = dataclasses.replace(t, config=t.config.with_values(**sizes), train_step=step)
  key = trainer.step_keys(config.seed, 0).update
  batch = take(groups, chosen)
  source_P = jnp.zeros(per_update, jnp.int32)
  s, _ = trainer.update(t, s, batch, source_P, key)  # the first call is slower
  began = time.perf_counter()
  trainer.update(t, s, batch, source_P, key)
  update = time.perf_counter() - began
  sampling = seconds * config.prompts.count / len(spread_P)
  total = sampling + update * updates
  device = t.mesh.devices.flat[0]
  stats = device.memory_stats() or {}  # None on a CPU
  peak = machine.peak_rss()
  where = 'the host, with Python and compiled programs'
  if 'peak_bytes_in_use' in stats:
    peak = stats['peak_bytes_in_use']
    where = 'a device'
  return (
    f'a step     about {total:.3g} s: sampling {sampling:.3g}, {updates} updates of '
    f'{update:.3g} ({teaching} of {per_update} groups had mixed verdicts); '
    f'{config.steps} steps {config.steps * total / 3600:.2g} h; machine load '
    f'{os.getloadavg()[0]:.2g} on {os.cpu_count()} cores\n'
    f'memory     at most {peak / 2**30:.3g} GiB of {where}; the arrays of an update '
    f'take about {r.budget.update / 2**30:.3g} by count\n'
    f'compiling  {t.timer.seconds["compile"]:.0f} s'
  )


def listed(findings: Sequence[Finding]) -> str:
  """Formats all findings, mistakes first."""
  lines = (
    f'{x.kind.upper()} ({x.name}): {x.text}'
    for x in sorted(findings, key=lambda x: x.kind)
  )
  return '\n'.join(derive.wrapped(x, '') for x in lines) or 'No problems found.'
