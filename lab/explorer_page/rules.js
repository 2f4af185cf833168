// The loss and clip rules of bapo_jax/algorithms, written again for a page without a
// server. tests/lab/test_explorer.py compares every number here with the JAX rules.
//
// 1. `LOSSES` computes ratio, gain and weight of a token under given clip bounds,
//    `PENALTIES` gain and weight of the penalty, `MASKS` whether a token takes part, and
//    `ADVANTAGES` the advantages of a group;
// 2. `tokensOf` moves the recorded tokens by the knobs, `search` finds clip bounds;
// 3. `apply` gives the bounds, the weights and the shares of a recorded batch;
// 4. `ownCurve`, `ownWeights` and `ownBounds` look a user's rule up in its table.
//
// `knobs` maps the dotted names of the config to values. Two names are the page's own:
// `stale`, a factor of the recorded log-ratios, and `moved`, the part of a log-ratio
// that the policy had moved before the learner step: log prox - log mu over log r.
'use strict';

const NO_BOUNDS = { low: 0, high: Infinity, dual: Infinity };

// Section `<slot>.<rule>` of the knobs, without its prefix.
function section(knobs, prefix) {
  const names = Object.keys(knobs).filter((name) => name.startsWith(`${prefix}.`));
  return Object.fromEntries(
    names.map((name) => [name.slice(prefix.length + 1), knobs[name]]));
}

// loss._cut_off: r A, or the crossed bound times A without a gradient.
function cutOff(logR, adv, bounds) {
  const r = Math.exp(logR);
  if (adv > 0 && r >= bounds.high) return [bounds.high * adv, 0];
  if (adv < 0 && r >= bounds.dual) return [bounds.dual * adv, 0];
  if (adv < 0 && r <= bounds.low) return [bounds.low * adv, 0];
  return [r * adv, r * adv];
}

// A rule maps a token t and bounds to [ratio that the bounds clip, gain, weight], with
// t.logp = log pi, t.logR = log pi - log mu, t.logProx = log prox - log mu,
// t.response = logp, logR and adv of the response's tokens, t.logS = the mean of logR over
// the response, t.logW = its sum, t.future = the discounted sum of logR over this and
// later tokens, t.adv = the advantage, t.squares = those of the batch (squaresOf), and
// t.outside = 1 if it is not in the batch. `boundsAt` gives the bounds of any token.
const LOSSES = {
  clipped(t, bounds, k) {
    const logR = clamp(t.logR, -k.limit, k.limit);
    const [gain, weight] = cutOff(logR, t.adv, bounds);
    return [Math.exp(logR), gain, logR === t.logR ? weight : 0];
  },
  decoupled(t, bounds, k) {
    const logR = t.logR - t.logProx;
    const stale = Math.exp(t.logProx);
    const above = k.beyond_cap === 'truncate' ? k.cap : 0;
    const factor = stale > k.cap ? above : stale;
    const [gain, weight] = cutOff(logR, t.adv, bounds);
    return [Math.exp(logR), factor * gain, factor * weight];
  },
  sequence(t, bounds) {
    return [Math.exp(t.logS), ...cutOff(t.logS, t.adv, bounds)];
  },
  gmpo(t, bounds, k, boundsAt) {
    const clip = (x) => (x.adv > 0 ? Math.min(x.logR, Math.log(boundsAt(x).high))
      : Math.max(x.logR, Math.log(boundsAt(x).low)));
    const gain = Math.exp(t.response.reduce((sum, x) => sum + clip(x), 0) / t.response.length) * t.adv;
    return [Math.exp(t.logR), gain, clip(t) === t.logR ? gain : 0];
  },
  cispo(t, bounds) {
    const r = Math.exp(t.logR);
    return [r, ...reinforce(clamp(r, bounds.low, bounds.high), t)];
  },
  tis(t, bounds, k) {
    const r = Math.exp(t.logR);
    return [r, ...reinforce(Math.min(r, k.cap), t)];
  },
  reinforce(t) {
    return [Math.exp(t.logR), ...reinforce(1, t)];
  },
  sapo(t, bounds, k) {
    const r = Math.exp(Math.min(t.logR, 20));
    const tau = t.adv > 0 ? k.positive : k.negative;
    const gate = 1 / (1 + Math.exp(-tau * (r - 1)));
    const weight = t.logR < 20 ? 4 * gate * (1 - gate) * r * t.adv : 0;
    return [Math.exp(t.logR), 4 / tau * gate * t.adv, weight];
  },
  vespo(t, bounds, k) {
    const logW = clamp(t.logW, Math.log(1e-8), 20);
    const [a, b] = t.adv >= 0 ? k.positive : k.negative;
    const phi = Math.exp(a * logW + b * (1 - Math.exp(logW)));
    return [Math.exp(t.logR), ...reinforce(phi, t)];
  },
  aspo(t, bounds, k) {
    const r = Math.exp(t.logR);
    const [gain, weight] = cutOff(t.logR, t.adv, bounds);
    if (weight === 0) return [r, t.adv > 0 ? t.adv * t.adv / gain : gain, 0];
    const factor = t.adv > 0 ? 1 / r : r;
    if (factor > k.cap) return [r, ...reinforce(k.cap, t)];
    return [r, factor * t.adv, factor * t.adv];
  },
  fipo(t, bounds, k) {
    const r = Math.exp(t.logR);
    let influence = clamp(Math.exp(t.future), ...k.limits);
    if (t.adv < 0 && r > k.safety) influence = Math.min(influence, 1);
    const [gain, weight] = cutOff(t.logR, t.adv, bounds);
    return [r, influence * gain, influence * weight];
  },
};

