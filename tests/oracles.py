"""Slow, obvious versions of what the package does quickly, to compare it with."""

import collections
import functools
import itertools
import re
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models import layers, transformer

# ---------------------------------------------------------------- policy and sampler


def logprob_oracle(hidden_BTD, head_VD, token_BT, temperature):
  """(logp_BT, entropy_BT, Cov_pi[pi, log pi]) by way of all the logits at once."""
  logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD, head_VD) / temperature
  p_BTV = jnp.exp(logits_BTV - logits_BTV.max(-1, keepdims=True))
  p_BTV = p_BTV / p_BTV.sum(-1, keepdims=True)
  target_BTV = jax.nn.one_hot(token_BT, head_VD.shape[0])
  log_BTV = jnp.log(p_BTV)
  mean_BT1 = (p_BTV * log_BTV).sum(-1, keepdims=True)
  typical_BT1 = (p_BTV * p_BTV).sum(-1, keepdims=True)
  covariance_BT = (p_BTV * (p_BTV - typical_BT1) * (log_BTV - mean_BT1)).sum(-1)
  return jnp.log((p_BTV * target_BTV).sum(-1)), -mean_BT1[..., 0], covariance_BT


@functools.partial(jax.jit, static_argnames='spec')
def _best_next(params, tokens_T, n, spec):
  hidden_D = layers.forward(params, tokens_T[None], spec)[0, n - 1]
  return jnp.argmax(transformer.head(params) @ hidden_D)


def decode_oracle(params, prompt: list[int], spec, new: int, eos: tuple[int, ...]):
  """Greedy decoding without a cache: every token computes the whole row anew."""
  row, length = list(prompt), len(prompt) + new
  while len(row) < length:
    padded_T = jnp.asarray(row + [0] * (length - len(row)))
    row.append(int(_best_next(params, padded_T, len(row), spec)))
    if row[-1] in eos:
      break
  return row[len(prompt) :]


# --- clip ----------------------------------------------------------------------------


def sums(ratio_BT, batch, low, high, contribution='gradient', weight='one'):
  """(P, N) as section 1 of the paper has them, in float64."""
  r_BT = np.where(batch.loss_mask_BT, np.float64(ratio_BT), 0)
  size_BT = np.float64(batch.adv_BT) * batch.loss_mask_BT
  if weight == 'behaviour':
    size_BT = size_BT * np.exp(batch.behavior_logp_BT)
  if contribution == 'surrogate':
    gain_BT = size_BT * np.where(
      size_BT > 0, np.minimum(r_BT, high), np.maximum(r_BT, low)
    )
  else:
    gain_BT = size_BT * r_BT * np.where(size_BT > 0, r_BT < high, r_BT > low)
  return gain_BT[gain_BT > 0].sum(), -gain_BT[gain_BT < 0].sum()


def enough(P, N, target) -> bool:
  """P / (P + N) >= target in float32, multiplied out."""
  left = np.float32(P) * np.float32(1 - target)
  return target == 0 or bool(P > 0 and left >= np.float32(N) * np.float32(target))


def algorithm_1(
  ratio_BT, batch, *, target, low, high, low_step, high_step, order='upper', **kind
):
  """Algorithm 1 of arXiv:2510.18927 as printed: (c_low, c_high, steps, met).

  The steps are counted, not added up: sixteen times 0.02 in floats is short of 0.32.
  With order='lower' the two bounds change their parts. `kind` is that of `sums`.
  """
  lows, highs = 0, 0
  last_low = round((low[1] - low[0]) / low_step)
  last_high = round((high[1] - high[0]) / high_step)
  while True:
    c_low = np.float32(low[0] + lows * low_step)
    c_high = np.float32(high[0] + highs * high_step)
    sides = sums(ratio_BT, batch, c_low, c_high, **kind)
    met = enough(*sides, target)
    room = lows + 1 <= last_low if order == 'upper' else highs + 1 <= last_high
    if met or not room:
      return c_low, c_high, lows + highs, met
    if order == 'upper':
      highs, lows = (highs + 1, lows) if highs < last_high else (highs, lows + 1)
    else:
      lows, highs = (lows + 1, highs) if lows < last_low else (lows, highs + 1)


def public_recipe(ratio_BT, batch, *, t, low, high, low_step, high_step):
  """What the paper's public code does, step by step: (c_low, c_high, steps, met)."""
  steps, (c_low, c_high) = 0, (low[0], high[0])

  def missed():
    bounds = np.float32(c_low), np.float32(c_high)
    sides = sums(ratio_BT, batch, *bounds, contribution='surrogate')
    return not enough(*sides, t / (1 + t))

  while missed() and c_low < low[1]:
    c_low, steps = min(c_low + low_step, low[1]), steps + 1
  while missed() and c_high < high[1]:
    c_high, steps = min(c_high + high_step, high[1]), steps + 1
  return np.float32(c_low), np.float32(c_high), steps, not missed()


def crossing(ratio_BT, batch, target, low, high):
  """Where the `gradient` share crosses the target, exactly, by sorting: (low, high).

  Ratios are where sums change: as `high` rises past one, a positive token comes in; as
  `low` reaches one, a negative token goes. (None, None) where no bounds are enough.
  """
  ratios = np.unique(ratio_BT[batch.loss_mask_BT])
  highs = [high[0], *(r for r in ratios if high[0] <= r < high[1])]
  above = [(c, np.nextafter(c, np.inf)) for c in highs]  # a token at the bound is cut
  for c_high, bound in [(high[0], high[0]), *above]:
    if enough(*sums(ratio_BT, batch, low[0], bound), target):
      return low[0], c_high
  for c_low in [r for r in ratios if low[0] < r <= low[1]]:
    if enough(*sums(ratio_BT, batch, c_low, high[1]), target):
      return c_low, high[1]
  return None, None


# --- buffer and batch ----------------------------------------------------------------


class Attempt(NamedTuple):
  """A group: a problem and how many of its responses are correct."""

  problem: int
  k: int
  step: int  # the learner step at which the group was completed
  row: Any  # (Groups, index): where its responses are
  teaches: bool = True  # the rewards of its unmasked responses are not all equal


class Lists(NamedTuple):
  """The buffer, newest first."""

  hard: list  # (problem, step of the last attempt), under fifo the last to enter first
  reusable: list  # (Attempt, how often it was trained on again; -1: never trained on)
  num_correct: int  # of all fresh responses
  num_responses: int
  thresholds: tuple  # (hard, reusable): sets of numbers of correct responses