// Minus loss.divergence, and its derivative: log r -> [gain, weight] at a cost of 1.
const PENALTIES = {
  behavior_policy: (logR) => [logR - Math.expm1(logR), -Math.expm1(logR)],
  policy_behavior(logR) {
    const slope = Math.exp(logR) * logR;
    return [Math.expm1(logR) - slope, -slope];
  },
  squared: (logR) => [-(logR ** 2) / 2, -logR],
};

// The curves of a rule with the penalty, which applies to masked tokens too.
function penalised(at, knobs) {
  const penalty = PENALTIES[knobs['loss.kl_direction']];
  const cost = knobs['loss.kl'];
  return (r, p, adv) => {
    const subtracted = penalty(Math.log(r));
    return at(r, p, adv).map((x, i) => (cost ? x + cost * subtracted[i] : x));
  };
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// advantage.py: the rewards of a group -> the advantages.
const ADVANTAGES = {
  group_relative(rewards) {
    const centred = ADVANTAGES.group_centred(rewards);
    const deviation = Math.sqrt(mean(centred.map((x) => x ** 2)) + 1e-6);
    return centred.map((x) => x / deviation);
  },
  leave_one_out: (rewards) => ADVANTAGES.group_centred(rewards).map(
    (x) => x * rewards.length / (rewards.length - 1)),
  group_centred: (rewards) => rewards.map((x) => x - mean(rewards)),
  max_rl: (rewards) => ADVANTAGES.group_centred(rewards).map(
    (x) => (mean(rewards) > 0 ? x / mean(rewards) : 0)),
};

// KL(Bernoulli(p) || Bernoulli(q)), with probabilities cut like masks.EDGE.
function binaryKl(p, q) {
  const [a, b] = [clamp(p, 1e-6, 1 - 1e-6), clamp(q, 1e-6, 1 - 1e-6)];
  return a * Math.log(a / b) + (1 - a) * (Math.log1p(-a) - Math.log1p(-b));
}

// Whether a token takes part, with p = pi(token) and q = mu(token).
const MASKS = {
  none: () => true,
  dppo_tv(t, p, q, k) {
    return t.adv === 0 || (t.adv > 0 ? p - q <= k.high : p - q >= -k.low);
  },
  dppo_kl(t, p, q, k) {
    const far = binaryKl(q, p);
    return !((t.adv > 0 && p > q && far > k.high) || (t.adv < 0 && p < q && far > k.low));
  },
  icepop(t, p, q, k) {
    const r = Math.exp(t.logR);
    return r >= k.low && r <= k.high;
  },
  kpop: (t, p, q, k) => Math.max(binaryKl(p, q), binaryKl(q, p)) <= k.limit,
  m2po(t, p, q, k) {
    const square = Math.fround(t.logR ** 2);
    const below = countUpTo(t.squares.sorted, square);
    const total = t.squares.totals[below] + t.outside * square;
    return t.adv === 0 || total < k.limit * (below + t.outside);
  },
  opsm: (t, p, q, k) => t.adv >= 0 || -t.logS <= k.limit,
};

// The (log r)^2 of the tokens with an advantage, sorted, and the sum of the first n.
function squaresOf(tokens) {
  const sorted = Float32Array.from(
    tokens.filter((t) => t.adv !== 0), (t) => t.logR ** 2).sort();
  const totals = [0];
  for (const square of sorted) totals.push(totals.at(-1) + square);
  return { sorted, totals };
}

// How many of the sorted values are at most `limit`.
function countUpTo(sorted, limit) {
  let [start, stop] = [0, sorted.length];
  while (start < stop) {
    const middle = Math.floor((start + stop) / 2);
    if (sorted[middle] <= limit) start = middle + 1;
    else stop = middle;
  }
  return start;
}

// loss._reinforce: no gradient through the weight.
function reinforce(weight, t) {
  return [weight * t.adv * t.logp, weight * t.adv];
}

// clip.dcpo: the bounds of one token, by its probability under mu.
function boundsOfToken(q, k) {
  const root = (x) => (1 + Math.sqrt(Math.max(x, 0))) / 2;
  const high = Math.min(root(1 + 4 * k.high / q), k.cap);
  return { low: root(1 - 4 * k.low / q), high, dual: k.dual };
}

// Whether a token takes part: the mask rule with its knobs.
function keeperOf(knobs) {
  const name = knobs['mask.rule'];
  const k = section(knobs, `mask.${name}`);
  return (t) => MASKS[name](t, Math.exp(t.logp), Math.exp(t.logp - t.logR), k);
}

// The rules with their knobs: (token, bounds) -> [ratio, gain, weight]; a masked token
// has neither gain nor weight.
function lossOf(knobs) {
  const name = knobs['loss.rule'];
  const [rule, k] = [LOSSES[name], section(knobs, `loss.${name}`)];
  const keeps = keeperOf(knobs);
  const byToken = knobs['clip.rule'] === 'dcpo' && section(knobs, 'clip.dcpo');
  return (t, bounds) => {
    const boundsAt = (x) => (byToken ? boundsOfToken(Math.exp(x.logp - x.logR), byToken) : bounds);
    const found = rule(t, boundsAt(t), k, boundsAt);
    return keeps(t) ? found : [found[0], 0, 0];
  };
}

// (r, p, adv) -> [gain, weight] of a token with probability p = pi(token) and ratio
// r = pi / mu, alone in its response, under the bounds of a batch; m2po adds the token
// to this batch.
function curveOf(knobs, { bounds, tokens: [{ squares }] }) {
  if (inTable(knobs)) return ownCurve(knobs);
  const rule = lossOf(knobs);
  return (r, p, adv) => {
    const logR = Math.log(r);
    const logProx = knobs.moved * logR;
    const token = { logp: Math.log(p), logR, logProx, adv, squares, outside: 1 };
    return rule({ ...token, response: [token], logS: logR, logW: logR, future: logR }, bounds).slice(1);
  };
}

// The tokens of a batch as the page's `stale` and `moved` place them, and the scale of
// each token's row relative to the largest (loss.row_scale).
function tokensOf(batch, knobs) {
  const tokens = [];
  const sequence = knobs['loss.aggregate'] === 'sequence';
  const shortest = Math.min(...batch.length);
  const decay = 2 ** (-1 / knobs['loss.fipo.half_life']);
  let first = 0;
  batch.length.forEach((length, row) => {
    const ratios = [];
    for (let i = first; i < first + length; i++) {
      ratios.push(knobs.stale * (batch.logp[i] - batch.old[i]));
    }
    const logS = ratios.reduce((a, b) => a + b, 0) / length;
    const logW = ratios.reduce((a, b) => a + clamp(b, -20, 20), 0);
    const futures = [...ratios];
    for (let i = length - 2; i >= 0; i--) futures[i] += decay * futures[i + 1];
    const scale = sequence ? shortest / length : 1;
    // One advantage per response, or per token.
    const byToken = batch.adv.length > batch.length.length;
    const response = ratios.map((logR, i) => (
      { logR, logp: batch.old[first + i] + logR, adv: batch.adv[byToken ? first + i : row] }));
    ratios.forEach((logR, i) => {
      const [old, future] = [batch.old[first + i], futures[i]];
      const logProx = knobs.moved * logR;
      const { adv } = response[i];
      tokens.push({ logp: old + logR, old, logR, logProx, response, logS, logW, future, scale, adv });
    });
    first += length;
  });
  const squares = squaresOf(tokens);
  return tokens.map((t) => ({ ...t, squares, outside: 0 }));
}

// clip.points and clip.clamped: the values of a bound, as float32 like the rule's.
function points([begin, end], step) {
  const steps = step ? Math.trunc((end - begin) / step + 1e-6) : 0;
  return Array.from({ length: steps + 1 }, (_, i) => Math.fround(begin + step * i));
}

function clamped([begin, end], step) {
  const steps = step ? Math.ceil((end - begin) / step - 1e-6) : 0;
  const at = (_, i) => Math.fround(Math.min(begin + step * i, end));
  return Array.from({ length: steps + 1 }, at);
}

// What a search reads: ranges, target, contribution, weight, order and dual clip.
function searched(knobs) {
  if (knobs['clip.rule'] === 'recipe') {
    const k = DATA.recipe;
    const lows = clamped(k.low, k.low_step);
    const highs = clamped(k.high, k.high_step);
    const target = k.positive_to_negative / (1 + k.positive_to_negative);
    return { target, lows, highs, contribution: 'surrogate', weight: 'one',
      order: 'lower', dual: k.dual };
  }
  const k = section(knobs, 'clip.balanced');
  const continuous = k.resolution === 'continuous';
  const lows = continuous ? clamped(k.low, DATA.tolerance) : points(k.low, k.low_step);
  const highs = continuous ? clamped(k.high, DATA.tolerance) : points(k.high, k.high_step);
  return { ...k, lows, highs };
}

// bound_search.contributions: terms of tokens with A > 0 and with A < 0, uncut.
function contributions(tokens, knobs, k) {
  const rule = lossOf(knobs);
  const plus = [];
  const minus = [];
  for (const t of tokens.filter(keeperOf(knobs))) {
    const [ratio, , weight] = rule(t, { ...NO_BOUNDS, dual: k.dual });
    let size = k.contribution === 'surrogate' ? t.adv : weight * t.scale;
    size = Math.abs(size) * (k.weight === 'behaviour' ? Math.exp(t.old) : 1);
    if (size > 0) (t.adv > 0 ? plus : minus).push([ratio, size]);
  }
  return [plus, minus];
}

// bound_search.sums: P and N at two bounds.
function sums([plus, minus], low, high, contribution) {
  let positive = 0;
  let negative = 0;
  for (const [r, size] of plus) {
    if (contribution === 'surrogate') positive += size * Math.min(r, high);
    else if (r < high) positive += size;
  }
  for (const [r, size] of minus) {
    if (contribution === 'surrogate') negative += size * Math.max(r, low);
    else if (r > low) negative += size;
  }
  return [positive, negative];
}

const shareOf = ([positive, negative]) =>
  positive > 0 ? positive / (positive + negative) : 0;

// bound_search.search: the first point of the path that meets the target, or the last.
function search(tokens, knobs) {
  const k = searched(knobs);
  const { lows, highs, target, contribution } = k;
  const sides = contributions(tokens, knobs, k);
  const evidence = sides[0].length + sides[1].length > 0;
  const [down, up] = [lows.length - 1, highs.length - 1];
  const bounds = (index) => {
    const leg = Math.min(index, k.order === 'upper' ? up : down);
    const [i, j] = k.order === 'upper' ? [index - leg, leg] : [leg, index - leg];
    return { low: lows[i], high: highs[j], dual: k.dual };
  };
  const share = (index) => {
    const { low, high } = bounds(index);
    return shareOf(sums(sides, low, high, contribution));
  };
  const meets = (index) => {
    const { low, high } = bounds(index);
    const [positive, negative] = sums(sides, low, high, contribution);
    return target === 0 || (positive > 0 && positive * (1 - target) >= negative * target);
  };
  let [begin, end] = [0, down + up + 1];
  if (contribution === 'surrogate') {
    if (k.order === 'upper') end = up + 1;
    else begin = down + 1;
  }
  let [start, stop] = [begin, end];
  while (start < stop) {
    const middle = Math.floor((start + stop) / 2);
    if (meets(middle)) stop = middle;
    else start = middle + 1;
  }
  if (begin && meets(0)) stop = 0;
  const met = stop < end && evidence;
  const index = met ? stop : evidence ? down + up : 0;
  return { ...bounds(index), start: bounds(0), index, met, evidence, target,
    last: down + up, turn: k.order === 'upper' ? up : down, share };
}

// The bounds of a clip rule on these tokens; dcpo has others for every token.
const CLIPS = {
  balanced: search,
  fixed: (tokens, knobs) => section(knobs, 'clip.fixed'),
  unclipped: () => NO_BOUNDS,
  recipe: search,
  dcpo: (tokens, knobs) => ({ ...NO_BOUNDS, dual: knobs['clip.dcpo.dual'] }),
  own: (tokens, knobs) => (DATA.own.bounds ? ownBounds(knobs) : NO_BOUNDS),
};

// Bounds of the clip rule on these tokens; `start` are those before a search.
function boundsOf(tokens, knobs) {
  const bounds = CLIPS[knobs['clip.rule']](tokens, knobs);
  return { start: bounds, ...bounds };
}

// Weights of the tokens in the gradient; 0 for a token that is cut.
function weightsOf(tokens, knobs, bounds) {
  if (inTable(knobs)) return ownWeights(knobs);
  const rule = lossOf(knobs);
  return tokens.map((t) => rule(t, bounds)[2]);
}

// The positive share of the gradient, and the tokens of either sign that have none.
function summary(tokens, weights) {
  const found = { positive: 0, negative: 0, plus: 0, minus: 0, cutPlus: 0, cutMinus: 0 };
  tokens.forEach((t, i) => {
    if (t.adv === 0) return;
    const side = t.adv > 0;
    found[side ? 'positive' : 'negative'] += Math.abs(weights[i]) * t.scale;
    found[side ? 'plus' : 'minus'] += 1;
    if (weights[i] === 0) found[side ? 'cutPlus' : 'cutMinus'] += 1;
  });
  return { ...found, share: shareOf([found.positive, found.negative]) };
}

// Applies the rules to a recorded batch.
function apply(batch, knobs) {
  const tokens = tokensOf(batch, knobs);
  const bounds = boundsOf(tokens, knobs);
  const weights = weightsOf(tokens, knobs, bounds);
  const before = summary(tokens, weightsOf(tokens, knobs, bounds.start));
  return { tokens, bounds, weights, before, after: summary(tokens, weights) };
}

// A user's rule is a table, since it exists in Python alone: an entry for every
// combination of the values of `axes`, the last axis fastest. A knob, r and p take the
// nearest value of the table. The entry of a clip rule that gives two bounds has only
// these; all other entries have gains and weights.
const isOwn = (knobs) => [knobs['loss.rule'], knobs['clip.rule']].includes('own');
const inTable = (knobs) => isOwn(knobs) && !DATA.own.bounds;

// The values that the table has of a knob, if a user's rule is shown.
const ownValues = (name) =>
  (isOwn(knobs) ? DATA.own.axes.find((axis) => axis.name === name)?.values : undefined);

const nearest = (values, x) =>
  values.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(values[best] - x)
    || value === x ? i : best), 0);

function ownEntry(knobs) {
  return DATA.own.axes.reduce(
    (index, { name, values }) => index * values.length + nearest(values, knobs[name]), 0);
}

function ownCurve(knobs) {
  const { ratios, probabilities, gains, weights } = DATA.own;
  const logs = ratios.map(Math.log);
  const entry = ownEntry(knobs);
  return (r, p, adv) => {
    const side = 2 * entry + (adv > 0 ? 0 : 1);
    const row = side * probabilities.length + nearest(probabilities, p);
    const i = row * ratios.length + nearest(logs, Math.log(r));
    return [gains[i], weights[i]];
  };
}

function ownBounds(knobs) {
  const entry = 6 * ownEntry(knobs);
  const [low, high, dual, startLow, startHigh, index] = DATA.own.bounds.subarray(entry, entry + 6);
  return { low, high, dual, index, start: { low: startLow, high: startHigh, dual } };
}

function ownWeights(knobs) {
  const [count, entry] = [DATA.batch.logp.length, ownEntry(knobs)];
  return Array.from(DATA.own.tokens.subarray(entry * count, (entry + 1) * count));
}