def thresholds(G: int, rate: Fraction, rule: str, hard=0, low=0, high=0) -> tuple:
  """(hard, reusable): numbers of correct responses, of G, where a group is so (Eq. 8).

  Args:
    rate: mean verdict.
    hard, low, high: c1, a Fraction; c2, c3: Fractions, or pairs of their first and
      last values.
  """
  if rule == 'everything':
    return set(), set(range(G + 1))
  if rule == 'threshold_free':
    return {0}, {G // 2}
  c1 = hard
  pairs = (c if isinstance(c, tuple) else (c,) * 2 for c in (low, high))
  c2, c3 = (rate * (end - start) + start for start, end in pairs)
  share = {k: Fraction(k, G) for k in range(G + 1)}
  reusable = {k for k in range(1, G) if c2 <= share[k] <= c3}
  return {k for k in share if share[k] <= c1}, reusable


def empty_lists(G: int, rule) -> Lists:
  """`rule`: rate -> (hard, reusable)."""
  return Lists([], [], 0, 0, rule(Fraction(0)))


def draw(lists: Lists, rows: int) -> list[int]:
  """The problems tried longest ago."""
  return [problem for problem, _ in sorted(lists.hard, key=lambda row: row[1])[:rows]]


def fill(
  fresh,
  reevaluated,
  lists: Lists,
  now: int,
  G: int,
  max_off_policy_steps: int,
  max_reuse: int,
):
  """Definition 3.1 of arXiv:2602.20722: (X1, X2, X3), each in the order it came.

  Args:
    fresh, reevaluated: [Attempt].
  """
  hard_k, reusable_k = lists.thresholds
  seen, tiers = set(), []
  for tier in (
    [t for t in fresh if 0 < t.k < G and t.teaches],
    [t for t in reevaluated if 0 < t.k < G and t.teaches and t.k not in hard_k],
    [
      t
      for t, used in lists.reusable
      if (t.k in reusable_k or used < 0) and 0 < t.k < G and t.teaches
      if used < max_reuse
      if 1 <= now - t.step <= max_off_policy_steps
    ],
  ):
    tiers.append([])
    for t in tier:
      if t.problem not in seen:
        tiers[-1].append(t)
        seen.add(t.problem)
  return tiers


def insert(
  lists: Lists,
  fresh,
  reevaluated,
  seated,
  now,
  *,
  rule,
  G,
  capacity,
  max_off_policy_steps,
  max_reuse,
  hard_order='fifo',
) -> tuple[Lists, dict]:
  """(lists, counts) after step `now`.

  Of a problem tried twice the later verdict counts. A group that the next step could
  not use does not stay. A promoted group whose problem found no seat stays, unused.

  Args:
    seated: (problems in the batch, those of them that were reused): two sets.
  """
  seated, reused = seated
  last = {t.problem: t for t in fresh + reevaluated}
  tried = [t for t in fresh + reevaluated if last[t.problem] is t]
  hard = with_hard(lists, tried, now, hard_order)
  counts = moves(lists, tried, reevaluated, G)
  counts['evicted'] = len(hard[capacity:])

  stored = [(t, used + (t.problem in reused)) for t, used in lists.reusable]
  stored = [row for row in stored if row[1] < max_reuse]
  stored = [row for row in stored if now + 1 - row[0].step <= max_off_policy_steps]
  reusable = with_reusable(lists, stored, tried, reevaluated, seated, G)

  num_correct = lists.num_correct + sum(t.k for t in fresh)
  num_responses = lists.num_responses + G * len(fresh)
  following = rule(Fraction(num_correct, max(num_responses, 1)))
  lists = Lists(
    hard[:capacity], reusable[:capacity], num_correct, num_responses, following
  )
  return lists, counts


def moves(lists: Lists, tried, reevaluated, G) -> collections.Counter:
  """Counts the problems that entered and left the hard list, by the way they went."""
  hard_k, _ = lists.thresholds
  known = {problem for problem, _ in lists.hard}
  counts = collections.Counter()
  for t in tried:
    if t.k in hard_k:
      counts['entered'] += t.problem not in known
    elif t.problem in known:
      solved = 'graduated' if t.k == G else 'promoted'
      counts[solved if any(t is r for r in reevaluated) else 'progressed'] += 1
  return counts


def with_hard(lists: Lists, tried, now, hard_order) -> list[tuple[int, int]]:
  """The hard list, newest first, with the problems tried at step `now`."""
  hard_k, _ = lists.thresholds
  outcomes = {t.problem: t.k in hard_k for t in tried}
  hard = [(t.problem, now) for t in tried if t.k in hard_k]
  if hard_order != 'fifo':
    return hard + [row for row in lists.hard if row[0] not in outcomes]
  # A queue: what is hard again stays where it stands.
  known = {problem for problem, _ in lists.hard}
  hard = [row for row in hard if row[0] not in known]
  for problem, step in lists.hard:
    if outcomes.get(problem, True):
      hard.append((problem, now if problem in outcomes else step))
  return hard


def with_reusable(lists: Lists, stored, tried, reevaluated, seated, G) -> list:
  """The list of reusable groups: promoted and unused, then new, then stored ones."""
  hard_k, reusable_k = lists.thresholds
  promoted = [t for t in reevaluated if 0 < t.k < G and t.k not in hard_k]
  waiting = [t for t in promoted if t.teaches and t.problem not in seated]
  # A rule that keeps groups of one verdict keeps those without an advantage too.
  fits = [t for t in tried if t.k in reusable_k and (t.teaches or 0 in reusable_k)]
  fits = [t for t in fits if not any(t is w for w in waiting)]
  renewed = {t.problem for t in fits + waiting}
  added = [(t, -1) for t in waiting] + [(t, 0) for t in fits]
  return added + [row for row in stored if row[0].problem not in renewed]


# --- answers -------------------------------------------------------------------------


def boxed(text):
  r"""The content of the \boxed{} that closes last, character by character.

  A box of nothing but blanks counts only if all are. A box of nothing but a box and
  blanks is that box.
  """
  boxes, closed, i, stack = [], [], 0, []
  while i < len(text):
    after = text[i:].removeprefix(r'\boxed')
    if len(after) < len(text) - i and after.lstrip().startswith('{'):
      i = len(text) - len(after.lstrip()) + 1
      stack.append(i)
      continue
    slashes = i - len(text[:i].rstrip('\\'))
    if slashes == 1:  # an escaped brace groups nothing
      i += 1
      continue
    if text[i] == '{':
      stack.append(None)
    elif text[i] == '}' and stack:
      start = stack.pop()
      if start is not None:
        content = text[start:i]
        wrapped = re.fullmatch(r'[ \n$]*\\boxed *\{(.*)\}[ \n$]*', content, re.S)
        if not (wrapped and closed and wrapped[1] == closed[-1]):
          boxes.append(content)
        if content.replace('\\ ', '').strip():
          closed.append(content)
    i += 1
  return next(
    reversed([box for box in boxes if box.replace('\\ ', '').strip()] or boxes), None
  )


# -------------------------------------------------------------------------- problems


@functools.cache
def reachable(numbers: tuple) -> set:
  """All that numbers can be combined to, each used once: + - * / in every order."""
  if len(numbers) == 1:
    return {Fraction(numbers[0])}
  found = set()
  for size in range(1, len(numbers)):
    for left in itertools.combinations(range(len(numbers)), size):
      rest = [numbers[i] for i in range(len(numbers)) if i not in left]
      for a in reachable(tuple(numbers[i] for i in left)):
        for b in reachable(tuple(rest)):
          found |= {a + b, a - b, a * b} | ({a / b} if b else set())
  return found
